"""Token weights against loops over tokens: TRL's correction for the sampler, P3O's figures and pull, KPO's filter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopo_trl.objectives import (
    batch_figures,
    filtered,
    kalman_gains,
    kl_pull,
    linear_scan,
    log_ratios,
    p3o_weights,
    ratio_sums,
    sampler_weights,
    token_gains,
)


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS = [(None, 3.0), (0.5, 3.0), (0.5, None), (0.9, 1.1)]


def example(seed=0):
    """Log-probabilities that differ by up to a few units, so that every bound is crossed; ragged masks."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(5, 7, generator=generator, dtype=torch.float64)
    sampler = logps + torch.randn(5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [1], [0]])).long()
    return logps, sampler, mask


def weights_by_loop(logps, sampler, mask, mode, low, high):
    def bounded(ratio):
        if mode.endswith("truncate"):
            ratio = ratio if low is None else max(ratio, low)
            return ratio if high is None else min(ratio, high)
        inside = (low is None or ratio >= low) and (high is None or ratio <= high)
        return ratio if inside else 0.0

    rows = []
    for b in range(len(logps)):
        differences = []
        for t in range(logps.shape[1]):
            difference = 0.0
            if mask[b, t] and not math.isnan(sampler[b, t]):
                difference = logps[b, t].item() - sampler[b, t].item()
            differences.append(difference)
        if mode.startswith("sequence"):
            rows.append([bounded(math.exp(sum(differences)))])
        else:
            rows.append([bounded(math.exp(difference)) for difference in differences])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_trls(mode, low, high):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, low, high)
    assert weights.shape == ((5, 1) if mode.startswith("sequence") else (5, 7))
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, low, high))


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_masking_without_bounds_leaves_the_ratio_alone(mode):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, None, None)
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, None, None))
    assert (weights > 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_token_without_sampler_logprob_counts_as_on_policy(mode):
    logps, sampler, mask = example()
    sampler[0, 2] = sampler[1, 0] = sampler[4, 3] = float("nan")
    sampler[3] = float("nan")
    weights = sampler_weights(logps, sampler, mask, mode, 0.25, 4.0)
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, 0.25, 4.0))
    assert weights[3].tolist() == [1.0] * weights.shape[1]
    if mode.startswith("token"):
        assert weights[0, 2] == weights[1, 0] == 1


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_are_not_scored_do_not_matter(mode):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, 0.25, 4.0)
    changed = torch.where(mask.bool(), sampler, -50.0)
    torch.testing.assert_close(sampler_weights(logps, changed, mask, mode, 0.25, 4.0), weights)


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_tokens_weigh_one(mode):
    logps, _, mask = example()
    assert (sampler_weights(logps, logps.clone(), mask, mode, 0.5, 2.0) == 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_the_sampler_found_impossible_is_capped_or_dropped(mode):
    logps, sampler, mask = example()
    sampler[0, 0] = -math.inf
    weight = sampler_weights(logps, sampler, mask, mode, None, 3.0)[0, 0]
    assert weight == (3.0 if mode.endswith("truncate") else 0.0)


def test_the_bounds_themselves_are_inside():
    logps = torch.tensor([[2.0, 0.5]]).log()
    weights = sampler_weights(logps, torch.zeros(1, 2), torch.ones(1, 2), "token_mask", 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5]]))


# P3O: sums over tokens, and what is made of them


LOG_RATIOS = st.lists(st.tuples(st.floats(-8, 8), st.booleans()), min_size=1, max_size=12)


def tensors(pairs):
    """Log-ratios and mask, `[1, C]`, of a list of pairs."""
    z, mask = zip(*pairs, strict=True)
    return torch.tensor([z], dtype=torch.float64), torch.tensor([mask]).long()


def figures(z, mask):
    return {name: value.item() for name, value in batch_figures(ratio_sums(z, mask)).items()}


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


@given(pairs=LOG_RATIOS)
def test_figures_of_a_batch_are_those_of_a_loop(pairs):
    z, mask = tensors(pairs)
    own = figures(z, mask)
    assert own == pytest.approx(figures_by_loop(z, mask), rel=1e-9, abs=1e-12)
    assert 0 < own["ess"] <= 1 and own["kl"] >= 0


@given(pairs=LOG_RATIOS, log_scale=st.floats(-8, 8))
def test_effective_sample_size_does_not_depend_on_the_scale_of_the_ratios(pairs, log_scale):
    z, mask = tensors(pairs)
    assert figures(z + log_scale, mask)["ess"] == pytest.approx(figures(z, mask)["ess"], rel=1e-9)


@given(value=st.floats(-40, 40), n=st.integers(1, 300))
def test_effective_sample_size_of_equal_ratios_is_one(value, n):
    ess = figures(torch.full((1, n), value, dtype=torch.float64), torch.ones(1, n))["ess"]
    assert 1 - 1e-14 < ess <= 1


@pytest.mark.parametrize("n", [1, 2, 3, 7, 49, 1000, 12345])
def test_figures_on_policy_are_exact(n):
    # The trainer skips the pull where ESS == 1: it must not be an approximation
    assert figures(torch.zeros(1, n), torch.ones(1, n)) == {"ess": 1.0, "ratio_mean": 1.0, "kl": 0.0}


def test_effective_sample_size_of_one_among_many_is_its_share():
    z = torch.full((1, 1000), -40.0)
    z[0, 17] = 0.0
    assert figures(z, torch.ones(1, 1000))["ess"] == pytest.approx(1 / 1000)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (2, 3)], ids=str)
def test_without_tokens_the_effective_sample_size_is_one(shape):
    z = torch.full(shape, 5.0)
    assert ratio_sums(z, torch.zeros(shape)).tolist() == [0.0] * 4
    assert figures(z, torch.zeros(shape)) == {"ess": 1.0, "ratio_mean": 0.0, "kl": 0.0}


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


@given(pairs=LOG_RATIOS, data=st.data())
def test_sums_add_up_over_microbatches(pairs, data):
    z, mask = tensors(pairs)
    cut = data.draw(st.integers(0, len(pairs)))
    parts = ratio_sums(z[:, :cut], mask[:, :cut]) + ratio_sums(z[:, cut:], mask[:, cut:])
    torch.testing.assert_close(parts, ratio_sums(z, mask), rtol=1e-12, atol=1e-12)


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


# P3O: the divergence token by token


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


# KPO: the gains


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


# KPO: the filter


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
