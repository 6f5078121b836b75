"""Kernels over explicit gradients `V` `[m, outputs, d]`: norms or neural tangent kernel, coefficients, their sum."""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

from functools import lru_cache

import torch
from transformers.utils import is_triton_available

from ..geometry.cost import Needs
from ..geometry.statistics import Statistics
from ..rules.rule import Rule
from .coefficients import (
    OVERLAP,
    TABLE_ROWS,
    Entry,
    Overlaps,
    _fisher_square,
    _interacting,
    _is_last,
    _non_interacting,
    tiles,
    variant_of,
)
from .launch import Fixed, Plan, jit, launch, part_of, power_of_two, scratch, types_of


if is_triton_available():
    import triton.language as tl

# Elements of V that one program reads
_V_CHUNK = 2**13


@jit(do_not_specialize=["m", "n", "blocks", "first", "chunks", "index", "size"])
def _norm_kernel(
    V,
    sums,
    norms,
    counter,
    table,
    advantages,
    history,
    settings,
    names,
    m,
    n,
    blocks,
    first,
    chunks,
    index,
    size,
    FINISH: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARIANT: tl.constexpr,
    NAMED: tl.constexpr,
    ACC: tl.constexpr,
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
            if VARIANT & OVERLAP:
                fisher_square, informed = _fisher_square(norms + n, norms, names, m, n, blocks, NAMED, BM, BB, BN)
            _non_interacting(
                fisher_square,
                informed,
                norm_square,
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


@jit(do_not_specialize=["m", "first", "chunks", "index", "size"])
def _ntk_kernel(
    V,
    sums,
    counter,
    table,
    advantages,
    history,
    settings,
    names,
    m,
    first,
    chunks,
    index,
    size,
    FINISH: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARIANT: tl.constexpr,
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
            _interacting(total, m, index, table, advantages, history, settings, BM, VARIANT, ACC)


@jit(do_not_specialize=["m", "index", "size"])
def _combine_kernel(V, out, table, m, index, size, ALIGNED: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    s = tl.arange(0, BM)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    c = tl.load(table + index * TABLE_ROWS * m + s, mask=s < m, other=0.0)
    at = s.to(tl.int64)[:, None] * size + e[None, :]
    v = tl.load(V + at, mask=(s < m)[:, None] & (e < size)[None, :], other=0.0)
    total = tl.sum(v * c.to(v.dtype)[:, None], 0)
    tl.store(out + e, total.to(out.dtype.element_ty), mask=e < size)


def v_coefficients(V: torch.Tensor, entry: Entry, overlaps: Overlaps | None = None) -> Entry:
    """
    The coefficients of a layer from explicit gradients, for a rule that needs their norms or the kernel.

    Args:
        V (`torch.Tensor`): `[m, outputs, d]`.
        entry ([`Entry`]): where the coefficients go.
        overlaps ([`Overlaps`], *optional*): of the layer, for a rule that needs these too.
    """
    ledger = entry.ledger
    m, outputs, d = V.shape
    here = _programs(outputs * d, ledger.needs)
    sums = ledger.scratch(V, "sums", *_sums_shape(m, here, ledger.needs))
    _launch_v(V, sums, 0, here, ledger.needs, True, ledger.variant, ledger.fixed, entry.first, overlaps)
    return entry


def _programs(size: int, needs: Needs) -> int:
    chunks = -(-size // _V_CHUNK)
    return min(chunks, 264) if needs.ntk else chunks


def _sums_shape(m: int, chunks: int, needs: Needs) -> tuple[int, ...]:
    if not needs.ntk:
        return m, chunks
    BM = power_of_two(m)
    return chunks, BM, BM


def _launch_v(V, sums, first, here, needs, finish, variant, fixed, index, overlaps):
    m, outputs, d = V.shape
    size = outputs * d
    variant = (finish, size % 16 == 0, variant)
    if needs.ntk:
        chunks = sums.shape[0]
        plan = _ntk_plan(m, here, chunks, variant, V.dtype, V.device)
        launch(_ntk_kernel, plan, (V, sums), (m, first, chunks, index, size), fixed)
        return
    chunks = sums.shape[1]
    overlap, samples, named = (sums, 0, False) if overlaps is None else overlaps
    blocks = (overlap.shape[0] - samples) // (m * samples) if samples else 1
    plan = _norm_plan(m, samples, blocks, here, chunks, (*variant, named), V.dtype, V.device)
    launch(_norm_kernel, plan, (V, sums, overlap), (m, samples, blocks, first, chunks, index, size), fixed)


class VBlocks:
    """
    The same for gradients that are given in blocks of outputs: `add` each; the coefficients are there after the last.

    Args:
        sizes (`list[int]`): the number of elements of each block of one sequence's gradient.
        entry, overlaps: as for [`v_coefficients`].
    """

    def __init__(self, sizes: list[int], entry: Entry, overlaps: Overlaps | None = None):
        self.entry, self.overlaps, self.needs = entry, overlaps, entry.ledger.needs
        self.chunks = sum(_programs(size, self.needs) for size in sizes)
        self.sums: torch.Tensor | None = None
        self.first = 0

    def add(self, V: torch.Tensor) -> None:
        """Take in the next block, `V` `[m, outputs, d]`."""
        ledger, index = self.entry
        here = _programs(V.shape[1] * V.shape[2], self.needs)
        if self.sums is None:
            self.sums = scratch(V, *_sums_shape(V.shape[0], self.chunks, self.needs))
        given = (V, self.sums, self.first, here, self.needs)
        _launch_v(*given, True, ledger.variant, ledger.fixed, index, self.overlaps)
        self.first += here


class VSums:
    """Norms or kernel of gradients that are given in blocks of outputs, without coefficients: `add` each."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.result = Statistics()

    def add(self, V: torch.Tensor) -> None:
        """Take in a block, `V` `[m, outputs, d]`."""
        m, size = V.shape[0], V.shape[1] * V.shape[2]
        needs = self.rule.needs
        here = _programs(size, needs)
        sums = scratch(V, *_sums_shape(m, here, needs))
        _launch_v(V, sums, 0, here, needs, False, variant_of(self.rule), Fixed((sums,) * 6), 0, None)
        if needs.ntk:
            total = sums.sum(0)[:m, :m]
            self.result.ntk = total if self.result.ntk is None else self.result.ntk + total
        else:
            total = sums.sum(1)
            self.result.norm = total if self.result.norm is None else self.result.norm + total


@lru_cache(maxsize=4096)
def _ntk_plan(m: int, here: int, chunks: int, variant: tuple, dtype: torch.dtype, device: torch.device) -> Plan:
    BM = power_of_two(m)
    acc, precision = types_of(dtype)
    if device.type == "cuda":
        precision = "tf32x3"
    BK = min(1024, 2**14 // BM**2) if BM <= 16 else 64
    # The last program's tile is small: its registers count for all programs
    constants = (*variant, acc, precision, BM, BK, part_of(2**10 if BM <= 16 else 2**13, BM**2, chunks))
    return Plan((here, 1, 1), constants, {"num_warps": 8})


@lru_cache(maxsize=4096)
def _norm_plan(
    m: int, n: int, blocks: int, here: int, chunks: int, variant: tuple, dtype: torch.dtype, device: torch.device
) -> Plan:
    BM, BN, BB = tiles(m, n, blocks)
    return Plan((here, m, 1), (*variant, types_of(dtype)[0], _V_CHUNK, BM, BN, BB, part_of(2**12, BM, chunks)))


@lru_cache(maxsize=4096)
def _combine_plan(m: int, size: int, of_V: torch.dtype, dtype: torch.dtype, device: torch.device) -> Plan:
    BM = power_of_two(m)
    BE = max(16, min(512, 2**12 // BM))
    return Plan((-(-size // BE), 1, 1), (size % 16 == 0, BM, BE), {"num_warps": 8})


def combined(V: torch.Tensor, c: Entry, dtype: torch.dtype) -> torch.Tensor:
    """`sum_s c_s V_s`, `V` `[m, outputs, d]`."""
    ledger, index = c
    m, outputs, d = V.shape
    size = outputs * d
    out = V.new_empty((outputs, d), dtype=dtype)
    plan = _combine_plan(m, size, V.dtype, dtype, V.device)
    launch(_combine_kernel, plan, (V, out, ledger.table), (m, index, size))
    return out
