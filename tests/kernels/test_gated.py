"""Gated activations by one kernel: the numbers, and the gradients, that the model's own operations give."""

import pytest
import torch
from torch.nn.functional import silu

from isopo_trl.kernels import gated
from tests.kernels import batches
from tests.kernels.batches import DEVICE, DTYPES


pytestmark = batches.of_kernels

# Of one type, the sum's last bit may be another where PyTorch rounds once for a product and a sum
CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def numbers(*shape, dtype, seed, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 3, 5), (3, 7, 64), (2, 1025)], ids=str)
def test_numbers_and_gradients_are_the_definitions(shape, dtype):
    gate, up, g = (numbers(*shape, dtype=dtype, seed=seed, scale=3) for seed in range(3))
    expected = silu(gate) * up
    with torch.no_grad():
        found = gated.forward(gate, up), *gated.backward(g, gate, up)
    for x, y in zip(found, (expected, *torch.autograd.grad(expected, (gate, up), g)), strict=True):
        torch.testing.assert_close(x, y, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_what_lies_between_two_operations_is_rounded_as_theirs_is():
    gate, up, g = (numbers(4096, dtype=torch.float16, seed=seed) for seed in range(3))
    expected = silu(gate) * up
    with torch.no_grad():
        found = gated.forward(gate, up), *gated.backward(g, gate, up)
    theirs = (expected, *torch.autograd.grad(expected, (gate, up), g))
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    once = silu(wide[0]) * wide[1]
    rounded_once = (once, *torch.autograd.grad(once, wide, g.double()))
    for x, y, other in zip(found, theirs, rounded_once, strict=True):
        assert (x != y).float().mean() < 0.01 < (other.half() != y).float().mean()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_large_numbers_stay_finite(dtype):
    gate = torch.tensor([-300.0, -90.0, -0.0, 90.0, 300.0], device=DEVICE, dtype=dtype)
    one = torch.ones_like(gate)
    torch.testing.assert_close(gated.forward(gate, one), silu(gate), rtol=CLOSE[dtype], atol=0.0)
    for x in gated.backward(one, gate, one):
        assert torch.isfinite(x).all()


def test_a_gradient_may_have_gaps_between_its_numbers():
    gate, up = (numbers(4, 6, dtype=DTYPES[0], seed=seed).detach() for seed in range(2))
    g = numbers(6, 4, dtype=DTYPES[0], seed=2).detach()
    for other in (g.t(), g[:1, :1].expand(4, 6)):
        for x, y in zip(gated.backward(other, gate, up), gated.backward(other.clone(), gate, up), strict=True):
            assert torch.equal(x, y)
