"""
The gated activation `silu(gate) * up` in one launch each way, with the roundings of the model's own two operations.

With `s = sigmoid(gate)`, the gradients are `dup = g silu(gate)` and `dgate = g up s (1 + gate (1 - s))`. What lies
between two of PyTorch's operations is rounded as it is there.
"""

from functools import lru_cache

import torch
from transformers.utils import is_triton_available

from .launch import INTERPRET, Plan, constant, jit, launch, tl, types_of


if is_triton_available():
    from triton.language.extra import libdevice

# Of a program
_ELEMENTS = 1024
_INTERPRETED = constant(INTERPRET)


# As PyTorch has them; the interpreter has neither for float64


@jit()
def _exp(x):
    if _INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@jit()
def _ratio(x, y):
    if _INTERPRETED:
        return x / y
    return tl.div_rn(x, y)


@jit()
def _rounded(x, out, ACC):
    return x.to(out.dtype.element_ty).to(ACC)


@jit(do_not_specialize=["units"])
def _forward_kernel(gate, up, y, units, UNIT: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    inside = at < units.to(tl.int64) * UNIT
    x = tl.load(gate + at, mask=inside, other=0.0).to(ACC)
    silu = _rounded(_ratio(x, 1 + _exp(-x)), y, ACC)
    tl.store(y + at, (silu * tl.load(up + at, mask=inside, other=0.0).to(ACC)).to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["units"])
def _backward_kernel(g, gate, up, dgate, dup, units, UNIT: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    inside = at < units.to(tl.int64) * UNIT
    x = tl.load(gate + at, mask=inside, other=0.0).to(ACC)
    grad = tl.load(g + at, mask=inside, other=0.0).to(ACC)
    below = 1 + _exp(-x)
    silu = _rounded(_ratio(x, below), dup, ACC)
    tl.store(dup + at, (grad * silu).to(dup.dtype.element_ty), mask=inside)
    grad = _rounded(grad * tl.load(up + at, mask=inside, other=0.0).to(ACC), dgate, ACC)
    s = _ratio(tl.full((BE,), 1.0, ACC), below)
    tl.store(dgate + at, (grad * s * (1 + x * (1 - s))).to(dgate.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def _plan(size: int, back: bool, dtype: torch.dtype, device: torch.device) -> tuple[Plan, tuple[int]]:
    unit = 8 if size % 8 == 0 else 1  # numbers that are read at once
    return Plan((-(-size // _ELEMENTS), 1, 1), (unit, types_of(dtype)[0], _ELEMENTS)), (size // unit,)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, of two tensors of one shape and type, contiguous."""
    y = torch.empty_like(gate)
    plan, numbers = _plan(gate.numel(), False, gate.dtype, gate.device)
    launch(_forward_kernel, plan, (gate, up, y), numbers)
    return y


def backward(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gate` and `up`, where `g` is that of the result."""
    g = g.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    plan, numbers = _plan(gate.numel(), True, gate.dtype, gate.device)
    launch(_backward_kernel, plan, (g, gate, up, dgate, dup), numbers)
    return dgate, dup
