"""
Kernels over explicit gradients `V` `[m, outputs, d]`: norms or neural tangent kernel, coefficients, their sum.

A gradient has `units * UNIT` elements. Where the compiler knows the second to be a multiple of 16 bytes, it reads as
much at once, and needs fewer instructions and registers.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..geometry.statistics import Direction, Statistics
from ..rules.rule import Rule
from .coefficients import (
    DIRECTION,
    OVERLAP,
    TABLE_ROWS,
    Entry,
    Overlaps,
    _fisher_square,
    _interacting,
    _is_last,
    _non_interacting,
    _sum_of_parts,
    _sum_of_rows,
    tiles,
    variant_of,
)
from .launch import (
    Fixed,
    Plan,
    has_warp_groups,
    jit,
    launch,
    part_of,
    power_of_two,
    scratch,
    shared_memory,
    tl,
    types_of,
)


# Elements of V that one program reads, for norms
_V_CHUNK = 2**13
# UNIT, where a gradient has a multiple of so many elements
_UNIT = 16
# Gradients that a program of their sum reads at once, and elements of each
_TOGETHER, _ALONG = 8, 512
# Programs whose sums the last one of them adds by itself
_FEW_PROGRAMS = 32


@jit(do_not_specialize=["m", "n", "blocks", "first", "chunks", "index", "units"])
def _norm_kernel(
    V, sums, norms,
    counter, table, advantages, history, settings, names,
    m, n, blocks, first, chunks, index, units,
    UNIT: tl.constexpr, FINISH: tl.constexpr, VARIANT: tl.constexpr, NAMED: tl.constexpr, ACC: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    size = units * UNIT
    chunk = tl.program_id(0)
    s = tl.program_id(1)
    e = chunk * CHUNK + tl.arange(0, CHUNK)
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
            book = table, advantages, history, settings
            _non_interacting(fisher_square, informed, norm_square, m, index, book, BM, VARIANT, ACC)


@jit()
def _elements(weight, bias, e, size, ACC, D, ROW, COLUMN, BIAS):
    """
    Elements `e` of a direction, of so many, in the order of a gradient's: each row of the weight's part `[p, D]`, with
    these strides, and behind it the bias's number. D is 0 where they lie one behind the other.
    """
    if D == 0:
        return tl.load(weight + e, mask=e < size, other=0.0).to(ACC)
    width = D
    if BIAS:
        width += 1
    row = (e // width).to(tl.int64)
    column = e % width
    values = tl.load(weight + row * ROW + column * COLUMN, mask=(e < size) & (column < D), other=0.0).to(ACC)
    if BIAS:
        values += tl.load(bias + row, mask=(e < size) & (column == D), other=0.0).to(ACC)
    return values


@jit()
def _half_of_products(v, BM):
    """
    `S` `[BM, BM]` such that `v v^T = S + S^T`, as exact as `tf32x3`, by two products instead of three: where `h` is
    `v` cut off to what TF32 holds, and `l` the rest, `h h^T / 2 + l h^T`.

    It begins at zero each time: sums in the hardware's products are cut off, not rounded, and would fall behind.
    """
    h = (v.to(tl.int32, bitcast=True) & -(2**13)).to(tl.float32, bitcast=True)
    rest = tl.dot(v - h, tl.trans(h), tl.zeros((BM, BM), tl.float32), input_precision="tf32")
    return tl.dot(0.5 * h, tl.trans(h), rest, input_precision="tf32")


@jit(do_not_specialize=["m", "adds", "ends", "group", "index", "units"])
def _ntk_kernel(
    V, sums, weight, bias,
    counter, table, advantages, history, settings, names,
    m, adds, ends, group, index, units,
    UNIT: tl.constexpr, FINISH: tl.constexpr, VARIANT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PAIRS: tl.constexpr, MATRIX: tl.constexpr, STAGES: tl.constexpr,
    GROUPED: tl.constexpr, BC: tl.constexpr,
    D: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """
    Two or three levels. Programs sum over their elements, and if `adds`, go on from where they stopped at the block
    before. If the block `ends` the gradients, the last of a `group` of programs adds theirs up, and the last of these
    has the kernel. With a direction, `weight` and `bias`, so it goes with the projections, which are behind all tiles.

    With `MATRIX`, the direction is the first column of a matrix that gradients are multiplied with. Where these are
    multiplied with each other by warps, each for itself, the compiler arranges them in shared memory for products of
    matrices. If anything else read them there, it would arrange them otherwise, and all would wait for few banks.
    """
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    size = units * UNIT
    s = tl.arange(0, BM)
    k = tl.arange(0, BK)
    rows = s.to(tl.int64) * size
    if PAIRS:  # every pair by itself, reduced once at the end
        products = tl.zeros((BM, BM, BK), ACC)
        if VARIANT & DIRECTION:
            along = tl.zeros((BM, 1, BK), ACC)
        for start in range(chunk * BK, size, chunks * BK):
            e = start + k[None, None, :]
            one = V + rows[:, None, None] + e
            other = V + rows[None, :, None] + e
            left = tl.load(one, mask=(s < m)[:, None, None] & (e < size), other=0.0)
            right = tl.load(other, mask=(s < m)[None, :, None] & (e < size), other=0.0)
            products += left * right
            if VARIANT & DIRECTION:
                along += left * _elements(weight, bias, e, size, ACC, D, ROW, COLUMN, BIAS)
        ntk = tl.sum(products, 2)
        if VARIANT & DIRECTION:
            projections = tl.sum(tl.sum(along, 2), 1)
    else:
        ntk = tl.zeros((BM, BM), ACC)
        if VARIANT & DIRECTION:
            # A step ahead: its type would have the compiler arrange gradients otherwise, as well
            ahead = _elements(weight, bias, chunk * BK + k, size, ACC, D, ROW, COLUMN, BIAS)
            if MATRIX:
                along = tl.zeros((BM, 16), ACC)
                one = (tl.arange(0, 16) == 0)[None, :]
            else:
                along = tl.zeros((BM, BK), ACC)
        for start in tl.range(chunk * BK, size, chunks * BK, num_stages=STAGES):
            e = start + k
            v = tl.load(V + rows[:, None] + e[None, :], mask=(s < m)[:, None] & (e < size)[None, :], other=0.0)
            if PRECISION == "tf32x3":
                ntk += _half_of_products(v, BM)
            else:
                ntk = tl.dot(v, tl.trans(v), ntk, input_precision=PRECISION)
            if VARIANT & DIRECTION:
                if MATRIX:
                    along = tl.dot(v, tl.where(one, ahead[:, None], 0.0), along, input_precision=PRECISION)
                else:
                    along += v * ahead[None, :]
                ahead = _elements(weight, bias, e + chunks * BK, size, ACC, D, ROW, COLUMN, BIAS)
        if PRECISION == "tf32x3":
            ntk += tl.trans(ntk)
        if VARIANT & DIRECTION:
            if MATRIX:
                along = tl.where(one, along, 0.0)
            projections = tl.sum(along, 1)
    place = s[:, None] * BM + s[None, :]
    own = sums + chunk * BM * BM + place
    if adds:
        ntk += tl.load(own)
    tl.store(own, ntk)
    if VARIANT & DIRECTION:
        tiles = chunks
        if GROUPED:
            tiles += (chunks + group - 1) // group
        behind = sums + tiles * BM * BM
        if adds:
            projections += tl.load(behind + chunk * BM + s)
        tl.store(behind + chunk * BM + s, projections)
    if FINISH:
        if ends:
            book = table, advantages, history, settings
            if GROUPED:
                of = chunk // group
                first = of * group
                count = tl.minimum(group, chunks - first)
                if _is_last(counter + 1 + of, count):
                    part = _sum_of_parts(sums, first, count, place, BM, BC)
                    tl.store(sums + (chunks + of) * BM * BM + place, part.to(ACC))
                    if VARIANT & DIRECTION:
                        of_part = _sum_of_rows(behind, first, count, BM, BC * BM)
                        tl.store(behind + (chunks + of) * BM + s, of_part.to(ACC))
                    groups = (chunks + group - 1) // group
                    if _is_last(counter, groups):
                        total = _sum_of_parts(sums, chunks, groups, place, BM, BC)
                        projected = total
                        if VARIANT & DIRECTION:
                            projected = _sum_of_rows(behind, chunks, groups, BM, BC * BM)
                        _interacting(total, projected, m, index, book, BM, VARIANT, ACC)
            else:
                if _is_last(counter, chunks):
                    total = _sum_of_parts(sums, 0, chunks, place, BM, BC)
                    projected = total
                    if VARIANT & DIRECTION:
                        projected = _sum_of_rows(behind, 0, chunks, BM, BC * BM)
                    _interacting(total, projected, m, index, book, BM, VARIANT, ACC)


@jit(do_not_specialize=["m", "index", "units"])
def _combine_kernel(
    V, out, table,
    m, index, units,
    UNIT: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """A few gradients at a time, so that the threads of a program lie along one, and each adds up its own elements."""
    size = units * UNIT
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros((BE,), V.dtype.element_ty)
    for start in range(0, m, BM):
        s = start + tl.arange(0, BM)
        c = tl.load(table + index * TABLE_ROWS * m + s, mask=s < m, other=0.0)
        at = s.to(tl.int64)[:, None] * size + e[None, :]
        v = tl.load(V + at, mask=(s < m)[:, None] & (e < size)[None, :], other=0.0)
        total += tl.sum(v * c.to(v.dtype)[:, None], 0)
    tl.store(out + e, total.to(out.dtype.element_ty), mask=e < size)


class Tiling(NamedTuple):
    """How the kernel between sequences is cut into programs, which changes no more of it than its rounding."""

    rows: int  # of a program's tile, at least as many as there are sequences
    pairs: bool  # whether each pair of sequences is multiplied elementwise, instead of all as matrices
    width: int  # elements of each gradient that a program takes in a step
    warps: int
    stages: int  # steps that are under way
    programs: int  # the most that there are
    least: int  # elements of each gradient for which there is a program
    part: int  # numbers that the last program adds at once; they take registers from all programs
    grouped: bool  # whether many programs' sums are added in two levels
    matrix: bool = True  # whether a direction, too, is multiplied as a matrix, where gradients are

    def programs_of(self, size: int) -> int:
        """The number of programs for gradients of `size` elements."""
        return min(-(-size // self.least), self.programs)

    def group(self, programs: int) -> int:
        """How many programs' sums are added first: about as many as there are such groups."""
        if not self.grouped or programs <= _FEW_PROGRAMS:
            return programs
        return math.isqrt(programs - 1) + 1

    def sums(self, programs: int) -> int:
        """The number of tiles that are written: by each program, and by each group where there are several."""
        groups = -(-programs // self.group(programs))
        return programs + groups * (groups > 1)


def tiling(m: int, itemsize: int, memory: int, direction: bool = False, warp_groups: bool = False) -> Tiling:
    """
    The [`Tiling`] for `m` sequences' gradients, with elements of `itemsize` bytes, and `memory` of a program's, that
    are projected on a `direction` or not. With `warp_groups`, four warps multiply matrices of 64 rows together.
    """
    rows = power_of_two(m)
    if rows <= 16:  # too few for a product of matrices
        width = min(1024, 2**14 // rows**2)
        if direction and rows == 4:  # else there are registers for one program at a time, and not for two
            width //= 2
        return Tiling(rows, True, width, warps=8, stages=1, programs=264, least=2**13, part=2**10, grouped=False)
    width = 64
    fitting = int(0.75 * memory) // (rows * width * itemsize)
    stages = max(1, min(4, fitting))
    matrix = rows < 64 or not warp_groups
    return Tiling(rows, False, width, rows // 16, stages, 528, least=2**11, part=2**11, grouped=True, matrix=matrix)


@lru_cache(maxsize=256)
def _tiling_of(m: int, dtype: torch.dtype, device: torch.device, direction: bool = False) -> Tiling:
    return tiling(m, dtype.itemsize, shared_memory(device), direction, has_warp_groups(device))


def v_coefficients(
    V: torch.Tensor, entry: Entry, overlaps: Overlaps | None = None, direction: Direction | None = None
) -> Entry:
    """
    The coefficients of a layer from explicit gradients `V` `[m, outputs, d]`, for a rule that needs their norms or the
    kernel; with the layer's overlaps, for one that needs these too, or with its direction.
    """
    VBlocks([V.shape[1] * V.shape[2]], entry, overlaps).add(V, direction)
    return entry


class VBlocks:
    """
    The same for gradients that are given in blocks of outputs: `add` each; the coefficients are there after the last.

    Args:
        sizes (`list[int]`): the number of elements of each block of one sequence's gradient.
        entry, overlaps: as for [`v_coefficients`].
        cut ([`Tiling`], *optional*): of the kernel between sequences, if not the usual one.
    """

    def __init__(self, sizes: list[int], entry: Entry, overlaps: Overlaps | None = None, cut: Tiling | None = None):
        self.sizes, self.entry, self.overlaps, self.cut = sizes, entry, overlaps, cut
        self.added = 0

    def add(self, V: torch.Tensor, direction: Direction | None = None) -> None:
        """
        Take in the next block, `V` `[m, outputs, d]`, with its outputs of a direction for a rule that goes by one: of
        the weight, `[outputs, d]`, or of weight and bias, `[outputs, d - 1]` and `[outputs]`. All blocks have one, or
        none has.
        """
        ledger, index = self.entry
        before, self.added = self.added, self.added + 1
        if ledger.needs.ntk:
            along = direction is not None
            cut = self.cut or _tiling_of(len(V), V.dtype, V.device, along)
            programs = max(map(cut.programs_of, self.sizes))
            sums = ledger.scratch(V, "sums", cut.sums(programs), cut.rows + along, cut.rows)
            variant = ledger.variant_along if along else ledger.variant
            ends = self.added == len(self.sizes)
            _launch_ntk(V, sums, cut, programs, before > 0, ends, True, variant, ledger.fixed, index, direction)
            return
        each = [-(-size // _V_CHUNK) for size in self.sizes]
        sums = ledger.scratch(V, "sums", len(V), sum(each))
        given = (True, ledger.variant, ledger.fixed, index, self.overlaps)
        _launch_norm(V, sums, sum(each[:before]), each[before], *given)


class VSums:
    """Norms or kernel of gradients that are given in blocks of outputs, without coefficients: `add` each."""

    def __init__(self, rule: Rule):
        self.needs, self.variant = rule.needs, variant_of(rule)
        self._sums: torch.Tensor | None = None
        self._sequences = 0

    def add(self, V: torch.Tensor) -> None:
        """Take in a block, `V` `[m, outputs, d]`."""
        m, size, before = V.shape[0], V.shape[1] * V.shape[2], self._sums
        self._sequences = m
        if not self.needs.ntk:
            sums = scratch(V, m, -(-size // _V_CHUNK))
            _launch_norm(V, sums, 0, sums.shape[1], False, self.variant, Fixed((sums,) * 6), 0, None)
            total = sums.sum(1)
            self._sums = total if before is None else before + total
            return
        cut = _tiling_of(m, V.dtype, V.device)
        sums = scratch(V, cut.programs_of(size), cut.rows, cut.rows) if before is None else before
        # Programs go on from where they stopped at the block before
        adds = before is not None
        _launch_ntk(V, sums, cut, len(sums), adds, False, False, self.variant, Fixed((sums,) * 6), 0, None)
        self._sums = sums

    @property
    def result(self) -> Statistics:
        """The norms or the kernel of the blocks so far."""
        sums, m = self._sums, self._sequences
        if sums is None:
            return Statistics()
        if not self.needs.ntk:
            return Statistics(norm=sums)
        ntk = sums.sum(0)[:m, :m]
        return Statistics(ntk=ntk, norm=ntk.diagonal() if self.needs.norm else None)


def _in_units(size: int) -> tuple[int, int]:
    """`units` and `UNIT` of gradients with so many elements."""
    return (size, 1) if size % _UNIT else (size // _UNIT, _UNIT)


def _launch_norm(V, sums, first, here, finish, variant, fixed, index, overlaps):
    m, outputs, d = V.shape
    size, chunks = outputs * d, sums.shape[1]
    overlap, samples, named = (sums, 0, False) if overlaps is None else overlaps
    blocks = (overlap.shape[0] - samples) // (m * samples) if samples else 1
    units, unit = _in_units(size)
    plan = _norm_plan(m, (samples, blocks, here, chunks), (unit, finish, variant, named), V.dtype, V.device)
    launch(_norm_kernel, plan, (V, sums, overlap), (m, samples, blocks, first, chunks, index, units), fixed)


def _launch_ntk(V, sums, cut, programs, adds, ends, finish, variant, fixed, index, direction):
    m, outputs, d = V.shape
    size = outputs * d
    weight = bias = None
    layout, dtypes = (0, 0, 0, False), (V.dtype,)
    if direction is not None:
        weight, bias = direction if len(direction) > 1 else (direction[0], None)
        dtypes += tuple([x.dtype for x in direction])
        if bias is not None:
            bias = bias.contiguous()
        if bias is not None or not weight.is_contiguous():
            layout = (weight.shape[1], *weight.stride(), bias is not None)
    units, unit = _in_units(size)
    plan = _ntk_plan(cut, programs, (unit, finish, variant), layout, dtypes, V.device)
    numbers = (m, int(adds), int(ends), cut.group(programs), index, units)
    launch(_ntk_kernel, plan, (V, sums, weight, bias), numbers, fixed)


@lru_cache(maxsize=4096)
def _ntk_plan(
    cut: Tiling, programs: int, traits: tuple, layout: tuple, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Plan:
    """`layout` has inputs, strides, and whether there is a bias, of a direction that does not lie as gradients do."""
    dtype = dtypes[0]
    acc, _ = types_of(dtype)
    precision = "ieee" if dtype == torch.float64 else "tf32x3"
    group = cut.group(programs)
    part = part_of(cut.part, cut.rows**2, group)
    shape = (cut.rows, cut.width, cut.pairs, cut.matrix, cut.stages, group < programs, part)
    return Plan((programs, 1, 1), (*traits, acc, precision, *shape, *layout), {"num_warps": cut.warps})


@lru_cache(maxsize=4096)
def _norm_plan(m: int, sizes: tuple[int, ...], traits: tuple, dtype: torch.dtype, device: torch.device) -> Plan:
    n, blocks, here, chunks = sizes
    BM, BN, BB = tiles(m, n, blocks)
    return Plan((here, m, 1), (*traits, types_of(dtype)[0], _V_CHUNK, BM, BN, BB, part_of(2**12, BM, chunks)))


@lru_cache(maxsize=4096)
def _combine_plan(m: int, size: int, of_V: torch.dtype, dtype: torch.dtype, device: torch.device) -> Plan:
    BM = min(power_of_two(m), _TOGETHER)
    return Plan((-(-size // _ALONG), 1, 1), (_in_units(size)[1], BM, _ALONG))


def combined(V: torch.Tensor, c: Entry, dtype: torch.dtype) -> torch.Tensor:
    """`sum_s c_s V_s`, `V` `[m, outputs, d]`."""
    ledger, index = c
    m, outputs, d = V.shape
    size = outputs * d
    out = V.new_empty((outputs, d), dtype=dtype)
    plan = _combine_plan(m, size, V.dtype, dtype, V.device)
    launch(_combine_kernel, plan, (V, out, ledger.table), (m, index, _in_units(size)[0]))
    return out
