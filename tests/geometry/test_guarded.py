"""Arithmetic that leaves out what has no gradient."""

import math

import pytest
import torch

from isopo_trl.geometry.guarded import alive_sequences, below_noise, mean_over, power, ratio


def test_alive_are_the_sequences_with_a_finite_nonzero_value_of_what_is_asked_for():
    fisher = torch.tensor([1.0, 0.0, math.nan, math.inf, 1.0, 1.0])
    norm = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])
    for given, expected in (((fisher, None), [0, 4, 5]), ((None, norm), [0, 1, 2, 3]), ((fisher, norm), [0])):
        assert alive_sequences(*given).nonzero().flatten().tolist() == expected
    layers = torch.tensor([[1.0, 0.0], [math.inf, 2.0]])  # layer by layer
    assert alive_sequences(layers, layers.flip(1)).tolist() == [[False, False], [False, False]]
    assert alive_sequences(layers, None).tolist() == [[True, False], [False, True]]


# Units of rounding that are noise: 256 of 2^-23 or 2^-52
LEVEL = {torch.float32: 2.0**-15, torch.float64: 2.0**-44}


@pytest.mark.parametrize("dtype", LEVEL)
@pytest.mark.parametrize(("factor", "noise"), [(0.98, True), (1.02, False), (1e3, False)])
def test_noise_is_what_is_below_some_units_of_rounding_of_the_root_mean_square(dtype, factor, noise):
    small = factor * LEVEL[dtype] * (50 / 4) ** 0.5
    x = torch.tensor([small, 3.0, 4.0, 5.0], dtype=torch.float64)
    running = torch.tensor(50 / 4).double()
    # Whatever the units; the running mean square takes over where it is larger
    for values, past in ((x, None), (1e-30 * x, None), (x, running), (x, 1e-6 * running)):
        assert below_noise(values, past, dtype).tolist() == [noise, False, False, False]
    assert below_noise(x[:1], running, dtype).tolist() == [noise]
    assert below_noise(x, 1e40 * running, dtype).all()


@pytest.mark.parametrize("x", [[2.0], [1e-200, 1e-200], [0.0, 0.0], [1e-300]])
def test_gradients_of_one_size_are_not_noise_however_small_they_are(x):
    assert not below_noise(torch.tensor(x, dtype=torch.float64), None, torch.float32).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_sequence_is_not_noise_and_nothing_is_compared_with_it(value):
    x = torch.tensor([1.0, value, 1e-20, 1e-3], dtype=torch.float64)
    assert below_noise(x, None, torch.float32).tolist() == [False, False, True, False]


def test_a_mean_is_over_the_sequences_that_are_alive():
    x = torch.tensor([1.0, math.nan, 5.0, math.inf, 3.0])
    assert mean_over(x, torch.tensor([True, False, True, False, True])) == 3
    assert mean_over(x, torch.zeros(5, dtype=torch.bool)) == 0


def test_nothing_is_divided_by_zero_and_broken_stays_broken():
    x, y = torch.tensor([6.0, 1.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 0.0, 2.0])
    assert ratio(x, y).tolist() == [2, 0, 0, 0]
    assert ratio(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])).isnan().all()
    for exponent in (-2.0, -0.5, 3.0):
        assert power(torch.tensor([0.0, 0.25, 9.0]), exponent).tolist() == pytest.approx(
            [0.0, 0.25**exponent, 9.0**exponent]
        )
        assert power(torch.tensor([math.nan]), exponent).isnan()
