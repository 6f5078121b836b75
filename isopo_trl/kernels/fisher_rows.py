"""
Kernels of layers whose samples are rows of the step before: overlaps, norms and coefficients in one launch, which also
copies the rows that this step keeps; and the copying of rows alone, inputs and cotangents in one launch.
"""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

from functools import lru_cache

import torch
from transformers.utils import is_triton_available

from ..geometry.reservoir import KEEP
from ..geometry.sequences import SampleRows, Sequences
from .coefficients import Entry, Overlaps, _fisher_square, _is_last, _non_interacting, tiles
from .launch import Plan, constant, jit, launch, power_of_two, takes, types_of
from .linear import _by_row, _pipeline, _row_products


if is_triton_available():
    import triton.language as tl

# Slots of cotangents and of inputs, `[n, ...]`, and the row that each of them gets, `[n]`
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_KEEP = constant(KEEP)
# Elements of a row that are copied at once by a program that does nothing else, and by one that does
_BLOCK = 1024
LARGE_BLOCK = 4096


@jit()
def _copy(x, out, row, slot, start, STRIDE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Features `start` to `start + BLOCK` of `x[row]` to `out[slot]`, or zeros where there is no such row."""
    k = start + tl.arange(0, BLOCK)
    inside = k < WIDTH
    there = inside & (tl.zeros((BLOCK,), tl.int64) + row >= 0)
    values = tl.load(x + row * STRIDE + k, mask=there, other=0.0)
    tl.store(out + slot * OUT + k, values.to(out.dtype.element_ty), mask=inside)


@jit()
def _square_sum(x, ACC: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of `WIDTH` numbers."""
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + k, mask=k < WIDTH, other=0.0).to(ACC)
        total += values * values
    return tl.sum(total, 0)


@jit(do_not_specialize=["m", "T", "n", "slots", "index"])
def _overlap_with_rows_kernel(
    g,
    a,
    g_samples,
    a_samples,
    g_out,
    a_out,
    source,
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
    slots,
    index,
    P: tl.constexpr,
    D: tl.constexpr,
    STRIDE_G: tl.constexpr,
    STRIDE_A: tl.constexpr,
    STRIDE_GS: tl.constexpr,
    STRIDE_AS: tl.constexpr,
    STORE: tl.constexpr,
    BIAS: tl.constexpr,
    FINISH: tl.constexpr,
    NAMED: tl.constexpr,
    VARIANT: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BB: tl.constexpr,
    ROW_P: tl.constexpr,
    ROW_D: tl.constexpr,
):
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
        own = _square_sum(a_samples + q * STRIDE_AS, ACC, D, ROW_D)
        if BIAS:
            own += 1.0
        own *= _square_sum(g_samples + q * STRIDE_GS, ACC, P, ROW_P)
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
    left = _row_products(
        g, STRIDE_G, row, real, g_samples, STRIDE_GS, sample, have, tl.zeros((BT, BN), ACC), P, BP, PRECISION
    )
    right = _row_products(
        a, STRIDE_A, row, real, a_samples, STRIDE_AS, sample, have, tl.zeros((BT, BN), ACC), D, BD, PRECISION
    )
    if BIAS:
        right += 1.0
    tl.store(partial + (s * blocks + block) * n + j, tl.sum(left * right, 0), mask=have)
    if FINISH:
        if _is_last(counter, blocks * tl.num_programs(1) * tl.num_programs(2)):
            fisher_square, informed = _fisher_square(partial, norms, names, m, n, blocks, NAMED, BM, BB, BN)
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
    OUT_X: tl.constexpr,
    OUT_Y: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    x,
    y,
    choices,
    x_out,
    y_out,
    choices_out,
    source,
    places,
    X: tl.constexpr,
    Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
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
    n: int,
    widths: tuple[int, int],
    strides: tuple[int, ...],
    k: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
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


@lru_cache(maxsize=4096)
def _overlap_plan(
    m: int,
    T: int,
    n: int,
    shape: tuple[int, int, int, int, int, int],
    store: bool,
    bias: bool,
    finish: bool,
    named: bool,
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
    rows = (min(power_of_two(P), LARGE_BLOCK), min(power_of_two(D), LARGE_BLOCK))
    constants = (*shape, store, bias, finish, named, variant, *types_of(dtype), BT, BN, *widths, BM, BB, *rows)
    return Plan((blocks, m, -(-n // BN)), constants, {"num_warps": 4, "num_stages": stages})


def overlap_coefficients(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    sequences: Sequences,
    samples: SampleRows,
    entry: Entry,
    into: Into | None = None,
) -> Entry:
    """
    What [`~kernels.linear.overlap_coefficients`] does, with samples that are rows from before.

    Args:
        into (`tuple`, *optional*): where rows of this microbatch go along the way: slots of cotangents and inputs,
            `[slots, ...]`, no more than there are samples, and the row that each of them gets, `[slots]`.
    """
    _launch_overlap(g, a, bias, sequences, samples, entry, into, finish=True)
    return entry


def overlaps(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    sequences: Sequences,
    samples: SampleRows,
    entry: Entry,
    into: Into | None = None,
) -> Overlaps:
    """What [`~kernels.linear.overlaps`] does; arguments as in [`overlap_coefficients`]."""
    sums = _launch_overlap(g, a, bias, sequences, samples, entry, into, finish=False)
    return Overlaps(sums, samples.number, entry.ledger.named)


def _launch_overlap(g, a, bias, sequences, samples, entry, into, finish):
    g, a = _by_row(g), _by_row(a)
    ledger, index = entry
    m, T, n = sequences.count, sequences.length, samples.g.shape[0]
    g_samples, a_samples = samples.g, samples.inputs
    strides = (g.stride(), a.stride(), g_samples.stride(), a_samples.stride())
    key = ("overlap with rows", m, T, n, g.shape, a.shape, strides, into is None, bias, finish, g.dtype)
    known = ledger.prepared.get(key)
    if known is None:
        shape = (g.shape[1], a.shape[1], *(stride[0] for stride in strides))
        traits = (into is not None, bias, finish, ledger.named, ledger.variant)
        plan = _overlap_plan(m, T, n, shape, *traits, g.dtype, g.device)
        known = ledger.prepared[key] = plan, ledger.scratch(g, "overlap", m * plan.grid[0] * n + n)
    plan, overlap = known
    # Without slots, these are not looked at
    g_out, a_out, source = (g, a, ledger.counter) if into is None else into
    slots = 0 if into is None else source.shape[0]
    tensors = (g, a, g_samples, a_samples, g_out, a_out, source, overlap)
    launch(_overlap_with_rows_kernel, plan, tensors, (m, T, n, slots, index), ledger.fixed)
    return overlap
