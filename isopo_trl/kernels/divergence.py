"""KL divergences of distributions over the vocabulary, from logits, in one launch."""

from functools import lru_cache

import torch

from .launch import Plan, is_here, jit, launch, power_of_two, takes, tl


_BLOCK = 4096


@jit()
def _added(most, total, x):
    """Largest logit and sum of exponentials, relative to it, with one logit more; minus infinity is no number."""
    largest = tl.maximum(most, x)
    zero = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, total * tl.exp(most - zero) + tl.exp(x - zero)


@jit()
def _log_total(most, total):
    """The logarithm of the sum over all places."""
    largest = tl.max(most)
    return largest + tl.log(tl.sum(total * tl.exp(most - largest)))


@jit()
def _divergence_kernel(before, after, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A position per program. Its logits are read twice: for the logarithms of their sums, and for the terms."""
    row = tl.program_id(0).to(tl.int64)
    before += row * SIZE
    after += row * SIZE
    most_p = tl.full([BLOCK], float("-inf"), tl.float32)
    most_q = tl.full([BLOCK], float("-inf"), tl.float32)
    total_p = tl.zeros([BLOCK], tl.float32)
    total_q = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(before + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
        y = tl.load(after + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
        most_p, total_p = _added(most_p, total_p, x)
        most_q, total_q = _added(most_q, total_q, y)
    log_p, log_q = _log_total(most_p, total_p), _log_total(most_q, total_q)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(before + at, mask=at < SIZE, other=0.0).to(tl.float32) - log_p
        y = tl.load(after + at, mask=at < SIZE, other=0.0).to(tl.float32) - log_q
        p, q, d = tl.exp(x), tl.exp(y), y - x
        # exp(d) - 1 - d by its series where it would cancel, and without overflow where q is far above p
        series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
        near = p * tl.where(tl.abs(d) < 0.25, series, tl.exp(d) - 1 - d)
        terms = tl.where(p == 0, q, tl.where(d < 1, near, q - p - p * d))
        sums += tl.where(at < SIZE, terms, 0.0)
    tl.store(out + row, tl.sum(sums))


@lru_cache(maxsize=1024)
def _divergence_plan(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Plan:
    return Plan((rows, 1, 1), (size, min(_BLOCK, power_of_two(size))), {"num_warps": 8})


def takes_both(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the kernel takes these logits."""
    plain = before.shape == after.shape and before.dtype == after.dtype != torch.float64
    return plain and all(x.is_contiguous() and takes(x) and is_here(x) for x in (before, after))


def divergences(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`[N]` in float32, from logits `[N, V]`."""
    rows, size = before.shape
    out = torch.empty(rows, device=before.device)
    launch(_divergence_kernel, _divergence_plan(rows, size, before.dtype, before.device), (before, after, out), ())
    return out
