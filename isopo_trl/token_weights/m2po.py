"""
M2PO ([Second-Moment Trust Policy Optimization](https://huggingface.co/papers/2510.01161)): `w_t = r_t`, and 0 for
harmful tokens whose `(log r)^2` is above a bound. Harmful are those that lead on: `A > 0` and `r > 1`, or `A < 0` and
`r < 1`. The bound is the one at which the mean of their `(log r)^2`, each cut down to the bound, meets a budget.

The mean is over the harmful tokens of the optimizer step's microbatches so far, or of a microbatch
(`token_weights_scope`), on all ranks; in the authors' code (Infini-AI-Lab/M2PO) over those of a rank's microbatch.
That code can also be given a least range, within which nothing is clipped. Its scripts give none, and there is none
here.
"""

import math
from typing import Any

import torch

from ..geometry.statistics import scalar_dtype
from ..settings.ranges import GIVE_AT_LEAST_0
from .gates import Gated, advantage_of_tokens, behaviour_of_tokens
from .weighting import SCOPE, Ranks, Tokens, register


@register("m2po")
class M2PO(Gated):
    """Ratios, gated by a bound that the batch's second moment sets."""

    title = "M2PO"
    credit = "Tokens were weighted by [M2PO](https://huggingface.co/papers/2510.01161)."
    settings = kept_on_resume = ("m2po_budget", "token_weights_scope")
    ranges = {**SCOPE, "m2po_budget": (GIVE_AT_LEAST_0, "is the mean of (log r)^2 that harmful tokens may have")}

    def __init__(self, args: Any, ranks: Ranks | None = None):
        super().__init__(args, ranks)
        # (log r)^2 of the step's harmful tokens so far, on all ranks; None where each microbatch is for itself
        self._seen: torch.Tensor | None = None

    def gated(self, tokens: Tokens) -> torch.Tensor:
        # Not cut as the ratio is: the tokens that are the furthest off are those that the bound is for
        advantages, z = advantage_of_tokens(tokens), tokens.logps.detach() - behaviour_of_tokens(tokens)
        harmful = tokens.mask.bool() & ((advantages > 0) & (z > 0) | (advantages < 0) & (z < 0))
        moments = z.to(scalar_dtype(z.device)).square()
        bound = largest_moment(self._in_scope(moments[harmful]), self.args.m2po_budget)
        return tokens.log_ratio.detach().exp().masked_fill(harmful & (moments > bound), 0)

    def _in_scope(self, moments: torch.Tensor) -> torch.Tensor:
        moments = self.gather(moments)
        if torch.is_grad_enabled() and self.args.token_weights_scope == "step":
            self._seen = moments = moments if self._seen is None else torch.cat([self._seen, moments])
        return moments

    def step(self) -> dict[str, torch.Tensor]:
        self._seen = None
        return super().step()

    def reset(self) -> None:
        self._seen = None
        super().reset()


def largest_moment(moments: torch.Tensor, budget: float) -> torch.Tensor:
    """
    The largest `v = (log r)^2` that a harmful token may have: infinity where their mean is within the budget `tau`.
    Else, with `v_0 <= v_1 <= ...` the `n` of them and `k` the first for which `v_k (n - k - 1) + sum_{j <= k} v_j >=
    tau n`, it is `v_{k - 1}`, or 0 if `k = 0`.

    Args:
        moments (`torch.Tensor`): `[n]`.
        budget (`float`): `tau`.
    """
    n = len(moments)
    if n == 0:
        return moments.new_tensor(math.inf)
    v = moments.sort().values
    # What the sum would be with all later ones cut down to v_k: it grows with k
    cut_down = v * torch.arange(n - 1, -1, -1, device=v.device) + v.cumsum(0)
    k = (cut_down < budget * n).sum()
    return torch.where(v.mean() <= budget, math.inf, torch.cat([v.new_zeros(1), v])[k])
