"""KPO's filter against loops over tokens: the schedule of its gains, the filter, and its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopo_trl.token_weights.kpo import filtered, kalman_gains, linear_scan, token_gains


# The gains


def steady_gain(noise):
    """`K` of the fixed point `P = (P + Q) / (P + Q + 1)` of the variance."""
    predicted = (noise + math.sqrt(noise * noise + 4 * noise)) / 2
    return predicted / (predicted + 1)


def test_gains_fall_from_a_half_to_the_root_of_the_noise():
    gains = kalman_gains(8192)
    assert gains.dtype == torch.float64 and gains.shape == (8192,)
    assert gains[0].item() == pytest.approx(0.5, rel=1e-5)
    assert (gains.diff() < 0).all()
    limit = steady_gain(1e-6)
    assert limit == pytest.approx(1e-3, rel=1e-3)
    assert gains[-1].item() == pytest.approx(limit, rel=1e-6)
    close = (gains < 1.01 * limit).nonzero()
    assert close[0].item() == 2650


def test_gains_without_initial_variance_rise_from_the_noise():
    gains = kalman_gains(8192, initial_variance=0.0)
    assert gains[0].item() == pytest.approx(1e-6, rel=1e-5)
    assert (gains.diff() > 0).all()
    assert gains[-1].item() == pytest.approx(steady_gain(1e-6), rel=1e-6)


@pytest.mark.parametrize("noise", [1e-8, 1e-4, 0.01, 1.0, 100.0])
def test_gains_of_the_steady_state_stay(noise):
    limit = steady_gain(noise)
    # The variance after an update is the gain, in units of the observation noise
    torch.testing.assert_close(kalman_gains(50, limit, noise), torch.full((50,), limit, dtype=torch.float64))


def test_gains_without_process_noise_are_an_average_with_a_first_observation_of_zero():
    torch.testing.assert_close(kalman_gains(100, 1.0, 0.0), 1 / torch.arange(2.0, 102.0, dtype=torch.float64))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 1000, 1024, 1025])
def test_gains_of_a_short_completion_are_the_first_ones(length):
    gains = kalman_gains(length)
    assert gains.shape == (length,)
    assert torch.equal(gains, kalman_gains(4096)[:length])


def test_unscored_tokens_have_no_gain_and_do_not_count():
    schedule = torch.tensor([0.5, 0.4, 0.3, 0.2], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    expected = [[0.5, 0, 0, 0.4, 0.3, 0], [0, 0, 0.5, 0.4, 0, 0.3], [0.0] * 6, [0.5, 0.4, 0.3, 0.2, 0, 0]]
    for kind in (torch.long, torch.float32, torch.bool):
        assert token_gains(mask.to(kind), schedule).tolist() == expected


# The filter


def observed(lengths, seed=0):
    """Log-ratios as between two arithmetics: tiny noise, and now and then a token that is far off; `[B, C]`, mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    z = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
    far = torch.rand(shape, generator=generator) < 0.02
    z = torch.where(far, 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64), z)
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    return z * mask, mask.long()


def kalman_filter(z, initial_variance, process_noise):
    """The filter as textbooks have it: state and variance are predicted, then updated. `z` is `[B, C]`."""
    state = torch.zeros_like(z[:, 0])
    variance = torch.full_like(state, initial_variance)
    states = []
    for t in range(z.shape[1]):
        variance = variance + process_noise
        gain = variance / (variance + 1.0)
        state = state + gain * (z[:, t] - state)
        variance = (1.0 - gain) * variance
        states.append(state)
    return torch.stack(states, dim=1)


def recursion(z, gains):
    """The filter's definition, which autograd can go back through."""
    rho, states = torch.zeros_like(z[:, 0]), []
    for t in range(z.shape[1]):
        rho = (1 - gains[:, t]) * rho + gains[:, t] * z[:, t]
        states.append(rho)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("initial_variance, process_noise", [(1.0, 1e-6), (0.0, 1e-6), (1.0, 1e-4)])
def test_filter_is_the_kalman_filter(initial_variance, process_noise):
    lengths = torch.randint(1, 4097, (198,), generator=torch.Generator().manual_seed(1)).tolist()
    lengths[:3] = [4096, 1, 2]
    z, mask = observed(lengths)
    gains = token_gains(mask, kalman_gains(z.shape[1], initial_variance, process_noise))
    own = filtered(z, gains)
    for dtype, bound in ((torch.float64, 1e-30), (torch.float32, 4e-15)):
        reference = kalman_filter(z.to(dtype), initial_variance, process_noise)
        error = (own - reference).square()[mask.bool()].mean().item()
        assert error < bound, error
    # After the last token, the state stays where it is
    assert torch.equal(own[2, 1:], own[2, 1:2].expand(4095))


def example_for_the_filter(length=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(3, length, generator=generator, dtype=torch.float64)
    gains = torch.rand(3, length, generator=generator, dtype=torch.float64)
    gains[1, 5::7] = 0
    gains[2, 3::4] = 1
    return z, gains


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 32, 33, 200])
def test_filter_is_its_recursion_and_so_is_its_gradient(length):
    z, gains = example_for_the_filter(length)
    z.requires_grad_()
    own, expected = filtered(z, gains), recursion(z, gains)
    torch.testing.assert_close(own, expected)
    weight = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (own_gradient,) = torch.autograd.grad((weight * own.exp()).sum(), z)
    (expected_gradient,) = torch.autograd.grad((weight * expected.exp()).sum(), z)
    torch.testing.assert_close(own_gradient, expected_gradient)


def test_filter_passes_autograds_own_check():
    z, gains = example_for_the_filter(13)
    assert torch.autograd.gradcheck(lambda z: filtered(z, gains), z.requires_grad_())


def test_observation_gets_the_gradient_that_is_documented():
    z, gains = example_for_the_filter(20)
    arrives = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (own,) = torch.autograd.grad(filtered(z.requires_grad_(), gains), z, arrives)
    for b in range(3):
        for k in range(20):
            total = sum(
                arrives[b, t] * torch.prod(1 - gains[b, k + 1 : t + 1])  # empty for t = k
                for t in range(k, 20)
            )
            torch.testing.assert_close(own[b, k], gains[b, k] * total)


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


def test_filter_does_not_look_ahead_or_into_other_rows():
    z, gains = example_for_the_filter(30)
    changed = z.clone()
    changed[1, 17] += 1.0
    difference = filtered(changed, gains) - filtered(z, gains)
    assert (difference[[0, 2]] == 0).all() and (difference[1, :17] == 0).all() and (difference[1, 17:20] > 0).all()


def test_filter_on_policy_is_exactly_zero():
    z = torch.zeros(2, 100)
    assert (filtered(z, kalman_gains(100).expand(2, -1)) == 0).all()


def adjoint_weights(schedule):
    """On policy, what each token's log-probability is multiplied by in the gradient of the sum of the ratios."""
    z = torch.zeros(1, len(schedule), dtype=torch.float64, requires_grad=True)
    (weights,) = torch.autograd.grad(filtered(z, schedule.unsqueeze(0)).exp().sum(), z)
    return weights[0]


def test_early_tokens_weigh_the_logarithm_of_what_follows():
    length = 2000
    # An average of all so far: the weight of token k is a harmonic sum
    weights = adjoint_weights(kalman_gains(length, 1.0, 0.0))
    harmonic = (1 / torch.arange(2.0, length + 2, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(weights, harmonic)
    # With process noise, it is nearly one as long as completions are not much longer than 1 / K_inf = 1000 tokens
    weights = adjoint_weights(kalman_gains(length))
    assert (weights.diff() < 0).all()
    for k in (20, 50, 100, 200, 400):
        assert weights[k].item() == pytest.approx(math.log(length / k), rel=0.2), k


@pytest.mark.parametrize("gain", [0.01, 0.0001, 1.0])
def test_filter_with_a_fixed_gain_is_an_exponential_average(gain):
    z, _ = observed([300, 300])
    rho = filtered(z, torch.full_like(z, gain))
    for t in (0, 1, 17, 299):
        past = torch.arange(t, -1, -1, dtype=torch.float64)
        torch.testing.assert_close(rho[:, t], (gain * (1 - gain) ** past * z[:, : t + 1]).sum(1))


@pytest.mark.parametrize("gain", [1e-6, 0.0001, 0.5, 0.999999, 1 - 2**-53, 1.0])
def test_filter_of_a_very_long_completion_stays_finite(gain):
    # Products of a hundred thousand decays are beyond any number format
    length = 100_000
    z = torch.ones(1, length, requires_grad=True)
    rho = filtered(z, torch.full((1, length), gain, dtype=torch.float64))
    last = -math.expm1(length * math.log1p(-gain)) if gain < 1 else 1.0
    assert torch.isfinite(rho).all() and (rho >= 0).all() and (rho <= 1).all()
    assert rho[0, -1].item() == pytest.approx(last, rel=1e-5)
    (gradient,) = torch.autograd.grad(rho.sum(), z)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 0].item() == pytest.approx(last, rel=1e-5)


def test_filter_of_a_very_long_completion_with_the_schedule_is_the_recursion():
    gains = kalman_gains(20_000).unsqueeze(0)
    z, _ = observed([20_000])
    torch.testing.assert_close(filtered(z, gains), recursion(z, gains), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_filter_gives_the_dtype_it_was_given_and_computes_in_float64(dtype):
    z, _ = observed([500, 500])
    z = z.to(dtype).requires_grad_()
    gains = kalman_gains(500).expand(2, -1)
    rho = filtered(z, gains)
    assert rho.dtype == dtype
    assert torch.equal(rho, filtered(z.double(), gains).to(dtype))
    rho.sum().backward()
    assert z.grad.dtype == dtype


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (0, 4), (2, 2, 9), (37,)], ids=str)
def test_scan_of_any_shape_is_its_loop(shape):
    generator = torch.Generator().manual_seed(0)
    decay = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    given = decay.clone(), x.clone()
    y, expected = torch.zeros(shape[:-1], dtype=torch.float64), torch.zeros_like(x)
    for t in range(shape[-1]):
        y = decay[..., t] * y + x[..., t]
        expected[..., t] = y
    torch.testing.assert_close(linear_scan(decay, x), expected)
    assert torch.equal(decay, given[0]) and torch.equal(x, given[1])
