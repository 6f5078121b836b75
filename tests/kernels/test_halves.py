"""Numbers in float16 and what that leaves out of them, by one kernel: the bits that plain PyTorch gives."""

import pytest
import torch

from isopo_trl.kernels import halves, launch
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.step_size import precise_forward
from tests.kernels import batches
from tests.kernels.batches import DEVICE


pytestmark = batches.of_kernels

SHAPES = [(1,), (1, 5), (7, 33), (64, 32), (3, 2048), (65, 129)]
# Triton's interpreter has none of bf16
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]


def numbers(*shape, dtype=torch.float32):
    """Of all sizes that float16 has numbers for, and beyond; some of them such numbers, some between two of these."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-30, 18, shape, generator=generator)
    values = torch.ldexp(1 + torch.rand(shape, generator=generator), exponents)
    values *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    bits = values.view(torch.int32)
    bits[..., 1::4] &= -(1 << 16)
    bits[..., 2::4] = bits[..., 2::4] & -(1 << 13) | 1 << 12
    return values.to(dtype).to(DEVICE)


def same_bits(found, expected):
    return found.dtype == expected.dtype == torch.float16 and torch.equal(
        found.view(torch.int16), expected.view(torch.int16)
    )


@pytest.mark.parametrize("most", [2.0**15, precise_forward.MOST])
@pytest.mark.parametrize("factor", [1.0, 16.0, 1 / 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_have_the_bits_of_plain_pytorch(shape, dtype, factor, most, monkeypatch):
    values = numbers(*shape, dtype=dtype)
    given = values.clone()
    assert halves.takes_all(values)
    found = precise_forward.halved(values, factor, most)
    assert torch.equal(values, given)
    monkeypatch.setattr(launch, "ENABLED", False)
    assert not halves.takes_all(values)
    assert same_bits(found, precise_forward.halved(values, factor, most)) and torch.equal(values, given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_parts_of_a_weight_have_the_bits_of_plain_pytorch(shape, monkeypatch):
    weight = numbers(*shape)
    found = precise_forward.in_halves(weight)
    monkeypatch.setattr(launch, "ENABLED", False)
    assert all(map(same_bits, found, precise_forward.in_halves(weight)))


def test_rows_of_a_weight_may_begin_anywhere(monkeypatch):
    parts = numbers(9, 33).split(4)
    found = [precise_forward.in_halves(part) for part in parts]
    monkeypatch.setattr(launch, "ENABLED", False)
    for part, both in zip(parts, found, strict=True):
        assert all(map(same_bits, both, precise_forward.in_halves(part)))


NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), 1.0]


@pytest.mark.parametrize("kernels", [True, False])
def test_a_weight_that_is_no_number_stays_none(kernels, monkeypatch):
    monkeypatch.setattr(launch, "ENABLED", kernels)
    weight = torch.tensor([NO_NUMBERS], device=DEVICE)
    high, low = precise_forward.in_halves(weight)
    assert (high.float() + low.float()).isfinite().tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("kernels", [True, False])
def test_numbers_that_are_too_large_are_cut_and_those_that_are_none_stay_none(kernels, monkeypatch):
    monkeypatch.setattr(launch, "ENABLED", kernels)
    values = torch.tensor([*NO_NUMBERS, 1e30, -1e30, 70000.0], device=DEVICE)
    found = precise_forward.halved(values, 1.0, 2.0**15)
    expected = torch.tensor([*NO_NUMBERS, 2.0**15, -(2.0**15), 2.0**15], device=DEVICE)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernels", [True, False])
def test_large_weights_have_both_parts(kernels, monkeypatch):
    monkeypatch.setattr(launch, "ENABLED", kernels)
    weight = torch.tensor([2047.9, 2048.9998, 3000.7, 4093.99, -4000.3, 5000.0, -1e30], device=DEVICE)
    high, low = precise_forward.in_halves(weight).double()
    both = high / precise_forward.FACTOR + low / (precise_forward.FACTOR * precise_forward.REST)
    torch.testing.assert_close(both, weight.double().clamp(-4094, 4094), rtol=2**-20, atol=0)


def test_other_tensors_take_the_plain_way():
    values = numbers(8, 12)

    class Other(torch.Tensor):
        pass

    for other in (values.T, values[:, :4], values.double(), values[:0], values.as_subclass(Other)):
        assert not halves.takes_all(other)
    assert halves.takes_all(torch.nn.Parameter(values))
    found = precise_forward.halved(values.T, 1.0, precise_forward.MOST)
    torch.testing.assert_close(
        found.float(), values.T.clamp(-precise_forward.MOST, precise_forward.MOST).half().float()
    )
