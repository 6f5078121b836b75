"""Everything of one elementwise parameter (a norm's scale, a bias) in one launch."""

from functools import lru_cache

import torch

from ..geometry.cost import Needs
from ..geometry.sequences import SampleRows, Samples, Sequences
from ..geometry.statistics import Direction
from .coefficients import (
    COUNTERS,
    DIRECTION,
    NORM,
    NTK,
    OVERLAP,
    TABLE_ROWS,
    Entry,
    _fisher_square,
    _interacting,
    _is_last,
    _non_interacting,
    _sum_of_parts,
    _sum_of_rows,
    tiles,
)
from .launch import Plan, jit, launch, part_of, power_of_two, tl, types_of


_FEATURE_BLOCK = 64
MOST_FEATURES = _FEATURE_BLOCK * (COUNTERS - 1)
# Numbers that the last program takes at once: it waits for memory each time, and more would not fit its registers
_LAST = 2**12


@jit(do_not_specialize=["m", "T", "n", "index", "splits", "parts"])
def _elementwise_kernel(
    v, of_samples, rows, sums, plus, scratch, out, slots, kept, along,
    counter, table, advantages, history, settings, names,
    m, T, n, index, splits, parts,
    D: tl.constexpr, SUMMED: tl.constexpr, STORE: tl.constexpr, NAMED: tl.constexpr, VARIANT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    BC: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """
    Everything of one elementwise parameter: three levels. Programs add up rows (unless that is done: `SUMMED`); the
    last of a block of features has the gradients `V` there, and adds its share to the statistics; the last of these
    has the coefficients. What `plus` adds up to is added to the result. With `STORE`, rows go to the slots of `kept`
    that `slots` has for them along the way. `along` `[D]` is the direction, where there is one.
    """
    block = tl.program_id(0)
    s = tl.program_id(2)
    blocks = tl.num_programs(0)
    d = block * BD + tl.arange(0, BD)
    inside = d < D
    V = scratch
    added = V + m * D
    partial = added + D
    norms = partial
    if VARIANT & OVERLAP:
        norms += m * blocks * n
    square = norms
    if VARIANT & OVERLAP:
        square += blocks * n
    ntk = square
    if VARIANT & NORM:
        ntk += m * blocks
    projections = ntk + blocks * BM * BM

    last = True
    if not SUMMED:
        split = tl.program_id(1)
        share = (T + splits - 1) // splits
        total = tl.zeros((BD,), ACC)
        stop = tl.minimum((split + 1) * share, T)
        for start in range(split * share, stop, BT):
            t = start + tl.arange(0, BT)
            position = s.to(tl.int64) * T + t
            there = (t < stop)[:, None] & inside[None, :]
            values = tl.load(v + position[:, None] * D + d[None, :], mask=there, other=0.0).to(ACC)
            if STORE:
                slot = tl.load(slots + position, mask=t < stop, other=-1)
                place = slot.to(tl.int64)[:, None] * D + d[None, :]
                tl.store(kept + place, values, mask=(slot >= 0)[:, None] & inside[None, :])
            total += tl.sum(values, 0)
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
        total_plus = tl.zeros((BD,), ACC)
        for start in range(0, parts, 64):
            part = start + tl.arange(0, 64)
            real_part = (part < parts)[:, None] & inside[None, :]
            total_plus += tl.sum(tl.load(plus + part[:, None] * D + d[None, :], mask=real_part, other=0.0), 0)
        tl.store(added + d, total_plus, mask=inside)
        if VARIANT & OVERLAP:
            for first in range(0, n, BN):
                j = first + tl.arange(0, BN)
                sample = tl.load(rows + j, mask=j < n, other=-1)
                have = (sample >= 0)[:, None] & inside[None, :]
                x = tl.load(of_samples + sample[:, None] * D + d[None, :], mask=have, other=0.0).to(ACC)
                overlap = tl.dot(x, tl.trans(gradient), tl.zeros((BN, BM), ACC), input_precision=PRECISION)
                place = (q[None, :] * blocks + block) * n + j[:, None]
                tl.store(partial + place, overlap, mask=(q < m)[None, :] & (j < n)[:, None])
                tl.store(norms + block * n + j, tl.sum(x * x, 1), mask=j < n)
        if VARIANT & NORM:
            tl.store(square + q * blocks + block, tl.sum(gradient * gradient, 1), mask=q < m)
        if VARIANT & NTK:
            products = tl.dot(gradient, tl.trans(gradient), tl.zeros((BM, BM), ACC), input_precision=PRECISION)
            tl.store(ntk + block * BM * BM + q[:, None] * BM + q[None, :], products)
            if VARIANT & DIRECTION:
                direction = tl.load(along + d, mask=inside, other=0.0).to(ACC)
                tl.store(projections + block * BM + q, tl.sum(gradient * direction[None, :], 1))

        if _is_last(counter, blocks):
            book = table, advantages, history, settings
            if VARIANT & NTK:
                kernel = _sum_of_parts(ntk, 0, blocks, q[:, None] * BM + q[None, :], BM, BC)
                projected = kernel
                if VARIANT & DIRECTION:
                    projected = _sum_of_rows(projections, 0, blocks, BM, BC * BM)
                _interacting(kernel, projected, m, index, book, BM, VARIANT, ACC)
            if VARIANT & (OVERLAP | NORM):
                fisher_square = tl.zeros((BM,), tl.float64)
                norm_square = tl.zeros((BM,), tl.float64)
                informed = True
                if VARIANT & NORM:
                    for first in range(0, blocks, BO):
                        b = first + tl.arange(0, BO)
                        there = (q < m)[:, None] & (b < blocks)[None, :]
                        place = q[:, None] * blocks + b[None, :]
                        values = tl.load(square + place, mask=there, other=0.0, cache_modifier=".cg")
                        norm_square += tl.sum(values.to(tl.float64), 1)
                if VARIANT & OVERLAP:
                    # The samples' norms, added over the blocks, take the place of the first block's
                    for first in range(0, n, BN):
                        j = first + tl.arange(0, BN)
                        weight = tl.zeros((BN,), ACC)
                        for start in range(0, blocks, BB):
                            b = start + tl.arange(0, BB)
                            there = (b < blocks)[:, None] & (j < n)[None, :]
                            place = b[:, None] * n + j[None, :]
                            weight += tl.sum(tl.load(norms + place, mask=there, other=0.0, cache_modifier=".cg"), 0)
                        tl.store(norms + j, weight, mask=j < n)
                    tl.debug_barrier()
                    fisher_square, informed = _fisher_square(partial, norms, names, m, n, blocks, NAMED, BM, BB, BN)
                _non_interacting(fisher_square, informed, norm_square, m, index, book, BM, VARIANT, ACC)
            tl.debug_barrier()
            c = tl.load(table + index * TABLE_ROWS * m + q, mask=q < m, other=0.0, cache_modifier=".cg")
            for start in range(0, D, BO):
                e = start + tl.arange(0, BO)
                mask = (q < m)[:, None] & (e < D)[None, :]
                values = tl.load(V + q[:, None] * D + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                result = tl.sum(values * c.to(ACC)[:, None], 0)
                result += tl.load(added + e, mask=e < D, other=0.0, cache_modifier=".cg")
                tl.store(out + e, result.to(out.dtype.element_ty), mask=e < D)


@lru_cache(maxsize=4096)
def _elementwise_plan(
    sizes: tuple[int, ...], needs: Needs, traits: tuple, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[Plan, int, int]:
    """The plan, splits of the rows of a sequence, and size of the scratch memory."""
    m, T, n, D = sizes
    BD = min(max(16, power_of_two(D)), _FEATURE_BLOCK)
    blocks = -(-D // BD)
    BM, BN, _ = tiles(m, n, blocks)
    BM = max(16, BM)
    splits = max(1, min(1024 // (m * blocks), T // 256))
    acc, _ = types_of(dtypes[0])
    of_block = needs.overlap * (m + 1) * n + needs.norm * m + needs.ntk * BM * BM + needs.direction * BM
    size = (m + 1) * D + blocks * of_block
    precision = "ieee" if acc == tl.float64 else "tf32x3"
    summed = traits[0]
    BB, BC, BO = part_of(_LAST, BM * BN, blocks), part_of(_LAST, BM**2, blocks), max(16, _LAST // BM)
    constants = (D, *traits, acc, precision, 64, BD, BM, BN, BB, BC, BO)
    grid = (blocks, 1, 1) if summed else (blocks, splits, m)
    return Plan(grid, constants, {"num_warps": 8}), splits, size


@lru_cache(maxsize=64)
def _numbers(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


def elementwise_gradient(
    v: torch.Tensor,
    sequences: Sequences,
    samples: Samples | SampleRows | None,
    entry: Entry,
    dtype: torch.dtype,
    sums: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    direction: Direction | None = None,
) -> torch.Tensor:
    """
    `sum_s c_s V_s` `[d]` of an elementwise parameter, from its gradient at each position, `v` `[N, d]`.

    Where these are summed already, `sums` `[m, splits, d]` are the sums, and `v` `[n, d]` those of the samples alone.
    Samples that are rows from before are where they are. The sum over `plus` `[parts, d]`, which has the type of sums,
    is added. `into`, where rows are to be kept: a tensor `[slots, d]` that some go to, and which of its rows each
    position goes to, `[N]`, or `-1`. `direction`, for a rule that goes by one: its parts, `d` numbers together.
    """
    v = v.contiguous()
    ledger, index = entry
    m, T, D = sequences.count, sequences.length, v.shape[1]
    n = 0 if samples is None else samples.number
    summed = sums is not None
    of_samples, rows, named = v, ledger.counter, False
    if isinstance(samples, SampleRows):
        of_samples, rows, named = samples.g, _numbers(n, v.device), ledger.named
    elif samples is not None:
        rows = samples.order if summed else samples.present
    kept, slots = (ledger.counter, ledger.counter) if into is None else into
    dtypes: tuple[torch.dtype, ...] = (v.dtype, dtype, of_samples.dtype, kept.dtype)
    along, variant = None, ledger.variant
    if direction is not None:
        along = direction[0].contiguous() if len(direction) == 1 else torch.cat(direction)
        variant, dtypes = ledger.variant_along, (*dtypes, along.dtype)
    traits = (summed, into is not None, named, variant)
    plan, splits, size = _elementwise_plan((m, T, n, D), ledger.needs, traits, dtypes, v.device)
    if sums is None:
        sums = ledger.scratch(v, "sums", m, splits, D)
    else:
        splits = sums.shape[1]
    out = v.new_empty(D, dtype=dtype)
    parts = 0 if plus is None else len(plus)
    memory = ledger.scratch(v, "elementwise", size)
    tensors = (v, of_samples, rows, sums, sums if plus is None else plus, memory, out, slots, kept, along)
    launch(_elementwise_kernel, plan, tensors, (m, T, n, index, splits, parts), ledger.fixed)
    return out
