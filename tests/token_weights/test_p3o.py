"""P3O's weights, bounded by the effective sample size, and its pull, which is a KL divergence and its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isopo_trl.token_weights import batch_figures, log_ratios, ratio_sums
from isopo_trl.token_weights.p3o import kl_pull, p3o_weights
from tests.token_weights.ratio_examples import LOG_RATIOS, figures, tensors


# The weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "values",
    [
        [1000.0, 0.0, -1000.0],
        [math.inf, 0.0],
        [-math.inf, 0.0],
        [math.inf, -math.inf],
        [-math.inf, -math.inf],
        [-1000.0],
        [1000.0] * 50,
    ],
    ids=lambda values: str(values[:3]),
)
def test_extreme_ratios_give_finite_figures_weights_and_pulls(values, dtype):
    logps = torch.zeros(1, len(values), dtype=dtype, requires_grad=True)
    ratios = log_ratios(logps, -torch.tensor([values], dtype=dtype))
    (gradient,) = torch.autograd.grad(ratios.sum(), logps)
    assert (gradient == 1).all()
    z = ratios.detach()
    own = figures(z, torch.ones_like(z))
    assert all(map(math.isfinite, own.values())) and 0 < own["ess"] <= 1 and own["kl"] >= 0
    weights = p3o_weights(z, torch.tensor(own["ess"], dtype=torch.float64))
    assert weights.dtype == dtype and torch.isfinite(weights).all() and (weights >= 0).all()
    for unbiased in (True, False):
        assert all(torch.isfinite(part).all() for part in kl_pull(z, unbiased))


def test_sums_carry_no_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    sums = ratio_sums(z, torch.ones(2, 3))
    parts = [sums, p3o_weights(z, sums[0]), *kl_pull(z), *kl_pull(z, False)]
    assert not any(part.requires_grad for part in parts)


@given(pairs=LOG_RATIOS)
def test_weights_of_p3o_are_bounded_by_the_effective_sample_size(pairs):
    z, mask = tensors(pairs)
    ess = batch_figures(ratio_sums(z, mask))["ess"]
    weights = p3o_weights(z, ess)
    expected = [[min(math.exp(value), ess.item()) for value in z[0].tolist()]]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_weights_of_p3o_on_policy_are_one_in_the_dtype_of_the_ratios():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weights = p3o_weights(torch.zeros(2, 3, dtype=dtype), torch.tensor(1.0, dtype=torch.float64))
        assert weights.dtype == dtype and (weights == 1).all()


# The divergence, token by token


def two_policies(seed, size=7):
    """Logits that want a gradient, and the log-probabilities of them and of a behaviour policy, `[size]`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
    behaviour = torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), behaviour


@pytest.mark.parametrize("seed", range(5))
def test_pull_is_on_average_the_divergence_and_its_gradient(seed):
    logits, logps, behaviour = two_policies(seed)
    divergence = (logps.exp() * (logps - behaviour)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    kl, slope = kl_pull((logps - behaviour).unsqueeze(0))
    assert (kl >= 0).all()
    # Every token of the vocabulary, as often as the behaviour policy draws it
    torch.testing.assert_close((behaviour.exp() * kl[0]).sum(), divergence.detach())
    (own,) = torch.autograd.grad((behaviour.exp() * slope[0] * logps).sum(), logits)
    torch.testing.assert_close(own, gradient)
    # Which is what the figures of the batch report
    often = torch.multinomial(behaviour.exp(), 200_000, True, generator=torch.Generator().manual_seed(seed))
    own = figures((logps - behaviour)[often].unsqueeze(0), torch.ones(1, len(often)))
    assert own["kl"] == pytest.approx(divergence.item(), rel=0.05)
    assert own["ratio_mean"] == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_pull_without_correction_is_that_of_tokens_of_the_policy_itself(seed):
    logits, logps, behaviour = two_policies(seed)
    kl, slope = kl_pull((logps - behaviour).unsqueeze(0), unbiased=False)
    assert (kl >= 0).all()
    divergence = (logps.exp() * (logps - behaviour)).sum()
    torch.testing.assert_close((logps.exp() * kl[0]).sum().detach(), divergence.detach())
    # Token by token, the slope is the derivative of the estimate
    z = (logps - behaviour).detach().requires_grad_()
    estimate = torch.exp(-z) - 1 + z
    torch.testing.assert_close(kl[0], estimate.detach())
    torch.testing.assert_close(slope[0], torch.autograd.grad(estimate.sum(), z)[0])


@given(z=st.floats(-39, 39))
def test_pull_is_never_negative_and_turns_around_on_policy(z):
    for unbiased in (True, False):
        kl, slope = kl_pull(torch.tensor([[z]], dtype=torch.float64), unbiased)
        assert kl >= 0
        assert torch.sign(slope) == math.copysign(z != 0, z)


def test_pull_of_on_policy_tokens_is_exactly_zero():
    for unbiased in (True, False):
        kl, slope = kl_pull(torch.zeros(2, 3), unbiased)
        assert (kl == 0).all() and (slope == 0).all()


def test_pull_of_tiny_ratios_keeps_its_figures_in_float32():
    # z^2 / 2, where 1 + z would have lost it
    z = torch.tensor([[1e-3, -1e-3]])
    for unbiased in (True, False):
        kl, slope = kl_pull(z, unbiased)
        torch.testing.assert_close(kl, z.square() / 2, rtol=2e-2, atol=1e-10)
        torch.testing.assert_close(slope, z, rtol=2e-3, atol=0.0)
