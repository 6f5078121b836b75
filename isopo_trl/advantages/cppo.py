"""
CPPO ([lzhxmu/CPPO](https://github.com/lzhxmu/CPPO)): of each group only the share `1 - P` of the completions with the
largest `|A|` is trained on. Advantages are those of the whole group. `P` is 0.5.

What is pruned is not computed: it has the advantage 0, and is left out as `skip_zero_advantage` says. The loss stays
normalised as with all of them. The authors fill the batch up with more prompts: raise
`gradient_accumulation_steps` by `1 / (1 - P)`, since what remains is packed into fewer microbatches.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..settings.ranges import GIVE_BELOW_1
from .transform import Generation, Transform, register


@register("cppo")
class CPPO(Transform):
    """Advantages, but 0 for the smallest of each group."""

    title = "CPPO"
    credit = "Completions were pruned as in [CPPO](https://github.com/lzhxmu/CPPO)."
    stage = "selection"
    settings = ("cppo_pruning",)
    ranges = {"cppo_pruning": (GIVE_BELOW_1, "is the share of a group's completions that is not trained on")}

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from super().refusals(args)
        yield (
            args.cppo_pruning < 1 and number_trained(args.num_generations, args.cppo_pruning) == 0,
            f"cppo_pruning={args.cppo_pruning} leaves none of num_generations={args.num_generations} completions: "
            "lower it, or raise num_generations.",
        )

    def apply(self, generation: Generation) -> torch.Tensor:
        grouped = generation.advantages.view(-1, generation.group)
        # Of equal ones the first
        order = grouped.abs().argsort(dim=1, descending=True, stable=True)
        pruned = order[:, number_trained(generation.group, self.args.cppo_pruning) :]
        return grouped.scatter(1, pruned, 0).flatten()


def number_trained(group: int, pruning: float) -> int:
    """How many of a group's completions are trained on: `(1 - P) G`, rounded down."""
    return int(group * (1 - pruning) + 1e-9)  # a product may miss a whole number by a rounding
