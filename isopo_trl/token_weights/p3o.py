"""
P3O ([Trust the Batch](https://huggingface.co/papers/2605.12380)): `w_t = min(r_t, ESS)` and a pull `(1 - ESS)
KL(pi_theta || pi_behaviour)`, with the normalised effective sample size `ESS = (sum r)^2 / (n sum r^2)` of the step's
tokens, over the microbatches so far and all ranks.
"""

import torch

from .ratios import batch_figures
from .weighting import Tokens, Unscaled, Weighted, Weighting, register


@register("p3o")
class P3O(Weighting):
    """Weights bounded by the effective sample size, and a pull towards the behaviour policy that no rule rescales."""

    title = "P3O"
    credit = "Tokens were weighted by [P3O](https://huggingface.co/papers/2605.12380)."
    goes_back_twice = True

    def weigh(self, tokens: Tokens) -> Weighted:
        sums = self.observe(tokens)
        ess = batch_figures(sums)["ess"].to(tokens.logps.dtype)
        log_ratio = tokens.log_ratio.detach()

        def pull() -> Unscaled | None:
            if not ess < 1:
                return None
            kl, slope = kl_pull(log_ratio, self.args.use_bias_correction_kl)
            return Unscaled((1 - ess) * kl, (1 - ess) * slope)

        return Weighted(weights=p3o_weights(log_ratio, ess), unscaled=pull, sums=sums)


def p3o_weights(log_ratio: torch.Tensor, ess: torch.Tensor) -> torch.Tensor:
    """`min(r_t, ESS)` `[B, C]`, without gradient."""
    return torch.minimum(log_ratio.detach().exp(), ess.to(log_ratio.dtype))


def kl_pull(log_ratio: torch.Tensor, unbiased: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `KL(pi_theta || pi_behaviour)` token by token, and what multiplies the gradient of `log pi_theta` in its gradient;
    `[B, C]` each, without gradient.

    Args:
        log_ratio (`torch.Tensor`): `[B, C]`, `log r_t`.
        unbiased (`bool`): `r log r - r + 1` and `r log r`, whose means over tokens of the behaviour policy are the
            divergence and its gradient; or `1 / r - 1 + log r` and `1 - 1 / r`, which would be for tokens of the
            policy itself.
    """
    z = log_ratio.detach()
    if unbiased:
        slope = z * z.exp()
        return slope - torch.expm1(z), slope
    slope = -torch.expm1(-z)
    return z - slope, slope
