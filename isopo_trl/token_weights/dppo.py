"""
DPPO ([Divergence Proximal Policy Optimization](https://huggingface.co/papers/2602.04879)): `w_t = min(r_t, c)`, and 0
where the policy is further than `delta` from the behaviour policy and the step would lead on. With `p` and `q` the
token's probabilities under the two, the distance is that of two coins: `|p - q|`, or their KL divergence.

Defaults are those of verl (`dppo_tv`, `dppo_kl`): `delta` 0.15 and 0.05, `c` 20. Other sources have 0.2 for the first
(prime-rl), and 10 (Stable-RL) or 10,000 (an example of verl's) for `c`.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from .gates import Gated, advantage_of_tokens, behaviour_of_tokens
from .weighting import Tokens, register


class DPPO(Gated):
    """Truncated ratios, gated by a distance of probabilities instead of by the ratio."""

    title = "DPPO"
    credit = "Tokens were weighted by [DPPO](https://huggingface.co/papers/2602.04879)."
    settings = kept_on_resume = ("dppo_delta", "dppo_cap")
    ranges = {"dppo_cap": ((lambda x: x > 0, "a number above 0"), "is the largest weight that a token can have")}
    default_delta: ClassVar[float]

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        delta = args.dppo_delta
        yield (
            delta is not None and not delta >= 0,
            f"dppo_delta={delta} is the distance of a token's two probabilities beyond which it is gated: give a "
            f"number of at least 0, or None for {cls.default_delta}.",
        )
        yield from super().refusals(args)

    def gated(self, tokens: Tokens) -> torch.Tensor:
        own, behaviour = tokens.logps.detach(), behaviour_of_tokens(tokens)
        delta = self.default_delta if self.args.dppo_delta is None else self.args.dppo_delta
        leads_on = torch.where(advantage_of_tokens(tokens) > 0, own > behaviour, own < behaviour)
        ratio = tokens.log_ratio.detach().exp().clamp(max=self.args.dppo_cap)
        return ratio.masked_fill(leads_on & (self.distance(own, behaviour) > delta), 0)

    @staticmethod
    @abstractmethod
    def distance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """How far the policy is from the behaviour policy at each token, `[B, C]`."""


@register("dppo_tv")
class DPPOByTotalVariation(DPPO):
    """`|p - q|`."""

    default_delta = 0.15

    @staticmethod
    def distance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() - log_q.exp()).abs()


@register("dppo_kl")
class DPPOByKL(DPPO):
    """`q log(q / p) + (1 - q) log((1 - q) / (1 - p))`."""

    default_delta = 0.05

    @staticmethod
    def distance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        p, q = log_p.exp(), log_q.exp()
        drawn = torch.where(q > 0, q * (log_q - log_p), 0)
        return drawn + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
