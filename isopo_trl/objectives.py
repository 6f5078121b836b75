"""Token weights: how much each token's log-probability counts, apart from the sequences' coefficients."""

import torch


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
