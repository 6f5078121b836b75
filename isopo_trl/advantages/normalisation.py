"""TRL's way from rewards to advantages, for rewards that a transform has changed."""

import torch

from ..loss.zero_advantages import equal_rewards


def totals(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rewards `[N]` in float64 on the host, of `rewards` and `weights` by function; NaN where there is none."""
    rewards = rewards.detach().cpu().double()
    total = (rewards * weights.cpu().double()).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def normalised(rewards: torch.Tensor, group: int, scale: str) -> torch.Tensor:
    """
    Advantages `[N]` as TRL makes them, but 0 where all rewards of a group are the same, without a rounding.

    Args:
        rewards (`torch.Tensor`): `[N]`, NaN where there is none.
        group (`int`): completions per prompt, which follow each other.
        scale (`str`): TRL's `scale_rewards`.
    """
    grouped = rewards.view(-1, group)
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    if scale != "none":
        advantages = advantages / (_deviation(rewards.view(1, -1) if scale == "batch" else grouped) + 1e-4)
    equal = equal_rewards(rewards.unsqueeze(1), torch.ones(1), group)
    return torch.nan_to_num(advantages.flatten(), nan=0.0).masked_fill(equal, 0)


def _deviation(rewards: torch.Tensor) -> torch.Tensor:
    """`[rows, 1]`, of the samples `[rows, n]` that are numbers."""
    count = (~rewards.isnan()).sum(1, keepdim=True)
    return ((rewards - rewards.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True) / (count - 1)).sqrt()
