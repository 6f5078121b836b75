"""What reward functions return: one number, or `None`, per completion, and an error that names the function if not."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..settings.types import shown
from ..trl_seam.rewards import is_async_callable


Seen = Callable[[list[float | None], str], None]


def verify_callable(reward_funcs: Any) -> None:
    """Raise unless what is given for a trainer's reward functions can be called, or is the name of a model."""
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not (function is None or isinstance(function, str) or callable(function)):
            raise ValueError(
                f"reward_funcs={shown(reward_funcs)} has an entry of type {type(function).__name__}, which cannot be "
                "called: give a function, a model or its name, or a list of these."
            )


def verify_weights(weights: torch.Tensor, kl_in_reward: bool) -> None:
    """Raise where all weights `[functions]` are 0, and the divergence is no reward either."""
    if not weights.any() and not kl_in_reward:
        raise ValueError(
            f"reward_weights={weights.tolist()} leaves out every reward, so that nothing would be learned: "
            "give at least one of them a weight other than 0."
        )


def verified(function: Any, name: str, seen: Seen = lambda values, name: None) -> Any:
    """
    The reward function, which raises where it does not return a list of numbers, and shows them to `seen`, with its
    name; a model is left as it is.
    """
    if isinstance(function, nn.Module):  # TRL calls it in its own way
        return function

    def shown_to_seen(returned: Any) -> list[float | None]:
        values = rewards(returned, name)
        seen(values, name)
        return values

    async def asynchronous(**kwargs: Any) -> list[float | None]:
        return shown_to_seen(await function(**kwargs))

    def synchronous(**kwargs: Any) -> list[float | None]:
        return shown_to_seen(function(**kwargs))

    return asynchronous if is_async_callable(function) else synchronous


def rewards(returned: Any, name: str) -> list[float | None]:
    """
    What the reward function `name` returned, as a list of numbers, with `None` for completions that it leaves out.
    """
    expected = "return a list with one number per completion, or None in it for a completion that is left out"
    if isinstance(returned, torch.Tensor):
        returned = returned.flatten(1).squeeze(1).tolist() if returned.dim() > 1 else returned.tolist()
    try:
        values = None if isinstance(returned, str | bytes | Mapping) else list(returned)
    except TypeError:  # nothing that has elements
        values = None
    if values is None:
        raise ValueError(
            f"The reward function {name!r} returned {shown(returned)} of type {type(returned).__name__}: {expected}."
        )
    return [_number(value, name, place, expected) for place, value in enumerate(values)]


def _number(value: Any, name: str, place: int, expected: str) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, str | bytes):
            return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's with several elements
        pass
    raise ValueError(
        f"The reward function {name!r} returned {shown(value)} of type {type(value).__name__} for completion {place}: "
        f"{expected}."
    )


def verify_size(rewards: torch.Tensor, weights: torch.Tensor, names: list[str], normalised: bool) -> None:
    """
    Raise where rewards are too large for the sums that TRL takes of them: it would take the advantage for zero.

    Args:
        rewards (`torch.Tensor`): `[B, functions]`, of all ranks; NaN where a function left a completion out.
        weights (`torch.Tensor`): `[functions]`.
        names (`list[str]`): of the functions.
        normalised (`bool`): whether rewards are divided by their standard deviation.
    """
    rewards = torch.nan_to_num(rewards.detach(), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    infinite = torch.isinf(rewards).sum(0).tolist()
    for name, count in zip(names, infinite, strict=True):
        if count:
            raise ValueError(
                f"The reward function {name!r} returned an infinite reward for {count} completions: return a "
                "finite number, or None to leave a completion out."
            )
    weighted = rewards * weights.to(rewards.device)
    sums = [weighted.sum(1)]
    if normalised:
        sums += [weighted.sum(1).square().sum(), rewards.square().sum()]
    if not all(bool(torch.isfinite(x).all()) for x in sums):
        largest = rewards.abs().amax(0).tolist()
        listed = ", ".join(f"{name!r}: {value:.3g}" for name, value in zip(names, largest, strict=True))
        raise ValueError(
            f"Rewards are too large for float32, in which TRL adds up and normalises them (largest by function: "
            f"{listed}): scale the rewards or `reward_weights` down."
        )
