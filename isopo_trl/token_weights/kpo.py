"""
KPO ([Online Causal Kalman Filtering](https://huggingface.co/papers/2602.10609)): `log r_t`, filtered along the
completion, in place of `log r_t` in the clipped objective `min(r A, clip(r) A)`.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..geometry.statistics import scalar_dtype
from ..trl_seam.generation import samples_at_temperature
from .weighting import Tokens, Weighted, Weighting, register


_SCHEDULE = ("kpo_initial_variance", "kpo_process_noise")


@register("kpo")
class KPO(Weighting):
    """Clipped ratios that a Kalman filter, or one of fixed gain, has passed along the completion."""

    title = "KPO"
    credit = "Tokens were weighted by [KPO](https://huggingface.co/papers/2602.10609)."
    looks_across_sequences = False
    settings = kept_on_resume = ("kpo_gain", "kpo_stop_gradient", *_SCHEDULE)
    defaults = {"epsilon": 0.0003, "epsilon_high": 0.0004}

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        schedule = args.given(*_SCHEDULE)
        gain, variance, noise = args.kpo_gain, args.kpo_initial_variance, args.kpo_process_noise
        yield (
            gain is not None and not 0 < gain <= 1,
            f"kpo_gain={gain} must lie in (0, 1]: it is the weight of the newest ratio in the average.",
        )
        yield (
            gain is not None and bool(schedule),
            f"kpo_gain={gain} is a fixed gain in place of the schedule that {', '.join(schedule)} is for: give either "
            "the one or the other.",
        )
        yield (
            not all(0 <= x < math.inf for x in (variance, noise)),
            f"kpo_initial_variance={variance} and kpo_process_noise={noise} are variances: give numbers that are "
            "finite and not negative.",
        )
        yield (
            variance == 0 and noise == 0,
            "kpo_initial_variance=0 and kpo_process_noise=0 make a filter that never looks at a ratio: raise one of "
            "them.",
        )
        yield (
            not all(x is not None and x >= 0 for x in (args.epsilon, args.epsilon_high)),
            f"epsilon={args.epsilon} and epsilon_high={args.epsilon_high} are distances from 1 at which filtered "
            "ratios are clipped: neither can be negative.",
        )
        yield (
            args.off_policy_mask_threshold is not None,
            "off_policy_mask_threshold drops sequences by their unfiltered ratios, which token_weights='kpo' does not "
            "use: leave the threshold unset.",
        )
        yield from super().refusals(args)

    def warnings(self) -> list[str]:
        if samples_at_temperature(self.args):
            return []
        return [
            "Tokens are not sampled from the distribution that is trained (top_p, top_k, min_p, repetition_penalty, "
            "generation_kwargs), so filtered ratios leave KPO's narrow range from the first step: most tokens with a "
            "negative advantage are clipped, and sampling at a higher temperature can flatten the policy whatever the "
            "reward. Sample at `temperature` alone, set epsilon and epsilon_high to 0.2, or use token_weights='p3o'."
        ]

    def weigh(self, tokens: Tokens) -> Weighted:
        rho = filtered(tokens.log_ratio, token_gains(tokens.mask, self._schedule(tokens.mask.shape[1])))
        sums = self.observe(tokens, (rho.detach().exp() * tokens.mask).sum(dtype=scalar_dtype(rho.device)))
        if self.args.kpo_stop_gradient:
            rho = rho.detach() + (tokens.logps - tokens.logps.detach())
        return Weighted(log_ratio=rho, sums=sums)

    def figures(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().figures(sums), "filtered_ratio_mean": sums[4] / sums[0].clamp(min=1)}

    def _schedule(self, length: int) -> torch.Tensor:
        args = self.args
        if args.kpo_gain is not None:
            return torch.full((length,), args.kpo_gain, dtype=torch.float64)
        return kalman_gains(length, args.kpo_initial_variance, args.kpo_process_noise)


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
