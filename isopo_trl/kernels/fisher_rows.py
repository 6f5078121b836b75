"""
Copying the rows that a step keeps as samples of the next: inputs and cotangents in one launch. Linear layers, which
measure at the same time, do it along the way ([`~kernels.linear`]).
"""

from functools import lru_cache

import torch

from ..geometry.reservoir import KEEP
from .launch import Plan, constant, jit, launch, power_of_two, takes, tl


# Slots of cotangents and of inputs, `[n, ...]`, and the row that each of them gets, `[n]`
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_KEEP = constant(KEEP)
# Elements of a row that are copied at once
_BLOCK = 1024


@jit()
def _copy(x, out, row, slot, start, STRIDE, OUT, WIDTH, BLOCK):
    """Features `start` to `start + BLOCK` of `x[row]` to `out[slot]`, or zeros where there is no such row."""
    k = start + tl.arange(0, BLOCK)
    inside = k < WIDTH
    there = inside & (tl.zeros((BLOCK,), tl.int64) + row >= 0)
    values = tl.load(x + row * STRIDE + k, mask=there, other=0.0)
    tl.store(out + slot * OUT + k, values.to(out.dtype.element_ty), mask=inside)


@jit()
def _put_kernel(
    x, y, x_out, y_out, source,
    X: tl.constexpr, Y: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr, OUT_X: tl.constexpr,
    OUT_Y: tl.constexpr, BLOCKS_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program copies a block of features of the row that its slot gets, of one tensor or of the other."""
    slot = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(source + slot)
    if row != _KEEP:
        if block < BLOCKS_X:
            _copy(x, x_out, row, slot, block * BLOCK, STRIDE_X, OUT_X, X, BLOCK)
        else:
            _copy(y, y_out, row, slot, (block - BLOCKS_X) * BLOCK, STRIDE_Y, OUT_Y, Y, BLOCK)


@jit()
def _put_routed_kernel(
    x, y, choices, x_out, y_out, choices_out, source, places,
    X: tl.constexpr, Y: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr,
    BLOCKS_X: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The same for the rows of a position at each of the `K` experts that it was sent to."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(source + place // K)
    if position != _KEEP:
        at = tl.maximum(position, 0) * K + place % K
        row = tl.where(position >= 0, tl.load(places + at), -1)
        if block < BLOCKS_X:
            _copy(x, x_out, row, place, block * BLOCK, STRIDE_X, X, X, BLOCK)
        else:
            _copy(y, y_out, row, place, (block - BLOCKS_X) * BLOCK, STRIDE_Y, Y, Y, BLOCK)
        if block == 0:
            tl.store(choices_out + place, tl.where(position >= 0, tl.load(choices + at), 0))


def take(rows: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> bool:
    """Whether the kernel can copy these rows, `[N, features]`, of one tensor or two."""
    if len(rows) > 2:
        return False
    for name, x in rows.items():
        buffer = buffers[name]
        if x.dim() != 2 or x.stride(1) != 1 or not takes(x) or buffer.numel() == 0 or buffer.stride(1) != 1:
            return False
    return True


def take_routed(g: torch.Tensor, a: torch.Tensor, buffers: dict[str, torch.Tensor]) -> bool:
    """Whether the kernel can copy the rows of a stack of experts, `[S, features]`."""
    return takes(g) and takes(a) and g.stride(1) == a.stride(1) == 1 and buffers["g"].numel() > 0


@lru_cache(maxsize=4096)
def _put_plan(
    n: int, widths: tuple[int, int], strides: tuple[int, ...], k: tuple[int, ...], dtypes: tuple, device: torch.device
) -> Plan:
    BLOCK = min(_BLOCK, power_of_two(max(widths)))
    blocks = [-(-width // BLOCK) for width in widths]
    return Plan((n, sum(blocks), 1), (*widths, *strides, blocks[0], BLOCK, *k), {"num_warps": 2})


def put(buffers: dict[str, torch.Tensor], rows: dict[str, torch.Tensor], source: torch.Tensor) -> None:
    """What [`~geometry.reservoir.Source.put`] does, for each of `rows` and without a factor."""
    names = list(rows)
    first, last = names[0], names[-1]
    x, y, x_out, y_out = rows[first], rows[last], buffers[first], buffers[last]
    assert len(x_out) == len(y_out) == len(source)
    widths = (x.shape[1], 0 if len(names) == 1 else y.shape[1])
    strides = (x.stride(0), y.stride(0), x_out.stride(0), y_out.stride(0))
    dtypes = (x.dtype, y.dtype, x_out.dtype, y_out.dtype)
    plan = _put_plan(len(source), widths, strides, (), dtypes, x.device)
    launch(_put_kernel, plan, (x, y, x_out, y_out, source), ())


def put_routed(
    buffers: dict[str, torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    choices: torch.Tensor,
    places: torch.Tensor,
    source: torch.Tensor,
) -> None:
    """
    Copy the rows of a stack of experts to their slots.

    Args:
        buffers (`dict[str, torch.Tensor]`): `g` `[n, k, p]`, `a` `[n, k, d]` and `choices` `[n, k]`.
        g, a (`torch.Tensor`): `[S, ...]`, the rows.
        choices (`torch.Tensor`): `[N, k]`, the experts of each position.
        places (`torch.Tensor`): `[N k]`, the row of each of these.
        source (`torch.Tensor`): `[n]`, the position that each slot gets.
    """
    g_out, a_out, choices_out = buffers["g"], buffers["a"], buffers["choices"]
    k = choices.shape[1]
    dtypes = (g.dtype, a.dtype, g_out.dtype, a_out.dtype, choices.dtype)
    strides = (g.stride(0), a.stride(0))
    plan = _put_plan(k * len(source), (g.shape[1], a.shape[1]), strides, (k,), dtypes, g.device)
    tensors = (g, a, choices.contiguous(), g_out, a_out, choices_out, source, places)
    launch(_put_routed_kernel, plan, tensors, ())
