"""Float32 values survive in 16 and 16 bits, and are on average what they are rounded to."""

import torch

from isopo_trl.narrow_weights.bits import join, rounded, split


def patterns():
    """Bits of float32 values: near every change of sign, exponent and half-way point, and a sample of the others."""
    upper = torch.tensor([*range(0, 0x100), *range(0x3F00, 0x4000), *range(0x7F00, 0x7F80)])
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    near = ((upper << 16)[:, None] + lower).flatten()
    others = torch.randint(0, 0x7F800000, (100_000,), generator=torch.Generator().manual_seed(0))
    positive = torch.cat([near, others])
    return torch.cat([positive, positive - 2**31]).to(torch.int32)


def test_every_finite_value_comes_back_to_the_last_bit_from_the_nearest_bf16_and_a_remainder():
    bits = patterns()
    values = bits.view(torch.float32)
    assert values.isfinite().all()
    narrow, remainder = split(values)
    assert narrow.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join(narrow, remainder).view(torch.int32), bits)
    # As PyTorch rounds, but for those half-way above an even one: they go up, for the want of a code
    half = (bits & 0x1FFFF) == 0x08000
    theirs = values.bfloat16().view(torch.int16)
    assert torch.equal(narrow.view(torch.int16)[~half], theirs[~half])
    assert torch.equal(narrow.view(torch.int16)[half], theirs[half] + 1)
    assert torch.equal(remainder == -(2**15), (bits & 0xFFFF) == 0x8000)


def test_what_is_not_finite_stays_so():
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001]).to(torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    values = torch.cat([payloads, torch.tensor([torch.inf, -torch.inf])])
    for noise in (0, 2**16 - 1):
        assert torch.equal(rounded(values, torch.full((6,), noise)).isnan(), values.isnan())
        assert torch.equal(rounded(values, torch.full((6,), noise))[4:].float(), values[4:])
    narrow, remainder = split(values)
    assert torch.equal(narrow.isnan(), values.isnan()) and torch.equal(narrow[4:].float(), values[4:])
    assert torch.equal(join(narrow, remainder)[4:], values[4:])


def test_the_mean_over_all_random_numbers_is_the_value():
    noise = torch.arange(2**16, dtype=torch.int32)
    for value in (1.0, -1.0, 1 + 2**-20, -(1 + 3 * 2**-12), 0.1, -1e-30, 3 * 2.0**-140, 0.0):
        wide = torch.tensor(value)
        each = rounded(wide.expand(2**16).contiguous(), noise).double()
        assert len(each.unique()) == (1 if wide.bfloat16() == wide else 2)
        assert each.mean() == wide.double()  # to the last bit: 65536 values of eight bits have room in float64
