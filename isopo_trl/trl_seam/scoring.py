"""TRL's scoring passes: log-probabilities of completions, and the distributions that they are drawn from."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor

from .batch import IMAGES, Batch, has_images, pad_token_id, together
from .loans import intercepted
from .required import require


disable_gradient_checkpointing = require(
    "trl.models.utils.disable_gradient_checkpointing", "model", "gradient_checkpointing_kwargs"
)


class Scoring:
    """A trainer's scoring passes."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def model(self) -> torch.nn.Module:
        """The policy, wrapped as the trainer has it."""
        return self._trainer.model

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        return self._trainer.temperature

    def base_model(self) -> torch.nn.Module:
        """The model itself, without wrappers and adapters. Takes a while: accelerate looks at every module."""
        policy = self._trainer.accelerator.unwrap_model(self.model)
        return policy.get_base_model() if hasattr(policy, "get_base_model") else policy

    def score_without_gradient(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Log-probabilities `[B, C]` of completions by the policy, without gradient, for what follows the model in the
        arguments of the trainer's own scoring pass.
        """
        return self._without_gradient(*args, **kwargs)[0]

    def logps(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities `[B, C]` of a batch's completions, by the pass that TRL's loss makes."""
        return self._pass(*_positional(batch), **_images(batch))[0]

    def logps_without_gradient(self, batch: Batch, rows: int) -> torch.Tensor:
        """Log-probabilities `[B, C]` of a batch's completions, in passes of `rows` sequences, without gradient."""
        return self._without_gradient(*_positional(batch), **_images(batch), batch_size=rows, compute_entropy=False)[0]

    def entropies(self, batch: Batch, rows: int) -> torch.Tensor:
        """Entropies `[B, C]` of the distributions that their tokens are drawn from, likewise."""
        return self._without_gradient(*_positional(batch), **_images(batch), batch_size=rows, compute_entropy=True)[1]

    def _pass(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self._trainer._get_per_token_logps_and_entropies(self.model, *args, **kwargs)

    def _without_gradient(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        checkpointing = self._trainer.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            return self._pass(*args, **kwargs)

    def head_rows(self) -> torch.Tensor:
        """The LM head's weight `[V, d]`, a row for each token of the vocabulary; raises where there is no such."""
        model: Any = self.base_model()
        weight: Any = getattr(model.get_output_embeddings(), "weight", None)
        width = model.config.get_text_config().vocab_size
        is_whole = isinstance(weight, torch.Tensor) and weight.is_floating_point() and not isinstance(weight, DTensor)
        if not is_whole or weight.dim() != 2 or len(weight) < width:
            raise ValueError(
                f"advantage_transform asks for the rows of {type(model).__name__}'s LM head, one for each of its "
                f"{width} tokens, and it has none that are whole on this device: leave out what needs them ('g2rl')."
            )
        return weight.detach()

    def log_distributions(self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """
        Logits `[B, len(places), V]` of a pass without gradient, divided by the temperature: but for their
        normalisation, the logarithms of the distributions that the tokens there are drawn from.
        """
        with self._trainer.accelerator.autocast():
            output = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=places, use_cache=False)
        return output.logits if self.temperature == 1 else output.logits.div_(self.temperature)

    def together(self, batches: list[Batch]) -> list[Batch]:
        """The sequences of all batches in one, with no more padding than needed; batches with images as they are."""
        return together(batches, pad_token_id(self._trainer))

    @contextmanager
    def passes_noted(self, note: Callable[..., None]) -> Iterator[None]:
        """Context in which `note(logps, model, *args, **kwargs)` is told of every scoring pass."""

        def stand_in(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(model, *args, **kwargs)
            note(output[0], model, *args, **kwargs)
            return output

        with intercepted(self._trainer, "_get_per_token_logps_and_entropies", stand_in):
            yield

    def is_reference(self, model: Any) -> bool:
        """Whether a scoring pass of `model`, made now, is one of the reference model's."""
        trainer = self._trainer
        if trainer.ref_model is not None:
            return model is trainer.ref_model
        # One model for both: TRL turns the adapter off, which leaves the base model, or exchanges an adapter that was
        # trained before for a copy of its initial state, under the name "ref"
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.accelerator.unwrap_model(model) is not policy:
            return False
        tuner = next((module for module in policy.modules() if isinstance(module, BaseTunerLayer)), None)
        if tuner is None:  # virtual tokens, which the base model's own forward leaves out
            copied = "ref" in policy.peft_config
            return policy.active_adapter == "ref" if copied else policy.forward == policy.base_model.forward
        return "ref" in tuner.active_adapters if "ref" in policy.peft_config else tuner.disable_adapters


def _positional(batch: Batch) -> tuple[Any, ...]:
    return batch.input_ids, batch.attention_mask, batch.completion_mask.size(1)


def _images(batch: Batch) -> dict[str, Any]:
    return {name: batch.get(name) for name in IMAGES}


def distribution_size(model: Any, batch: Batch) -> int:
    """Elements of [`Scoring.log_distributions`] at all positions of completions; 0 where there are none to be had."""
    if has_images(batch) or not takes_positions(model):
        return 0
    return batch.completion_mask.numel() * model.config.get_text_config().vocab_size


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether the model can be asked for the logits at given positions alone; some can but for those at the end."""
    parameter = inspect.signature(model.forward).parameters.get("logits_to_keep")
    return parameter is not None and "Tensor" in str(parameter.annotation)


def most_positions(model: Any) -> float:
    """Width of a batch up to which all models of the family have a place for every position, padding included."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # MPT has the other
    numbers = [number for number in (getattr(config, name, None) for name in names) if number is not None]
    return min(numbers, default=math.inf) - 2  # some begin to count at 2


def distribution_inputs(batch: Batch, columns: torch.Tensor, width: int = 0) -> tuple[torch.Tensor, ...]:
    """
    What [`Scoring.log_distributions`] takes for some positions of a batch's completions: token ids and attention mask,
    padded on the right to at least `width`, and where the logits are.
    """
    width = max(width, batch.attention_mask.size(1))
    ids, mask = (torch.nn.functional.pad(x, (0, width - x.size(1))) for x in (batch.input_ids, batch.attention_mask))
    # A token is drawn from the logits at the one before it; from the end, since adapters may put others in front
    return ids, mask, columns + batch["prompt_ids"].size(1) - 1 - width
