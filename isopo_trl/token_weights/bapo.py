"""
BAPO ([Balanced Policy Optimization](https://huggingface.co/papers/2510.18927)): `w_t = r_t` between bounds that the
batch chooses, and 0 beyond them. They start at 0.6 and 1.2 and rise by 0.05, first the lower one up to 0.8, then the
upper one up to 2.0, until

    sum_{A > 0} A min(r, high) >= target sum_{A < 0} |A| max(r, low)

or there is no step left. With a negative advantage ratios above 3 are gated, too.

That is the authors' released code (WooooDyy/BAPO, recipe/bapo), with a `target` of 1 in its configuration and of 0.5
in its README. The paper has another search: terms are weighed by `q`, the upper bound rises first, the bounds end at
0.9 and 3.0, and the target is a share of 0.4. The sums are over the scored tokens of the optimizer step's microbatches
so far, or of a microbatch, as in that code (`token_weights_scope`), on all ranks.
"""

import torch

from ..geometry.statistics import scalar_dtype
from ..settings.ranges import GIVE_AT_LEAST_0
from .gates import advantage_of_tokens, gate
from .weighting import SCOPE, Tokens, Weighted, Weighting, register


LOWER = [0.6 + 0.05 * step for step in range(5)]
UPPER = [1.2 + 0.05 * step for step in range(17)]
DUAL = 3.0


@register("bapo")
class BAPO(Weighting):
    """Ratios, gated by bounds under which the two signs of the advantages balance. Logs the bounds."""

    title = "BAPO"
    credit = "Tokens were weighted by [BAPO](https://huggingface.co/papers/2510.18927)."
    looks_across_sequences = False  # without an advantage, nothing is added to the sums
    settings = kept_on_resume = ("bapo_target", "token_weights_scope")
    _meaning = "is what tokens with a positive advantage are to weigh beside those with a negative one"
    ranges = {**SCOPE, "bapo_target": (GIVE_AT_LEAST_0, _meaning)}

    def weigh(self, tokens: Tokens) -> Weighted:
        advantages, ratio = advantage_of_tokens(tokens), tokens.log_ratio.detach().exp()
        found = contributions(ratio, advantages, tokens.mask)
        if self.args.token_weights_scope == "step":
            sums = self.observe(tokens, *found)
            low, high = bounds(sums[4:], self.args.bapo_target)
        else:
            low, high = bounds(self.ranks.reduce(found, reduction="sum"), self.args.bapo_target)
            sums = self.observe(tokens, low, high, torch.ones_like(low))  # of which the log has the mean
        return Weighted(weights=gate(ratio, advantages, low, high, dual=DUAL), sums=sums)

    def figures(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        of_step = self.args.token_weights_scope == "step"
        low, high = bounds(sums[4:], self.args.bapo_target) if of_step else sums[4:6] / sums[6]
        return {**super().figures(sums), "clip_low": low, "clip_high": high}


def contributions(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    `sum |A| max(r, low)` over the tokens with a negative advantage for each of the lower bounds, then `sum A min(r,
    high)` over those with a positive one for each of the upper bounds, `[22]`; they add up over microbatches and
    ranks.
    """
    dtype = scalar_dtype(ratio.device)
    ratio, sizes = ratio.to(dtype), advantages.to(dtype) * mask.bool()
    negative = [(-sizes.clamp(max=0) * ratio.clamp(min=low)).sum() for low in LOWER]
    positive = [(sizes.clamp(min=0) * ratio.clamp(max=high)).sum() for high in UPPER]
    return torch.stack([*negative, *positive])


def bounds(sums: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper bound that `sums` `[22]` of [`contributions`] lead to, scalars."""
    negative, positive = sums.split([len(LOWER), len(UPPER)])
    # Along the way: all lower bounds with the first upper one, then the other upper bounds with the last lower one
    ways = [(low, 0) for low in range(len(LOWER))] + [(len(LOWER) - 1, high) for high in range(1, len(UPPER))]
    lows, highs = torch.tensor(ways, device=sums.device).unbind(1)
    met = (positive[highs] / (negative[lows] + 1e-8) >= target) | (negative[lows] <= 0)
    # As many steps as there are places before the first that meets the target, and none beyond the last
    steps = (met.cumsum(0) == 0).sum().clamp(max=len(ways) - 1)
    return sums.new_tensor(LOWER)[lows[steps]], sums.new_tensor(UPPER)[highs[steps]]
