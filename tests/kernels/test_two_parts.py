"""Weights in two parts by one kernel: the bits that plain PyTorch gives."""

import pytest
import torch

from isopo_trl import float32
from isopo_trl.kernels import launch, two_parts
from isopo_trl.kernels.launch import INTERPRET
from tests.kernels import batches
from tests.kernels.batches import DEVICE


pytestmark = batches.of_kernels

# Exponent from which on a rest has all bits of bf16; Triton's interpreter does not round smaller ones as it should
WHOLE = -90


def plain(weight, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(launch, "ENABLED", False)
        assert not two_parts.usable(weight)
        coarse, rest = float32.in_two_parts(weight)
    if INTERPRET:  # Triton's interpreter cuts off what bf16 has no bits for
        rest = ((weight - coarse).view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    return coarse, rest


def check(weight, monkeypatch):
    assert two_parts.usable(weight)
    found, expected = float32.in_two_parts(weight), plain(weight, monkeypatch)
    for mine, theirs, bits in zip(found, expected, (torch.int32, torch.int16), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine.view(bits), theirs.view(bits))


def weights(*shape):
    """Of all sizes, some of them numbers of bf16 and TF32, some between two of these."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(WHOLE if INTERPRET else -126, 127, shape, generator=generator)
    weight = torch.ldexp(1 + torch.rand(shape, generator=generator), exponents)
    weight *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    bits = weight.view(torch.int32)
    bits[..., 1::4] &= -(1 << 16)
    bits[..., 2::4] = bits[..., 2::4] & -(1 << 13) | 1 << 12
    return torch.where(weight.isfinite(), weight, 0.0).to(DEVICE)


@pytest.mark.parametrize("shape", [(1,), (1, 5), (7, 33), (64, 32), (3, 1024), (65, 129)], ids=str)
def test_both_parts_have_the_bits_of_plain_pytorch(shape, monkeypatch):
    check(weights(*shape), monkeypatch)


def test_every_bit_of_the_fraction_is_rounded_as_by_pytorch(monkeypatch):
    smallest = WHOLE + 127 << 23 if INTERPRET else 0
    values = torch.cat([torch.arange(2**14) + start for start in (smallest, 0x3F800000, 0x3FFFE000, 0x7F7FC000)])
    values = torch.cat([values, values | -(2**31)]).int().view(torch.float32)
    finite = (values.view(torch.int32) + 2**12 & 0x7FFFFFFF) < 0x7F800000  # also as TF32 has it
    check(values[finite].to(DEVICE), monkeypatch)


def test_rows_of_a_weight_may_begin_anywhere(monkeypatch):
    for part in weights(9, 33).split(4):
        check(part, monkeypatch)


def test_a_weight_that_is_no_number_stays_none():
    weight = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], device=DEVICE)
    coarse, rest = float32.in_two_parts(weight)
    assert (coarse + rest).isfinite().tolist() == [[False, False, False, True]]


def test_other_weights_take_the_plain_way():
    weight = weights(8, 12)

    class Other(torch.Tensor):
        pass

    for other in (weight.T, weight[:, :4], weight.double(), weight.half(), weight[:0], weight.as_subclass(Other)):
        assert not two_parts.usable(other)
    assert two_parts.usable(torch.nn.Parameter(weight))
    torch.testing.assert_close(sum(map(torch.Tensor.float, float32.in_two_parts(weight.T))), weight.T)
