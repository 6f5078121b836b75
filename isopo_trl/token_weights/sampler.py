"""The sampler's correction: truncated or masked importance weights, as TRL has them for vLLM."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from .weighting import Tokens, Weighted, Weighting, register


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@register("sampler")
class SamplerCorrection(Weighting):
    """`w_t = min(r_t, cap)`, and TRL's other modes."""

    title = "the sampler's correction"
    credit = "Tokens were weighted by their importance ratio to the sampler."
    looks_across_sequences = False
    settings = (
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    )

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield (
            not args.vllm_importance_sampling_correction,
            "token_weights='sampler' is the correction that vllm_importance_sampling_correction=False turns off: "
            "remove one of the two.",
        )
        yield from _invalid(args)

    @classmethod
    def refusals_beside(cls, args: Any, chosen: type[Weighting]) -> Iterator[tuple[bool, str]]:
        given = args.given(*cls.settings)
        # Without token weights they are settings of TRL's that wait for a correction
        yield (
            chosen.needs_behaviour and bool(given),
            f"{', '.join(given)} is a setting of {cls.title}, which token_weights={chosen.name!r} takes the place of: "
            "remove it, or set token_weights='sampler'.",
        )
        yield from _invalid(args)

    def weigh(self, tokens: Tokens) -> Weighted:
        args, logps = self.args, tokens.logps.detach()
        mode = args.vllm_importance_sampling_mode
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        weights = sampler_weights(logps, tokens.behaviour, tokens.mask, mode, low, high)
        return Weighted(weights=weights, figures=self._figures_of_trl(logps, tokens, weights))

    def _figures_of_trl(self, logps: torch.Tensor, tokens: Tokens, weights: torch.Tensor) -> dict[str, float]:
        """The metrics that TRL logs of its own correction, under the same names."""
        mask = tokens.mask.bool()
        known = mask & ~torch.isnan(tokens.behaviour)
        difference = torch.where(known, (logps - tokens.behaviour).abs(), 0)
        by_sequence = self.args.vllm_importance_sampling_mode.startswith("sequence")
        of_interest = weights.flatten() if by_sequence else weights[mask]
        if of_interest.numel() == 0:
            of_interest = weights.new_zeros(1)
        figures = {
            "sampling_logp_difference/mean": difference.sum() / known.sum().clamp(min=1),
            "sampling_logp_difference/max": difference.max(),
            "importance_sampling_ratio/min": of_interest.min(),
            "importance_sampling_ratio/mean": of_interest.mean(),
            "importance_sampling_ratio/max": of_interest.max(),
        }
        gathered = self.ranks.gather(torch.stack(list(figures.values())).unsqueeze(0))
        over_ranks = {
            "min": gathered.amin(0).tolist(),
            "mean": gathered.mean(0).tolist(),
            "max": gathered.amax(0).tolist(),
        }
        return {f"sampling/{name}": over_ranks[name.rpartition("/")[2]][place] for place, name in enumerate(figures)}


def _invalid(args: Any) -> Iterator[tuple[bool, str]]:
    """What is wrong with the settings whether they are in use or not."""
    yield (
        args.vllm_importance_sampling_mode not in MODES,
        f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} is unknown: choose one of "
        f"{', '.join(map(repr, MODES))}.",
    )
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    yield (
        high is not None and not high > 0,
        f"vllm_importance_sampling_clip_max={high} is the largest importance weight that a token or sequence may "
        "have, and weights are positive: give a number above 0 (None or inf for no bound).",
    )
    yield (
        low is not None and not 0 <= low < math.inf,
        f"vllm_importance_sampling_clip_min={low} is the smallest importance weight that a token or sequence may "
        "have: give a finite number of at least 0 (None for no bound).",
    )


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
