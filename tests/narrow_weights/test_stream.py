"""Random numbers that depend on nothing but where they are used."""

import torch

from isopo_trl.narrow_weights.stream import key, noise


def test_parts_have_the_numbers_of_the_whole_wherever_they_begin():
    own = key(42, 3, 7)
    whole = noise(own, 2**33 - 501, 1000)  # beyond 32 bits as well
    assert whole.dtype == torch.int32
    assert torch.equal(torch.cat([noise(own, 2**33 - 501 + start, 125) for start in range(0, 1000, 125)]), whole)
    assert not torch.equal(noise(own, 0, 1000), noise(own, 2**33, 1000))


def test_numbers_are_even_and_those_of_other_seeds_steps_parameters_and_neighbours_say_nothing_of_them():
    """Within five standard deviations, on numbers that are the same on every machine."""
    number = 2**18
    places = [(42, 1, 0), (42, 2, 0), (42, 1, 1), (43, 1, 0), (42, 1, 2**20), (0, 0, 0), (1, 0, 0), (2**32, 0, 0)]
    draws = [noise(key(*place), 0, number).double() for place in places]
    draws += [noise(key(*places[0]), number, number).double(), draws[0].roll(1), draws[0].roll(256)]
    normalised = []
    for x in draws:
        assert x.min() >= 0 and x.max() <= 65535
        normalised.append((x - 32767.5) / (65536 / 12**0.5))
        counts = torch.bincount((x / 256).long(), minlength=256).double()
        chi = ((counts - number / 256).square() / (number / 256)).sum().item()
        assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
        for bit in range(16):
            share = ((x.long() >> bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 5 * 0.5 / number**0.5
    correlations = torch.corrcoef(torch.stack(normalised)).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / number**0.5
