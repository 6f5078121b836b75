"""
PACS ([ritzz-ai/PACS](https://github.com/ritzz-ai/PACS)): the policy as a classifier of its own completions, right ones
from wrong ones. With `psi_i = beta (log pi - log mu)` summed over the tokens of a completion,

    Psi_i = psi_i - mean of the others' psi
    e_i = c_i (R_i - sigmoid(Psi_i)),   A_i = beta (e_i - mean of the others' e)

which is the gradient of the binary cross entropy of `sigmoid(Psi)`. The weights `c_i = G / (2 n)`, with the number `n`
of the group's completions that have the same reward, count right and wrong ones alike; they are 1 where all rewards of
a group are the same. `beta` is 1. Rewards are 0 or 1.

`mu` is what the tokens were drawn with. Where the policy itself drew them, `Psi` is 0 and no pass is made; else it
costs a forward pass over the generation.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..settings.ranges import GIVE_ABOVE_0
from .transform import Generation, Transform, register


@register("pacs")
class PACS(Transform):
    """Residuals of a classification, each against the others of its group."""

    title = "PACS"
    credit = "Advantages were those of [PACS](https://github.com/ritzz-ai/PACS)."
    stage = "normalisation"
    settings = ("pacs_beta",)
    ranges = {"pacs_beta": (GIVE_ABOVE_0, "multiplies the log-ratios of PACS")}
    takes_rewards = (0, 1)
    needs_behaviour = True

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from super().refusals(args)
        yield (
            args.uses_stale_data,
            "advantage_transform='pacs' has advantages that change with every optimizer step, and here completions "
            "serve for more than one: set num_iterations=1, and steps_per_generation to a divisor of "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}.",
        )

    def apply(self, generation: Generation) -> torch.Tensor:
        rewards, beta = generation.rewards, self.args.pacs_beta
        advantages, psi = torch.zeros_like(rewards), beta * generation.rollout.log_ratios
        for places in generation.places():
            if len(places) > 1:
                advantages[places] = beta * residuals(rewards[places], psi[places])
        return advantages


def residuals(rewards: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """`[G]`, the weighted residual of each completion of a prompt, less the mean of the others'."""
    right = rewards == 1
    same = torch.where(right, right.sum(), (~right).sum()).to(rewards)
    weights = torch.where(same < len(rewards), len(rewards) / (2 * same), 1.0)
    return apart(weights * (rewards - torch.sigmoid(apart(psi))))


def apart(values: torch.Tensor) -> torch.Tensor:
    """Each of `values` `[G]` less the mean of the others; 0 where all are the same, without a rounding."""
    values = values - values[0]
    return values - (values.sum() - values) / (len(values) - 1)
