"""
CPPO ([lzhxmu/CPPO](https://github.com/lzhxmu/CPPO)): of each group the share `P` of the completions with the smallest
`|A|`, rounded down to a number of them, is not trained on. Advantages are those of the whole group. `P` is 0.5.

What is pruned is not computed: it has the advantage 0, and is left out as `skip_zero_advantage` says. With
`group_microbatches`, which keeps groups whole, all of a group is computed. The loss stays normalised as with all of
them. The authors fill the batch up with more prompts: raise `gradient_accumulation_steps` by `1 / (1 - P)`, since what
remains is packed into fewer microbatches.
"""

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

    def apply(self, generation: Generation) -> torch.Tensor:
        grouped = generation.advantages.view(-1, generation.group)
        # Of equal ones the first
        order = grouped.abs().argsort(dim=1, descending=True, stable=True)
        pruned = order[:, number_trained(generation.group, self.args.cppo_pruning) :]
        return grouped.scatter(1, pruned, 0).flatten()


def number_trained(group: int, pruning: float) -> int:
    """How many of a group's completions are trained on: `G` less `G P`, which is rounded down; at least one."""
    return max(group - int(group * pruning + 1e-9), 1)  # the product may miss a whole number by a rounding
