"""
Steps of SGD and AdamW as functions of the weights before them: with the operations of PyTorch's optimizers, one after
the other, so that they are the same to the last bit where everything is in float32.

`group` is one of the optimizer's groups of parameters.
"""

from typing import Any, NamedTuple

import torch


class StepInputs(NamedTuple):
    """
    What a step is made of, beside the weights before it.

    Args:
        gradient (`torch.Tensor`): in the type of the step, as are the moments.
        moments (`dict[str, torch.Tensor]`): by name, as in the optimizer's state.
        number (`int`): of the step, from 1.
    """

    gradient: torch.Tensor
    moments: dict[str, torch.Tensor]
    number: int


class SGD:
    """Steps of `torch.optim.SGD`."""

    @staticmethod
    def moment_names(group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments."""
        return ("momentum_buffer",) if group["momentum"] else ()

    @staticmethod
    def learn(group: dict[str, Any], before: torch.Tensor, step: StepInputs, is_first: bool) -> None:
        """Let the moments, in place, see the gradient of a step; of their first, they are new."""
        if group["momentum"]:
            slope, buffer = SGD._slope(group, before, step.gradient), step.moments["momentum_buffer"]
            if is_first:
                buffer.copy_(slope)
            else:
                buffer.mul_(group["momentum"]).add_(slope, alpha=1 - group["dampening"])

    @staticmethod
    def moved(group: dict[str, Any], rate: float, before: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """
        The weights after a step at this learning rate, with moments that have seen its gradient: `before` times `1 -
        rate decay`, and what does not depend on it.
        """
        if group["momentum"] and not group["nesterov"]:
            return before.add(step.moments["momentum_buffer"], alpha=-rate)
        slope = SGD._slope(group, before, step.gradient)
        if group["momentum"]:
            slope = slope.add(step.moments["momentum_buffer"], alpha=group["momentum"])
        return before.add(slope, alpha=-rate)

    @staticmethod
    def decay(group: dict[str, Any]) -> float:
        """What a step takes of the weights before it, per learning rate."""
        return 0.0 if group["momentum"] and not group["nesterov"] else group["weight_decay"]

    @staticmethod
    def _slope(group: dict[str, Any], before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if group["maximize"]:
            gradient = -gradient
        return gradient.add(before, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


class AdamW:
    """Steps of `torch.optim.AdamW`."""

    @staticmethod
    def moment_names(group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def learn(group: dict[str, Any], before: torch.Tensor, step: StepInputs, is_first: bool) -> None:
        gradient = -step.gradient if group["maximize"] else step.gradient
        first, second = group["betas"]
        step.moments["exp_avg"].lerp_(gradient, 1 - first)
        step.moments["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    @staticmethod
    def moved(group: dict[str, Any], rate: float, before: torch.Tensor, step: StepInputs) -> torch.Tensor:
        first, second = (1 - beta**step.number for beta in group["betas"])
        denominator = (step.moments["exp_avg_sq"].sqrt() / second**0.5).add_(group["eps"])
        decayed = before * (1 - rate * group["weight_decay"]) if group["weight_decay"] else before
        return torch.addcdiv(decayed, step.moments["exp_avg"], denominator, value=-(rate / first))

    @staticmethod
    def decay(group: dict[str, Any]) -> float:
        return group["weight_decay"]
