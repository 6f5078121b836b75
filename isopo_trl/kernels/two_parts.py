"""A weight in float32 as the sum of what TF32 has numbers for and of the rest, in one launch."""

# `tl.constexpr` in signatures exists only with Triton
from __future__ import annotations

from functools import lru_cache

import torch
from transformers.utils import is_triton_available

from .launch import Plan, is_here, jit, launch, takes


if is_triton_available():
    import triton.language as tl

# Elements of a program and its warps: four to a thread, so that both results are stored as they are computed
_BLOCK = 1024
_WARPS = 8


@jit(do_not_specialize=["size"])
def _two_parts_kernel(
    weight,
    coarse,
    rest,
    size,
    HALF: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < size  # without a mask, a thread reads and writes its elements at once
    values = tl.load(weight + at, mask=inside)
    first = ((values.to(tl.int32, bitcast=True) + HALF) & MASK).to(tl.float32, bitcast=True)
    tl.store(coarse + at, first, mask=inside)
    tl.store(rest + at, (values - first).to(tl.bfloat16), mask=inside)


@lru_cache(maxsize=4096)
def _two_parts_plan(size: int, bits: int, device: torch.device) -> Plan:
    constants = (1 << (bits - 1), -(1 << bits), size % _BLOCK == 0, _BLOCK)
    return Plan((-(-size // _BLOCK), 1, 1), constants, {"num_warps": _WARPS})


def usable(weight: torch.Tensor) -> bool:
    """Whether the kernel takes this weight: others of PyTorch's kinds do not lie where they seem to."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return plain and weight.dtype == torch.float32 and weight.is_contiguous() and takes(weight) and is_here(weight)


def in_two_parts(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight`, rounded to a number that ends in as many zero `bits`, and what is left of it, in bf16."""
    coarse, rest = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bfloat16)
    plan = _two_parts_plan(weight.numel(), bits, weight.device)
    launch(_two_parts_kernel, plan, (weight, coarse, rest), (weight.numel(),))
    return coarse, rest
