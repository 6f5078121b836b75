"""
A fused RMSNorm, `y = (w + offset) * x / sqrt(mean(x^2) + eps)`, which sums its weight's gradient sequence by sequence.

Model code writes an RMSNorm as eight small operations, whose backward takes twice as many. Here each way is one
kernel, and the backward leaves what [`~kernels.elementwise.elementwise_gradient`] goes on from.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..geometry.sequences import Samples, Sequences
from ..geometry.statistics import accumulation_dtype
from .launch import Plan, Scratch, jit, launch, power_of_two, tl, types_of


# Of a tile of rows
_ELEMENTS = 4096
MOST_FEATURES = 2**14
# Norms whose factors are in one piece of memory, and the most numbers in it
_FACTORS = 16
_MOST_FACTORS = 2**20


class Flavour(NamedTuple):
    """How a model family writes its RMSNorm."""

    eps: float
    offset: float  # added to the weight
    early: bool  # whether the normalised input is rounded to the input's type before it is multiplied

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The definition, in plain PyTorch."""
        normal = x.to(torch.float32)
        normal = normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.early:
            return weight * normal.to(x.dtype)
        return (normal * (weight.to(torch.float32) + self.offset)).to(x.dtype)

    def output_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.promote_types(x, weight) if self.early else x


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, weight, settings, y, scale,
    rows,
    D: tl.constexpr, OFFSET: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    normal = values.to(ACC)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(ACC) + OFFSET
    factor = tl.rsqrt(tl.sum(normal * normal, 1) / D + tl.load(settings).to(ACC))
    normal = normal * factor[:, None]
    if EARLY:
        normal = normal.to(values.dtype).to(ACC)
    tl.store(y + at, (normal * w[None, :]).to(y.dtype.element_ty), mask=inside)
    tl.store(scale + row, factor, mask=row < rows)


@jit(do_not_specialize=["T", "share", "stride_b", "stride_t", "stride_h"])
def _backward_kernel(
    x, g, weight, scale, slots, dx, sums, of_samples,
    T, share, stride_b, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr,
    OFFSET: tl.constexpr, EARLY: tl.constexpr, SAMPLES: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    s = tl.program_id(1)
    # Of an argument `tl.multiple_of` says nothing to the compiler, and eight numbers at once are read where it knows
    stride_b, stride_t, stride_h = stride_b * UNIT, stride_t * UNIT, stride_h * UNIT
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(ACC) + OFFSET
    total = tl.zeros((BD,), ACC)
    stop = tl.minimum((split + 1) * share, T)
    for start in range(split * share, stop, BT):
        t = start + tl.arange(0, BT)
        inside = (t < stop)[:, None] & (d < D)[None, :]
        position = s.to(tl.int64) * T + t
        v = tl.zeros((BT, BD), ACC)
        for h in range(H):
            at = (position * H + h)[:, None] * D + d[None, :]
            source = s.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + h * stride_h
            values = tl.load(x + at, mask=inside, other=0.0)
            grad = tl.load(g + source[:, None] + d[None, :], mask=inside, other=0.0).to(ACC)
            factor = tl.load(scale + position * H + h, mask=t < stop, other=0.0)
            normal = values.to(ACC) * factor[:, None]
            inner = grad * w[None, :]
            mean = tl.sum(inner * normal, 1) / D
            result = (inner - normal * mean[:, None]) * factor[:, None]
            tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
            if EARLY:
                normal = normal.to(values.dtype).to(ACC)
            v += grad * normal
        if SAMPLES:
            slot = tl.load(slots + position, mask=t < stop, other=-1)
            place = slot.to(tl.int64)[:, None] * D + d[None, :]
            tl.store(of_samples + place, v, mask=(slot >= 0)[:, None] & (d < D)[None, :])
        total += tl.sum(v, 0)
    tl.store(sums + (s * tl.num_programs(0) + split) * D + d, total, mask=d < D)


class Factors(Scratch):
    """Memory for the factors of rows, which wait for the backward pass: of several norms in one piece."""

    def __init__(self):
        super().__init__()
        self._free: dict[tuple, list[torch.Tensor]] = {}

    def take(self, x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """`[rows]` on the device of `x`, not initialised; nobody else has it."""
        key = (rows, dtype, x.device)
        free = self._free.get(key)
        if not free:
            number = min(_FACTORS, _MOST_FACTORS // rows)
            if number < 2 or rows % 4:  # whose addresses would not be aligned
                return x.new_empty(rows, dtype=dtype)
            free = self._free[key] = list(x.new_empty((number, rows), dtype=dtype).unbind())
        return free.pop()


@lru_cache
def _epsilon(eps: float, device: torch.device) -> torch.Tensor:
    """On the device, where it is brought once: it would have to be waited for with every new shape."""
    return torch.tensor([eps], device=device, dtype=torch.float64)


@lru_cache(maxsize=4096)
def _forward_plan(
    rows: int, D: int, flavour: Flavour, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[Plan, torch.Tensor, torch.dtype, torch.dtype]:
    """The plan, epsilon on the device, and the types of the output and of the factors."""
    BD = max(16, power_of_two(D))
    BR = max(1, _ELEMENTS // BD)
    constants = (D, flavour.offset, flavour.early, types_of(dtypes[0])[0], BR, BD)
    plan = Plan((-(-rows // BR), 1, 1), constants)
    return plan, _epsilon(flavour.eps, device), flavour.output_dtype(*dtypes), accumulation_dtype(dtypes[0])


def forward(
    x: torch.Tensor, weight: torch.Tensor, flavour: Flavour, factors: Factors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Output, of the shape of `x` `[..., d]` (contiguous), and the factor of each row, `[rows]`, in memory from `factors`
    if they are given.
    """
    D = x.shape[-1]
    rows = x.numel() // D
    plan, epsilon, of_output, of_factors = _forward_plan(rows, D, flavour, (x.dtype, weight.dtype), x.device)
    y = torch.empty_like(x, dtype=of_output)
    scale = x.new_empty(rows, dtype=of_factors) if factors is None else factors.take(x, rows, of_factors)
    launch(_forward_kernel, plan, (x, weight, epsilon, y, scale), (rows,))
    return y, scale


@lru_cache(maxsize=4096)
def _backward_plan(
    m: int, T: int, shape: tuple[int, int], traits: tuple, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[Plan, int]:
    """The plan, and how many positions of a sequence a program has; `shape` is heads and features."""
    BD = max(16, power_of_two(shape[1]))
    BT = max(1, _ELEMENTS // BD)
    share = -(-T // max(1, min(-(-T // BT), 512 // m)))
    return Plan((-(-T // share), m, 1), (*shape, *traits, types_of(dtypes[0])[0], BT, BD)), share


class _BackwardLaunch(NamedTuple):
    """What the norms of one shape in a microbatch have in common."""

    samples: Samples | None
    plan: Plan
    numbers: tuple[int, ...]
    sums: torch.Tensor  # memory for those over sequences
    of_samples: torch.Tensor  # memory for the gradients at sampled positions
    slots: torch.Tensor  # which of these each position is


def _backward_launch(x, g, weight, flavour, sequences, samples, stores, memory):
    m, T, D = sequences.count, sequences.length, x.shape[-1]
    H = x.shape[2] if x.dim() == 4 else 1
    strides = g.stride()[:3] if g.dim() == 4 else (g.stride(0), g.stride(1), 0)
    unit = 8 if strides[0] % 8 == strides[1] % 8 == strides[2] % 8 == 0 else 1
    dtypes = (x.dtype, g.dtype, weight.dtype)
    traits = (flavour.offset, flavour.early, samples is not None or stores, unit)
    plan, share = _backward_plan(m, T, (H, D), traits, dtypes, x.device)
    sums = memory.scratch(x, "norm", m, plan.grid[0], D)
    of_samples, slots = sums[0], weight  # not looked at
    if samples is not None:
        of_samples, slots = memory.scratch(x, "norm", samples.number, D), samples.slots(sequences.rows)
    return _BackwardLaunch(samples, plan, (T, share, *[stride // unit for stride in strides]), sums, of_samples, slots)


def backward(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    flavour: Flavour,
    sequences: Sequences,
    samples: Samples | None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ledger: Scratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Gradient of the input; the weight's gradient summed over parts of each sequence, `[m, splits, d]`, and at the
    sampled positions, `[n, d]`.

    Args:
        x, g (`torch.Tensor`): `[m, T, d]` or, with heads, `[m, T, H, d]`: the input (contiguous) and the cotangent.
        weight, scale, flavour: as in `forward`.
        sequences, samples: as elsewhere; the layout is regular.
        into (`tuple`, *optional*): in place of samples, a tensor `[n, d]` that some rows go to, and which of its rows
            each position goes to, `[N]`, or `-1`; the tensor is returned.
        ledger ([`Scratch`], *optional*): has the memory that the sums go to.
    """
    if g.stride(-1) != 1:
        g = g.contiguous()
    memory = Scratch() if ledger is None else ledger
    if into is not None:
        samples = None
    stores, dtypes = into is not None, (x.dtype, g.dtype, weight.dtype)
    key = ("norm", sequences.count, sequences.length, x.shape, g.stride(), flavour, stores, dtypes, x.device)
    known = memory.prepared.get(key)
    if known is None or known.samples is not samples:
        known = _backward_launch(x, g, weight, flavour, sequences, samples, stores, memory)
        memory.prepared[key] = known
    _, plan, numbers, sums, of_samples, slots = known
    if into is not None:
        of_samples, slots = into
    dx = torch.empty_like(x)
    launch(_backward_kernel, plan, (x, g, weight, scale, slots, dx, sums, of_samples), numbers)
    return dx, sums, of_samples
