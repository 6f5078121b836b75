"""
DCPO's smooth standardisation ([lime-RL/DCPO](https://github.com/lime-RL/DCPO)): rewards are held against those of the
same prompt's earlier visits, so that a group in which all are equal still tells something.

At visit `i` of a prompt, with `n = i - 1` before it, the mean `m` and the deviation `s` of the group's rewards, and
`M` and `S` of the visits before,

    M' = (n M + m) / i,   S'^2 = [n S^2 + s^2 + (n / i) (m - M)^2] / i
    a = (R - m) / s,      T = (R - M') / S'                             (0 where the deviation is 0)
    x = ((i - 1) a + T) / i,   y = (a + (i - 1) T) / i

and A is the smaller of `x` and `y` in size. At the first visit both are `a`: where no prompt comes again, this is
GRPO, without the 1e-4 that TRL adds to the deviation. `s` is that of a sample, with `n - 1` in its denominator, as in
that code. DCPO's clipping is `token_weights="dcpo"`.
"""

from typing import Any

import torch

from .transform import Generation, Transform, register


@register("dcpo")
class DCPO(Transform):
    """Rewards standardised over the visits of their prompt. Logs the share of prompts that had one before."""

    title = "DCPO's standardisation"
    credit = "Advantages were standardised as in [DCPO](https://github.com/lime-RL/DCPO)."
    stage = "normalisation"

    def __init__(self, args: Any):
        super().__init__(args)
        # By prompt: number of visits, mean, and variance
        self._visits: dict[int, tuple[int, float, float]] = {}

    def apply(self, generation: Generation) -> torch.Tensor:
        advantages, seen = torch.zeros_like(generation.rewards), 0
        keys = generation.rollout.prompts.tolist()
        for key, places in zip(keys, generation.places(), strict=True):
            seen += key in self._visits
            if len(places):
                before = self._visits.get(key, (0, 0.0, 0.0))
                advantages[places], self._visits[key] = smooth(generation.rewards[places], *before)
        generation.figures["prompts_seen_before"] = seen / max(len(keys), 1)
        return advantages

    def state_dict(self) -> dict[str, Any]:
        numbers = torch.tensor([*self._visits.values()], dtype=torch.float64).view(-1, 3)
        return {"prompts": torch.tensor([*self._visits], dtype=torch.int64), "visits": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits = {}
        if state:
            rows = zip(state["prompts"].tolist(), state["visits"].tolist(), strict=True)
            self._visits = {key: (int(visits), mean, variance) for key, (visits, mean, variance) in rows}


def smooth(
    rewards: torch.Tensor, n: int, mean: float, variance: float
) -> tuple[torch.Tensor, tuple[int, float, float]]:
    """Advantages of one prompt's `rewards` `[G]`, after `n` visits with this `mean` and `variance`; and the next."""
    i = n + 1
    # Equal rewards have no deviation, and none by a rounding
    is_equal = bool((rewards == rewards[0]).all())
    m, s = (rewards[0].item(), 0.0) if is_equal else (rewards.mean().item(), rewards.std().item())
    variance = (n * variance + s**2 + n / i * (m - mean) ** 2) / i
    mean += (m - mean) / i
    own = (rewards - m) / s if s else torch.zeros_like(rewards)
    total = (rewards - mean) / variance**0.5 if variance else torch.zeros_like(rewards)
    x, y = (n * own + total) / i, (own + n * total) / i
    return torch.where(x.abs() < y.abs(), x, y), (i, mean, variance)
