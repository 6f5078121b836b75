"""Arithmetic that leaves out what has no gradient."""

import math

import pytest
import torch

from isopo_trl.geometry.guarded import alive_sequences, mean_over, power, ratio


def test_alive_are_the_sequences_with_a_finite_nonzero_value_of_what_is_asked_for():
    fisher = torch.tensor([1.0, 0.0, math.nan, math.inf, 1.0, 1.0])
    norm = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])
    for given, expected in (((fisher, None), [0, 4, 5]), ((None, norm), [0, 1, 2, 3]), ((fisher, norm), [0])):
        assert alive_sequences(*given).nonzero().flatten().tolist() == expected


def test_alive_sequences_are_found_layer_by_layer():
    fisher = torch.tensor([[1.0, 0.0], [math.inf, 2.0]])
    assert alive_sequences(fisher, None).tolist() == [[True, False], [False, True]]
    assert alive_sequences(fisher, torch.tensor([[0.0, 1.0], [1.0, 1.0]])).tolist() == [[False, False], [False, True]]


def test_a_mean_is_over_the_sequences_that_are_alive():
    x = torch.tensor([1.0, math.nan, 5.0, math.inf, 3.0])
    assert mean_over(x, torch.tensor([True, False, True, False, True])) == 3
    assert mean_over(x, torch.zeros(5, dtype=torch.bool)) == 0


def test_a_ratio_is_zero_where_nothing_is_divided_by():
    x, y = torch.tensor([6.0, 1.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 0.0, 2.0])
    assert ratio(x, y).tolist() == [2, 0, 0, 0]
    assert ratio(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])).isnan().all()  # broken stays broken


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.5, 3.0])
def test_a_power_of_zero_is_zero_whatever_the_exponent(exponent):
    values = [0.0, 0.25, 1.0, 9.0]
    expected = [0.0 if x == 0 else x**exponent for x in values]
    assert power(torch.tensor(values), exponent).tolist() == pytest.approx(expected)
    assert power(torch.tensor([math.nan]), exponent).isnan()
