"""
ASPO ([wizard-III/Archer2.0](https://github.com/wizard-III/Archer2.0)): with a positive advantage the ratio is turned
over, so that tokens that have become unlikely count more and not less.

    A > 0:  w_t = min(1 / r_t, 3), and 0 where r_t > 1 + epsilon_high
    A < 0:  w_t = min(r_t, 3), and 0 where r_t < 1 - epsilon

Both epsilons are 0.2. That Archer2.0 takes 0.4 for tokens of high entropy is not part of this. Without an advantage,
of which the sources say nothing, `w_t = min(r_t, 3)`.
"""

import torch

from .gates import Gated, advantage_of_tokens, gate
from .weighting import Tokens, register


LARGEST = 3.0


@register("aspo")
class ASPO(Gated):
    """Ratios, gated, and turned over where the advantage is positive."""

    title = "ASPO"
    credit = "Tokens were weighted by ASPO, as in [Archer2.0](https://github.com/wizard-III/Archer2.0)."
    defaults = {"epsilon": 0.2, "epsilon_high": 0.2}
    kept_on_resume = tuple(defaults)

    def gated(self, tokens: Tokens) -> torch.Tensor:
        z, advantages = tokens.log_ratio.detach(), advantage_of_tokens(tokens)
        ratio = z.exp()
        open_ = gate(ratio, advantages, 1 - self.args.epsilon, 1 + self.args.epsilon_high) > 0
        turned = torch.where(advantages > 0, (-z).exp(), ratio)
        return turned.clamp(max=LARGEST).masked_fill(~open_, 0)
