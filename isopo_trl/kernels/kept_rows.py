"""The copying of a layer's sampled rows to where they are kept, inputs and cotangents in one launch."""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

from functools import lru_cache

import torch
from transformers.utils import is_triton_available

from ..geometry.reservoir import KEEP
from .launch import Plan, constant, jit, launch, power_of_two, takes


if is_triton_available():
    import triton.language as tl

_KEEP = constant(KEEP)
_BLOCK = 1024


@jit()
def _copy(x, out, row, slot, block, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < WIDTH
    there = inside & (tl.zeros((BLOCK,), tl.int64) + row >= 0)  # else the slot gets zeros
    values = tl.load(x + row * STRIDE + k, mask=there, other=0.0)
    tl.store(out + slot.to(tl.int64) * WIDTH + k, values.to(out.dtype.element_ty), mask=inside)


@jit()
def _put_kernel(
    x,
    y,
    x_out,
    y_out,
    source,
    X: tl.constexpr,
    Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program copies a block of features of the row that its slot gets, of one tensor or of the other."""
    slot = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(source + slot)
    if row != _KEEP:
        if block < BLOCKS_X:
            _copy(x, x_out, row, slot, block, STRIDE_X, X, BLOCK)
        else:
            _copy(y, y_out, row, slot, block - BLOCKS_X, STRIDE_Y, Y, BLOCK)


def take(rows: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> bool:
    """Whether the kernel can copy these rows, `[N, features]`, of one tensor or two."""
    if len(rows) > 2:
        return False
    for name, x in rows.items():
        if x.dim() != 2 or x.stride(1) != 1 or not takes(x) or buffers[name].numel() == 0:
            return False
    return True


@lru_cache(maxsize=4096)
def _put_plan(
    n: int, widths: tuple[int, int], strides: tuple[int, int], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Plan:
    BLOCK = min(_BLOCK, power_of_two(max(widths)))
    blocks = [-(-width // BLOCK) for width in widths]
    return Plan((n, sum(blocks), 1), (*widths, *strides, blocks[0], BLOCK), {"num_warps": 2})


def put(buffers: dict[str, torch.Tensor], rows: dict[str, torch.Tensor], source: torch.Tensor) -> None:
    """What [`~geometry.reservoir.put`] does, for each of `rows` and without a factor."""
    names = list(rows)
    assert all(len(buffer) == len(source) for buffer in buffers.values())
    first, last = names[0], names[-1]
    x, y = rows[first], rows[last]
    widths = (x.shape[1], 0 if len(names) == 1 else y.shape[1])
    strides = (x.stride(0), y.stride(0))
    dtypes = (x.dtype, y.dtype, buffers[first].dtype, buffers[last].dtype)
    plan = _put_plan(len(source), widths, strides, dtypes, x.device)
    launch(_put_kernel, plan, (x, y, buffers[first], buffers[last], source), ())
