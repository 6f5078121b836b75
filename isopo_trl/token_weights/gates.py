"""
What weightings that clip have in common: `w_t = r_t`, or something like it, and 0 where a token is to have no gradient
because of its advantage's sign.
"""

from abc import abstractmethod

import torch

from .weighting import Tokens, Weighted, Weighting


class Gated(Weighting):
    """
    Weights some of which are 0, as the gradient of PPO's `min(r A, clip(r) A)` is. Their share of the scored tokens is
    logged, as `off_policy/gated`.
    """

    looks_across_sequences = False

    def weigh(self, tokens: Tokens) -> Weighted:
        weights = self.gated(tokens)
        closed = ((weights == 0) & tokens.mask.bool()).sum()
        return Weighted(weights=weights, sums=self.observe(tokens, closed))

    @abstractmethod
    def gated(self, tokens: Tokens) -> torch.Tensor:
        """The weights `[B, C]`, without gradient; positive where the token keeps its gradient."""

    def figures(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().figures(sums), "gated": sums[4] / sums[0].clamp(min=1)}


def gate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    dual: float = torch.inf,
) -> torch.Tensor:
    """
    `ratio` `[B, C]`, but 0 where `A > 0` and `r > high`, or `A < 0` and `r < low` or `r > dual`.

    Args:
        ratio (`torch.Tensor`): `[B, C]`, `r_t`.
        advantages (`torch.Tensor`): `[B, 1]`.
        low, high (`torch.Tensor` or `float`): `[B, C]`, a scalar or a number.
        dual (`float`): PPO's second bound for negative advantages.
    """
    closed = (advantages > 0) & (ratio > high) | (advantages < 0) & ((ratio < low) | (ratio > dual))
    return ratio.masked_fill(closed, 0)


def advantage_of_tokens(tokens: Tokens) -> torch.Tensor:
    """The advantages as a column, `[B, 1]`."""
    if tokens.advantages is None:
        raise ValueError(
            "Tokens are weighted by the sign of their advantage, and there are no advantages: pass `advantages`, one "
            "per sequence."
        )
    return tokens.advantages.unsqueeze(1)


def behaviour_of_tokens(tokens: Tokens) -> torch.Tensor:
    """`log q_t` `[B, C]`, not cut as the ratio is; the policy's own where the sampler gave none."""
    own = tokens.logps.detach()
    return torch.where(tokens.mask.bool() & ~tokens.behaviour.isnan(), tokens.behaviour, own)
