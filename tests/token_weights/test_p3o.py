"""P3O's weights, bounded by the effective sample size, and its pull, which is a KL divergence and its gradient."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from isopo_trl.token_weights import batch_figures, log_ratios, ratio_sums
from isopo_trl.token_weights.p3o import kl_pull, p3o_weights
from tests.token_weights.ratio_examples import LOG_RATIOS, figures, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "values",
    [[1000.0, 0.0, -1000.0], [math.inf, -math.inf], [-math.inf, -math.inf], [1000.0] * 50],
    ids=lambda values: str(values[:3]),
)
def test_extreme_ratios_give_finite_figures_weights_and_pulls(values, dtype):
    ratios = log_ratios(torch.zeros(1, len(values), dtype=dtype), -torch.tensor([values], dtype=dtype))
    own = figures(ratios, torch.ones_like(ratios))
    assert all(map(math.isfinite, own.values())) and 0 < own["ess"] <= 1 and own["kl"] >= 0
    weights = p3o_weights(ratios, torch.tensor(own["ess"], dtype=torch.float64))
    assert weights.dtype == dtype and torch.isfinite(weights).all() and (weights >= 0).all()
    for unbiased in (True, False):
        assert all(torch.isfinite(part).all() for part in kl_pull(ratios, unbiased))


def test_weights_and_pull_carry_no_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    sums = ratio_sums(z, torch.ones(2, 3))
    parts = [sums, p3o_weights(z, sums[0]), *kl_pull(z), *kl_pull(z, False)]
    assert not any(part.requires_grad for part in parts)


@given(pairs=LOG_RATIOS)
def test_weights_of_p3o_are_bounded_by_the_effective_sample_size(pairs):
    z, mask = tensors(pairs)
    ess = batch_figures(ratio_sums(z, mask))["ess"]
    expected = [[min(math.exp(value), ess.item()) for value in z[0].tolist()]]
    torch.testing.assert_close(p3o_weights(z, ess), torch.tensor(expected, dtype=torch.float64))


# The divergence, token by token


def two_policies(seed, size=7):
    """Logits that want a gradient, and the log-probabilities of them and of a behaviour policy, `[size]`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
    behaviour = torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), behaviour


@pytest.mark.parametrize("seed", range(2))
def test_pull_is_on_average_the_divergence_and_its_gradient(seed):
    logits, logps, behaviour = two_policies(seed)
    divergence = (logps.exp() * (logps - behaviour)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    kl, slope = kl_pull((logps - behaviour).unsqueeze(0))
    # Every token of the vocabulary, as often as the behaviour policy draws it
    torch.testing.assert_close((behaviour.exp() * kl[0]).sum(), divergence.detach())
    (own,) = torch.autograd.grad((behaviour.exp() * slope[0] * logps).sum(), logits)
    torch.testing.assert_close(own, gradient)
    # Which is what the figures of the batch report
    often = torch.multinomial(behaviour.exp(), 200_000, True, generator=torch.Generator().manual_seed(seed))
    own = figures((logps - behaviour)[often].unsqueeze(0), torch.ones(1, len(often)))
    assert (own["kl"], own["ratio_mean"]) == pytest.approx((divergence.item(), 1), rel=0.05)


def test_pull_without_correction_is_that_of_tokens_of_the_policy_itself():
    _, logps, behaviour = two_policies(0)
    z = (logps - behaviour).detach().requires_grad_()
    kl, slope = kl_pull(z.unsqueeze(0), unbiased=False)
    torch.testing.assert_close((logps.exp() * kl[0]).sum(), (logps.exp() * (logps - behaviour)).sum())
    # Token by token, the slope is the derivative of the estimate
    estimate = torch.exp(-z) - 1 + z
    torch.testing.assert_close(kl[0], estimate.detach())
    torch.testing.assert_close(slope[0], torch.autograd.grad(estimate.sum(), z)[0])


@given(z=st.floats(-39, 39))
@example(z=0.0)
def test_pull_is_never_negative_and_turns_around_on_policy(z):
    for unbiased in (True, False):
        kl, slope = kl_pull(torch.tensor([[z]], dtype=torch.float64), unbiased)
        assert kl > 0 or abs(z) < 1e-7 and kl >= 0
        assert torch.sign(slope) == math.copysign(z != 0, z)


def test_pull_of_tiny_ratios_keeps_its_figures_in_float32():
    # z^2 / 2, where 1 + z would have lost it
    z = torch.tensor([[1e-3, -1e-3]])
    for unbiased in (True, False):
        kl, slope = kl_pull(z, unbiased)
        torch.testing.assert_close(kl, z.square() / 2, rtol=2e-2, atol=1e-10)
        torch.testing.assert_close(slope, z, rtol=2e-3, atol=0.0)
