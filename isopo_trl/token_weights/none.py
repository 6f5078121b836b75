"""No weighting: every token counts the same."""

from collections.abc import Iterator
from typing import Any

import torch

from ..trl_seam.head import HeadFigures
from .weighting import Tokens, Weighted, Weighting, register


@register("none")
class NoWeighting(Weighting):
    """`w_t = 1`: nothing is asked of the sampler, and TRL's loss is left alone."""

    needs_behaviour = False
    looks_across_sequences = False

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from ()

    def __call__(
        self,
        logps: torch.Tensor,
        behaviour: torch.Tensor,
        mask: torch.Tensor,
        advantages: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
        head: HeadFigures | None = None,
        learning_rate: float | None = None,
    ) -> Weighted:
        return Weighted()

    def weigh(self, tokens: Tokens) -> Weighted:
        return Weighted()
