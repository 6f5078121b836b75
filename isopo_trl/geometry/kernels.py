"""
Fused Triton versions of `statistics` and `coefficients`, for padded batches on a GPU.

At the sizes of language models the arithmetic of ISOPO is small, and what costs time is launching it: some thirty
small operations a layer. Here a layer takes two launches beside its own products. In each kernel that makes a
statistic, programs write what they have summed to a scratch tensor, and the last one to finish, which a counter finds,
adds it all up in a fixed order and goes on to the coefficients. So results do not depend on the order of execution.

The functions do what their counterparts in plain PyTorch do, which stay the reference and take over elsewhere
([`usable`] says where). Rows must be those of a padded batch: row `s T + t` is position `t` of sequence `s`.
`TRITON_INTERPRET=1` runs the kernels on the CPU; `ISOPO_DISABLE_TRITON=1` turns them off.
"""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers.utils import is_triton_available

from .coefficients import COUNTERS, Ledger, Rule
from .sequences import Samples, Sequences
from .statistics import Statistics, accumulation_dtype


if is_triton_available():
    import triton
    import triton.language as tl

ENABLED = is_triton_available() and os.environ.get("ISOPO_DISABLE_TRITON", "0") != "1"
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Largest tile of [sequences, samples], or of the partial sums of these, that a program holds
_LARGEST_TILE = 2**13
# Elements of V that one program of the kernels over V reads
_V_CHUNK = 2**13
_MAX_SAMPLE_BLOCK = 128
_FEATURE_BLOCK = 64
_COMPILED = (torch.bfloat16, torch.float16, torch.float32)
# Triton's interpreter has no products of bf16
_INTERPRETED = (torch.float16, torch.float32, torch.float64) if INTERPRET else ()
# Of an elementwise parameter
MOST_FEATURES = _FEATURE_BLOCK * (COUNTERS - 1)


def usable(x: torch.Tensor, sequences: int, samples: int, rule: Rule) -> bool:
    """Whether the kernels can take a tensor like `x` and so many sequences and samples."""
    if not takes(x):
        return False
    if _power(sequences) * min(_power(samples), _MAX_SAMPLE_BLOCK) > _LARGEST_TILE:
        return False
    return sequences <= (64 if rule.interacting else 1024)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels can read `x`: on NVIDIA GPUs from Ampere on."""
    if not ENABLED or x.numel() == 0:
        return False
    return x.dtype in _COMPILED and _is_new_enough(x.device) if x.is_cuda else x.dtype in _INTERPRETED


@lru_cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _power(x: int) -> int:
    """The power of two that a tile of at least `x` needs."""
    return 1 << max(x - 1, 0).bit_length()


def _jit(**options: Any) -> Any:
    return triton.jit(**options) if is_triton_available() else lambda function: function


@dataclass
class Plan:
    """
    All that a launch takes beside its tensors and numbers, worked out once for each shape.

    Args:
        grid (`tuple[int, int, int]`): number of programs.
        constants (`tuple`): what the kernel is compiled for.
        options (`dict`): warps and stages.
        run (`Any`): launches the compiled kernel; there once it has been launched the usual way.
    """

    grid: tuple[int, int, int]
    constants: tuple
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    run: Any = None


def launch(kernel: Any, plan: Plan, tensors: tuple, numbers: tuple) -> None:
    """
    Launch `kernel(*tensors, *numbers, *plan.constants)`.

    From the second time on without Triton's inspection of every argument, which takes most of a launch's time. That is
    sound since numbers are declared not to be specialised on, a plan is made for one combination of types, and the
    pointers are aligned.
    """
    for x in tensors:
        if x.data_ptr() % 16 != 0:
            kernel[plan.grid](*tensors, *numbers, *plan.constants, **plan.options)
            return
    if plan.run is not None:
        plan.run(*tensors, *numbers, *plan.constants)
        return
    compiled = kernel[plan.grid](*tensors, *numbers, *plan.constants, **plan.options)
    if hasattr(compiled, "__getitem__"):  # not so when interpreted
        plan.run = compiled[plan.grid]


# Pieces of kernels


@_jit()
def _is_last(counter, total):
    """Whether all `total` programs but this one have passed here; then their stores can be read."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == total - 1:
        tl.store(counter, 0)
    return before == total - 1


@_jit()
def _row_products(
    x,
    stride: tl.constexpr,
    row,
    real,
    sample,
    have,
    acc,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc + x[row] . x[sample]`, `[rows, samples]`."""
    k = tl.arange(0, BLOCK)
    rows = x + row[:, None] * stride + k[None, :]
    samples = x + sample[None, :] * stride + k[:, None]
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


@_jit()
def _fisher_square(partial, norms, m, n, blocks, BM: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    """
    `F_s^2` `[BM]` from overlaps `partial` `[m, blocks, n]`, to be added over the blocks, and the squared norms of the
    samples' gradients, `norms` `[n]`; and whether any sample has a gradient.
    """
    s = tl.arange(0, BM)
    square = tl.zeros((BM,), tl.float64)
    weight = tl.zeros((BN,), tl.float64)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        overlap = tl.zeros((BM, BN), tl.float64)
        for start in range(0, blocks, BB):
            b = start + tl.arange(0, BB)
            at = (s[:, None, None] * blocks + b[None, :, None]) * n + j[None, None, :]
            inside = (s < m)[:, None, None] & (b < blocks)[None, :, None] & (j < n)[None, None, :]
            overlap += tl.sum(tl.load(partial + at, mask=inside, other=0.0, cache_modifier=".cg"), 1)
        square += tl.sum(overlap * overlap, 1)
        weight += tl.load(norms + j, mask=j < n, other=0.0, cache_modifier=".cg")
    total = tl.sum(weight, 0)
    return square / tl.where(total == 0, 1.0, total), total != 0


@_jit()
def _mean_over(x, alive):
    count = tl.sum(alive.to(tl.float64), 0)
    return tl.sum(tl.where(alive, x, 0.0), 0) / tl.maximum(count, 1.0)


@_jit()
def _part(x, exponent, level, REGULARIZED: tl.constexpr, KEEP_SMALL: tl.constexpr):
    """`reg2(x)^exponent`, and 0 where `reg2(x)` is 0."""
    if REGULARIZED:
        if KEEP_SMALL:
            x = tl.where(level == 0, 0.0, tl.sqrt(x * x / tl.where(level == 0, 1.0, level) + 1.0))
        else:
            x = tl.sqrt(x * x + level)
    return tl.where(x == 0, 0.0, tl.exp(tl.log(tl.where(x == 0, 1.0, x)) * exponent))


@_jit()
def _known_or(known, history, own):
    return tl.where(known, tl.load(history), own)


@_jit()
def _non_interacting(
    fisher_square,
    informed,
    norm_square,
    m,
    index,
    table,
    advantages,
    history,
    settings,
    BM: tl.constexpr,
    RULE: tl.constexpr,
):
    """
    `coefficients._non_interacting` for all sequences; writes the layer's row of the table.

    `RULE` is `Rule.traits`; `history`, `settings` and `table` are laid out as [`Ledger`] says.
    """
    OVERLAP: tl.constexpr = RULE & 1
    NORM: tl.constexpr = RULE & 2
    P: tl.constexpr = RULE & 8
    Q: tl.constexpr = RULE & 16
    R: tl.constexpr = RULE & 32
    REGULARIZED: tl.constexpr = RULE & 64
    KEEP_SMALL: tl.constexpr = RULE & 128
    PAPER: tl.constexpr = RULE & 256
    s = tl.arange(0, BM)
    present = s < m
    history += index * 6
    known = tl.load(history + 5) != 0
    strength = tl.load(settings + 3)
    unscale = tl.load(settings + 4)
    factor = tl.load(settings + 5)
    A = tl.load(advantages + s, mask=present, other=0.0)

    F = tl.sqrt(fisher_square) * unscale
    N = tl.sqrt(tl.maximum(norm_square, 0.0)) * unscale
    # `maximum` may drop a NaN
    N = tl.where(norm_square != norm_square, norm_square, N)
    ratio = tl.where(N == 0, 0.0, F / tl.where(N == 0, 1.0, N))
    alive = present
    if OVERLAP:
        alive = alive & (F > 0) & (F < float("inf"))
    if NORM:
        alive = alive & (N > 0) & (N < float("inf"))

    raw = tl.full((BM,), 1.0, tl.float64)
    if P:
        level = strength * _known_or(known, history, _mean_over(F * F, alive))
        raw *= _part(F, tl.load(settings), level, REGULARIZED, KEEP_SMALL)
    if Q:
        level = strength * _known_or(known, history + 1, _mean_over(N * N, alive))
        raw *= _part(N, tl.load(settings + 1), level, REGULARIZED, KEEP_SMALL)
    if R:
        level = strength * _known_or(known, history + 2, _mean_over(ratio * ratio, alive))
        raw *= _part(ratio, tl.load(settings + 2), level, REGULARIZED, KEEP_SMALL)

    if PAPER:
        multiplier = raw * factor
        mean = tl.where(known, tl.load(history + 4) * factor, 0.0)
    else:
        x = F if OVERLAP else N
        weighted = _mean_over(raw * x, alive)
        own = tl.where(weighted == 0, 0.0, _mean_over(x, alive) / tl.where(weighted == 0, 1.0, weighted))
        multiplier = raw * _known_or(known, history + 3, own)
        mean = 1.0
    if OVERLAP:
        multiplier = tl.where(informed, multiplier, mean)
    table += index * 4 * m
    tl.store(table + s, A * multiplier, mask=present)
    tl.store(table + m + s, F, mask=present)
    tl.store(table + 2 * m + s, N, mask=present)
    tl.store(table + 3 * m + s, raw, mask=present)


@_jit()
def _interacting(ntk, m, index, table, advantages, history, settings, BM: tl.constexpr, RULE: tl.constexpr):
    """
    `coefficients._interacting`: `ntk` `[BM, BM]`; writes the layer's row of the table.

    Elimination without pivots, which the matrix `K / c0 + I` does not need: it is positive definite and its smallest
    eigenvalue is 1.
    """
    PAPER: tl.constexpr = RULE & 256
    s = tl.arange(0, BM)
    present = s < m
    diagonal = s[:, None] == s[None, :]
    history += index * 6
    known = tl.load(history + 5) != 0
    unscale = tl.load(settings + 4)
    A = tl.load(advantages + s, mask=present, other=0.0)

    ntk = ntk * unscale * unscale
    square = tl.sum(tl.where(diagonal, ntk, 0.0), 1)
    N = tl.where(square != square, square, tl.sqrt(tl.maximum(square, 0.0)))
    alive = present & (N > 0) & (N < float("inf"))
    c0 = tl.load(settings + 3) * _known_or(known, history + 1, _mean_over(N * N, alive))
    keep = alive & (tl.zeros((BM,), tl.float64) + c0 > 0)
    unit = tl.where(c0 > 0, c0, 1.0)
    matrix = tl.where(keep[:, None] & keep[None, :], ntk / unit, 0.0) + tl.where(diagonal, 1.0, 0.0)
    solution = tl.where(keep, A, 0.0)
    for k in range(m):
        row = tl.sum(tl.where(s[:, None] == k, matrix, 0.0), 0)
        column = tl.sum(tl.where(s[None, :] == k, matrix, 0.0), 1)
        pivot = tl.sum(tl.where(s == k, row, 0.0), 0)
        value = tl.sum(tl.where(s == k, solution, 0.0), 0)
        factor = tl.where(s == k, 0.0, column / pivot)
        matrix -= factor[:, None] * row[None, :]
        solution -= factor * value
    solution = tl.where(keep, solution / tl.sum(tl.where(diagonal, matrix, 0.0), 1), 0.0)
    if PAPER:
        solution = solution / unit * tl.load(settings + 5)
    table += index * 4 * m
    tl.store(table + s, solution, mask=present)
    tl.store(table + m + s, tl.zeros((BM,), tl.float64), mask=present)
    tl.store(table + 2 * m + s, N, mask=present)
    tl.store(table + 3 * m + s, tl.zeros((BM,), tl.float64), mask=present)


# Kernels


@_jit(do_not_specialize=["m", "T", "n", "index"])
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
    RULE: tl.constexpr,
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
    left = _row_products(g, STRIDE_G, row, real, sample, have, tl.zeros((BT, BN), ACC), P, BP, PRECISION)
    right = _row_products(a, STRIDE_A, row, real, sample, have, tl.zeros((BT, BN), ACC), D, BD, PRECISION)
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
            fisher_square, informed = _fisher_square(partial, norms, m, n, blocks, BM, BB, BN)
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
                RULE,
            )


@_jit(do_not_specialize=["m", "T", "index"])
def _scale_kernel(
    x,
    out,
    table,
    m,
    T,
    index,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    s = tl.program_id(2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row = s.to(tl.int64) * T + t
    c = tl.load(table + index * 4 * m + s)
    inside = (t < T)[:, None] & (d < D)[None, :]
    values = tl.load(x + row[:, None] * STRIDE + d[None, :], mask=inside, other=0.0)
    if x.dtype.element_ty != tl.float64:
        c = c.to(tl.float32)
    tl.store(out + row[:, None] * D + d[None, :], values * c, mask=inside)


@_jit(do_not_specialize=["m", "n", "blocks", "first", "chunks", "index", "size"])
def _norm_kernel(
    V,
    sums,
    norms,
    counter,
    table,
    advantages,
    history,
    settings,
    m,
    n,
    blocks,
    first,
    chunks,
    index,
    size,
    FINISH: tl.constexpr,
    ALIGNED: tl.constexpr,
    RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
):
    chunk = tl.program_id(0)
    s = tl.program_id(1)
    e = chunk * CHUNK + tl.arange(0, CHUNK)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    v = tl.load(V + s.to(tl.int64) * size + e, mask=e < size, other=0.0)
    tl.store(sums + s * chunks + first + chunk, tl.sum(v * v, 0))
    if FINISH:
        if _is_last(counter, chunks * m):
            q = tl.arange(0, BM)
            norm_square = tl.zeros((BM,), tl.float64)
            for start in range(0, chunks, BC):
                k = start + tl.arange(0, BC)
                inside = (q < m)[:, None] & (k < chunks)[None, :]
                at = q[:, None] * chunks + k[None, :]
                norm_square += tl.sum(
                    tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64), 1
                )
            fisher_square = tl.zeros((BM,), tl.float64)
            informed = True
            if RULE & 1:
                fisher_square, informed = _fisher_square(norms + n, norms, m, n, blocks, BM, BB, BN)
            _non_interacting(
                fisher_square, informed, norm_square, m, index, table, advantages, history, settings, BM, RULE
            )


@_jit(do_not_specialize=["m", "first", "chunks", "index", "size"])
def _ntk_kernel(
    V,
    sums,
    counter,
    table,
    advantages,
    history,
    settings,
    m,
    first,
    chunks,
    index,
    size,
    FINISH: tl.constexpr,
    ALIGNED: tl.constexpr,
    RULE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    chunk = tl.program_id(0)
    s = tl.arange(0, BM)
    k = tl.arange(0, BK)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    rows = s.to(tl.int64) * size
    if BM <= 16:  # too small for a matrix product: every pair by itself, reduced once at the end
        products = tl.zeros((BM, BM, BK), ACC)
        for start in range(chunk * BK, size, tl.num_programs(0) * BK):
            e = start + k[None, None, :]
            one = V + rows[:, None, None] + e
            other = V + rows[None, :, None] + e
            left = tl.load(one, mask=(s < m)[:, None, None] & (e < size), other=0.0)
            right = tl.load(other, mask=(s < m)[None, :, None] & (e < size), other=0.0)
            products += left * right
        ntk = tl.sum(products, 2)
    else:
        ntk = tl.zeros((BM, BM), ACC)
        for start in range(chunk * BK, size, tl.num_programs(0) * BK):
            e = start + k
            v = tl.load(V + rows[:, None] + e[None, :], mask=(s < m)[:, None] & (e < size)[None, :], other=0.0)
            ntk = tl.dot(v, tl.trans(v), ntk, input_precision=PRECISION)
    place = s[:, None] * BM + s[None, :]
    tl.store(sums + (first + chunk) * BM * BM + place, ntk)
    if FINISH:
        if _is_last(counter, chunks):
            total = tl.zeros((BM, BM), tl.float64)
            for start in range(0, chunks, BC):
                b = start + tl.arange(0, BC)
                at = b[:, None, None] * BM * BM + place[None, :, :]
                inside = (b < chunks)[:, None, None] & (place >= 0)[None, :, :]
                values = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
                total += tl.sum(values.to(tl.float64), 0)
            _interacting(total, m, index, table, advantages, history, settings, BM, RULE)


@_jit(do_not_specialize=["m", "index", "size"])
def _combine_kernel(V, out, table, m, index, size, ALIGNED: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    s = tl.arange(0, BM)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    c = tl.load(table + index * 4 * m + s, mask=s < m, other=0.0)
    at = s.to(tl.int64)[:, None] * size + e[None, :]
    v = tl.load(V + at, mask=(s < m)[:, None] & (e < size)[None, :], other=0.0)
    total = tl.sum(v * c.to(v.dtype)[:, None], 0)
    tl.store(out + e, total.to(out.dtype.element_ty), mask=e < size)


@_jit(do_not_specialize=["m", "T", "n", "index", "splits"])
def _elementwise_kernel(
    v,
    rows,
    sums,
    scratch,
    out,
    counter,
    table,
    advantages,
    history,
    settings,
    m,
    T,
    n,
    index,
    splits,
    D: tl.constexpr,
    SUMMED: tl.constexpr,
    RULE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """
    Everything of one elementwise parameter: three levels. Programs add up rows (unless that is done: `SUMMED`); the
    last of a block of features has the gradients `V` there, and adds its share to the statistics; the last of these
    has the coefficients.
    """
    block = tl.program_id(0)
    s = tl.program_id(2)
    blocks = tl.num_programs(0)
    d = block * BD + tl.arange(0, BD)
    inside = d < D
    V = scratch
    partial = V + m * D
    norms = partial
    if RULE & 1:
        norms += m * blocks * n
    square = norms
    if RULE & 1:
        square += blocks * n
    ntk = square
    if RULE & 2:
        ntk += m * blocks

    last = True
    if not SUMMED:
        split = tl.program_id(1)
        share = (T + splits - 1) // splits
        total = tl.zeros((BD,), ACC)
        stop = tl.minimum((split + 1) * share, T)
        for start in range(split * share, stop, BT):
            t = start + tl.arange(0, BT)
            at = (s.to(tl.int64) * T + t)[:, None] * D + d[None, :]
            total += tl.sum(tl.load(v + at, mask=(t < stop)[:, None] & inside[None, :], other=0.0).to(ACC), 0)
        tl.store(sums + (s * splits + split) * D + d, total, mask=inside)
        last = _is_last(counter + 1 + block, splits * tl.num_programs(2))

    if last:
        q = tl.arange(0, BM)
        gradient = tl.zeros((BM, BD), ACC)
        for start in range(0, splits, 8):
            part = start + tl.arange(0, 8)
            source = (q[:, None, None] * splits + part[None, :, None]) * D + d[None, None, :]
            real = (q < m)[:, None, None] & (part < splits)[None, :, None] & inside[None, None, :]
            gradient += tl.sum(tl.load(sums + source, mask=real, other=0.0, cache_modifier=".cg"), 1)
        tl.store(V + q[:, None] * D + d[None, :], gradient, mask=(q < m)[:, None] & inside[None, :])
        if RULE & 1:
            for first in range(0, n, BN):
                j = first + tl.arange(0, BN)
                sample = tl.load(rows + j, mask=j < n, other=-1)
                have = (sample >= 0)[:, None] & inside[None, :]
                x = tl.load(v + sample[:, None] * D + d[None, :], mask=have, other=0.0).to(ACC)
                overlap = tl.dot(x, tl.trans(gradient), tl.zeros((BN, BM), ACC), input_precision=PRECISION)
                place = (q[None, :] * blocks + block) * n + j[:, None]
                tl.store(partial + place, overlap, mask=(q < m)[None, :] & (j < n)[:, None])
                tl.store(norms + block * n + j, tl.sum(x * x, 1), mask=j < n)
        if RULE & 2:
            tl.store(square + q * blocks + block, tl.sum(gradient * gradient, 1), mask=q < m)
        if RULE & 4:
            products = tl.dot(gradient, tl.trans(gradient), tl.zeros((BM, BM), ACC), input_precision=PRECISION)
            tl.store(ntk + block * BM * BM + q[:, None] * BM + q[None, :], products)

        if _is_last(counter, blocks):
            if RULE & 4:
                kernel = tl.zeros((BM, BM), tl.float64)
                for b in range(blocks):
                    place = b * BM * BM + q[:, None] * BM + q[None, :]
                    kernel += tl.load(ntk + place, cache_modifier=".cg")
                _interacting(kernel, m, index, table, advantages, history, settings, BM, RULE)
            if RULE & 3:
                fisher_square = tl.zeros((BM,), tl.float64)
                norm_square = tl.zeros((BM,), tl.float64)
                informed = True
                if RULE & 2:
                    for b in range(blocks):
                        norm_square += tl.load(square + q * blocks + b, mask=q < m, other=0.0, cache_modifier=".cg")
                if RULE & 1:
                    # The samples' norms, added over the blocks, take the place of the first block's
                    for first in range(0, n, BN):
                        j = first + tl.arange(0, BN)
                        weight = tl.zeros((BN,), ACC)
                        for b in range(blocks):
                            weight += tl.load(norms + b * n + j, mask=j < n, other=0.0, cache_modifier=".cg")
                        tl.store(norms + j, weight, mask=j < n)
                    tl.debug_barrier()
                    fisher_square, informed = _fisher_square(partial, norms, m, n, blocks, BM, BB, BN)
                _non_interacting(
                    fisher_square, informed, norm_square, m, index, table, advantages, history, settings, BM, RULE
                )
            tl.debug_barrier()
            c = tl.load(table + index * 4 * m + q, mask=q < m, other=0.0, cache_modifier=".cg")
            for start in range(0, D, BD):
                e = start + tl.arange(0, BD)
                mask = (q < m)[:, None] & (e < D)[None, :]
                values = tl.load(V + q[:, None] * D + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                result = tl.sum(values * c.to(ACC)[:, None], 0)
                tl.store(out + e, result.to(out.dtype.element_ty), mask=e < D)


# Functions


def _types(dtype: torch.dtype) -> tuple[Any, str]:
    """Accumulation type and precision of products."""
    if dtype == torch.float64:
        return tl.float64, "ieee"
    return tl.float32, "ieee" if dtype == torch.float32 else "tf32"


def _part_of(tile: int, width: int, length: int) -> int:
    """How much of `length` to take at once, so that a tile with `width` does not outgrow `tile`."""
    return max(1, min(_power(length), tile // width))


def _tiles(m: int, n: int, blocks: int) -> tuple[int, int, int]:
    """Tile of the last program's sum: sequences, samples, blocks."""
    BM, BN = _power(m), min(max(16, _power(n)), _MAX_SAMPLE_BLOCK)
    return BM, BN, _part_of(_LARGEST_TILE, BM * BN, blocks)


def _scratch(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, device=like.device, dtype=accumulation_dtype(like.dtype))


def _pipeline(dtype: torch.dtype, device: torch.device, rows: int) -> tuple[int, int]:
    """Width of a step over features and number of steps under way, as shared memory allows for so many rows."""
    if device.type != "cuda":
        return 32, 1
    memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**16)
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
    traits: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    P, D, _, _ = shape
    BT = 64
    blocks = -(-T // BT)
    BM, BN, BB = _tiles(m, n, blocks)
    width, stages = _pipeline(dtype, device, BT + BN)
    widths = (min(width, max(16, _power(P))), min(width, max(16, _power(D))))
    constants = (*shape, bias, finish, traits, *_types(dtype), BT, BN, *widths, BM, BB)
    return Plan((blocks, m, -(-n // BN)), constants, {"num_warps": 4, "num_stages": stages})


def overlap_coefficients(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    sequences: Sequences,
    samples: Samples,
    ledger: Ledger,
    index: int,
    finish: bool = True,
) -> torch.Tensor:
    """
    Overlaps of a linear layer by products between rows, and, if `finish`, the coefficients of layer `index` from them.

    Returns the squared norms of the samples' gradients, `[n]`, and behind them the overlaps by blocks of positions,
    `[m, blocks, n]`, in one tensor: for [`VSums`], where a rule needs the Euclidean norm too.
    """
    g, a = _by_row(g), _by_row(a)
    m, T, rows = sequences.count, sequences.length, samples.present
    n = rows.shape[0]
    shape = (g.shape[1], a.shape[1], g.stride(0), a.stride(0))
    plan = _overlap_plan(m, T, n, shape, bias, finish, ledger.traits, g.dtype, g.device)
    overlap = _scratch(g, m * plan.grid[0] * n + n)
    launch(_overlap_kernel, plan, (g, a, rows, overlap, *ledger.tensors), (m, T, n, index))
    return overlap


@lru_cache(maxsize=4096)
def _scale_plan(m: int, T: int, D: int, stride: int, dtype: torch.dtype, device: torch.device) -> Plan:
    BD = min(_power(D), 1024)
    BT = _part_of(2**13, BD, T)
    return Plan((-(-T // BT), -(-D // BD), m), (D, stride, BT, BD))


def scaled(x: torch.Tensor, sequences: Sequences, ledger: Ledger, index: int) -> torch.Tensor:
    """Each row of `x` `[N, d]` times its sequence's coefficient at layer `index`."""
    x = _by_row(x)
    m, T, D = sequences.count, sequences.length, x.shape[1]
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    plan = _scale_plan(m, T, D, x.stride(0), x.dtype, x.device)
    launch(_scale_kernel, plan, (x, out, ledger.table), (m, T, index))
    return out


def v_coefficients(
    V: torch.Tensor,
    ledger: Ledger,
    index: int,
    overlap: torch.Tensor | None = None,
    samples: int = 0,
    sums: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """
    Coefficients of layer `index` from explicit gradients, for a rule that needs their norms or the kernel.

    Args:
        V (`torch.Tensor`): `[m, outputs, d]`, whole or (see [`VBlocks`]) a block of the outputs.
        ledger, index: where the coefficients go.
        overlap (`torch.Tensor`, *optional*): what `overlap_coefficients` returned, from so many `samples`.
        sums, first: where the sums over all blocks are collected, and this block's place in them.
    """
    rule, traits = ledger.rule, ledger.traits
    size = V.shape[1] * V.shape[2]
    here = _programs(size, rule)
    if sums is None:
        sums = _v_scratch(V, here, rule)
    _launch_v(V, sums, first, here, rule, (True, size % 16 == 0, traits), ledger.tensors, index, overlap, samples)


def _programs(size: int, rule: Rule) -> int:
    chunks = -(-size // _V_CHUNK)
    return min(chunks, 264) if rule.interacting else chunks


def _v_scratch(V: torch.Tensor, chunks: int, rule: Rule) -> torch.Tensor:
    m = V.shape[0]
    return _scratch(V, chunks, _power(m), _power(m)) if rule.interacting else _scratch(V, m, chunks)


def _launch_v(V, sums, first, here, rule, traits, tensors, index, overlap, samples):
    m, size = V.shape[0], V.shape[1] * V.shape[2]
    if rule.interacting:
        chunks = sums.shape[0]
        plan = _ntk_plan(m, here, chunks, traits, V.dtype, V.device)
        launch(_ntk_kernel, plan, (V, sums, *tensors), (m, first, chunks, index, size))
        return
    chunks = sums.shape[1]
    if overlap is None:
        overlap, samples = sums, 0
    blocks = (overlap.shape[0] - samples) // (m * samples) if samples else 1
    plan = _norm_plan(m, samples, blocks, here, chunks, traits, V.dtype, V.device)
    launch(_norm_kernel, plan, (V, sums, overlap, *tensors), (m, samples, blocks, first, chunks, index, size))


class VBlocks:
    """
    The same for gradients that are given in blocks of outputs: `add` each; the coefficients are there after the last.

    Args:
        sizes (`list[int]`): the number of elements of each block of one sequence's gradient.
        ledger, index, overlap, samples: as for [`v_coefficients`].
    """

    def __init__(
        self, sizes: list[int], ledger: Ledger, index: int, overlap: torch.Tensor | None = None, samples: int = 0
    ):
        self.arguments = (ledger, index, overlap, samples)
        self.rule = ledger.rule
        self.chunks = sum(_programs(size, self.rule) for size in sizes)
        self.sums: torch.Tensor | None = None
        self.first = 0

    def add(self, V: torch.Tensor) -> None:
        """Take in the next block, `V` `[m, outputs, d]`."""
        if self.sums is None:
            self.sums = _v_scratch(V, self.chunks, self.rule)
        v_coefficients(V, *self.arguments, self.sums, self.first)
        self.first += _programs(V.shape[1] * V.shape[2], self.rule)


class VSums:
    """Norms or kernel of gradients that are given in blocks of outputs, without coefficients: `add` each."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.result = Statistics()

    def add(self, V: torch.Tensor) -> None:
        """Take in a block, `V` `[m, outputs, d]`."""
        m, size = V.shape[0], V.shape[1] * V.shape[2]
        here = _programs(size, self.rule)
        sums = _v_scratch(V, here, self.rule)
        traits = (False, size % 16 == 0, self.rule.traits)
        _launch_v(V, sums, 0, here, self.rule, traits, (sums,) * 5, 0, None, 0)
        if self.rule.interacting:
            total = sums.sum(0)[:m, :m]
            self.result.ntk = total if self.result.ntk is None else self.result.ntk + total
        else:
            total = sums.sum(1)
            self.result.norm = total if self.result.norm is None else self.result.norm + total


@lru_cache(maxsize=4096)
def _ntk_plan(m: int, here: int, chunks: int, traits: tuple, dtype: torch.dtype, device: torch.device) -> Plan:
    BM = _power(m)
    acc, precision = _types(dtype)
    if device.type == "cuda":
        precision = "tf32x3"
    BK = min(256, 2**14 // BM**2) if BM <= 16 else 64
    # The last program's tile is small: its registers count for all programs
    tiles = (acc, precision, BM, BK, _part_of(2**10 if BM <= 16 else 2**13, BM**2, chunks))
    return Plan((here, 1, 1), (*traits, *tiles), {"num_warps": 8})


@lru_cache(maxsize=4096)
def _norm_plan(
    m: int, n: int, blocks: int, here: int, chunks: int, traits: tuple, dtype: torch.dtype, device: torch.device
) -> Plan:
    BM, BN, BB = _tiles(m, n, blocks)
    return Plan((here, m, 1), (*traits, _V_CHUNK, BM, BN, BB, _part_of(2**12, BM, chunks)))


@lru_cache(maxsize=4096)
def _combine_plan(m: int, size: int, kept: torch.dtype, dtype: torch.dtype, device: torch.device) -> Plan:
    BM = _power(m)
    BE = max(16, 2**12 // BM)
    return Plan((-(-size // BE), 1, 1), (size % 16 == 0, BM, BE))


def combined(V: torch.Tensor, ledger: Ledger, index: int, dtype: torch.dtype) -> torch.Tensor:
    """`sum_s c_s V_s`, `V` `[m, outputs, d]`."""
    m, size = V.shape[0], V.shape[1] * V.shape[2]
    out = torch.empty(V.shape[1:], device=V.device, dtype=dtype)
    plan = _combine_plan(m, size, V.dtype, dtype, V.device)
    launch(_combine_kernel, plan, (V, out, ledger.table), (m, index, size))
    return out


@lru_cache(maxsize=4096)
def _elementwise_plan(
    m: int, T: int, n: int, D: int, summed: bool, rule: Rule, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[Plan, int, int]:
    """The plan, splits of the rows of a sequence, and size of the scratch memory."""
    BD = min(max(16, _power(D)), _FEATURE_BLOCK)
    blocks = -(-D // BD)
    BM, BN, BB = _tiles(m, n, blocks)
    BM = max(16, BM)
    splits = max(1, min(1024 // (m * blocks), T // 256))
    acc, _ = _types(dtypes[0])
    needs = rule.needs
    size = m * D + blocks * (needs.overlap * (m + 1) * n + needs.norm * m + needs.ntk * BM * BM)
    tiles = (acc, "ieee" if acc == tl.float64 else "tf32x3", 64, BD, BM, BN, BB)
    return Plan((blocks, 1, 1) if summed else (blocks, splits, m), (D, summed, rule.traits, *tiles)), splits, size


def elementwise_gradient(
    v: torch.Tensor,
    sequences: Sequences,
    samples: Samples | None,
    ledger: Ledger,
    index: int,
    dtype: torch.dtype,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    `sum_s c_s V_s` `[d]` of an elementwise parameter, from its gradient at each position, `v` `[N, d]`.

    Where these are summed already, `sums` `[m, splits, d]` are the sums, and `v` `[n, d]` those of the samples alone.
    """
    v = v.contiguous()
    m, T, D = sequences.count, sequences.length, v.shape[1]
    n = 0 if samples is None else samples.rows.shape[0]
    summed = sums is not None
    plan, splits, size = _elementwise_plan(m, T, n, D, summed, ledger.rule, (v.dtype, dtype), v.device)
    if sums is None:
        sums = _scratch(v, m, splits, D)
    else:
        splits = sums.shape[1]
    if samples is None:
        rows = ledger.counter
    else:
        rows = samples.order if summed else samples.present
    out = torch.empty(D, device=v.device, dtype=dtype)
    tensors = (v, rows, sums, _scratch(v, size), out, *ledger.tensors)
    launch(_elementwise_kernel, plan, tensors, (m, T, n, index, splits))
    return out
