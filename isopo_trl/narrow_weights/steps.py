"""
Steps of SGD and AdamW as functions of the weights before them: with the operations of PyTorch's optimizers, one after
the other, so that they are the same to the last bit where everything is in float32.

`moments` maps names to tensors, as in the optimizer's state, and `group` is one of its groups of parameters.
"""

from typing import Any

import torch


class SGD:
    """Steps of `torch.optim.SGD`."""

    @staticmethod
    def kept(group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments."""
        return ("momentum_buffer",) if group["momentum"] else ()

    @staticmethod
    def learn(
        group: dict[str, Any],
        before: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        is_first: bool,
    ) -> None:
        """Let the moments, in place, see the gradient of a step; of their first, they are new."""
        if group["momentum"]:
            slope, buffer = SGD._slope(group, before, gradient), moments["momentum_buffer"]
            if is_first:
                buffer.copy_(slope)
            else:
                buffer.mul_(group["momentum"]).add_(slope, alpha=1 - group["dampening"])

    @staticmethod
    def moved(
        group: dict[str, Any],
        rate: float,
        before: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        number: int,
    ) -> torch.Tensor:
        """
        The weights after a step at this learning rate, with moments that have seen its gradient: `before` times `1 -
        rate decay`, and what does not depend on it. The step has this number, from 1.
        """
        if not group["momentum"]:
            slope = SGD._slope(group, before, gradient)
        elif group["nesterov"]:
            slope = SGD._slope(group, before, gradient).add(moments["momentum_buffer"], alpha=group["momentum"])
        else:
            slope = moments["momentum_buffer"]
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
    def kept(group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def learn(
        group: dict[str, Any],
        before: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        is_first: bool,
    ) -> None:
        if group["maximize"]:
            gradient = -gradient
        first, second = group["betas"]
        moments["exp_avg"].lerp_(gradient, 1 - first)
        moments["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    @staticmethod
    def moved(
        group: dict[str, Any],
        rate: float,
        before: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        number: int,
    ) -> torch.Tensor:
        first, second = (1 - beta**number for beta in group["betas"])
        denominator = (moments["exp_avg_sq"].sqrt() / second**0.5).add_(group["eps"])
        decayed = before * (1 - rate * group["weight_decay"]) if group["weight_decay"] else before
        return torch.addcdiv(decayed, moments["exp_avg"], denominator, value=-(rate / first))

    @staticmethod
    def decay(group: dict[str, Any]) -> float:
        return group["weight_decay"]
