"""Numbers in float16, and if asked for what that leaves out of them, in float16 as well: in one launch."""

from functools import lru_cache

import torch

from .launch import Plan, is_here, jit, launch, takes, tl


# Elements of a program and its warps: eight to a thread, so that it stores 16 bytes at once
_BLOCK = 2048
_WARPS = 8


@jit(do_not_specialize=["size"])
def _halves_kernel(
    values, high, low,
    size,
    FACTOR: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < size  # without a mask, a thread reads and writes its elements at once
    x = tl.load(values + at, mask=inside)
    if x.dtype == tl.bfloat16:  # by its bits: LLVM would round to float16 first, and multiply then
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    x = x.to(tl.float32) * FACTOR
    size_of = tl.abs(x)
    x = tl.where((size_of > MOST) & (size_of < float("inf")), tl.where(x > 0, MOST, -MOST), x)
    first = x.to(tl.float16)
    tl.store(high + at, first, mask=inside)
    if REST > 0:
        tl.store(low + at, ((x - first.to(tl.float32)) * REST).to(tl.float16), mask=inside)


@lru_cache(maxsize=4096)
def _plan(size: int, dtype: torch.dtype, device: torch.device, factor: float, most: float, rest: float) -> Plan:
    constants = (factor, most, rest, size % _BLOCK == 0, _BLOCK)
    return Plan((-(-size // _BLOCK), 1, 1), constants, {"num_warps": _WARPS})


def takes_all(values: torch.Tensor) -> bool:
    """Whether the kernel takes these values: tensors of other kinds do not lie where they seem to."""
    plain = type(values) in (torch.Tensor, torch.nn.Parameter)
    return plain and values.dtype != torch.float64 and values.is_contiguous() and takes(values) and is_here(values)


def halved(values: torch.Tensor, factor: float, most: float) -> torch.Tensor:
    """`factor * values` in float16; what is larger than `most` is cut to it, and what is not finite stays as it is."""
    high = torch.empty_like(values, dtype=torch.float16)
    plan = _plan(values.numel(), values.dtype, values.device, factor, most, 0.0)
    launch(_halves_kernel, plan, (values, high, high), (values.numel(),))
    return high


def in_halves(values: torch.Tensor, factor: float, most: float, rest: float) -> torch.Tensor:
    """`[2, ...]`: the same, and `rest` times what is left of it."""
    both = torch.empty(2, *values.shape, dtype=torch.float16, device=values.device)
    high, low = both
    plan = _plan(values.numel(), values.dtype, values.device, factor, most, rest)
    launch(_halves_kernel, plan, (values, high, low), (values.numel(),))
    return both
