"""
Kernels of linear layers: overlaps between rows with the coefficients in one launch, and the scaling of rows. Where
samples are rows of the step before, the first also finds their norms, and copies the rows that this step keeps.

Functions do what their counterparts in plain PyTorch do ([`~geometry.statistics`]), which stay the reference and take
over elsewhere. Rows must be those of a padded batch: row `s T + t` is position `t` of sequence `s`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..geometry.sequences import SampleRows, Samples, Sequences
from .coefficients import TABLE_ROWS, Entry, Overlaps, _finish, tiles
from .fisher_rows import _KEEP, Into, _copy
from .launch import Fixed, Plan, jit, launch, part_of, power_of_two, processors, shared_memory, tl, types_of


# Rows that a program multiplies at once with samples: the more, the less often these are read, if there are programs
# for nearly all of the GPU
_ROWS = (128, 64)
# Elements of a row that a program reads at once, for its norm or a copy
_LARGE_BLOCK = 4096


@jit()
def _row_products(x, STRIDE, row, real, y, STRIDE_Y, sample, have, acc, WIDTH, BLOCK, PRECISION):
    """`acc + x[row] . y[sample]`, `[rows, samples]`."""
    k = tl.arange(0, BLOCK)
    rows = x + row[:, None] * STRIDE + k[None, :]
    samples = y + sample[None, :] * STRIDE_Y + k[:, None]
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


@jit()
def _products(row, real, sample, have, zeros, g, a, of_g, of_a, P, D, G, A, OF_G, OF_A, BIAS, BP, BD, PRECISION):
    """
    `g[row] . of_g[sample]` and `a[row] . of_a[sample]`, `[rows, samples]`, whose product is an overlap: of so many
    features P and D and with the strides that come behind them.
    """
    left = _row_products(g, G, row, real, of_g, OF_G, sample, have, zeros, P, BP, PRECISION)
    right = _row_products(a, A, row, real, of_a, OF_A, sample, have, zeros, D, BD, PRECISION)
    if BIAS:
        right += 1.0
    return left, right


@jit()
def _square_sum(x, ACC, WIDTH, BLOCK):
    """The sum of the squares of `WIDTH` numbers."""
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + k, mask=k < WIDTH, other=0.0).to(ACC)
        total += values * values
    return tl.sum(total, 0)


@jit()
def _square_norm(g, a, row, G, A, P, D, BIAS, ACC, ROW_P, ROW_D):
    """`|g[row]|^2 |a[row]|^2`, of so many features P and D."""
    square = _square_sum(a + row * A, ACC, D, ROW_D)
    if BIAS:
        square += 1.0
    return square * _square_sum(g + row * G, ACC, P, ROW_P)


@jit(do_not_specialize=["m", "T", "n", "index"])
def _overlap_kernel(
    g, a, rows, norms,
    counter, table, advantages, history, settings, names,
    m, T, n, index,
    P: tl.constexpr, D: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_A: tl.constexpr,
    BIAS: tl.constexpr, FINISH: tl.constexpr, VARIANT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
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
    zeros = tl.zeros((BT, BN), ACC)
    left, right = _products(
        *(row, real, sample, have, zeros, g, a, g, a),
        *(P, D, STRIDE_G, STRIDE_A, STRIDE_G, STRIDE_A, BIAS, BP, BD, PRECISION),
    )
    products = left * right
    tl.store(partial + (s * blocks + block) * n + j, tl.sum(products, 0), mask=j < n)
    # A sample's own norm is its product with itself, in the one program that has it among its rows
    own = tl.sum(tl.where(row[:, None] == sample[None, :], products, 0.0), 0)
    first = s.to(tl.int64) * T + block * BT
    here = (sample >= first) & (sample < first + tl.minimum(BT, T - block * BT))
    absent = (sample < 0) & (tl.zeros((BN,), tl.int32) + s + block == 0)
    tl.store(norms + j, own, mask=(here | absent) & (j < n))
    if FINISH:
        programs = blocks * tl.num_programs(1) * tl.num_programs(2)
        book = table, advantages, history, settings
        _finish(counter, programs, norms, names, m, n, blocks, index, book, False, VARIANT, ACC, BM, BB, BN)


@jit(do_not_specialize=["m", "T", "n", "slots", "index"])
def _overlap_with_rows_kernel(
    g, a, g_samples, a_samples, g_out, a_out, source, norms,
    counter, table, advantages, history, settings, names,
    m, T, n, slots, index,
    P: tl.constexpr, D: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_A: tl.constexpr,
    BIAS: tl.constexpr, FINISH: tl.constexpr, VARIANT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    STRIDE_GS: tl.constexpr, STRIDE_AS: tl.constexpr, STORE: tl.constexpr, NAMED: tl.constexpr,
    ROW_P: tl.constexpr, ROW_D: tl.constexpr,
):  # fmt: skip
    """
    A program multiplies a block of a sequence's rows with a block of samples. Beside that, it has its share of single
    samples, whose norms it finds, and of slots, which it fills with rows of the batch.
    """
    block = tl.program_id(0)
    s = tl.program_id(1)
    blocks = tl.num_programs(0)
    partial = norms + n
    first = tl.program_id(2) * BN
    own_share = first + s.to(tl.int64) * blocks + block
    for q in range(own_share, tl.minimum(first + BN, n), blocks * tl.num_programs(1)):
        own = _square_norm(g_samples, a_samples, q, STRIDE_GS, STRIDE_AS, P, D, BIAS, ACC, ROW_P, ROW_D)
        tl.store(norms + q, own)
        if STORE:
            if q < slots:
                row = tl.load(source + q)
                if row != _KEEP:
                    for start in range(0, D, ROW_D):
                        _copy(a, a_out, row, q, start, STRIDE_A, D, D, ROW_D)
                    for start in range(0, P, ROW_P):
                        _copy(g, g_out, row, q, start, STRIDE_G, P, P, ROW_P)
    t = block * BT + tl.arange(0, BT)
    real = t < T
    row = s.to(tl.int64) * T + t
    j = first + tl.arange(0, BN)
    have = j < n
    sample = j.to(tl.int64)
    zeros = tl.zeros((BT, BN), ACC)
    left, right = _products(
        *(row, real, sample, have, zeros, g, a, g_samples, a_samples),
        *(P, D, STRIDE_G, STRIDE_A, STRIDE_GS, STRIDE_AS, BIAS, BP, BD, PRECISION),
    )
    tl.store(partial + (s * blocks + block) * n + j, tl.sum(left * right, 0), mask=have)
    if FINISH:
        programs = blocks * tl.num_programs(1) * tl.num_programs(2)
        book = table, advantages, history, settings
        _finish(counter, programs, norms, names, m, n, blocks, index, book, NAMED, VARIANT, ACC, BM, BB, BN)


@jit(do_not_specialize=["m", "T", "index"])
def _scale_kernel(
    x, plus, out, table,
    m, T, index,
    D: tl.constexpr, STRIDE: tl.constexpr, STRIDE_PLUS: tl.constexpr, PLUS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
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


def _steps(
    P: int, D: int, dtype: torch.dtype, device: torch.device, rows: int, warps: int = 4
) -> tuple[tuple[int, int], dict[str, int]]:
    """Widths of steps over features of cotangents and inputs where so many rows are multiplied, and the options."""
    width, stages = _pipeline(dtype, device, rows)
    widths = (min(width, max(16, power_of_two(P))), min(width, max(16, power_of_two(D))))
    return widths, {"num_warps": warps, "num_stages": stages}


def _rows(m: int, T: int, device: torch.device) -> int:
    """How many rows of `m` sequences of length T a program multiplies at once with samples."""
    most, fewer = _ROWS
    return most if m * -(-T // most) >= 0.9 * processors(device) else fewer


def _row_blocks(P: int, D: int) -> tuple[int, int]:
    """How much of a row of cotangents and of inputs is read at once by itself."""
    return min(power_of_two(P), _LARGE_BLOCK), min(power_of_two(D), _LARGE_BLOCK)


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


# What follows from shapes is worked out once for each: Python at every layer is what there is to save


@lru_cache(maxsize=4096)
def _overlap_plan(
    sizes: tuple[int, int, int], shape: tuple, traits: tuple, of_rows: tuple, dtype: torch.dtype, device: torch.device
) -> Plan:
    """`shape` has features and strides of rows, `of_rows` what is asked where samples are rows from before."""
    m, T, n = sizes
    P, D = shape[:2]
    rows = _rows(m, T, device)
    blocks = -(-T // rows)
    BM, BN, BB = tiles(m, n, blocks)
    widths, options = _steps(P, D, dtype, device, rows + BN, warps=8)
    constants = (*shape, *traits, *types_of(dtype), rows, BN, *widths, BM, BB)
    if of_rows:
        constants += (*of_rows, *_row_blocks(P, D))
    return Plan((blocks, m, -(-n // BN)), constants, options)


class _OverlapLaunch(NamedTuple):
    """What the layers of one shape in a microbatch have in common."""

    plan: Plan
    samples: Samples | None
    overlap: torch.Tensor
    fixed: Fixed
    sizes: tuple[int, int, int]


def overlaps(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    sequences: Sequences,
    samples: Samples | SampleRows,
    entry: Entry,
    into: Into | None = None,
    finish: bool = False,
) -> Overlaps:
    """
    The overlaps of a linear layer, by products between rows.

    Args:
        into (`tuple`, *optional*): with samples that are rows from before, where rows of this microbatch go along the
            way: slots of cotangents and inputs, `[slots, ...]`, no more than there are samples, and the row that each
            of them gets, `[slots]`.
        finish (`bool`): whether to go on to the coefficients, for a rule that needs no more; then they are in `entry`.
    """
    g, a = _by_row(g), _by_row(a)
    ledger, index = entry
    m, T = sequences.count, sequences.length
    key: tuple = ("overlap", m, T, g.shape, a.shape, g.stride(), a.stride(), bias, finish, g.dtype)
    before = samples if isinstance(samples, SampleRows) else None
    if before is not None:
        key = (key, len(before.g), before.g.stride(), before.inputs.stride(), into is None)
    known = ledger.prepared.get(key)
    if known is None or (before is None and known.samples is not samples):
        known = ledger.prepared[key] = _prepared(g, a, bias, (m, T, samples.number), samples, ledger, into, finish)
    plan, _, overlap, fixed, (m, T, n) = known
    if before is not None:
        # Without slots, these are not looked at
        g_out, a_out, source = (g, a, ledger.counter) if into is None else into
        tensors = (g, a, before.g, before.inputs, g_out, a_out, source, overlap)
        slots = 0 if into is None else source.shape[0]
        launch(_overlap_with_rows_kernel, plan, tensors, (m, T, n, slots, index), fixed)
    else:
        launch(_overlap_kernel, plan, (g, a), (m, T, n, index), fixed)
    return Overlaps(overlap, n, before is not None and ledger.named)


def _prepared(g, a, bias, sizes, samples, ledger, into, finish) -> _OverlapLaunch:
    m, _, n = sizes
    before = isinstance(samples, SampleRows)
    shape = (g.shape[1], a.shape[1], g.stride(0), a.stride(0))
    of_rows = (samples.g.stride(0), samples.inputs.stride(0), into is not None, ledger.named) if before else ()
    plan = _overlap_plan(sizes, shape, (bias, finish, ledger.variant), of_rows, g.dtype, g.device)
    overlap = ledger.scratch(g, "overlap", m * plan.grid[0] * n + n)
    fixed = ledger.fixed if before else Fixed((samples.present, overlap, *ledger.fixed.tensors))
    return _OverlapLaunch(plan, None if before else samples, overlap, fixed, sizes)


@lru_cache(maxsize=4096)
def _scale_plan(
    m: int, T: int, D: int, strides: tuple[int, int], adds: bool, dtypes: tuple[torch.dtype, ...], device: torch.device
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
