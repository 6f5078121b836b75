"""TRL's loss: its forward pass, its tokens' weights, and its terms without an advantage."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from .batch import REFERENCE_LOGPS, Batch
from .loans import borrowed, intercepted
from .log import figures_apart
from .required import INSTALL, require


require(
    "trl.GRPOTrainer._compute_loss",
    "model",
    "inputs",
    mentions=(
        *("_get_per_token_logps_and_entropies", "beta", "use_vllm", "vllm_importance_sampling_correction"),
        *("_entropy_bonus_enabled", "aux_loss_enabled", "entropy_coef", "use_adaptive_entropy", "policy_loss"),
        *("advantages", "prompt_mask", "completion_mask", "tool_mask"),
        *("importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps", REFERENCE_LOGPS),
    ),
)
require(
    "trl.GRPOTrainer._get_per_token_logps_and_entropies",
    *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"),
)


class Outputs(NamedTuple):
    """What the loss's forward pass returns, with gradient: `[B, C]`, `[B, C]` and a scalar."""

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None


# Settings that add terms without an advantage, as they are without
_NO_TERMS = {
    "beta": 0.0,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "aux_loss_enabled": False,
}


def without_graph(outputs: Outputs) -> Outputs:
    """
    The same numbers as leaves, which is what a loss gets whose derivatives are asked for: autograd goes over all of a
    graph before it begins, and the model's is long.
    """
    logps = outputs.logps.detach().requires_grad_(torch.is_grad_enabled())
    aux_loss = outputs.aux_loss
    if aux_loss is not None:
        aux_loss = aux_loss.detach().requires_grad_(aux_loss.requires_grad)
    return outputs._replace(logps=logps, aux_loss=aux_loss)


Figures = dict[str, list[float]]  # to be logged

_PASS = "_get_per_token_logps_and_entropies"


class _PassMade(Exception):
    """Ends TRL's loss, which has nothing to say before its forward pass."""

    def __init__(self, outputs: Outputs):
        self.outputs = outputs


class TRLLoss:
    """The parts of TRL's loss: its forward pass, the policy's loss, and the terms that carry no advantage."""

    def __init__(self, trainer: Any, loss: Callable[[Batch], torch.Tensor]):
        self._trainer, self._loss = trainer, loss

    def forward(self, batch: Batch) -> Outputs:
        """The forward pass that the loss of a batch begins with."""
        wanted = {"compute_aux_loss": self._trainer.aux_loss_enabled}  # for the terms, from the same pass

        def stand_in(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            raise _PassMade(Outputs(*forward(*args, **{**kwargs, **wanted})))

        with intercepted(self._trainer, _PASS, stand_in):
            try:
                self._loss(batch)
            except _PassMade as made:
                return made.outputs
        raise RuntimeError(f"TRL's loss made no forward pass by `{_PASS}`: {INSTALL}.")

    def of_policy(self, batch: Batch, outputs: Outputs, balances: bool = False) -> tuple[torch.Tensor, Figures]:
        """
        The loss without the terms that carry no advantage, but for the load-balancing loss if it `balances`, and what
        TRL logs of it.
        """
        with self._policy_alone(batch, outputs, balances), figures_apart(self._trainer) as figures:
            return self._loss(batch), figures

    def policy_loss_figure(self, batch: Batch, outputs: Outputs) -> list[float]:
        """What TRL logs as `policy_loss` beside an entropy bonus."""
        with torch.no_grad(), self._policy_alone(batch, outputs), figures_apart(self._trainer) as figures:
            with borrowed(self._trainer, _entropy_bonus_enabled=True):
                self._loss(batch)
        return figures["policy_loss"]

    def of_terms(self, batch: Batch, outputs: Outputs) -> tuple[torch.Tensor, Figures]:
        """The loss of a batch whose advantages are 0: what remains are the terms without an advantage."""
        others: dict[str, Any] = {"use_vllm": False, "vllm_importance_sampling_correction": False}
        if self._trainer.args.kl_in_reward:
            others["beta"] = 0.0
        with borrowed(self._trainer, **others), self._of(outputs), figures_apart(self._trainer) as figures:
            return self._loss(batch), figures

    @contextmanager
    def _policy_alone(self, batch: Batch, outputs: Outputs, balances: bool = False) -> Iterator[None]:
        # TRL multiplies by weights where it thinks that they are vLLM's
        weighs = batch.has_weights
        settings = {**_NO_TERMS, "use_vllm": weighs, "vllm_importance_sampling_correction": weighs}
        if balances:
            del settings["aux_loss_enabled"]
        with borrowed(self._trainer, **settings), self._of(outputs):
            yield

    def _of(self, outputs: Outputs) -> AbstractContextManager[None]:
        """Context in which TRL's loss is computed of these outputs."""
        return intercepted(self._trainer, _PASS, lambda *args, **kwargs: outputs)


@contextmanager
def unequal_ranks(trainer: Any) -> Iterator[None]:
    """
    Context for TRL's `_compute_loss` of microbatches that differ in size from rank to rank: of the figures that it
    gathers, one number per sequence, the missing ones are NaN, which TRL leaves out.
    """
    accelerator = trainer.accelerator

    def stand_in(gather: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
        return gather(accelerator.pad_across_processes(tensor, pad_index=torch.nan) if tensor.ndim else tensor)

    with intercepted(accelerator, "gather", stand_in):
        yield
