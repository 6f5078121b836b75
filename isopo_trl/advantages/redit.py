"""
ReDit ([Reward Dithering](https://huggingface.co/papers/2506.18631)): noise on every reward, before advantages are made
of them,

    R' = R + e,   e ~ U(-a, a) or N(0, sigma^2)

with `a` 0.05. Our sources are secondary, and have no number for `sigma`, which has to be chosen. A group whose rewards
are all the same has advantages of nothing but the noise, and where rewards are divided by their deviation
(`scale_rewards="group"`, the default), these are as large as any.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..settings.ranges import GIVE_AT_LEAST_0, outside
from .transform import Generation, Transform, register


NOISES = ("uniform", "gaussian")
REACH = 0.05  # of uniform noise


@register("redit")
class ReDit(Transform):
    """Rewards with noise, from a random stream of its own, which is the same on every rank."""

    title = "ReDit"
    credit = "Noise was added to the rewards, as in [ReDit](https://huggingface.co/papers/2506.18631)."
    stage = "rewards"
    settings = ("redit_noise", "redit_scale")
    gives_any_reward = True

    def __init__(self, args: Any):
        super().__init__(args)
        self._generations = 0

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield (
            args.redit_noise not in NOISES,
            f"redit_noise={args.redit_noise!r} is unknown: choose one of {', '.join(map(repr, NOISES))}.",
        )
        yield (
            args.redit_noise == "gaussian" and args.redit_scale is None,
            "redit_noise='gaussian' needs redit_scale, the deviation of the noise, for which our sources have no "
            "number: give a finite number of at least 0.",
        )
        if args.redit_scale is not None:
            meaning = "is how far noise reaches (uniform), or its deviation (gaussian)"
            yield outside(args, "redit_scale", GIVE_AT_LEAST_0, meaning)
        yield from super().refusals(args)

    def apply(self, generation: Generation) -> torch.Tensor:
        stream = np.random.default_rng([self.args.seed, self._generations])
        self._generations += 1
        scale = REACH if self.args.redit_scale is None else self.args.redit_scale
        is_uniform, count = self.args.redit_noise == "uniform", len(generation.rewards)
        noise = stream.uniform(-scale, scale, count) if is_uniform else stream.normal(0, scale, count)
        return generation.rewards + torch.from_numpy(noise)

    def state_dict(self) -> dict[str, Any]:
        return {"generations": self._generations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generations = state.get("generations", 0)
