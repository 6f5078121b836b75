"""
ReDit ([Reward Dithering](https://huggingface.co/papers/2506.18631)): noise on every reward, before advantages are made
of them,

    R' = R + e,   e ~ U(-a, a) or N(0, sigma^2)

with `a` 0.05. A group whose rewards are all the same has advantages of nothing but the noise, and where rewards are
divided by their deviation (`scale_rewards="group"`, the default), these are as large as any. Our sources are
secondary, and have no number for `sigma`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..settings.ranges import GIVE_AT_LEAST_0
from .transform import Generation, Transform, register


NOISES = ("uniform", "gaussian")


@register("redit")
class ReDit(Transform):
    """Rewards with noise, from a random stream of its own, which is the same on every rank."""

    title = "ReDit"
    credit = "Noise was added to the rewards, as in [ReDit](https://huggingface.co/papers/2506.18631)."
    stage = "rewards"
    settings = ("redit_noise", "redit_scale")
    ranges = {"redit_scale": (GIVE_AT_LEAST_0, "is how far noise reaches (uniform), or its deviation (gaussian)")}

    def __init__(self, args: Any):
        super().__init__(args)
        self._generations = 0

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield (
            args.redit_noise not in NOISES,
            f"redit_noise={args.redit_noise!r} is unknown: choose one of {', '.join(map(repr, NOISES))}.",
        )
        yield from super().refusals(args)

    def apply(self, generation: Generation) -> torch.Tensor:
        stream = np.random.default_rng([self.args.seed, self._generations])
        self._generations += 1
        scale, count = self.args.redit_scale, len(generation.rewards)
        is_uniform = self.args.redit_noise == "uniform"
        noise = stream.uniform(-scale, scale, count) if is_uniform else stream.normal(0, scale, count)
        return generation.rewards + torch.from_numpy(noise)

    def state_dict(self) -> dict[str, Any]:
        return {"generations": self._generations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generations = state.get("generations", 0)
