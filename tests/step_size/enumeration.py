"""A training run of which everything is kept, so that the divergence of its steps can be found by enumeration."""

import torch
from transformers import TrainerCallback

from isopo_trl import ISOPOTrainer
from isopo_trl.step_size.controller import Measurement
from tests import training


class Recorded(ISOPOTrainer):
    """Keeps the microbatches of its run."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.__dict__.setdefault("batches", []).append(inputs)
        return inputs


class Weights(TrainerCallback):
    """Keeps the weights before and after every step."""

    def __init__(self):
        self.before, self.after = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: value.clone() for name, value in model.state_dict().items()})


class Run:
    """A run of the model that `build` makes: its log lines, and what its steps are by the definition."""

    def __init__(self, folder, build, others=None, *, callbacks=(), **settings):
        self._build, self.weights = build, Weights()
        options = {"callbacks": [self.weights, *callbacks], **(others or {})}
        self.trainer = training.build(folder, build(), Recorded, options=options, **settings)
        self.trainer.train()
        self.lines = [line for line in self.trainer.state.log_history if "step/kl" in line]

    def divergences(self, step, microbatches):
        """For each sequence of the microbatches, alone and unpadded: `[C]` over the vocabulary, in float64."""
        model, sides = self._build().double().eval(), []
        for weights in (self.weights.before[step], self.weights.after[step]):
            model.load_state_dict(weights)
            sides.append([each for batch in microbatches for each in self._log_distributions(model, batch)])
        return [(old.exp() * (old - new)).sum(-1) for old, new in zip(*sides, strict=True)]

    def _log_distributions(self, model, batch):
        for prompt, completion in sequences(batch):
            with torch.no_grad():
                logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0), use_cache=False).logits[0]
            yield (logits[len(prompt) - 1 : -1] / self.trainer.temperature).log_softmax(-1)


def sequences(batch):
    """Prompt and completion of each sequence, without padding."""
    parts = (zip(batch[f"{name}_ids"], batch[f"{name}_mask"].bool(), strict=True) for name in ("prompt", "completion"))
    return zip(*([ids[mask] for ids, mask in part] for part in parts), strict=True)


def ratio_of_sums(divergences, weights=None):
    """The mean over all positions, or over those that have a weight, and its error: sequences are what is drawn."""
    own = [torch.ones_like(each) if weights is None else weights[: len(each)] for each in divergences]
    kl = torch.stack([(each * weight).sum() for each, weight in zip(divergences, own, strict=True)])
    tokens = torch.stack([weight.sum() for weight in own])
    ratio = kl.sum() / tokens.sum()
    error = ((kl - ratio * tokens).square().sum() * len(kl) / (len(kl) - 1)).sqrt() / tokens.sum()
    return Measurement(ratio.item(), error.item())
