"""RMSNorm in the ways in which model families write it, one kernel each way on a GPU."""

from typing import Any

import torch
from torch import nn

from ..geometry.sequences import Sequences
from ..kernels import rms_norm
from ..kernels.elementwise import elementwise_gradient
from ..kernels.launch import is_here, takes
from ..kernels.rms_norm import Flavour
from ..microbatch import CurrentMicrobatch, Microbatch
from .elementwise import ElementwiseLayer
from .layer import (
    PROBE_ERRORS,
    Layer,
    LayerFunction,
    Shortcut,
    exchanged,
    full_shape,
    has_own_forward,
    layer_backward,
    once,
    parameter_of,
    take_aside,
)


class KnownNorm(Layer):
    """A norm whose formula is known: by a kernel in passes that are made in float32, where small operations add up."""

    flavour: Any

    def forward_apart(self, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.current.in_float32 and not torch.is_grad_enabled() and len(args) == 1 and not kwargs:
            x, weight = args[0], parameter_of(module, "weight")
            known = x.dtype == torch.float32 and x.shape[-1] <= rms_norm.MOST_FEATURES
            if known and takes(x) and takes(weight) and is_here(x):
                return rms_norm.forward(x.contiguous(), weight, self.flavour)[0]
        return super().forward_apart(module, *args, **kwargs)


class RMSNormLayer(KnownNorm, ElementwiseLayer):
    """`y = (w + offset) * x / sqrt(mean(x^2) + eps)`: an elementwise layer whose formula is known."""

    kind = "rms norm"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.flavour = flavour_of(self.module)

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        return set(trainable) == {"weight"} and super().accepts(module, trainable) and flavour_of(module) is not None

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._kernel_takes(module, microbatch, x) or args or kwargs:
            return super().forward(module, microbatch, x, *args, **kwargs)
        weight = parameter_of(module, "weight")
        microbatch.note_parameters(self.index, weight)
        return _RMSNorm.apply(x, weight, self, microbatch)

    def _kernel_takes(self, module: Any, microbatch: Microbatch, x: torch.Tensor) -> bool:
        if x.dim() not in (3, 4) or x.shape[-1] > rms_norm.MOST_FEATURES or not microbatch.kernels_take(x):
            return False
        axes = self.axes(x, microbatch)
        in_place = axes == (0, 1) or (x.dim() == 3 and axes == (1,))  # [B, T, d], [1, B T, d], [B, T, H, d]
        return in_place and microbatch.kernels_take(parameter_of(module, "weight"))


def _backward_of_term(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Keep the weight's gradient as parts whose sum it is, `[parts, d]`, where memory is not saved by recomputing."""
    x, weight, scale = ctx.saved_tensors
    microbatch = ctx.microbatch
    if x.dim() == 3:  # positions may come in one row
        grad = grad.reshape(*microbatch.shape, -1)
    dx, sums, _ = rms_norm.backward(x, grad, weight, scale, ctx.layer.flavour, microbatch.sequences, None)
    microbatch.visit_in_term(ctx.layer.index)
    sums = sums.flatten(0, 1)
    if microbatch.recomputes:
        sums = sums.sum(0, keepdim=True)
    before = take_aside(ctx)
    ctx.aside = sums if before is None else torch.cat([before, sums])
    return dx


class _RMSNorm(LayerFunction):
    @staticmethod
    def forward(ctx, x, weight, layer, microbatch):
        x = x.contiguous()
        y, scale = rms_norm.forward(x, weight, layer.flavour, microbatch.factors)
        ctx.save_for_backward(x, weight, scale)
        ctx.layer, ctx.microbatch = layer, microbatch
        return y

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        layer, microbatch = ctx.layer, ctx.microbatch
        sequences, draw, index = microbatch.sequences, microbatch.draw, layer.index
        positions: Any = microbatch.samples
        into = None if draw is None else draw.into_vectors(index, x, sequences.rows)
        if x.dim() == 3:  # positions may come in one row
            grad = grad.reshape(*microbatch.shape, -1)
        entry = microbatch.open_entry(index)
        memory, flavour = entry.ledger, layer.flavour
        dx, sums, of_samples = rms_norm.backward(x, grad, weight, scale, flavour, sequences, positions, into, memory)
        if draw is not None and into is None:
            draw.collect_samples(index, of_samples, sequences.rows)
        held = microbatch.held(index)
        if held is not None:
            of_samples = held.g
        samples = held or positions
        of_term, direction = take_aside(ctx), microbatch.direction_of(index)
        given = (sequences, samples, entry, weight.dtype, sums, of_term)
        total = elementwise_gradient(of_samples, *given, direction=direction)
        return dx, total, None, None


class FrozenRMSNorm(KnownNorm, Shortcut):
    """An RMSNorm that is not trained: here for speed alone, as most of the operations of a LoRA step are norms'."""

    kind = "frozen"

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, flavour: Flavour):
        super().__init__(current, module)
        self.flavour = flavour

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = parameter_of(module, "weight")
        known = x.dim() in (3, 4) and x.shape[-1] <= rms_norm.MOST_FEATURES and x.shape[0] < 2**16
        known = known and takes(x) and is_here(x)
        if args or kwargs or weight.requires_grad or not x.requires_grad or not known or not takes(weight):
            return type(module).forward(module, x, *args, **kwargs)
        return _FrozenRMSNorm.apply(x, weight, self.flavour, microbatch)


class _FrozenRMSNorm(LayerFunction):
    @staticmethod
    def forward(ctx, x, weight, flavour, microbatch):
        x = x.contiguous()
        y, scale = rms_norm.forward(x, weight, flavour, microbatch.factors)
        ctx.save_for_backward(x, weight, scale)
        ctx.flavour, ctx.memory = flavour, microbatch.factors
        return y

    @staticmethod
    @once
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        every = Sequences.regular(x.shape[0], x.shape[1])
        # Of the weight's gradient, which nobody reads
        dx, _, _ = rms_norm.backward(x, grad, weight, scale, ctx.flavour, every, None, ledger=ctx.memory)
        return dx, None, None, None


def frozen_norms(current: CurrentMicrobatch, model: nn.Module, layers: list[Layer]) -> list[FrozenRMSNorm]:
    """The norms of `model` that are not among the trained `layers` and whose formula is known."""
    trained = {layer.module for layer in layers}
    found = []
    for module in model.modules():
        alone = set(module._parameters) == {"weight"} and next(module.children(), None) is None
        if alone and module not in trained and not has_own_forward(module):
            flavour = flavour_of(module)
            if flavour is not None:
                found.append(FrozenRMSNorm(current, module, flavour))
    return found


def flavour_of(module: nn.Module) -> Flavour | None:
    """The formula of the module's forward, found by trying; `None` if it is none that is known."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module._parameters.get("weight")
    if not isinstance(eps, float) or weight is None or weight.device.type == "meta" or len(full_shape(weight)) != 1:
        return None
    (size,) = full_shape(weight)
    x = torch.linspace(-1.5, 2, 6 * size, device=weight.device).view(2, 3, size).sin()
    values = torch.linspace(0.5, 1.5, size, device=weight.device)
    dtypes = (torch.float32, torch.bfloat16)
    tried = [(x.to(dtype), values.to(of_weight)) for dtype in dtypes for of_weight in dtypes]
    try:
        with torch.no_grad():
            outputs = [_output(module, *pair) for pair in tried]
    except PROBE_ERRORS:
        return None
    for flavour in (Flavour(eps, 0.0, True), Flavour(eps, 0.0, False), Flavour(eps, 1.0, False)):
        expected = [flavour(*pair) for pair in tried]
        if all(y.dtype == z.dtype and torch.equal(y, z) for y, z in zip(outputs, expected, strict=True)):
            return flavour
    return None


def _output(module: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with exchanged([(module, "weight")], [weight]):
        return type(module).forward(module, x)
