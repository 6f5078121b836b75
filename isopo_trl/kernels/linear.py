"""
Kernels of linear layers: overlaps between rows with the coefficients in one launch, and the scaling of rows.

Functions do what their counterparts in plain PyTorch do ([`~geometry.statistics`]), which stay the reference and take
over elsewhere. Rows must be those of a padded batch: row `s T + t` is position `t` of sequence `s`.
"""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from transformers.utils import is_triton_available

from ..geometry.sequences import Samples, Sequences
from .coefficients import TABLE_ROWS, Entry, Overlaps, _fisher_square, _is_last, _non_interacting, tiles
from .launch import Fixed, Plan, jit, launch, part_of, power_of_two, shared_memory, types_of


if is_triton_available():
    import triton.language as tl


@jit()
def _row_products(
    x,
    stride: tl.constexpr,
    row,
    real,
    y,
    sample_stride: tl.constexpr,
    sample,
    have,
    acc,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc + x[row] . y[sample]`, `[rows, samples]`."""
    k = tl.arange(0, BLOCK)
    rows = x + row[:, None] * stride + k[None, :]
    samples = y + sample[None, :] * sample_stride + k[:, None]
    for start in range(0, WIDTH, BLOCK):
        if WIDTH % BLOCK == 0:
            left = tl.load(rows, mask=real[:, None], other=0.0)
            right = tl.load(samples, mask=have[None, :], other=0.0)
        else:
            inside = start + k < WIDTH
            left = tl.load(rows, mask=real[:, None] & inside[None, :], other=0.0)
            right = tl.load(samples, mask=have[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        rows += BLOCK
        samples += BLOCK
    return acc


@jit(do_not_specialize=["m", "T", "n", "index"])
def _overlap_kernel(
    g,
    a,
    rows,
    norms,
    counter,
    table,
    advantages,
    history,
    settings,
    names,
    m,
    T,
    n,
    index,
    P: tl.constexpr,
    D: tl.constexpr,
    STRIDE_G: tl.constexpr,
    STRIDE_A: tl.constexpr,
    BIAS: tl.constexpr,
    FINISH: tl.constexpr,
    VARIANT: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BB: tl.constexpr,
):
    block = tl.program_id(0)
    s = tl.program_id(1)
    blocks = tl.num_programs(0)
    partial = norms + n
    t = block * BT + tl.arange(0, BT)
    real = t < T
    row = s.to(tl.int64) * T + t
    j = tl.program_id(2) * BN + tl.arange(0, BN)
    sample = tl.load(rows + j, mask=j < n, other=-1)
    have = sample >= 0
    left = _row_products(g, STRIDE_G, row, real, g, STRIDE_G, sample, have, tl.zeros((BT, BN), ACC), P, BP, PRECISION)
    right = _row_products(a, STRIDE_A, row, real, a, STRIDE_A, sample, have, tl.zeros((BT, BN), ACC), D, BD, PRECISION)
    if BIAS:
        right += 1.0
    products = left * right
    tl.store(partial + (s * blocks + block) * n + j, tl.sum(products, 0), mask=j < n)
    # A sample's own norm is its product with itself, in the one program that has it among its rows
    own = tl.sum(tl.where(row[:, None] == sample[None, :], products, 0.0), 0)
    first = s.to(tl.int64) * T + block * BT
    here = (sample >= first) & (sample < first + tl.minimum(BT, T - block * BT))
    absent = (sample < 0) & (tl.zeros((BN,), tl.int32) + s + block == 0)
    tl.store(norms + j, own, mask=(here | absent) & (j < n))
    if FINISH:
        if _is_last(counter, blocks * tl.num_programs(1) * tl.num_programs(2)):
            fisher_square, informed = _fisher_square(partial, norms, names, m, n, blocks, False, BM, BB, BN)
            _non_interacting(
                fisher_square,
                informed,
                tl.zeros((BM,), tl.float64),
                m,
                index,
                table,
                advantages,
                history,
                settings,
                BM,
                VARIANT,
                ACC,
            )


@jit(do_not_specialize=["m", "T", "index"])
def _scale_kernel(
    x,
    plus,
    out,
    table,
    m,
    T,
    index,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    STRIDE_PLUS: tl.constexpr,
    PLUS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    s = tl.program_id(2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row = s.to(tl.int64) * T + t
    c = tl.load(table + index * TABLE_ROWS * m + s)
    inside = (t < T)[:, None] & (d < D)[None, :]
    values = tl.load(x + row[:, None] * STRIDE + d[None, :], mask=inside, other=0.0)
    if x.dtype.element_ty != tl.float64:
        c = c.to(tl.float32)
    values = values * c
    if PLUS:
        values += tl.load(plus + row[:, None] * STRIDE_PLUS + d[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * D + d[None, :], values, mask=inside)


def _pipeline(dtype: torch.dtype, device: torch.device, rows: int) -> tuple[int, int]:
    """Width of a step over features and number of steps under way, as shared memory allows for so many rows."""
    if device.type != "cuda":
        return 32, 1
    memory = shared_memory(device)
    for width, stages in ((128, 4), (128, 3), (64, 4), (64, 3), (32, 3), (32, 2)):
        if rows * width * dtype.itemsize * stages <= 0.75 * memory:
            return width, stages
    return 16, 2


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


# What follows from shapes is worked out once for each: Python at every layer is what there is to save


@lru_cache(maxsize=4096)
def _overlap_plan(
    m: int,
    T: int,
    n: int,
    shape: tuple[int, int, int, int],
    bias: bool,
    finish: bool,
    variant: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    P, D = shape[:2]
    BT = 64
    blocks = -(-T // BT)
    BM, BN, BB = tiles(m, n, blocks)
    width, stages = _pipeline(dtype, device, BT + BN)
    widths = (min(width, max(16, power_of_two(P))), min(width, max(16, power_of_two(D))))
    constants = (*shape, bias, finish, variant, *types_of(dtype), BT, BN, *widths, BM, BB)
    return Plan((blocks, m, -(-n // BN)), constants, {"num_warps": 4, "num_stages": stages})


def overlap_coefficients(
    g: torch.Tensor, a: torch.Tensor, bias: bool, sequences: Sequences, samples: Samples, entry: Entry
) -> Entry:
    """The coefficients of a linear layer from overlaps alone, by products between rows."""
    _launch_overlap(g, a, bias, sequences, samples, entry, finish=True)
    return entry


def overlaps(
    g: torch.Tensor, a: torch.Tensor, bias: bool, sequences: Sequences, samples: Samples, entry: Entry
) -> Overlaps:
    """The overlaps of a linear layer, by products between rows, for a rule that needs the Euclidean norm too."""
    return Overlaps(_launch_overlap(g, a, bias, sequences, samples, entry, finish=False), samples.number)


class _OverlapLaunch(NamedTuple):
    """What the layers of one shape in a microbatch have in common."""

    plan: Plan
    samples: Samples
    overlap: torch.Tensor
    fixed: Fixed
    sizes: tuple[int, int, int]


def _launch_overlap(g, a, bias, sequences, samples, entry, finish):
    g, a = _by_row(g), _by_row(a)
    ledger, index = entry
    m, T = sequences.count, sequences.length
    key = ("overlap", m, T, g.shape, a.shape, g.stride(), a.stride(), bias, finish, g.dtype)
    known = ledger.prepared.get(key)
    if known is None or known.samples is not samples:
        n = samples.number
        sizes = (m, T, n)
        shape = (g.shape[1], a.shape[1], g.stride(0), a.stride(0))
        plan = _overlap_plan(*sizes, shape, bias, finish, ledger.variant, g.dtype, g.device)
        overlap = ledger.scratch(g, "overlap", m * plan.grid[0] * n + n)
        fixed = Fixed((samples.present, overlap, *ledger.fixed.tensors))
        known = ledger.prepared[key] = _OverlapLaunch(plan, samples, overlap, fixed, sizes)
    launch(_overlap_kernel, known.plan, (g, a), (*known.sizes, index), known.fixed)
    return known.overlap


@lru_cache(maxsize=4096)
def _scale_plan(
    m: int,
    T: int,
    D: int,
    strides: tuple[int, int],
    adds: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> Plan:
    BD = min(power_of_two(D), 1024)
    BT = part_of(2**13, BD, T)
    return Plan((-(-T // BT), -(-D // BD), m), (D, *strides, adds, BT, BD))


def scaled(x: torch.Tensor, sequences: Sequences, c: Entry, plus: torch.Tensor | None = None) -> torch.Tensor:
    """
    Each row of `x` `[N, d]` times its sequence's coefficient; `plus` `[N, d]` is added. To be used before another
    layer's rows are scaled, which may take their place.
    """
    ledger, index = c
    x = _by_row(x)
    other = x if plus is None else _by_row(plus)
    m, T = sequences.count, sequences.length
    key = ("scaled", m, T, x.shape, x.stride(), other.stride(), x.dtype, other.dtype, plus is None)
    plan = ledger.prepared.get(key)
    if plan is None:
        strides, dtypes = (x.stride(0), other.stride(0)), (x.dtype, other.dtype)
        plan = ledger.prepared[key] = _scale_plan(m, T, x.shape[1], strides, plus is not None, dtypes, x.device)
    out = ledger.rows_like(x)
    launch(_scale_kernel, plan, (x, other, out, ledger.table), (m, T, index))
    return out
