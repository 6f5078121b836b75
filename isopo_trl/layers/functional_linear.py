"""
Modules that are not `nn.Linear` but multiply by a `weight` of their own with `torch.nn.functional.linear` and go on
from there: the routers of mixtures of experts, which return probabilities and choices made of the product.

The module runs its own forward, in which that one call is taken over; what is done before and after it (casts,
softmax, groups, corrections) is left to the module.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..microbatch import Microbatch
from .layer import PROBE_ERRORS, autocast, full_shape, has_own_forward
from .linear import LinearLayer, _Linear


class FunctionalLinearLayer(LinearLayer):
    """`y = W a + b` inside of a module's forward."""

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        if "weight" not in trainable or not set(trainable) <= {"weight", "bias"}:
            return False
        if len(full_shape(trainable["weight"])) != 2 or has_own_forward(module):
            return False
        if any(True for child in module.children() for _ in child.parameters()):
            return False
        return calls_linear_once(module)

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return _Linear.apply(*autocast(x, weight, bias), self, microbatch)

        with LinearCalls(module.weight, product) as calls:
            output = type(module).forward(module, x, *args, **kwargs)
        if calls.number != 1:
            raise RuntimeError(
                f"{self.name} multiplied by its weight {calls.number} times in one forward, where ISOPO expects once: "
                "freeze it, or leave it out of the LoRA targets."
            )
        return output


class LinearCalls(TorchFunctionMode):
    """
    Context in which `linear(x, weight, bias)` is replaced by `product`, where its weight is `weight` or a cast of it.

    Attributes:
        number (`int`): how many calls were replaced.
    """

    def __init__(self, weight: torch.Tensor, product: Callable[..., torch.Tensor]):
        super().__init__()
        self.weight, self.product, self.number = weight, product, 0
        self._node = torch.autograd.graph.get_gradient_edge(weight).node

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if self._is_weight(weight):
                self.number += 1
                return self.product(*args, **{"x" if name == "input" else name: v for name, v in kwargs.items()})
        return func(*args, **kwargs)

    def _is_weight(self, x: torch.Tensor) -> bool:
        if x is self.weight:
            return True
        if x.shape != self.weight.shape or not x.requires_grad:
            return False
        node = torch.autograd.graph.get_gradient_edge(x).node
        while node is not self._node and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        return node is self._node


def calls_linear_once(module: Any) -> bool:
    """Try the module on a few positions: it must multiply by its weight once, and use it for nothing else."""
    weight = module.weight
    if full_shape(weight) != tuple(weight.shape):
        return True  # nothing to run on here; each forward verifies it
    x = torch.linspace(-1.5, 2, 6 * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(6, -1)

    def constant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight.detach(), None if bias is None else bias.detach())

    try:
        with torch.enable_grad(), LinearCalls(weight, constant) as calls:
            output = type(module).forward(module, x)
    except PROBE_ERRORS:
        return False  # not called with one tensor of positions
    tensors = [y for y in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(y, torch.Tensor)]
    return calls.number == 1 and not any(y.requires_grad for y in tensors)
