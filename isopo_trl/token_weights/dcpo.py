"""
DCPO's clipping ([lime-RL/DCPO](https://github.com/lime-RL/DCPO)): `w_t = r_t`, and 0 beyond bounds that are wider for
tokens that were less likely. With `q` the token's probability under the behaviour policy,

    low = 1/2 + 1/2 sqrt(max(1 - 4 epsilon / q, 0)),  high = min(1/2 + 1/2 sqrt(1 + 4 epsilon_high / q), 10)

and with a negative advantage ratios above 10 are gated, too. The authors' README has 0.16 and 0.2 for the two
epsilons, which are the defaults here; their script has 0.2 and 0.28. Their advantages are
`advantage_transform="dcpo"`.
"""

import torch

from .gates import Gated, advantage_of_tokens, behaviour_of_tokens, gate
from .weighting import Tokens, register


LARGEST = 10.0


@register("dcpo")
class DCPO(Gated):
    """Ratios, gated by bounds of each token's own."""

    title = "DCPO"
    credit = "Tokens were weighted by the clipping of [DCPO](https://github.com/lime-RL/DCPO)."
    defaults = {"epsilon": 0.16, "epsilon_high": 0.2}
    kept_on_resume = tuple(defaults)

    def gated(self, tokens: Tokens) -> torch.Tensor:
        low, high = bounds(behaviour_of_tokens(tokens).exp(), self.args.epsilon, self.args.epsilon_high)
        return gate(tokens.log_ratio.detach().exp(), advantage_of_tokens(tokens), low, high, dual=LARGEST)


def bounds(q: torch.Tensor, epsilon: float, epsilon_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest ratio `[B, C]` of tokens with the probabilities `q` `[B, C]`."""
    q = q.clamp(min=torch.finfo(q.dtype).tiny)
    low = (1 + (1 - 4 * epsilon / q).clamp(min=0).sqrt()) / 2
    high = (1 + (1 + 4 * epsilon_high / q).sqrt()) / 2
    return low, high.clamp(max=LARGEST)
