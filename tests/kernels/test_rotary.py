"""Rotary embeddings by one kernel: the numbers, and the gradients, that the model's own operations give."""

import pytest
import torch

from isopo_trl.kernels import rotary
from isopo_trl.layers.rotary import definition
from tests.kernels import batches
from tests.kernels.batches import DEVICE, DTYPES


pytestmark = batches.of_kernels

# Sequences, positions, heads of queries and of keys, features
SHAPES = [(1, 1, 1, 1, 2), (2, 9, 3, 1, 8), (3, 17, 4, 2, 64), (2, 5, 1, 3, 6), (1, 40, 2, 2, 128)]


def numbers(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def heads(B, T, H, D, dtype, seed, turned=True):
    """`[B, H, T, D]`, in memory position by position if `turned`, as products leave them, or head by head."""
    if turned:
        return numbers(B, T, H, D, dtype=dtype, seed=seed).transpose(1, 2)
    return numbers(B, H, T, D, dtype=dtype, seed=seed)


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x, y)


@pytest.mark.parametrize("each", [False, True], ids=["angles of all", "angles of each"])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("of_angles", [None, torch.float32], ids=["", "angles in float32"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_and_gradients_are_the_definitions(shape, dtype, of_angles, turned, each):
    B, T, H, K, D = shape
    q, k = (heads(B, T, n, D, dtype, seed, turned).requires_grad_() for seed, n in enumerate((H, K)))
    cos, sin = (numbers(B if each else 1, T, D, dtype=of_angles or dtype, seed=seed) for seed in (2, 3))
    expected = definition(q, k, cos, sin)
    of_results = expected[0].dtype
    cotangents = [heads(B, T, n, D, of_results, seed, not turned) for seed, n in ((4, H), (5, K))]
    with torch.no_grad():
        same(rotary.rotated(q, k, cos, sin, of_results), expected)
        found = rotary.rotated(*cotangents, cos, sin, dtype, back=True)
    same(found, torch.autograd.grad(expected, (q, k), cotangents))


def test_outputs_lie_as_inputs_do_and_gaps_between_numbers_are_no_matter():
    q, k = (heads(2, 5, n, 8, DTYPES[0], n) for n in (3, 2))
    cos, sin = (numbers(1, 5, 8, dtype=DTYPES[0], seed=seed) for seed in (2, 3))
    found = rotary.rotated(q, k, cos, sin, q.dtype)
    assert [y.stride() for y in found] == [q.stride(), k.stride()]
    wide = torch.cat([q, q], dim=-1)
    with_gaps = rotary.rotated(wide[..., :8], k.unsqueeze(-1).expand(*k.shape, 2)[..., 0], cos, sin, q.dtype)
    same(with_gaps, found)
    same(rotary.rotated(wide[..., 8:].expand(2, 3, 5, 8), k, cos, sin, q.dtype), found)
