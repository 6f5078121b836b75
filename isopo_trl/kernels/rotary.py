"""
Rotary embeddings of queries and keys in one launch each way, with the roundings of the model's own ten operations.

With a head's features in two halves, `y1 = x1 cos1 - x2 sin1` and `y2 = x2 cos2 + x1 sin2`. The gradient has the same
form, `dx1 = g1 cos1 + g2 sin2` and `dx2 = g2 cos2 - g1 sin1`.
"""

from functools import lru_cache

import torch

from .launch import Plan, jit, launch, part_of, power_of_two, tl, types_of


# Of one half of a head at several positions
_ELEMENTS = 1024
MOST_FEATURES = 2 * _ELEMENTS


@jit()
def _product(x, factor, out, ACC):
    """Rounded, as a product of tensors is, and ready to be added."""
    return (x.to(ACC) * factor.to(ACC)).to(out.dtype.element_ty).to(ACC)


@jit()
def _rotate(x, out, row, stride, cos1, cos2, sin1, sin2, inside, HEADS, HALF, BACK, ACC):
    for head in range(HEADS):
        at = row + head * stride
        x1 = tl.load(x + at, mask=inside, other=0.0)
        x2 = tl.load(x + at + HALF, mask=inside, other=0.0)
        if BACK:
            y1 = _product(x1, cos1, out, ACC) + _product(x2, sin2, out, ACC)
            y2 = _product(x2, cos2, out, ACC) - _product(x1, sin1, out, ACC)
        else:
            y1 = _product(x1, cos1, out, ACC) - _product(x2, sin1, out, ACC)
            y2 = _product(x2, cos2, out, ACC) + _product(x1, sin2, out, ACC)
        tl.store(out + at, y1.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + HALF, y2.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["T", "q_b", "q_h", "q_t", "k_b", "k_h", "k_t"])
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out,
    T, q_b, q_h, q_t, k_b, k_h, k_t,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    EACH: tl.constexpr, BACK: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # Of an argument `tl.multiple_of` says nothing to the compiler, and eight numbers at once are read where it knows
    q_b, q_h, q_t, k_b, k_h, k_t = q_b * UNIT, q_h * UNIT, q_t * UNIT, k_b * UNIT, k_h * UNIT, k_t * UNIT
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    inside = (t < T)[:, None] & (d < HALF)[None, :]
    angle = (b * EACH * T + t)[:, None] * 2 * HALF + d[None, :]
    cos1 = tl.load(cos + angle, mask=inside, other=0.0)
    cos2 = tl.load(cos + angle + HALF, mask=inside, other=0.0)
    sin1 = tl.load(sin + angle, mask=inside, other=0.0)
    sin2 = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    row = b * q_b + t.to(tl.int64)[:, None] * q_t + d[None, :]
    _rotate(q, q_out, row, q_h, cos1, cos2, sin1, sin2, inside, Q, HALF, BACK, ACC)
    row = b * k_b + t.to(tl.int64)[:, None] * k_t + d[None, :]
    _rotate(k, k_out, row, k_h, cos1, cos2, sin1, sin2, inside, K, HALF, BACK, ACC)


@lru_cache(maxsize=4096)
def _plan(
    B: int, T: int, shape: tuple[int, int, int], traits: tuple, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Plan:
    """`shape` is heads of queries and of keys, and half of their features."""
    BD = power_of_two(shape[2])
    BT = part_of(_ELEMENTS, BD, T)
    constants = (*shape, *traits, types_of(dtypes[0])[0], BT, BD)
    return Plan((-(-T // BT), B, 1), constants, {"num_warps": 4, "enable_fp_fusion": False})


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, back: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Queries and keys `[B, H, T, D]` turned by their positions' angles, or if `back`, the gradients of what was turned.

    Args:
        q, k (`torch.Tensor`): of one type, with as many heads each as they have, in any order of dimensions; of fewer
            than 2^31 numbers, so that strides and offsets inside of a sequence have 32 bits.
        cos, sin (`torch.Tensor`): `[B or 1, T, D]`, contiguous, of one type.
        dtype (`torch.dtype`): of the results, and of products.
    """
    q, q_out = _with_output(q, dtype)
    k, k_out = _with_output(k, dtype)
    B, heads, T, D = q.shape
    strides = (*q.stride()[:3], *k.stride()[:3])
    unit = 8 if not any(stride % 8 for stride in strides) else 1
    dtypes = (q.dtype, cos.dtype, dtype)
    plan = _plan(B, T, (heads, k.shape[1], D // 2), (cos.shape[0] > 1, back, unit), dtypes, q.device)
    numbers = (T, *[stride // unit for stride in strides])
    launch(_rotary_kernel, plan, (q, k, cos, sin, q_out, k_out), numbers)
    return q_out, k_out


def _with_output(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, and memory in which its numbers have the same places."""
    out = torch.empty_like(x, dtype=dtype)
    if out.stride() == x.stride() and x.stride(3) == 1:
        return x, out
    x = x.contiguous()
    return x, torch.empty_like(x, dtype=dtype)
