"""TRL's loss: its forward pass, its tokens' weights, and its terms without an advantage."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from .batch import REFERENCE_LOGPS, Batch
from .loans import borrowed, intercepted
from .log import figures_apart
from .required import require


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


class LossInput:
    """
    The log-probabilities, or log-ratios, that a loss is computed of.

    Attributes:
        with_graph (`torch.Tensor`): `[B, C]`, as the forward pass has made them.
        leaf (`torch.Tensor`): `[B, C]`, the same numbers without their graph, which is what the loss gets: autograd,
            when asked for a derivative, goes over all of the graph before it begins, and the model's is long.
        aux_loss (`torch.Tensor`, *optional*): scalar, the load-balancing loss likewise, where there is one.
    """

    with_graph: torch.Tensor
    leaf: torch.Tensor
    aux_loss: torch.Tensor | None

    def cut(self, outputs: Outputs) -> Outputs:
        """The outputs with the leaves in them."""
        self.with_graph, aux_loss = outputs.logps, outputs.aux_loss
        self.leaf = outputs.logps.detach().requires_grad_(torch.is_grad_enabled())
        self.aux_loss = None if aux_loss is None else aux_loss.detach().requires_grad_(aux_loss.requires_grad)
        return outputs._replace(logps=self.leaf, aux_loss=self.aux_loss)


@contextmanager
def weighed_loss(
    trainer: Any,
    batch: Batch,
    weigh: Callable[[Outputs], tuple[torch.Tensor | None, torch.Tensor | None] | None],
    balances: bool = False,
) -> Iterator[LossInput]:
    """
    Context for TRL's `_compute_loss` of the batch, in which the loss is that of the policy, without the terms that
    carry no advantage, and tokens are weighed. The first call makes the forward pass; others get what it returned.
    The loss's gradient ends at the leaves of what the context yields.

    Args:
        weigh (`Callable`): gets what the loss's forward pass returned, and returns the weights and the ratios of
            [`Batch.set_weights`]; `None` leaves the batch as it is.
        balances (`bool`): whether the load-balancing loss, which is a leaf of its own, stays in the loss.
    """
    with ExitStack() as loans:
        wanted = {"compute_aux_loss": trainer.aux_loss_enabled}  # for the terms, from the same pass
        seen: list[Any] = []
        given = LossInput()

        def stand_in(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not seen:
                outputs = Outputs(*forward(*args, **{**kwargs, **wanted}))
                weighed = weigh(outputs)
                seen.append(given.cut(outputs if weighed is None else weighed_outputs(outputs, *weighed)))
            return seen[0]

        def weighed_outputs(outputs: Outputs, weights: torch.Tensor | None, ratios: torch.Tensor | None) -> Outputs:
            batch.set_weights(weights, ratios)
            if weights is not None:  # TRL multiplies by weights where it thinks that they are vLLM's
                loans.enter_context(borrowed(trainer, use_vllm=True, vllm_importance_sampling_correction=True))
            return outputs if ratios is None else outputs._replace(logps=ratios)

        own_loss = {**_NO_TERMS, "use_vllm": False, "vllm_importance_sampling_correction": False}
        if balances:
            del own_loss["aux_loss_enabled"]
        loans.enter_context(borrowed(trainer, **own_loss))
        loans.enter_context(intercepted(trainer, "_get_per_token_logps_and_entropies", stand_in))
        yield given


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


@contextmanager
def figures_of_policy(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Context, inside [`weighed_loss`], in which TRL tells `policy_loss` among its figures, which are kept apart."""
    with borrowed(trainer, _entropy_bonus_enabled=True), figures_apart(trainer) as figures:
        yield figures


@contextmanager
def terms_of_loss(trainer: Any, outputs: Outputs) -> Iterator[dict[str, list[float]]]:
    """
    Context for TRL's `_compute_loss` of a batch whose advantages are 0: what remains are the terms without an
    advantage, of what the forward pass of the policy's loss has returned. TRL's figures are kept apart.
    """
    others: dict[str, Any] = {"use_vllm": False, "vllm_importance_sampling_correction": False}
    if trainer.args.kl_in_reward:
        others["beta"] = 0.0
    again = intercepted(trainer, "_get_per_token_logps_and_entropies", lambda *args, **kwargs: outputs)
    with borrowed(trainer, **others), again, figures_apart(trainer) as figures:
        yield figures
