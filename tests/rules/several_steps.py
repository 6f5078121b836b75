"""Optimizer steps of two microbatches, for rules that look at what was there before: the oracle's gradients of each
sequence, and the same microbatches through the trainer or through `ISOPO` alone."""

import functools

import torch

from isopo_trl import ISOPO
from tests import oracle, training
from tests.gradients.test_oracle import build, trainer_for


STEPS = [2, 2, 1]  # microbatches of each
MODELS = {"full, tied": ("llama", False, True), "LoRA": ("qwen2", True, None)}


@functools.cache
def gradients(model, step, part):
    """A microbatch, and `V` `[m, numbers]` of each use of trained parameters, where the loss carries no constant."""
    batch = oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=10 * step + part)
    batch.advantages[2] = 0.0  # takes part all the same
    G = oracle.position_gradients(build(*MODELS[model]), batch, oracle.token_weights(batch, "grpo"))
    return batch, {name: each.sum(1) for name, each in G.items()}


def parameters(model):
    """The trained parameters of each use."""
    return {name: oracle.trained(module) for name, module in oracle.trained_modules(model).items()}


def flat(tensors, of):
    return torch.cat([tensors[p].flatten() for p in of])


def add(tensors, of, vector):
    for p, part in zip(of, vector.split([p.numel() for p in of]), strict=True):
        tensors[p] = tensors[p] + part.view_as(p)


class ByTrainer:
    """The sign of the advantages is in the loss, with one over the number of microbatches."""

    def __init__(self, name, folder, checkpointing=False, **settings):
        kwargs = {"use_reentrant": False}
        settings |= {"gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": kwargs}
        self.trainer = trainer_for(build(*MODELS[name]), folder, loss_type="grpo", **settings)
        self.model, self.isopo = self.trainer.model, self.trainer.isopo
        if checkpointing:
            self.model.gradient_checkpointing_enable(kwargs)
            self.model.enable_input_require_grads()

    def backward(self, batch, microbatches):
        training.prepared(self.trainer, microbatches)
        self.trainer.compute_loss(self.model, batch.for_trl()).backward()
        self.isopo.end()


class ByHand:
    """The sign of the advantages is in the coefficients."""

    def __init__(self, name, folder, rule, **settings):
        self.model = build(*MODELS[name])
        self.isopo = ISOPO(self.model, rule, **settings)

    def backward(self, batch, microbatches):
        scale = 1 / microbatches
        with self.isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask, loss_scale=scale):
            logps = oracle.token_logps(self.model, batch)
            (-(logps * oracle.token_weights(batch, "grpo", microbatches)).sum()).backward()


RUNS = {
    "trainer, full, tied": (ByTrainer, "full, tied", {}),
    "trainer, LoRA, checkpointing": (ByTrainer, "LoRA", {"checkpointing": True}),
    "by hand, full, tied": (ByHand, "full, tied", {}),
}
