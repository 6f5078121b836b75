"""No weighting: every token counts the same."""

from collections.abc import Iterator
from typing import Any

from .weighting import Tokens, Weighted, Weighting, register


@register("none")
class NoWeighting(Weighting):
    """`w_t = 1`: nothing is asked of the sampler, and TRL's loss is left alone."""

    needs_behaviour = False
    looks_across_sequences = False

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from ()

    def __call__(self, *args: Any, **others: Any) -> Weighted:
        return Weighted()

    def weigh(self, tokens: Tokens) -> Weighted:
        return Weighted()
