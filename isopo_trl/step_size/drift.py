"""
How far the policy has gone from the one that drew the data, and when that is too far: completions that serve for more
than one optimizer step are then generated anew.

The divergence KL(behaviour || policy), in nats per token, is the mean of `exp(d) - 1 - d` over the tokens that were
drawn, with `d = log pi - log pi_behaviour` of the training forward and the sampler: no pass is made for it. Where the
sampler computes in another precision, the two differ before the first step; that much is measured then, and is not
counted as drift. Where the sampler tells nothing, the drift is what the measured steps since the generation come to,
if all of them went in one direction.
"""

import math
from typing import Any

import torch

from ..trl_seam.generation import Progress


# Default bound, in units of `target_kl`: as far as four steps go in one direction
DEFAULT = 16.0


def drift_sums(logps: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Sum over tokens of their part in the divergence, and the number of tokens: `[2]`, in float64. Where nobody knows
    what a token was drawn with, it is left out.

    Args:
        logps, behaviour (`torch.Tensor`): `[B, C]`, log-probabilities by the policy, and by the one that drew.
        mask (`torch.Tensor`): `[B, C]`, nonzero at the tokens that count.
    """
    change = logps.detach().double() - behaviour.double()
    counts = mask.bool() & ~change.isnan()
    each = torch.where(counts, torch.expm1(change) - change, 0.0)
    return torch.stack([each.sum(), counts.sum().double()])


def is_exhausted(drift: float, step: float, bound: float) -> bool:
    """Whether a step of KL divergence `step` on top of `drift`, in the same direction, goes beyond the bound."""
    return (math.sqrt(max(drift, 0.0)) + math.sqrt(max(step, 0.0))) ** 2 > bound


class BehaviourBound:
    """
    Ends the use of a generation when its drift is too large: more nats per token than `bound`, or than [`DEFAULT`]
    times the target of steps.
    """

    def __init__(self, bound: float | None, progress: Progress, accelerator: Any):
        self._progress, self._accelerator = progress, accelerator
        self._follows, self.bound = bound is None, math.inf if bound is None else bound
        self.floor = 0.0  # how far sampler and trainer are apart without a step
        self.path = 0.0  # sum of the roots of the steps' divergences since the generation
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        self._fresh: set[bool] = set()

    def aim(self, target: float) -> None:
        """Steps have this target from now on, in nats per token."""
        if self._follows:
            self.bound = DEFAULT * target

    def see(self, fresh: bool) -> None:
        """Take note of a microbatch; `fresh`: whether no step came between its generation and now."""
        self._fresh.add(fresh)

    def add(self, sums: torch.Tensor) -> None:
        """Add [`drift_sums`] of a microbatch."""
        self._sums = self._sums + sums

    def close(self, step: float) -> dict[str, float]:
        """
        After an optimizer step, of KL divergence `step`: end the use of the generation where it is exhausted, on all
        ranks or none. Returns the figures to be logged.
        """
        total, tokens = self._accelerator.reduce(self._sums, reduction="sum").tolist()
        if True in self._fresh:  # of a generation inside the step, which is the one that the next will use
            self.path = 0.0
        if self._fresh == {True} and tokens:  # else no pass was made, and what was known of the sampler stays
            self.floor = total / tokens
        drift = max(0.0, total / tokens - self.floor) if tokens else self.path**2
        self.path += math.sqrt(max(step, 0.0))
        self.forget()
        stopped = self._progress.is_inside_generation and is_exhausted(drift, step, self.bound)
        if stopped:
            self._progress.end_generation()
        return {"behaviour_kl": drift, "stopped_early": float(stopped)}

    def state_dict(self) -> dict[str, float]:
        return {"floor": self.floor, "path": self.path}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.floor, self.path = state["floor"], state["path"]
