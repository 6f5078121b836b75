r"""
Ratios `r_t = pi_theta / pi_behaviour` of the sampled tokens, and what a batch of them says: pure functions of tensors.

The behaviour policy is the one that drew the tokens: an earlier policy, or the same one in other arithmetic or at
another temperature.
"""

import torch

from ..geometry.statistics import scalar_dtype


# Log-ratios are cut here, so that one token cannot have it all
_LIMIT = 10.0


def log_ratios(logps: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """
    `log r_t` `[B, C]`, with the gradient of `logps`; 0 where `behaviour` is NaN, and cut at plus and minus 10, where
    it says no more than that the two policies have nothing in common.
    """
    own = logps.detach()
    value = torch.nan_to_num(own - behaviour, nan=0.0, posinf=_LIMIT, neginf=-_LIMIT).clamp(-_LIMIT, _LIMIT)
    return value + (logps - own)


def ratio_sums(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Number of scored tokens, and the sums over them of `r`, `r^2` and an estimate of `KL(pi_theta || pi_behaviour)`,
    `[4]`; they add up over microbatches and ranks.

    The KL divergence is estimated by `r log r - r + 1`, which is never negative and whose mean over tokens of the
    behaviour policy is `KL(pi_theta || pi_behaviour)`.

    Args:
        log_ratio (`torch.Tensor`): `[B, C]`, `log r_t`.
        mask (`torch.Tensor`): `[B, C]`, nonzero at scored tokens.
    """
    scored = mask.bool()
    z = torch.where(scored, log_ratio.detach(), 0).to(scalar_dtype(log_ratio.device))
    r = z.exp()
    terms = torch.stack([torch.ones_like(r), r, r.square(), r * z - torch.expm1(z)])
    return torch.where(scored, terms, 0).sum((1, 2))


def batch_figures(sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    `ess`, the normalised effective sample size in `(0, 1]` (1 if and only if all ratios are equal; 1 without tokens),
    `ratio_mean` and `kl`, from `sums` `[4]`.
    """
    n, ratio, square, kl = sums.unbind()
    tokens = n.clamp(min=1)
    # The division first: n sum r^2 is beyond float32 where the sums are not
    ess = torch.where(n > 0, (ratio / tokens).square() / (square / tokens).clamp(min=torch.finfo(sums.dtype).tiny), 1)
    return {"ess": ess.clamp(max=1), "ratio_mean": ratio / tokens, "kl": kl / tokens}
