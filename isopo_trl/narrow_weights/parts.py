"""Parts of a parameter, which are widened one after the other: nothing of its whole size is."""

from dataclasses import dataclass

import torch

from .bits import join, rounded, split
from .steps import StepInputs
from .stream import noise


@dataclass(frozen=True)
class Part:
    """
    A part of a parameter, and of all that belongs to it.

    Attributes:
        weight (`torch.Tensor`): a view.
        remainder (`torch.Tensor`, *optional*): a view, in the type of the weight, with the bits of an int16.
        step ([`StepInputs`]): what moves it, with views of its moments.
        others (`list[torch.Tensor]`): views of what else was asked for.
        key (`int`): of the random numbers for this step of this parameter.
        start (`int`): the first element, in the whole parameter.
        is_exact (`bool`): whether weights in bf16 have remainders, or will have.
    """

    weight: torch.Tensor
    remainder: torch.Tensor | None
    step: StepInputs
    others: list[torch.Tensor]
    key: int
    start: int
    is_exact: bool

    def wide(self) -> torch.Tensor:
        """The weights as a step sees them; a copy."""
        return widened(self.weight, self.remainder)

    def write(self, wide: torch.Tensor) -> None:
        """Keep these weights."""
        self.weight.copy_(self.narrow(wide))
        if self.remainder is not None:
            self.remainder.view(torch.int16).copy_(split(wide)[1])

    def narrow(self, wide: torch.Tensor) -> torch.Tensor:
        """What the model will have of these weights."""
        if self.weight.dtype != torch.bfloat16:
            return wide
        if self.is_exact:
            return split(wide)[0]
        numbers = noise(self.key, self.start, wide.numel(), wide.device)
        return rounded(wide, numbers.view(wide.shape))


def widened(weight: torch.Tensor, remainder: torch.Tensor | None) -> torch.Tensor:
    """A copy of weights in float32, or what is wider."""
    if remainder is not None:
        return join(weight, remainder.view(torch.int16))
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
