"""
Kernels of a mixture's experts: statistics of each expert's rows, its coefficients, and the scaling of rows.

Rows are sorted by expert and sequence ([`~geometry.routing`]), so that those of a sequence at an expert stand in one
piece, whose length only the device knows: programs read it there, and the host never waits. The number of launches
depends neither on that nor on the number of experts.
"""

from functools import lru_cache

import torch

from ..geometry.routing import Routing
from ..geometry.sequences import SampleRows, Samples
from .coefficients import (
    DIRECTION,
    NORM,
    NTK,
    OVERLAP,
    TABLE_ROWS,
    Entry,
    _counted,
    _interacting,
    _non_interacting,
    tiles,
)
from .launch import Plan, jit, launch, part_of, power_of_two, tl, types_of
from .linear import _by_row, _products, _row_blocks, _square_norm, _steps


# Rows that a program multiplies at once, with samples or with other rows
_ROWS = 64
_SAMPLES = 16
# Programs that share the rows of a sequence at an expert, at most
_PARTS = 16


@jit(do_not_specialize=["m", "count"])
def _expert_overlap_kernel(
    g, a, g_samples, a_samples, bounds, samples, sample_bounds, norms,
    m, count,
    P: tl.constexpr, D: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_GS: tl.constexpr,
    STRIDE_AS: tl.constexpr, FROM_BEFORE: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, ROW_P: tl.constexpr, ROW_D: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    s = tl.program_id(1)
    e = tl.program_id(2)
    parts = tl.num_programs(0)
    first = tl.load(bounds + e * (m + 1) + s)
    end = tl.load(bounds + e * (m + 1) + s + 1)
    last_sample = tl.load(sample_bounds + e + 1)
    overlaps = norms + count + (s * parts + part) * count
    for start in range(tl.load(sample_bounds + e), last_sample, BN):
        j = start + tl.arange(0, BN)
        sample = tl.load(samples + j, mask=j < last_sample, other=-1)
        have = sample >= 0
        total = tl.zeros((BN,), ACC)
        for begin in range(first + part * BT, end, parts * BT):
            row = begin + tl.arange(0, BT)
            real = row < end
            left, right = _products(
                *(row, real, sample, have, tl.zeros((BT, BN), ACC), g, a, g_samples, a_samples),
                *(P, D, STRIDE_G, STRIDE_A, STRIDE_GS, STRIDE_AS, BIAS, BP, BD, PRECISION),
            )
            products = left * right
            total += tl.sum(products, 0)
            if not FROM_BEFORE:
                # A sample's own norm is its product with itself, in the one program that has it among its rows
                own = tl.sum(tl.where(row[:, None] == sample[None, :], products, 0.0), 0)
                here = (sample >= begin) & (sample < tl.minimum(begin + BT, end))
                tl.store(norms + j, own, mask=here)
        tl.store(overlaps + j, total, mask=have)
    if FROM_BEFORE:  # samples are rows of tensors of their own, and each program has its share of their norms
        for q in range(tl.load(sample_bounds + e) + s * parts + part, last_sample, m * parts):
            of_sample = tl.load(samples + q)
            own = _square_norm(g_samples, a_samples, of_sample, STRIDE_GS, STRIDE_AS, P, D, BIAS, ACC, ROW_P, ROW_D)
            tl.store(norms + q, own)


@jit(do_not_specialize=["m"])
def _expert_products_kernel(
    g, a, bounds, sums,
    m,
    P: tl.constexpr, D: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_A: tl.constexpr, BIAS: tl.constexpr,
    PAIRS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`<V_es, V_es'>`: of every pair of sequences, or (not `PAIRS`) `|V_es|^2` in as many parts as programs share."""
    s = tl.program_id(1)
    e = tl.program_id(2)
    first = tl.load(bounds + e * (m + 1) + s)
    end = tl.load(bounds + e * (m + 1) + s + 1)
    if PAIRS:
        other = tl.program_id(0)
        begin = first
        step = BT
        end = tl.where(other < s, first, end)  # the program of the mirrored pair does it
    else:
        other = s
        begin = first + tl.program_id(0) * BT
        step = tl.num_programs(0) * BT
    first_other = tl.load(bounds + e * (m + 1) + other)
    end_other = tl.load(bounds + e * (m + 1) + other + 1)
    total = tl.zeros((BT,), ACC)
    for i in range(begin, end, step):
        row = i + tl.arange(0, BT)
        real = row < end
        # Of a sequence with itself each pair of blocks once
        for j in range(tl.where(other == s, i, first_other), end_other, BT):
            column = j + tl.arange(0, BT)
            have = column < end_other
            left, right = _products(
                *(row, real, column, have, tl.zeros((BT, BT), ACC), g, a, g, a),
                *(P, D, STRIDE_G, STRIDE_A, STRIDE_G, STRIDE_A, BIAS, BP, BD, PRECISION),
            )
            total += tl.sum(left * right, 1) * tl.where((other == s) & (j > i), 2.0, 1.0).to(ACC)
    value = tl.sum(total, 0)
    if PAIRS:
        if other >= s:
            tl.store(sums + (e * m + s) * m + other, value)
            tl.store(sums + (e * m + other) * m + s, value)
    else:
        tl.store(sums + (e * m + s) * tl.num_programs(0) + tl.program_id(0), value)


@jit(do_not_specialize=["m", "count", "parts", "index"])
def _expert_coefficients_kernel(
    norms, samples, sample_bounds, sums, projections,
    counter, table, advantages, history, settings, names,
    m, count, parts, index,
    K: tl.constexpr, VARIANT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    s = tl.arange(0, BM)
    book = table, advantages, history, settings
    if VARIANT & NTK:
        inside = (s < m)[:, None] & (s < m)[None, :]
        ntk = tl.load(sums + (e * m + s[:, None]) * m + s[None, :], mask=inside, other=0.0).to(tl.float64)
        along = tl.zeros((BM,), tl.float64)
        if VARIANT & DIRECTION:
            along += tl.load(projections + e * m + s, mask=s < m, other=0.0)
        _interacting(ntk, along, m, index + e, book, BM, VARIANT, ACC)
    else:
        fisher_square = tl.zeros((BM,), tl.float64)
        norm_square = tl.zeros((BM,), tl.float64)
        informed = True
        if VARIANT & OVERLAP:
            total = tl.zeros((BM,), tl.float64)
            last_sample = tl.load(sample_bounds + e + 1)
            for start in range(tl.load(sample_bounds + e), last_sample, BN):
                j = start + tl.arange(0, BN)
                overlap = tl.zeros((BM, BN), tl.float64)
                for begin in range(0, parts, BB):
                    b = begin + tl.arange(0, BB)
                    at = count + (s[:, None, None] * parts + b[None, :, None]) * count + j[None, None, :]
                    inside = (s < m)[:, None, None] & (b < parts)[None, :, None] & (j < last_sample)[None, None, :]
                    overlap += tl.sum(tl.load(norms + at, mask=inside, other=0.0).to(tl.float64), 1)
                weight = tl.load(norms + j, mask=j < last_sample, other=0.0).to(tl.float64)
                if K > 0:  # samples have names; each position is so many of them
                    n = count // K
                    position = tl.load(samples + j, mask=j < last_sample, other=0) // K
                    counted = _counted(names, names + n, position, s, n, m, True)
                else:
                    counted = _counted(names, names, j, s, 0, m, False)
                fisher_square += tl.sum(tl.where(counted, overlap * overlap, 0.0), 1)
                total += tl.sum(tl.where(counted, weight[None, :], 0.0), 1)
            fisher_square = fisher_square / tl.where(total == 0, 1.0, total)
            informed = total != 0
        if VARIANT & NORM:
            for begin in range(0, parts, BC):
                b = begin + tl.arange(0, BC)
                inside = (s < m)[:, None] & (b < parts)[None, :]
                at = (e * m + s[:, None]) * parts + b[None, :]
                norm_square += tl.sum(tl.load(sums + at, mask=inside, other=0.0).to(tl.float64), 1)
        _non_interacting(fisher_square, informed, norm_square, m, index + e, book, BM, VARIANT, ACC)


@jit(do_not_specialize=["m", "S", "index"])
def _expert_scale_kernel(
    x, plus, out, keys, table,
    m, S, index,
    D: tl.constexpr, STRIDE: tl.constexpr, STRIDE_PLUS: tl.constexpr, PLUS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    real = row < S
    key = tl.load(keys + row, mask=real, other=0)
    e = key // (m + 1)
    s = key % (m + 1)
    c = tl.load(table + (index + e) * TABLE_ROWS * m + s, mask=real & (s < m), other=0.0)
    if x.dtype.element_ty != tl.float64:
        c = c.to(tl.float32)
    inside = real[:, None] & (d < D)[None, :]
    values = tl.load(x + row[:, None] * STRIDE + d[None, :], mask=inside, other=0.0)
    values = values * c[:, None]
    if PLUS:
        values += tl.load(plus + row[:, None] * STRIDE_PLUS + d[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * D + d[None, :], values, mask=inside)


# What follows from shapes is worked out once for each: Python at every layer is what there is to save


@lru_cache(maxsize=4096)
def _overlap_plan(
    grid: tuple[int, int, int], shape: tuple[int, ...], traits: tuple, dtype: torch.dtype, device: torch.device
) -> Plan:
    P, D = shape[:2]
    widths, options = _steps(P, D, dtype, device, _ROWS + _SAMPLES)
    constants = (*shape, *traits, *types_of(dtype), _ROWS, _SAMPLES, *widths, *_row_blocks(P, D))
    return Plan(grid, constants, options)


@lru_cache(maxsize=4096)
def _products_plan(
    grid: tuple[int, int, int], shape: tuple[int, ...], traits: tuple, dtype: torch.dtype, device: torch.device
) -> Plan:
    P, D = shape[:2]
    widths, options = _steps(P, D, dtype, device, 2 * _ROWS)
    return Plan(grid, (*shape, *traits, *types_of(dtype), _ROWS, *widths), options)


@lru_cache(maxsize=4096)
def _coefficients_plan(m: int, E: int, parts: int, traits: tuple, dtype: torch.dtype, device: torch.device) -> Plan:
    BM, BN, BB = tiles(m, _SAMPLES, parts)
    return Plan((E, 1, 1), (*traits, types_of(dtype)[0], BM, BN, BB, power_of_two(parts)))


@lru_cache(maxsize=4096)
def _scale_plan(S: int, D: int, strides: tuple[int, int], adds: bool, dtypes: tuple, device: torch.device) -> Plan:
    BD = min(power_of_two(D), 1024)
    BT = part_of(2**13, BD, S)
    return Plan((-(-S // BT), -(-D // BD), 1), (D, *strides, adds, BT, BD))


def expert_coefficients(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    routing: Routing,
    samples: Samples | SampleRows | None,
    entry: Entry,
    projection: torch.Tensor | None = None,
) -> Entry:
    """
    The coefficients of all experts of a stack, by products between rows.

    Args:
        g (`torch.Tensor`): `[S, p]` cotangents.
        a (`torch.Tensor`): `[S, d]` inputs.
        bias (`bool`): whether a trained bias takes part, one more input that is always 1.
        routing ([`Routing`]): whose the rows are; every row must be some sequence's.
        samples ([`Samples`] or [`SampleRows`], *optional*): sampled positions, or rows from before, of the type of
            `g`; needed for the overlap.
        entry ([`Entry`]): where the coefficients go.
        projection (`torch.Tensor`, *optional*): `[E, m]`, the projections on a direction, for a rule that goes by one.
    """
    ledger, index = entry
    needs = ledger.needs
    if not any(needs):  # they are there already
        return entry
    g, a = _by_row(g), _by_row(a)
    m, E, bounds = routing.sequences, routing.experts, routing.bounds
    shape = (g.shape[1], a.shape[1], g.stride(0), a.stride(0))
    # Twice as many as the rows of a sequence take at an expert on average
    parts = max(1, min(_PARTS, -(-2 * len(g) // (m * E * _ROWS))))
    norms = sums = bounds
    sample_bounds, rows, count, k = bounds, bounds, 0, 0
    if needs.overlap:
        assert samples is not None
        g_samples, a_samples, from_before = g, a, isinstance(samples, SampleRows)
        if isinstance(samples, SampleRows):
            g_samples, a_samples = samples.g, samples.inputs
            rows, sample_bounds = routing.rows_from_before(samples)
            k = samples.g.shape[1] * ledger.named
        else:
            rows, sample_bounds = routing.sample_rows(samples)
        count = len(rows)
        norms = ledger.scratch(g, "overlaps of experts", (m * parts + 1) * count)
        strides = (g_samples.stride(-2), a_samples.stride(-2))  # `[n, k, ...]` is `[n k, ...]`
        plan = _overlap_plan((parts, m, E), (*shape, *strides), (from_before, bias), g.dtype, g.device)
        tensors = (g, a, g_samples, a_samples, bounds, rows, sample_bounds, norms)
        launch(_expert_overlap_kernel, plan, tensors, (m, count))
    if needs.norm or needs.ntk:
        programs = m if needs.ntk else parts
        sums = ledger.scratch(g, "products of experts", E * m * programs)
        plan = _products_plan((programs, m, E), shape, (bias, needs.ntk), g.dtype, g.device)
        launch(_expert_products_kernel, plan, (g, a, bounds, sums), (m,))
    variant = ledger.variant
    if projection is not None:
        projection, variant = projection.to(sums.dtype).contiguous(), ledger.variant_along
    plan = _coefficients_plan(m, E, parts, (k, variant), g.dtype, g.device)
    of_all = (norms, rows, sample_bounds, sums, projection)
    launch(_expert_coefficients_kernel, plan, of_all, (m, count, parts, index), ledger.fixed)
    return entry


def scaled(x: torch.Tensor, routing: Routing, c: Entry, plus: torch.Tensor | None = None) -> torch.Tensor:
    """Each row of `x` `[S, d]` times the coefficient of its sequence at its expert; `plus` `[S, d]` is added."""
    ledger, index = c
    x = _by_row(x)
    other = x if plus is None else _by_row(plus)
    S, D = x.shape
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    plan = _scale_plan(S, D, (x.stride(0), other.stride(0)), plus is not None, (x.dtype, other.dtype), x.device)
    launch(_expert_scale_kernel, plan, (x, other, out, routing.keys, ledger.table), (routing.sequences, S, index))
    return out
