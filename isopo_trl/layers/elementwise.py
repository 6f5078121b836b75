"""
Parameters that act on each position alone and feature by feature: RMSNorm in all its flavours, and their like.

There are as many ways to write an RMSNorm as there are model families (`w * x`, `1 + w`, cast before or after). None
is repeated here. The module runs its own forward, but finds in place of its parameter `[d]` the same values handed out
once per position, `[B, T, d]` without a copy; autograd then brings back one gradient per position, which is what the
statistics need.
"""

from typing import Any

import torch
from torch import nn

from ..geometry.statistics import accumulation_dtype, elementwise_statistics
from ..kernels import elementwise as kernel
from ..microbatch import Microbatch
from .layer import (
    PROBE_ERRORS,
    Layer,
    Unsupported,
    exchanged,
    full_shape,
    has_own_forward,
    layer_backward,
    put_aside,
    with_aside,
)


def elementwise_gradient(v: torch.Tensor, index: int, microbatch: Microbatch, dtype: torch.dtype) -> torch.Tensor:
    """`sum_s c_s V_s` `[d]` from the gradient at each position, `v` `[N, d]`."""
    sequences, draw = microbatch.sequences, microbatch.draw
    by_kernel = microbatch.kernels_take(v) and v.shape[1] <= kernel.MOST_FEATURES
    into = draw.into_vectors(index, v, sequences.rows) if by_kernel and draw is not None else None
    if into is None:
        microbatch.collect(index, v)
    samples, direction = microbatch.samples_of(index), microbatch.direction_of(index)
    if by_kernel:
        entry = microbatch.open_entry(index)
        return kernel.elementwise_gradient(v, sequences, samples, entry, dtype, into=into, direction=direction)
    statistics, V = elementwise_statistics(v, sequences, samples, microbatch.needs, direction)
    return (microbatch.coefficients(index, statistics).to(V.dtype) @ V).to(dtype)


class VectorLayer(Layer):
    """A layer whose per-sequence gradients are vectors, so small that they are always formed."""

    way = "whole"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._axes: dict[int, tuple[int, ...]] = {}  # where positions were found, by number of dimensions
        self._last: tuple = ()  # shapes of an input and its microbatch where there was no doubt, and where they were

    def axes(self, x: torch.Tensor, microbatch: Microbatch) -> tuple[int, ...]:
        """The dimensions of `x` that count sequences and positions; where in doubt, as when there was none."""
        shapes = (x.shape, microbatch.shape)
        if self._last and self._last[0] == shapes:
            return self._last[1]
        axes, certain = position_axes(self.name, x, microbatch)
        if certain:
            self._axes[x.dim()] = axes
            self._last = (shapes, axes)
        return self._axes.get(x.dim(), axes)


class ElementwiseLayer(VectorLayer):
    """Vectors `w` of a module with `y_t = function(x_t, w)` position by position."""

    kind = "elementwise"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        sizes = {full_shape(p) for p in trainable.values()}
        if len(sizes) != 1 or len(next(iter(sizes))) != 1 or next(module.children(), None) is not None:
            return False
        if has_own_forward(module) or not _is_elementwise(module, trainable, next(iter(sizes))[0]):
            raise Unsupported(
                f"{type(module).__name__} does not apply its parameters position by position and feature by feature, "
                "or is replaced by a kernel of its own"
            )
        return True

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = [module._parameters[name] for name in self.parameters]
        axes = self.axes(x, microbatch)
        microbatch.note_parameters(self.index, *own)
        handed_out = _HandOut.apply(axes, x.dim(), self, microbatch, *own)
        with exchanged([(module, name) for name in self.parameters], handed_out):
            return type(module).forward(module, x, *args, **kwargs)


def _backward_of_term(ctx: Any, *gradients: torch.Tensor) -> None:
    ctx.microbatch.visit_in_term(ctx.layer.index)
    sums = [g.flatten(0, -2).sum(0, dtype=accumulation_dtype(g.dtype)) for g in gradients]
    put_aside(ctx, *(total.to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True)))


class _HandOut(torch.autograd.Function):
    """Give each position its own view of the parameters; take back one gradient per position."""

    @staticmethod
    def forward(ctx, axes, dims, layer, microbatch, *parameters):
        ctx.axes, ctx.layer, ctx.microbatch = axes, layer, microbatch
        ctx.dtypes = [p.dtype for p in parameters]
        B, T = microbatch.shape
        sizes = dict(zip(axes, (B, T) if len(axes) == 2 else (B * T,), strict=True))
        shape = [sizes.get(axis, 1) for axis in range(dims - 1)]
        return tuple(p.view_as(p).expand(*shape, -1) for p in parameters)

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, *gradients):
        microbatch, layer = ctx.microbatch, ctx.layer
        rows = [g.movedim(ctx.axes, tuple(range(len(ctx.axes)))).flatten(len(ctx.axes)) for g in gradients]
        v = microbatch.rows(layer.name, torch.cat(rows, dim=-1) if len(rows) > 1 else rows[0])
        total = elementwise_gradient(v, layer.index, microbatch, ctx.dtypes[0])
        flat = zip(total.split(v.shape[1] // len(rows)), ctx.dtypes, strict=True)
        return None, None, None, None, *with_aside(ctx, *(g.to(dtype) for g, dtype in flat))


def position_axes(name: str, x: torch.Tensor, microbatch: Microbatch) -> tuple[tuple[int, ...], bool]:
    """
    The dimensions of `x` that count sequences and positions, and whether there is no doubt about them: `[B, T, d]`,
    `[N, d]`, `[1, N, d]`, or with heads `[B, T, H, d]`, `[B, H, T, d]`.
    """
    B, T = microbatch.shape
    candidates = [axis for axis in range(1, x.dim() - 1) if x.shape[axis] == T] if x.shape[0] == B else []
    if not candidates:
        if x.shape[0] == B * T:
            return (0,), True
        if x.dim() > 2 and x.shape[:2] == (1, B * T):
            return (1,), True
        microbatch.rows(name, x)  # raises, and says what was seen
    # As many heads as positions: projections put positions first in memory, whichever way the view is turned
    return (0, max(candidates, key=lambda axis: x.stride(axis))), len(candidates) == 1


def _is_elementwise(module: nn.Module, trainable: dict[str, nn.Parameter], size: int) -> bool:
    """
    Try the module's forward on a small input with different parameters at each position: the output at a position must
    be what the module gives for that position alone.
    """
    device = next(iter(trainable.values())).device
    if device.type == "meta":
        return True  # nothing to run on; the first backward still verifies that the layer is reached
    dtype = next(iter(trainable.values())).dtype
    x = torch.linspace(-1.5, 2, 6 * size, device=device, dtype=dtype).view(2, 3, size)
    values = {
        name: torch.linspace(0.5 + k, 1.5 + k, 6 * size, device=device, dtype=dtype).view(2, 3, size)
        for k, name in enumerate(trainable)
    }

    def run(b, t):
        with exchanged([(module, name) for name in values], [value[b, t] for value in values.values()]):
            return type(module).forward(module, x[b, t] if isinstance(t, slice) else x[b : b + 1, t : t + 1])

    try:
        with torch.no_grad():
            together = run(slice(None), slice(None))
            alone = torch.stack([run(b, t).reshape(-1) for b in range(2) for t in range(3)]).view(2, 3, -1)
    except PROBE_ERRORS:
        return False  # a kernel that insists on a vector, or a module that is not called with one tensor
    return together.shape == x.shape and torch.allclose(together, alone, rtol=1e-3, atol=1e-5)
