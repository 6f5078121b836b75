"""The weights before an optimizer's step, so that it can be taken back along itself."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class KeptWeights:
    """
    A copy of the trained weights, of this rank's shards where they are sharded.

    Args:
        parameters (`Iterable[torch.Tensor]`): what the optimizer moves.
        offload (`bool`): whether to keep the copy in the memory of the host.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], offload: bool = False):
        self._weights = [local(p) for p in parameters]
        self._share = 1.0  # of the step that the weights have
        on_host = [offload and weight.device.type != "cpu" for weight in self._weights]
        self._copies = [
            torch.empty_like(weight, device="cpu", pin_memory=True) if host else torch.empty_like(weight)
            for weight, host in zip(self._weights, on_host, strict=True)
        ]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the weights, before the step."""
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.copy_(weight)
        self._share = 1.0

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Put the weights where they would be with a share of the step, from 0 (as they were) to 1; 0 is for good."""
        ratio = share / self._share if share else 0.0
        for weight, copy in zip(self._weights, self._copies, strict=True):
            before = copy.to(weight.device)
            if not share:  # whatever the step has made of the weight
                weight.copy_(before)
                continue
            wide = torch.promote_types(weight.dtype, torch.float32)
            step = weight.to(wide) - before.to(wide)
            weight.copy_(before.to(wide) + ratio * step)
        self._share = share

    @property
    def bytes(self) -> int:
        """Memory of the copy."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)


def local(p: Any) -> torch.Tensor:
    """The part of a parameter, or of its gradient, that is on this rank; a view."""
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p
