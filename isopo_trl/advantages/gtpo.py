"""
GTPO's advantages ([winstonsmith1897/GTPO](https://github.com/winstonsmith1897/GTPO)): uncertain completions are
liked less, and the most uncertain ones are dropped. With the mean entropy `H` of a completion's tokens,

    A = R - mean of R over the group,   A' = A - lambda H,   A' = 0 where H > tau

`lambda` is 0.1 and `tau` is ln 2, which the code rounds to 0.7. The code drops completions in every run, and by its
README only where the policy's entropy was below `tau` before training. This is the code: raise `tau` for a policy that
begins above it, or most of its completions are dropped. `H` is of the distributions that tokens were drawn from; the
code's is at a temperature of 1.

`R - mean` is `scale_rewards="none"`, and other advantages of TRL's are refused. What is dropped is not computed, as
`skip_zero_advantage` says. A completion without scored tokens has an entropy of 0, and so keeps its advantage.

GTPO's token weights are `token_weights="gtpo"`. They look for conflicts by the signs of `A'`, so that a dropped
completion is in none, where the authors take those of `A`.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch

from ..settings.ranges import GIVE_AT_LEAST_0, Bound
from .transform import Generation, Transform, named, register


ABOVE_0: Bound = (lambda x: x > 0, "a number above 0")


@register("gtpo")
class GTPO(Transform):
    """Advantages less a part of the entropy, but 0 for uncertain completions. Costs a forward pass."""

    title = "GTPO's advantages"
    credit = "Advantages were changed by entropy, as in [GTPO](https://github.com/winstonsmith1897/GTPO)."
    stage = "selection"
    settings = ("gtpo_entropy", "gtpo_threshold")
    ranges = {
        "gtpo_entropy": (GIVE_AT_LEAST_0, "is how much of a completion's entropy is subtracted from its advantage"),
        "gtpo_threshold": (ABOVE_0, "is the entropy above which a completion is dropped"),
    }

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from super().refusals(args)
        given, chosen = args.advantage_transform, named(args.advantage_transform)
        before = list(takewhile(lambda transform: transform is not cls, chosen))
        left_out = [transform.name for transform in before if transform.stage == cls.stage]
        yield (
            bool(left_out),
            f"advantage_transform={given!r}: 'gtpo' would give advantages again to what {', '.join(left_out)} leaves "
            "out: put 'gtpo' first.",
        )
        yield (
            args.multi_objective_aggregation != "sum_then_normalize",
            f"advantage_transform={given!r} takes rewards less their mean, and multi_objective_aggregation="
            f"{args.multi_objective_aggregation!r} divides them by a deviation: set "
            "multi_objective_aggregation='sum_then_normalize'.",
        )
        yield (
            args.scale_rewards != "none" and all(transform.stage != "normalisation" for transform in before),
            f"advantage_transform={given!r} takes rewards less their mean, and scale_rewards={args.scale_rewards!r} "
            "divides them by a deviation: set scale_rewards='none'.",
        )

    def apply(self, generation: Generation) -> torch.Tensor:
        entropies, args = generation.rollout.entropies, self.args
        return less_entropy(generation.advantages, entropies, args.gtpo_entropy, args.gtpo_threshold)


def less_entropy(advantages: torch.Tensor, entropies: torch.Tensor, strength: float, threshold: float) -> torch.Tensor:
    """`A'` `[N]`, of the advantages `A` `[N]` and the mean entropies `H` `[N]`, with `lambda` and `tau`."""
    return (advantages - strength * entropies).masked_fill(entropies > threshold, 0)
