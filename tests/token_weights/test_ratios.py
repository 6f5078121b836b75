"""What a batch of ratios says, against loops over tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isopo_trl.token_weights import batch_figures, log_ratios, ratio_sums
from tests.token_weights.ratio_examples import LOG_RATIOS, figures, tensors


def figures_by_loop(z, mask):
    ratios = [math.exp(value) for value, scored in zip(z.flatten().tolist(), mask.flatten(), strict=True) if scored]
    if not ratios:
        return {"ess": 1.0, "ratio_mean": 0.0, "kl": 0.0}
    n = len(ratios)
    return {
        "ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "ratio_mean": sum(ratios) / n,
        "kl": sum(r * math.log(r) - r + 1 for r in ratios) / n,
    }


@given(pairs=LOG_RATIOS, data=st.data())
def test_figures_are_those_of_a_loop_and_add_up_over_microbatches(pairs, data):
    z, mask = tensors(pairs)
    own = figures(z, mask)
    assert own == pytest.approx(figures_by_loop(z, mask), rel=1e-9, abs=1e-12)
    assert 0 < own["ess"] <= 1 and own["kl"] >= 0
    cut = data.draw(st.integers(0, len(pairs)))
    parts = ratio_sums(z[:, :cut], mask[:, :cut]) + ratio_sums(z[:, cut:], mask[:, cut:])
    torch.testing.assert_close(parts, ratio_sums(z, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 49, 12345])
def test_figures_on_policy_are_exact(n):
    # The trainer skips the pull where ESS == 1: it must not be an approximation
    assert figures(torch.zeros(1, n), torch.ones(1, n)) == {"ess": 1.0, "ratio_mean": 1.0, "kl": 0.0}


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (2, 3)], ids=str)
def test_without_tokens_the_effective_sample_size_is_one(shape):
    assert figures(torch.full(shape, 5.0), torch.zeros(shape)) == {"ess": 1.0, "ratio_mean": 0.0, "kl": 0.0}


def test_sums_in_float32_give_finite_figures():
    # As on a device without float64
    z = log_ratios(torch.full((1, 4), 1000.0), torch.zeros(1, 4))
    sums = ratio_sums(z, torch.ones_like(z)).float() * 1e3
    own = {name: value.item() for name, value in batch_figures(sums).items()}
    assert own["ess"] == pytest.approx(1) and all(map(math.isfinite, own.values()))


def test_tokens_that_are_not_scored_do_not_enter_the_figures():
    z = torch.tensor([[0.1, 500.0, -0.3], [math.nan, 0.2, math.inf]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert figures(z, mask) == pytest.approx(figures(torch.tensor([[0.1, -0.3, 0.2]]), torch.ones(1, 3)))


def test_log_ratios_have_the_gradient_of_the_policy_whatever_the_sampler_said():
    logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, math.nan, -math.inf, -4.0]])
    ratios = log_ratios(logps, behaviour)
    assert ratios.tolist() == [[0.5, 0.0, 10.0, 0.0]]
    (gradient,) = torch.autograd.grad(ratios.sum(), logps)
    assert (gradient == 1).all()
