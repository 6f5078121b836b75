"""
The weights before an optimizer's step, so that it can be taken back along itself: as a copy, or from what AdamW keeps;
and SGD's steps, which are tried before they are made.

AdamW's step from weights `w`, with moments `m` and `v` and their corrections, is `w (1 - rate decay) - u` with
`u = rate m / (sqrt(v) + eps)`. Both `u` and the rates are there after the step, so that `w` is known to rounding, and
with it any share of the step. For weights in bf16 rounding is of the size of the step, and a copy is kept.

SGD's step is its rate times a direction that is known before the step. So the weights are moved along it, measured,
and put back, to the last bit; then the optimizer makes the step, with the rate that was found. With weight decay the
direction depends on the weights, and a copy of them is kept meanwhile.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


# Bytes from which on a copy is not kept where it need not be
SMALL = 2**28
# Elements that are moved at a time, widened
_BLOCK = 2**22


def way_back_of(optimizer: Any, offload: bool = False) -> "WayBack":
    """
    What tries the steps of an optimizer, or takes them back; it may have its own, as those of `narrow_weights` do.

    Args:
        optimizer (`torch.optim.Optimizer`): the optimizer.
        offload (`bool`): whether to keep a copy in the memory of the host.
    """
    if hasattr(optimizer, "way_back"):
        return optimizer.way_back(offload)
    if can_be_tried(optimizer):
        return SGDSteps(optimizer, offload)
    parameters = list(trained(optimizer))
    size = sum(local(p).numel() * p.element_size() for p in parameters)
    if size > SMALL and not offload and can_be_undone(optimizer):
        return AdamWSteps(optimizer)
    return WeightCopy(parameters, offload)


def trained(optimizer: Any) -> Iterator[torch.Tensor]:
    """What the optimizer moves."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def can_be_undone(optimizer: Any) -> bool:
    """Whether the optimizer is PyTorch's AdamW, as it is described above, on weights that are not rounded away."""
    if type(optimizer) is not torch.optim.AdamW:
        return False
    wide = all(p.dtype in (torch.float32, torch.float64) and local(p).is_contiguous() for p in trained(optimizer))
    others = ("amsgrad", "maximize", "capturable", "differentiable")
    return wide and not any(group[name] for group in optimizer.param_groups for name in others)


def can_be_tried(optimizer: Any) -> bool:
    """Whether the optimizer is PyTorch's SGD, whose step is known before it is made."""
    return type(optimizer) is torch.optim.SGD and not any(group["differentiable"] for group in optimizer.param_groups)


def room_for(weight: torch.Tensor, offload: bool) -> torch.Tensor:
    """A tensor that a weight can be copied to, in the memory of the host if it is to `offload` that of a device."""
    if offload and weight.device.type != "cpu":
        return torch.empty_like(weight, device="cpu", pin_memory=True)
    return torch.empty_like(weight)


class WeightCopy:
    """
    A copy of the trained weights, of this rank's shards where they are sharded. Where a step of weights narrower than
    float32 is moved along, there is another of them after it: a share of what was rounded would be rounded again, and
    stay where it is.

    Args:
        parameters (`list[torch.Tensor]`): what the optimizer moves.
        offload (`bool`): whether to keep the copy in the memory of the host.
        moved (`Callable`, *optional*): is called when they have been moved.
    """

    lost = False

    def __init__(self, parameters: list[torch.Tensor], offload: bool = False, moved: Callable[[], None] | None = None):
        self._parameters, self._moved = parameters, moved
        self._weights = [local(p) for p in parameters]
        self._share = 1.0  # of the step that the weights have
        self._after: dict[int, torch.Tensor] = {}
        self._copies = [room_for(weight, offload) for weight in self._weights]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the weights, before the step."""
        self._weights = [local(p) for p in self._parameters]  # somebody may have given them other storage
        torch._foreach_copy_(self._copies, self._weights)
        self._share = 1.0
        self._after.clear()

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Put the weights where they would be with a share of the step, from 0 (as they were) to 1; 0 is for good."""
        for place, (weight, copy) in enumerate(zip(self._weights, self._copies, strict=True)):
            if not share:  # whatever the step has made of the weight
                weight.copy_(copy)
                continue
            if torch.promote_types(weight.dtype, torch.float32) == weight.dtype:
                for part, before in blocks(weight, copy):
                    before = before.to(weight.device)
                    part.sub_(before).mul_(share / self._share).add_(before)
                continue
            if place not in self._after:
                self._after[place] = torch.empty_like(copy).copy_(weight)
            for part, *others in blocks(weight, copy, self._after[place]):
                before, after = (other.to(weight.device, torch.float32) for other in others)
                part.copy_(after.sub_(before).mul_(share).add_(before))
        self._share = share
        if self._moved is not None:
            self._moved()

    def settle(self) -> None:
        """The step stays as it is."""
        self._after.clear()

    @property
    def bytes(self) -> int:
        """Memory of the copy."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)


class StepsOfOptimizer:
    """
    The learning rates of an optimizer's step, by which it is made, tried or undone without a copy of the weights.

    Attributes:
        lost (`bool`): whether weights of this rank could not be computed back, by the last move.
    """

    bytes = 0
    lost = False
    is_tried = False  # before it is made

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._rates: list[float] = []
        self._share = 0.0  # of the step that the weights have

    def remember(self) -> None:
        """Note the learning rates of the step, before it."""
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._share = 0.0 if self.is_tried else 1.0

    def settle(self) -> None:
        """The step stays as it is."""

    def _groups(self) -> Iterator[tuple[dict[str, Any], float]]:
        """The groups of parameters, and their learning rates."""
        return zip(self._optimizer.param_groups, self._rates, strict=True)


class AdamWSteps(StepsOfOptimizer):
    """The steps of AdamW, undone by what it keeps: no memory, and weights that are the former ones to rounding."""

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Put the weights where [`WeightCopy.move`] would; weights that the step has made infinite are [`lost`]."""
        moved = [
            (group, rate, p)
            for group, rate in self._groups()
            for p in group["params"]
            if p.grad is not None  # else the optimizer has left it alone
        ]
        if not moved:
            return
        counts = [self._optimizer.state[p]["step"].float() for _, _, p in moved]
        steps = torch.stack([count.to(counts[0].device) for count in counts]).tolist()
        for (group, rate, p), number in zip(moved, steps, strict=True):
            state = self._optimizer.state[p]
            first, second = (1 - float(beta) ** number for beta in group["betas"])
            for parts in blocks(*map(local, (p, state["exp_avg"], state["exp_avg_sq"]))):
                wide, mean, square = (part.to(torch.float64, copy=True) for part in parts)
                denominator = square.sqrt_().div_(math.sqrt(second)).add_(group["eps"])
                step = mean.div_(denominator).mul_(rate / first)
                decay = rate * group["weight_decay"]
                before = wide.add_(step, alpha=self._share).div_(1 - self._share * decay)
                parts[0].copy_(before.mul_(1 - share * decay).sub_(step, alpha=share))
        self._share = share
        self.lost = not share and not all(bool(local(p).isfinite().all()) for _, _, p in moved)


class SGDSteps(StepsOfOptimizer):
    """
    The steps of SGD, tried before they are made. No memory, but for the few weights that lose a bit on the way there
    and back: those are noted; with weight decay, all.

    Args:
        optimizer (`torch.optim.SGD`): the optimizer.
        offload (`bool`): whether to note all in the memory of the host.
    """

    is_tried = True

    def __init__(self, optimizer: Any, offload: bool = False):
        super().__init__(optimizer)
        self._offload = offload
        # Of each block that has been moved, what is put back
        self._noted: list[Noted] = []

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Put the weights where they would be with so many times the step; 0 is where they were, to the last bit."""
        if self._share:
            # Fewer are noted where an error has come in between
            for (group, rate, weights, *others), noted in zip(self._blocks(), self._noted, strict=False):
                if noted.places is not None:
                    direction = sgd_direction(group, weights, *others)
                    weights.copy_(_added(weights, direction, rate * self._share))
                noted.put_back(weights)
            self._noted = []
        self._share = share
        for group, rate, weights, *others in self._blocks() if share else ():
            direction = sgd_direction(group, weights, *others)
            moved = _added(weights, direction, -rate * share)
            if group["weight_decay"]:
                noted = Noted(weights, offload=self._offload)
            else:
                noted = Noted(weights, _added(moved, direction, rate * share) != weights)
            weights.copy_(moved)
            self._noted.append(noted)

    def settle(self) -> None:
        """Put the weights back where they were."""
        self.move(0.0)

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """Squares of the length of the step, and of the weights that it moves, `[2]`, of this rank."""
        sums = [torch.zeros(2, dtype=torch.float64)]
        for group, rate, weights, *others in self._blocks():
            direction = sgd_direction(group, weights, *others)
            sums.append(torch.stack([rate**2 * square(direction), square(weights)]).cpu())
        return torch.stack(sums).sum(0)

    def _blocks(self) -> Iterator[tuple[Any, ...]]:
        """Groups of parameters and their rates, with parts of the weights, their gradients and, if any, momentum."""
        for group, rate in self._groups():
            for p in group["params"]:
                if p.grad is None:  # the optimizer leaves it alone
                    continue
                former = self._optimizer.state[p].get("momentum_buffer") if p in self._optimizer.state else None
                tensors = [p, p.grad] if not group["momentum"] or former is None else [p, p.grad, former]
                for parts in blocks(*map(local, tensors)):
                    yield group, rate, *parts


WayBack = WeightCopy | AdamWSteps | SGDSteps


def sgd_direction(
    group: dict[str, Any], weights: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None = None
) -> torch.Tensor:
    """What SGD subtracts from the weights, but for the rate; `momentum` is that of the step before."""
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"]:
        gradient = gradient.add(weights, alpha=group["weight_decay"])
    buffer = gradient
    if momentum is not None:
        buffer = (momentum * group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
    return gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


class Noted:
    """
    What weights were: all of them, or, where that takes less memory, those that are to be put back.

    Attributes:
        places (`tuple[torch.Tensor]`, *optional*): where these are; `None` for all of them.
    """

    def __init__(self, weights: torch.Tensor, wanted: torch.Tensor | None = None, offload: bool = False):
        self.places: tuple[torch.Tensor, ...] | None = None
        if wanted is not None:
            places = tuple(place.int() for place in wanted.nonzero(as_tuple=True))
            index = sum(place.element_size() for place in places)
            if len(places[0]) * (index + weights.element_size()) < weights.numel() * weights.element_size():
                self.places = places
        whole = self.places is None
        self._before = room_for(weights, offload).copy_(weights) if whole else weights[self.places]

    def put_back(self, weights: torch.Tensor) -> None:
        if self.places is None:
            weights.copy_(self._before)
        else:
            weights[self.places] = self._before


def square(values: torch.Tensor) -> torch.Tensor:
    """Of the length of a tensor, in float64."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def _added(weights: torch.Tensor, direction: torch.Tensor, factor: float) -> torch.Tensor:
    largest = torch.finfo(weights.dtype).max
    return weights.add(direction, alpha=min(largest, max(-largest, factor))).to(weights.dtype)


def blocks(*alike: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, of as many elements as are moved at a time; all if they lie in another order."""
    if not all(values.is_contiguous() for values in alike):
        return iter([alike])
    return zip(*(values.view(-1).split(_BLOCK) for values in alike), strict=True)


def local(p: Any) -> torch.Tensor:
    """The part of a parameter, or of its gradient, that is on this rank; a view."""
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p
