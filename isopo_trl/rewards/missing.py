"""Rewards that are missing, and rewards that tell no completion from another: nothing is learned of either."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn

from ..loss.zero_advantages import equal_rewards
from .functions import verified, verify_size


logger = get_logger(__name__)

# Optimizer steps in a row, without an advantage in any of them, after which that is said
PATIENCE = 10


def tells_nothing(rewards: torch.Tensor, weights: torch.Tensor, group: int, by_function: bool) -> bool:
    """
    Whether all completions of each prompt have the same reward, or none.

    Args:
        rewards (`torch.Tensor`): `[N, functions]`, NaN where a function gave none.
        weights (`torch.Tensor`): `[functions]`.
        group (`int`): completions per prompt, which follow each other.
        by_function (`bool`): whether each function's rewards are compared by themselves, instead of their sum.
    """
    if not by_function:
        return bool(equal_rewards(rewards, weights, group).all())
    return all(bool(equal_rewards(each, torch.ones(1), group).all()) for each in rewards.split(1, dim=1))


class MissingRewards:
    """What a run is told of its rewards, once each. All of it is known on the host."""

    def __init__(self) -> None:
        self._said: set[str] = set()  # names of functions
        self._means = ""  # of the last generation, by function
        self._last: list[bool] = []  # whether the last generation of the step before told nothing
        self._in_step: list[bool] = []  # the same of those in this step
        self._steps = 0  # in a row, that told nothing
        self._nans: dict[str, str] = {}  # for how many completions functions returned NaN in this generation

    def watched(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The reward functions for a generation, whose returns are verified and seen here; models as they are."""
        self._nans = {}
        return [verified(*each, self.returned) for each in zip(functions, names, strict=True)]

    def calculated(
        self,
        rewards: torch.Tensor,
        weights: torch.Tensor,
        functions: Sequence[Any],
        names: list[str],
        args: Any,
        group: int | None,
    ) -> None:
        """
        Take what TRL has made of the returns; raises where nothing can be.

        Args:
            rewards (`torch.Tensor`): `[N, functions]`, of all ranks; NaN where a function gave none.
            weights (`torch.Tensor`): `[functions]`.
            functions, names (`list`): the reward functions.
            args ([`ISOPOConfig`]): the settings.
            group (`int`, *optional*): completions per prompt, where it is trained on them.
        """
        rewards, weights = rewards.detach().cpu(), weights.cpu()
        by_function = args.multi_objective_aggregation == "normalize_then_sum"
        verify_size(rewards, weights, names, args.scale_rewards != "none" or by_function)
        for function, name, column in zip(functions, names, rewards.unbind(1), strict=True):
            if isinstance(function, nn.Module):  # which nobody has seen
                self.returned(column.tolist(), name, of_all_ranks=True)
        if group is not None:
            self.generated(rewards, weights, names, group, by_function)

    def returned(self, rewards: Sequence[float | None], name: str, of_all_ranks: bool = False) -> None:
        """Take what the reward function `name` returned; `None` is meant, and NaN is not."""
        count = sum(reward is not None and math.isnan(reward) for reward in rewards)
        if not count:
            return
        self._nans[name] = f"{count} of {len(rewards)}"
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                f"The reward function {name!r} returned NaN for {self._nans[name]} completions, which counts as no "
                "reward: return a number, or None where a completion is to be left out. This is said once.",
                main_process_only=of_all_ranks,
            )

    def generated(
        self, rewards: torch.Tensor, weights: torch.Tensor, names: list[str], group: int, by_function: bool
    ) -> None:
        """
        Take the rewards of a generation that is trained on, as in [`tells_nothing`], of functions with these `names`.
        Raises where no completion has a reward, though a function tried to give one.
        """
        if self._nans and bool(torch.isnan(rewards).all()):
            listed = ", ".join(f"{name!r} returned NaN for {count}" for name, count in self._nans.items())
            raise ValueError(
                f"No completion of this generation has a reward, so there is nothing to learn from it ({listed}): "
                "return a number, or None where a completion is to be left out."
            )
        self._in_step.append(tells_nothing(rewards, weights, group, by_function))
        means = rewards.nanmean(0).tolist()
        self._means = ", ".join(f"{name!r} {mean:.3g}" for name, mean in zip(names, means, strict=True))

    def learned(self) -> None:
        """Take that the last generation has advantages after all, which are not made of its rewards alone."""
        self._in_step[-1:] = [False]

    def step(self) -> None:
        """Close an optimizer step, whose completions may be those of a step before."""
        now, self._in_step = self._in_step or self._last, []
        self._last = now[-1:]
        self._steps = self._steps + 1 if now and all(now) else 0
        if self._steps == PATIENCE and "" not in self._said:
            self._said.add("")  # which is nobody's name
            logger.warning(
                f"In {PATIENCE} optimizer steps in a row, all completions of each prompt had the same reward (means "
                f"of the last generation: {self._means}), so that none had an advantage, and nothing is learned. The "
                "task may be too easy or too hard, completions may be cut before their answer "
                "(completions/clipped_ratio), or the reward functions may not read them as they are. This is said "
                "once."
            )
