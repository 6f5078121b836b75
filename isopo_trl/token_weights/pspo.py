"""
PSPO ([MCDwyer/GR-PSPO](https://github.com/MCDwyer/GR-PSPO)): the policy in the ratio is smoothed towards the one that
drew the tokens, `r' = (1 - alpha) r + alpha`, and nothing is clipped. Its gradient is that of `w_t = (1 - alpha) r_t`:
`1 - alpha` on fresh data. `alpha` is 0.1, as in the authors' code.
"""

from ..settings.ranges import GIVE_BELOW_1
from .weighting import Tokens, Weighted, Weighting, register


@register("pspo")
class PSPO(Weighting):
    """`w_t = (1 - alpha) r_t`."""

    title = "PSPO"
    credit = "Tokens were weighted by [PSPO](https://github.com/MCDwyer/GR-PSPO)."
    looks_across_sequences = False
    settings = kept_on_resume = ("pspo_alpha",)
    ranges = {"pspo_alpha": (GIVE_BELOW_1, "is the behaviour policy's share of the smoothed policy")}

    def weigh(self, tokens: Tokens) -> Weighted:
        return Weighted(weights=(1 - self.args.pspo_alpha) * tokens.log_ratio.detach().exp())
