"""
The weights before a step, from which the optimizer makes it once more, as a share of it; and steps of SGD, which are
tried before they are made.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..step_size.taken_back import SMALL, Noted, SGDSteps, StepsOfOptimizer, local, room_for, square
from .parts import Part, widened


class NarrowSteps(StepsOfOptimizer):
    """
    The steps of a `Narrow` optimizer, made again with another share of the learning rate: in float32, and rounded
    with the same random numbers. The weights before the step, and their remainders, are a copy; with remainders, large
    ones are computed back from gradients and moments, to float32's rounding.

    Args:
        optimizer (`Narrow`): the optimizer.
        offload (`bool`): whether to keep a copy in the memory of the host.

    Attributes:
        lost (`bool`): whether weights of this rank could not be computed back, by the last [`move`].
    """

    def __init__(self, optimizer: Any, offload: bool = False):
        super().__init__(optimizer)
        self._offload = offload
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        size = sum(local(p).numel() * p.element_size() for p in self._parameters)
        self._has_copies = optimizer.updates == "stochastic" or offload or size <= SMALL
        self._copies: dict[torch.Tensor, list[torch.Tensor]] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Before the step: note its learning rates, and copy the weights."""
        super().remember()
        self._optimizer.give_remainders()
        if not self._has_copies:
            return
        for p in self._parameters:
            values = [local(p), *self._optimizer.remainder(p)]
            if len(self._copies.get(p, ())) != len(values):  # before its first gradient, a weight has no remainder
                self._copies[p] = [room_for(value, self._offload) for value in values]
            torch._foreach_copy_(self._copies[p], values)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Put the weights where they would be with a share of the step, from 0 (as they were) to 1; 0 is for good."""
        optimizer = self._optimizer
        rates = {id(group): rate for group, rate in self._groups()}
        is_finite = True
        for place, group, p in optimizer.stepped():
            rate = rates[id(group)]
            for part in optimizer.parts(place, p, *self._copies.get(p, ())):
                before = self._copied(part) if self._has_copies else self._undone(group, rate, part)
                part.write(optimizer.formula.moved(group, share * rate, before, part.step) if share else before)
                is_finite = is_finite and (self._has_copies or share > 0 or bool(before.isfinite().all()))
        self._share, self.lost = share, not is_finite

    @property
    def bytes(self) -> int:  # type: ignore[override]
        """Memory of the copy."""
        return sum(copy.numel() * copy.element_size() for copies in self._copies.values() for copy in copies)

    @staticmethod
    def _copied(part: Part) -> torch.Tensor:
        weight, *remainder = (copy.to(part.weight.device) for copy in part.others)
        return widened(weight, remainder[0] if remainder else None)

    def _undone(self, group: dict[str, Any], rate: float, part: Part) -> torch.Tensor:
        """The weights before the step, from the weights that a share of it has left."""
        after, rate = part.wide(), self._share * rate
        if not rate:
            return after
        formula = self._optimizer.formula
        alone = formula.moved(group, rate, torch.zeros_like(after), part.step)
        return after.double().sub_(alone).div_(1 - rate * formula.decay(group)).to(after.dtype)


class NarrowTrials(SGDSteps):
    """
    The steps of `NarrowSGD`, tried as [`SGDSteps`] are: the model gets the weights that the step will leave, rounded
    with the same random numbers, and gets its own back. Remainders are left alone. Few weights in bf16
    change in a step, and only these are noted; of weights in float32 all do.
    """

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        self._changed: list[tuple[torch.Tensor, Noted]] = []

    def remember(self) -> None:
        super().remember()
        self._optimizer.give_remainders()

    @torch.no_grad()
    def move(self, share: float) -> None:
        for weights, noted in self._changed:
            noted.put_back(weights)
        self._changed = []
        self._share = share
        for rate, group, part in self._parts() if share else ():
            after = part.narrow(self._formula.moved(group, rate * share, part.wide(), part.step))
            noted = Noted(part.weight, after != part.weight)
            part.weight.copy_(after)
            self._changed.append((part.weight, noted))

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        sums = [torch.zeros(2, dtype=torch.float64)]
        for rate, group, part in self._parts():
            before = part.wide()
            step = self._formula.moved(group, rate, torch.zeros_like(before), part.step)
            sums.append(torch.stack([square(step), square(before)]).cpu())
        return torch.stack(sums).sum(0)

    @property
    def _formula(self) -> Any:
        return self._optimizer.formula

    def _parts(self) -> Iterator[tuple[float, dict[str, Any], Part]]:
        """The rate, the group and the parts of all that a step moves, with moments that have seen its gradient."""
        rates = {id(group): rate for group, rate in self._groups()}
        for place, group, p in self._optimizer.stepped():
            for part in self._optimizer.parts(place, p, ahead=True):
                step, names = part.step, self._formula.moment_names(group)
                moments = {name: step.moments[name].clone() for name in names if name in step.moments}
                is_first = len(moments) < len(names)
                moments |= {name: torch.empty_like(step.gradient) for name in names if name not in moments}
                ahead = step._replace(moments=moments)
                self._formula.learn(group, part.wide(), ahead, is_first)
                yield rates[id(group)], group, replace(part, step=ahead)
