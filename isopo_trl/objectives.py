r"""
Token weights: how much each token's log-probability counts, apart from the sequences' coefficients.

All of them look at the ratio `r_t = pi_theta / pi_behaviour` of the sampled tokens, where the behaviour policy is the
one that drew them: an earlier policy, or the same one in other arithmetic or at another temperature.

- Sampler correction: `w_t = min(r_t, cap)`, and TRL's other modes.
- P3O ([Trust the Batch](https://huggingface.co/papers/2605.12380)): `w_t = min(r_t, ESS)` and a pull `(1 - ESS)
  KL(pi_theta || pi_behaviour)`, with the normalised effective sample size `ESS = (sum r)^2 / (n sum r^2)`.
- KPO ([Online Causal Kalman Filtering](https://huggingface.co/papers/2602.10609)): `log r_t`, filtered along the
  completion, in place of `log r_t` in the clipped objective `min(r A, clip(r) A)`.
"""

import functools

import torch

from .geometry.statistics import scalar_dtype


# Log-ratios are cut here, so that one token cannot have it all
_LIMIT = 10.0


def sampler_weights(
    logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """
    Importance weights `pi_theta / pi_sampler`, truncated or masked as TRL's four modes do.

    TRL takes the numerator from an extra forward pass over the whole batch; here it is the training forward's own, so
    that the weight also accounts for how far the policy has moved since the tokens were sampled.

    Args:
        logps (`torch.Tensor`): `[B, C]`, log-probabilities of the training forward, without gradient.
        sampler_logps (`torch.Tensor`): `[B, C]`, the sampler's own; NaN, where it gave none, counts as a
            ratio of 1.
        mask (`torch.Tensor`): `[B, C]`, nonzero at scored tokens.
        mode (`str`): `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`.
        clip_min, clip_max (`float`, *optional*): the bounds C_min and C_max.

    Returns:
        `torch.Tensor`: `[B, C]`, or `[B, 1]` for the sequence modes.
    """
    level, action = mode.split("_")
    log_ratio = torch.nan_to_num((logps - sampler_logps) * mask, nan=0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    weights = log_ratio.exp()
    if action == "truncate":
        return weights.clamp(min=clip_min, max=clip_max)
    outside = torch.zeros_like(weights, dtype=torch.bool)
    if clip_min is not None:
        outside = outside | (weights < clip_min)
    if clip_max is not None:
        outside = outside | (weights > clip_max)
    return weights.masked_fill(outside, 0.0)


def log_ratios(logps: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """
    `log r_t` `[B, C]`, with the gradient of `logps`; 0 where `behaviour` is NaN, and cut at plus and minus 10, where
    it says no more than that the two policies have nothing in common.
    """
    own = logps.detach()
    value = torch.nan_to_num(own - behaviour, nan=0.0, posinf=_LIMIT, neginf=-_LIMIT).clamp(-_LIMIT, _LIMIT)
    return value + (logps - own)


# P3O


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


# KPO


@functools.lru_cache(maxsize=32)
def _gains(length: int, initial_variance: float, process_noise: float) -> torch.Tensor:
    gains, variance = [], initial_variance
    for _ in range(length):
        predicted = variance + process_noise
        gain = predicted / (predicted + 1)
        variance = (1 - gain) * predicted
        gains.append(gain)
    return torch.tensor(gains, dtype=torch.float64)


def kalman_gains(length: int, initial_variance: float = 1.0, process_noise: float = 1e-6) -> torch.Tensor:
    """
    Gains `K_0 .. K_{length - 1}` of a Kalman filter for a random walk that is observed with noise, `[length]` in
    float64. They do not depend on the observations, so the filter is an average with a schedule known beforehand.

    Args:
        length (`int`): number of observations.
        initial_variance (`float`): `P_0`, in units of the observation noise `V`.
        process_noise (`float`): `Q`, in units of `V`. The gains tend to about `sqrt(Q)`.
    """
    # A few lengths serve for all: the first gains of a longer schedule are a shorter one's
    return _gains(1 << max(length - 1, 0).bit_length(), initial_variance, process_noise)[:length]


def token_gains(mask: torch.Tensor, schedule: torch.Tensor) -> torch.Tensor:
    """
    The gain of each token `[B, C]`, from the `schedule` of a completion's first, second, ... scored token. Tokens that
    are not scored, such as a tool's, have gain 0: the filter passes over them.
    """
    scored = mask.bool()
    place = scored.cumsum(1) - 1
    return schedule.to(mask.device, scalar_dtype(mask.device))[place.clamp(min=0)] * scored


def filtered(z: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """
    `rho_t = (1 - K_t) rho_{t-1} + K_t z_t` along the last dimension, with `rho_{-1} = 0`.

    Differentiable with respect to `z`: observation `k` gets `K_k sum_{t >= k} prod_{k < j <= t} (1 - K_j)` times what
    arrives at `rho_t`. Both directions are scans of logarithmic depth, in float64 where the device has it.

    Args:
        z (`torch.Tensor`): `[B, C]`, observations.
        gains (`torch.Tensor`): `[B, C]`, `K_t`.
    """
    dtype = scalar_dtype(z.device)
    return _Filter.apply(z.to(dtype), gains.to(dtype)).to(z.dtype)


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gains):
        ctx.save_for_backward(gains)
        return linear_scan(1 - gains, gains * z)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (gains,) = ctx.saved_tensors
        # s_k = grad_k + (1 - K_{k+1}) s_{k+1}: the same scan from the other end
        decay = torch.nn.functional.pad(1 - gains[:, 1:], (0, 1))
        return gains * linear_scan(decay.flip(1), grad.flip(1)).flip(1), None


def linear_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y_t = decay_t y_{t-1} + x_t` along the last dimension, with `y_{-1} = 0`, by doubling the span."""
    span, length = 1, x.shape[-1]
    while span < length:
        # After each round, y_t takes in the last 2 span of x, and decay_t carries over as many steps
        x = torch.cat([x[..., :span], torch.addcmul(x[..., span:], decay[..., span:], x[..., :-span])], -1)
        decay = torch.cat([decay[..., :span], decay[..., span:] * decay[..., :-span]], -1)
        span *= 2
    return x
