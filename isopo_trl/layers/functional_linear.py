"""
Modules that are not `nn.Linear` but multiply by a `weight` of their own with `torch.nn.functional.linear` and go on
from there: the routers of mixtures of experts, which return probabilities and choices made of the product.

The module runs its own forward, in which that one call is taken over; what is done before and after it (casts,
softmax, groups, corrections) is left to the module.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.overrides import TorchFunctionMode

from ..microbatch import CurrentMicrobatch, Microbatch
from .layer import PROBE_ERRORS, ForwardElsewhere, Layer, autocast, exchanged, full_shape, has_own_forward
from .linear import LinearLayer, _Linear
from .parameter_lora import Factor, verify_active


# The function that modules mean, whatever bears its name: DeepSpeed's ZeRO-3 puts another in its place, and leaves it
LINEAR = torch._C._nn.linear


class FunctionalLinearLayer(LinearLayer):
    """`y = W a + b` inside of a module's forward."""

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        return "weight" in trainable and set(trainable) <= {"weight", "bias"} and calls_linear_once(module)

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return _Linear.apply(*autocast(x, weight, bias), self, microbatch)

        # What the product is called with may be casts of them
        microbatch.note_parameters(self.index, module.weight, module._parameters.get("bias"))
        return _with_product(self, product, module, x, *args, **kwargs)


def _with_product(layer: Layer, product: Callable[..., torch.Tensor], module: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module returns whose one product with its weight is made by `product`."""
    with LinearCalls(module.weight, product) as calls:
        output = type(module).forward(module, *args, **kwargs)
    calls.verify_once(layer.name)
    return output


class LinearFactor(ForwardElsewhere, LinearLayer):
    """A factor of LoRA on the weight of such a module."""


class FunctionalLoRA(Layer):
    """The forward of such a module with LoRA on its weight."""

    kind = "linear"

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, name: str, wrapper: ParamWrapper, adapter: str):
        super().__init__(current, module, name, -1)
        self.wrapper, self.adapter = wrapper, adapter
        self.factors: dict[str, LinearFactor] = {}

    def add_factor(self, factor: Factor, name: str, index: int) -> LinearFactor:
        """A trained factor, with its entry in the running statistics."""
        self.factors[factor.side] = LinearFactor(self, factor.module, name, index)
        return self.factors[factor.side]

    def takes_part(self) -> bool:
        return "weight" in getattr(self.module, "parametrizations", {})

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        verify_active(self.wrapper, self.adapter, self.name)
        for factor in self.factors.values():
            microbatch.add_to_graph(factor.module)
            microbatch.note_parameters(factor.index, factor.module.get_parameter("weight"))
        scaling = self.wrapper.scaling[self.adapter]

        def linear(x: torch.Tensor, side: str) -> torch.Tensor:
            weights: Any = getattr(self.wrapper, f"lora_{side}")[self.adapter].weight
            operands = autocast(x, weights.to(x.dtype), None)
            if side not in self.factors:
                return torch.nn.functional.linear(*operands)
            return _Linear.apply(*operands, self.factors[side], microbatch)

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            frozen = module.parametrizations.weight.original.to(weight.dtype)
            return torch.nn.functional.linear(x, frozen, bias) + linear(linear(x, "A") * scaling, "B")

        return _with_product(self, product, module, x, *args, **kwargs)


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

    def __enter__(self):
        self._named, torch.nn.functional.linear = torch.nn.functional.linear, LINEAR
        return super().__enter__()

    def __exit__(self, *error):
        torch.nn.functional.linear = self._named
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is LINEAR:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if self._is_weight(weight):
                self.number += 1
                return self.product(*args, **{"x" if name == "input" else name: v for name, v in kwargs.items()})
        return func(*args, **kwargs)

    def verify_once(self, name: str) -> None:
        """Raise unless there was one call in the forward of the module `name`."""
        if self.number != 1:
            raise RuntimeError(
                f"{name} multiplied by its weight {self.number} times in one forward, where ISOPO expects once: "
                "freeze it, or leave it out of the LoRA targets."
            )

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
    own = {name: p for name, p in module._parameters.items() if p is not None}
    weight = own.get("weight")
    if weight is None or len(full_shape(weight)) != 2 or has_own_forward(module):
        return False
    if any(p.requires_grad for child in module.children() for p in child.parameters()):
        return False
    if full_shape(weight) != tuple(weight.shape):
        return True  # nothing to run on here; each forward verifies it
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    corrections = [weight.new_zeros(weight.shape[0]) for _ in required]  # a number for each output, in some routers
    x = torch.linspace(-1.5, 2, 6 * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(6, -1)

    def constant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight.detach(), None if bias is None else bias.detach())

    devices = [weight.device] if weight.device.type == "cuda" else []
    try:
        others = [p.detach().requires_grad_() for p in own.values()]
        # Some routers draw random numbers
        with torch.random.fork_rng(devices), torch.enable_grad(), exchanged([(module, name) for name in own], others):
            with LinearCalls(module.weight, constant) as calls:
                output = type(module).forward(module, x, *corrections)
    except PROBE_ERRORS:
        return False  # not called with one tensor of positions
    tensors = [y for y in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(y, torch.Tensor)]
    return calls.number == 1 and not any(y.requires_grad for y in tensors)
