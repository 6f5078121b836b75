"""The policy before training, kept aside, and how far the present one is from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class InitialPolicy:
    """A copy, in CPU memory, of a model's trained parameters (of this rank's part of them, where they are sharded)."""

    def __init__(self, trainer: Any):
        self.copies = {name: values.to("cpu", copy=True) for name, values in storages(trainer)}

    def differs_from(self, trainer: Any) -> bool:
        """Whether a parameter of the model (of this rank's part of it) has another value than its copy."""
        return any(not torch.equal(values.cpu(), self.copies[name]) for name, values in storages(trainer))

    @contextmanager
    def in_place_of(self, trainer: Any) -> Iterator[None]:
        """The copies take the place of the model's parameters, which come back afterwards."""
        self._exchange(trainer)
        try:
            yield
        finally:
            self._exchange(trainer)

    def _exchange(self, trainer: Any) -> None:
        for name, theirs in storages(trainer):
            mine = self.copies[name]
            now = theirs.to("cpu", copy=True)
            theirs.copy_(mine)
            mine.copy_(now)


def kl_estimates(logps: torch.Tensor, initial_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Estimate of `KL(policy || initial policy)` in nats per completion, `[B]`, from completions that the policy drew:
    `sum_t (exp(d_t) - 1 - d_t)` with `d_t = log pi_initial - log pi`, which is never negative.

    Args:
        logps, initial_logps (`torch.Tensor`): log-probabilities of the completions' tokens, `[B, C]`.
        mask (`torch.Tensor`): 1 where there is a token, `[B, C]`.
    """
    difference = (initial_logps - logps).cpu().double()
    return ((difference.exp() - 1 - difference) * mask.cpu()).sum(1)


@torch.no_grad()
def storages(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the trained parameters, and the tensors that hold their values, or this rank's part of them."""
    model = trainer.model
    for module in model.modules():
        if isinstance(module, FSDPModule):  # some stay whole after a forward pass
            module.reshard()
    offload = getattr(getattr(trainer.model_wrapped, "optimizer", None), "parameter_offload", None)
    if offload is not None:  # DeepSpeed ZeRO-3: some are whole, some on their way
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()  # as TRL does after a generation
        coordinator.release_and_reset_all(offload.module)
    for name, p in model.named_parameters():
        if p.requires_grad:
            values: Any = p
            if hasattr(values, "ds_tensor"):  # DeepSpeed ZeRO-3, which keeps small parameters whole as well
                values = values.ds_tensor
            values = values.detach()
            yield name, values.to_local() if isinstance(values, DTensor) else values
