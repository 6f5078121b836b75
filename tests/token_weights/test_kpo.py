"""KPO's filter against loops over tokens: the schedule of its gains, the filter, and its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopo_trl.token_weights.kpo import filtered, kalman_gains, linear_scan, token_gains


# The gains


def test_gains_fall_from_a_half_to_the_root_of_the_noise():
    gains = kalman_gains(8192)
    assert gains.dtype == torch.float64 and gains.shape == (8192,)
    assert gains[0].item() == pytest.approx(0.5, rel=1e-5) and (gains.diff() < 0).all()
    # The variance's fixed point: P = (P + Q) / (P + Q + 1)
    predicted = (1e-6 + math.sqrt(1e-12 + 4e-6)) / 2
    assert gains[-1].item() == pytest.approx(predicted / (predicted + 1), rel=1e-6)
    # Without noise, they are those of an average with a first observation of zero
    torch.testing.assert_close(kalman_gains(100, 1.0, 0.0), 1 / torch.arange(2.0, 102.0, dtype=torch.float64))


def test_gains_of_a_short_completion_are_the_first_ones():
    for length in (0, 1, 2, 3, 1000, 1024, 1025):
        assert torch.equal(kalman_gains(length), kalman_gains(4096)[:length]), length


def test_unscored_tokens_have_no_gain_and_do_not_count():
    schedule = torch.tensor([0.5, 0.4, 0.3, 0.2], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    expected = [[0.5, 0, 0, 0.4, 0.3, 0], [0, 0, 0.5, 0.4, 0, 0.3], [0.0] * 6, [0.5, 0.4, 0.3, 0.2, 0, 0]]
    assert token_gains(mask, schedule).tolist() == expected


# The filter


def observed(lengths):
    """Log-ratios as between two arithmetics: tiny noise, and now and then a token that is far off; `[B, C]`, mask."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    z = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
    far = torch.rand(shape, generator=generator) < 0.02
    z = torch.where(far, 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64), z)
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    return z * mask, mask.long()


def kalman_filter(z, variance, process_noise):
    """The filter as textbooks have it: state and variance are predicted, then updated. `z` is `[B, C]`."""
    state, states = torch.zeros_like(z[:, 0]), []
    for t in range(z.shape[1]):
        variance = variance + process_noise
        gain = variance / (variance + 1.0)
        state = state + gain * (z[:, t] - state)
        variance = (1.0 - gain) * variance
        states.append(state)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("initial_variance, process_noise", [(1.0, 1e-6), (0.0, 1e-6), (1.0, 1e-4)])
def test_filter_is_the_kalman_filter(initial_variance, process_noise):
    z, mask = observed([1500, 1, 2, 700, 3])
    own = filtered(z, token_gains(mask, kalman_gains(z.shape[1], initial_variance, process_noise)))
    expected = kalman_filter(z, initial_variance, process_noise)
    torch.testing.assert_close(own * mask, expected * mask, rtol=0, atol=1e-14)
    # After the last token, the state stays where it is
    assert torch.equal(own[2, 1:], own[2, 1:2].expand(1499))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 32, 33, 200])
def test_filter_is_its_recursion_and_so_is_its_gradient(length):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, length, generator=generator, dtype=torch.float64, requires_grad=True)
    gains = torch.rand(3, length, generator=generator, dtype=torch.float64)
    gains[1, 5::7], gains[2, 3::4] = 0, 1
    rho, states = torch.zeros(3, dtype=torch.float64), []
    for t in range(length):
        rho = (1 - gains[:, t]) * rho + gains[:, t] * z[:, t]
        states.append(rho)
    own, expected = filtered(z, gains), torch.stack(states, dim=1)
    torch.testing.assert_close(own, expected)
    weight = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    (own_gradient,) = torch.autograd.grad((weight * own.exp()).sum(), z)
    (expected_gradient,) = torch.autograd.grad((weight * expected.exp()).sum(), z)
    torch.testing.assert_close(own_gradient, expected_gradient)


@settings(max_examples=50)
@given(data=st.data(), length=st.integers(1, 40))
def test_filter_passes_over_unscored_tokens(data, length):
    scored = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    z = torch.randn(1, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).requires_grad_()
    rho = filtered(z, token_gains(scored, kalman_gains(length)))
    compact = z[scored].unsqueeze(0)
    expected = filtered(compact, kalman_gains(compact.shape[1]).unsqueeze(0))
    torch.testing.assert_close(rho[scored], expected[0])
    (own,) = torch.autograd.grad(rho[scored].exp().sum(), z, retain_graph=True)
    (gradient,) = torch.autograd.grad(expected.exp().sum(), z)
    torch.testing.assert_close(own, gradient)
    assert (own[~scored] == 0).all()


def test_filter_on_policy_is_exactly_zero():
    assert (filtered(torch.zeros(2, 100), kalman_gains(100).expand(2, -1)) == 0).all()


@pytest.mark.parametrize("gain", [1e-6, 0.0001, 0.5, 1 - 2**-53, 1.0])
def test_filter_of_a_very_long_completion_stays_finite(gain):
    # Products of a hundred thousand decays are beyond any number format
    length = 100_000
    z = torch.ones(1, length, requires_grad=True)
    rho = filtered(z, torch.full((1, length), gain, dtype=torch.float64))
    last = -math.expm1(length * math.log1p(-gain)) if gain < 1 else 1.0
    assert torch.isfinite(rho).all() and (rho >= 0).all() and (rho <= 1).all()
    assert rho[0, -1].item() == pytest.approx(last, rel=1e-5)
    (gradient,) = torch.autograd.grad(rho.sum(), z)
    assert torch.isfinite(gradient).all() and gradient[0, 0].item() == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_filter_gives_the_dtype_it_was_given_and_computes_in_float64(dtype):
    z, _ = observed([500, 500])
    z = z.to(dtype).requires_grad_()
    gains = kalman_gains(500).expand(2, -1)
    rho = filtered(z, gains)
    assert rho.dtype == dtype and torch.equal(rho, filtered(z.double(), gains).to(dtype))
    rho.sum().backward()
    assert z.grad.dtype == dtype


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (2, 2, 9)], ids=str)
def test_scan_of_any_shape_is_its_loop(shape):
    decay, x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, expected = torch.zeros(shape[:-1], dtype=torch.float64), torch.zeros_like(x)
    for t in range(shape[-1]):
        expected[..., t] = y = decay[..., t] * y + x[..., t]
    torch.testing.assert_close(linear_scan(decay, x), expected)
