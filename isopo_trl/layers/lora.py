"""
A linear layer with LoRA as one function.

PEFT computes `W x + scaling B(A(x))` with a module call, casts and an addition for each part. Its two factors are
[`~layers.linear.LinearLayer`]s like any other and stay so; but where the whole is what it nearly always is (one
adapter, no dropout, a plain frozen base layer), it is done here in one go, with half the operations of PEFT's.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from torch.nn.functional import linear

from ..microbatch import CurrentMicrobatch, Microbatch
from .layer import (
    Layer,
    LayerFunction,
    autocast,
    has_own_forward,
    is_hooked,
    layer_backward,
    parameter_of,
    take_aside,
)
from .linear import LinearLayer, LinearRows, LinearTerms, linear_gradient


class LoRALinear(Layer):
    """PEFT's linear layer around two factors that are trained."""

    kind = "lora"

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, adapter: str, A: LinearLayer, B: LinearLayer):
        super().__init__(current, module, A.name.rpartition(".lora_A")[0], -1)
        self.adapter, self.A, self.B = adapter, A, B

    @property
    def entered(self) -> list[int]:
        return [self.A.index, self.B.index]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.module, self.A.module, self.B.module]

    def takes_part(self) -> bool:
        base: Any = self.module._modules["base_layer"]
        A, B, weight = (parameter_of(module, "weight") for module in (self.A.module, self.B.module, base))
        return self._is_one_function() and A.requires_grad and B.requires_grad and not weight.requires_grad

    def _is_one_function(self) -> bool:
        """Whether there is nothing but the base layer and the one adapter, at present."""
        module: Any = self.module
        if module.disable_adapters or module.merged or module.active_adapters != [self.adapter]:
            return False
        # Through the dictionaries: a search of `nn.Module.__getattr__` for each would take longer than all the rest
        inside: dict[str, Any] = module._modules
        dropout = inside["lora_dropout"]._modules[self.adapter]
        if dropout.training and getattr(dropout, "p", 0) > 0:
            return False
        base = inside["base_layer"]
        # Their calls are skipped here, and with them what others do there: DeepSpeed, for one, gathers the weights
        return not (has_own_forward(base) or any(map(is_hooked, (base, self.A.module, self.B.module))))

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = module._modules["base_layer"]
        A, B = (parameter_of(factor.module, "weight") for factor in (self.A, self.B))
        cast, weight, bias = autocast(x, parameter_of(base, "weight"), parameter_of(base, "bias"))
        # As PEFT does: the adapter's type, unless autocast has the last word
        mixed = cast.dtype != A.dtype and not torch.is_autocast_enabled(x.device.type)
        if args or kwargs or mixed or cast.dtype != weight.dtype or (bias is not None and bias.dtype != cast.dtype):
            return type(module).forward(module, x, *args, **kwargs)
        microbatch.add_to_graph(self.A.module)
        microbatch.note_parameters(self.A.index, A)
        microbatch.note_parameters(self.B.index, B)
        return _LoRA.apply(cast, weight, bias, A, B, module.scaling[self.adapter], self, microbatch)

    def forward_apart(self, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In float32 without gradient, the adapter's part is added while it is made."""
        measures = self.current.in_float32 and not torch.is_grad_enabled()
        if not measures or len(args) != 1 or kwargs or not self._is_one_function():
            return super().forward_apart(module, *args, **kwargs)
        (x,) = args
        base = module._modules["base_layer"]
        A, B = (parameter_of(factor.module, "weight") for factor in (self.A, self.B))
        y = linear(x, parameter_of(base, "weight"), parameter_of(base, "bias"))
        h = linear(x, A)
        y.view(-1, y.size(-1)).addmm_(h.view(-1, h.size(-1)), B.t().to(h.dtype), alpha=module.scaling[self.adapter])
        return y


def lora_linears(current: CurrentMicrobatch, model: nn.Module, layers: list[Layer]) -> list[LoRALinear]:
    """The layers of PEFT's whose factors are among `layers` and that are no more than a product."""
    planned = {layer.module: layer for layer in layers}
    found = []
    module: Any
    for module in model.modules():
        if type(module).forward is not PeftLinear.forward or has_own_forward(module):
            continue
        base: Any = module.base_layer
        if type(base).forward is not nn.Linear.forward or has_own_forward(base) or base.weight.requires_grad:
            continue
        if type(base.weight) is not nn.Parameter:  # quantised storage
            continue
        if base.bias is not None and base.bias.requires_grad:
            continue
        adapters = [name for name, factor in module.lora_A.items() if factor in planned]
        if len(adapters) != 1 or adapters[0] in module.lora_variant:
            continue
        factors = [planned.get(factor[adapters[0]]) for factor in (module.lora_A, module.lora_B)]
        if all(isinstance(factor, LinearLayer) and factor.module.bias is None for factor in factors):
            found.append(LoRALinear(current, module, adapters[0], *factors))  # type: ignore[arg-type]
    return found


def _gone_back(ctx: Any, grad: torch.Tensor) -> tuple[LinearRows, LinearRows, torch.Tensor | None]:
    """The rows of `A` and of `B`, and the gradient of the input where it is needed."""
    x, h, weight, A, B = ctx.saved_tensors
    g = grad.flatten(0, -2)
    dh = torch.addmm(h, g, B, beta=0, alpha=ctx.scaling)
    needs_x = ctx.needs_input_grad[0]
    grad_x = g.mm(weight).addmm_(dh, A).view(*grad.shape[:-1], -1) if needs_x else None
    return LinearRows(dh, x, ctx.dtype), LinearRows(g, h, ctx.dtype), grad_x


def _backward_of_term(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    microbatch = ctx.microbatch
    rows_A, rows_B, grad_x = _gone_back(ctx, grad)
    microbatch.visit_in_term(ctx.layer.A.index, ctx.layer.B.index)
    ctx.aside = of_A, of_B = take_aside(ctx) or (LinearTerms(), LinearTerms())
    of_A.add(rows_A, microbatch)
    of_B.add(rows_B, microbatch)
    return grad_x


class _LoRA(LayerFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scaling, layer, microbatch):
        microbatch.verify_positions(layer.name, x)
        ctx.dtype, ctx.scaling, ctx.layer, ctx.microbatch = A.dtype, scaling, layer, microbatch
        if not A.dtype == B.dtype == x.dtype:
            A, B = A.to(x.dtype), B.to(x.dtype)
        rows = x.reshape(microbatch.sequences.rows, -1)
        # The scaling, which belongs to the cotangent of B, is moved to its input, where it costs nothing
        h = torch.addmm(A[0, 0], rows, A.t(), beta=0, alpha=scaling)
        y = torch.nn.functional.linear(rows, weight, bias).addmm_(h, B.t())
        ctx.save_for_backward(rows, h, weight, A, B)
        return y.resize_(*x.shape[:-1], y.shape[1])  # no view, with which a model could not go on in place

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad):
        layer, microbatch = ctx.layer, ctx.microbatch
        rows_A, rows_B, grad_x = _gone_back(ctx, grad)
        of_A, of_B = take_aside(ctx) or (None, None)
        grad_B, _ = linear_gradient(rows_B, layer.B.index, microbatch, of_B)
        grad_A, _ = linear_gradient(rows_A, layer.A.index, microbatch, of_A)
        return grad_x, None, None, grad_A, grad_B, None, None, None
