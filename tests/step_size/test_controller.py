"""The controller of steps, on plain numbers."""

import math

import numpy as np
import pytest

from isopo_trl.step_size import controller
from isopo_trl.step_size.controller import LARGEST_CHANGE, Measurement, StepSize, fitted, is_too_long


TARGET = 1e-3


def level_of(observations, variances):
    """Posterior mean and variance of where a random walk ends, by one linear system over all of its steps."""
    count = len(observations)
    precision = np.diag(1 / np.array(variances))
    for step in range(count - 1):  # what neighbours have to do with each other
        tie = np.zeros(count)
        tie[step], tie[step + 1] = -1, 1
        precision += np.outer(tie, tie) / controller.DRIFT**2
    covariance = np.linalg.inv(precision)
    return (covariance @ (np.array(observations) / np.array(variances)))[-1], covariance[-1, -1]


def test_the_level_is_the_posterior_mean_of_a_random_walk_seen_through_noise():
    random = np.random.default_rng(0)
    size, observations, variances = StepSize(target=0.01), [], []
    for _ in range(12):
        kl, relative = 0.01 * math.exp(random.normal() / 2), random.uniform(0, 1.5)
        kl *= size.rate**2 if size.level is None else math.exp(size.level) / 0.01 * size.rate**2
        kept, schedule = random.uniform(0.1, 1), random.uniform(0.1, 1)
        observations.append(math.log(kl / schedule) - 2 * math.log(size.rate * kept))
        variances.append(controller.SCATTER**2 + min(relative, 1) ** 2)
        size.measured(Measurement(kl, relative * kl), kept, schedule)
        level, variance = level_of(observations, variances)
        assert size.level == pytest.approx(level, rel=1e-9)
        assert size.variance == pytest.approx(variance, rel=1e-9)


def test_a_level_that_jumps_is_believed_sooner_than_one_that_wanders():
    size = StepSize(target=TARGET, level=math.log(TARGET), variance=0.01)
    size.measured(Measurement(TARGET * math.exp(12), 0.0))
    assert size.level - math.log(TARGET) > 0.95 * 12


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0, 1e4])
def test_a_quadratic_step_reaches_the_target_from_any_start_by_bounded_changes(start):
    size = StepSize(target=TARGET)
    for _ in range(1 + math.ceil(abs(math.log(start * 100)) / math.log(LARGEST_CHANGE))):
        kl, before = 10 * (start * size.rate) ** 2, size.rate
        size.measured(Measurement(kl, 0.1 * kl))
        assert abs(math.log(size.rate / before)) < 1.0001 * math.log(LARGEST_CHANGE)
    assert start * size.rate == pytest.approx(0.01, rel=1e-6)


# Steps that are too long


@pytest.mark.parametrize(
    "curve",
    [
        lambda share: 0.05 * share**2,
        lambda share: 0.05 * share**2 + 3 * share**3,
        lambda share: 4 * (1 - math.exp(-300 * share**2)),  # collapsed: further out, nothing changes any more
        lambda share: math.nan if share > 0.02 else 20 * share**2,
        lambda share: math.inf if share > 0.5 else 20 * share**2,
    ],
)
def test_a_step_that_is_too_long_is_shortened_to_the_target(curve):
    whole = Measurement(curve(1.0), 0.0)
    assert is_too_long(whole, TARGET)
    kept, tried, latest = fitted(TARGET, whole, lambda share: Measurement(curve(share), 0.0))
    assert kept == tried and 0 < kept < 1
    assert latest.kl == curve(kept) == pytest.approx(TARGET, rel=controller.CLOSE)


@pytest.mark.parametrize(
    "curve",
    [
        lambda share: 1e-12 * share**2,
        lambda share: 1e20 * share**2,
        lambda share: 4 * (1 - math.exp(-1e12 * share**2)),
        lambda share: math.nan if share > 1e-9 else 1e17 * share**2,
        lambda share: 0.0 if share < 1e6 else 1e-16 * share**2,
    ],
)
def test_a_step_of_any_length_is_found(curve):
    whole = Measurement(curve(1.0), 0.0)
    kept, tried, latest = fitted(TARGET, whole, lambda share: Measurement(curve(share), 0.0), may_grow=True)
    assert kept == tried and latest.kl == curve(kept) == pytest.approx(TARGET, rel=controller.CLOSE)


def test_a_step_that_moves_nothing_however_long_is_not_made_longer():
    tried = []
    kept, _, latest = fitted(
        TARGET, Measurement(0.0, 0.0), lambda s: tried.append(s) or Measurement(0.0, 0.0), may_grow=True
    )
    assert kept == tried[-1] == 1 and latest.kl == 0


def shares_of(target, whole, curve):
    """What [`fitted`] returns, and the shares that it has tried."""
    shares = []
    found = fitted(target, Measurement(whole, 0.0), lambda s: shares.append(s) or Measurement(curve(s), 0.0))
    return *found, shares


def test_a_share_that_was_short_enough_is_kept_where_no_other_comes_near_the_target():
    """As where weights in bf16, or choices of experts, change at once: nothing is between too short and too long."""
    kept, tried, latest, shares = shares_of(TARGET, 1e-2, lambda share: 1e-5 if share <= 0.04 else 1e-2)
    assert kept == tried == shares[-1] and latest.kl == 1e-5
    assert kept in shares[:-1] and len(shares) == controller.SHORTENINGS + 1
    assert sorted(shares[:3], reverse=True) == shares[:3] and max(shares[3:]) < shares[1]  # known to be too long


def test_a_share_that_is_lost_in_rounding_is_kept_and_the_next_step_is_longer_than_that():
    kept, tried, latest, shares = shares_of(1e-8, 1e-4, lambda share: 1e-4 if share > 0.1 else 0.0)
    assert [kept] == [tried] == shares == [pytest.approx(1e-2)] and latest.kl == 0
    size = StepSize(target=1e-8)
    size.too_small(kept)
    assert size.rate == kept * LARGEST_CHANGE


def test_what_stays_too_long_is_given_up_after_a_stated_number_of_measurements():
    kept, tried, _, shares = shares_of(TARGET, math.nan, lambda share: math.nan)
    assert kept == 0 and len(shares) == controller.SHORTENINGS and tried == shares[-1]
    size = StepSize(target=TARGET)
    size.taken_back(tried)
    assert size.rate == pytest.approx(tried / LARGEST_CHANGE) and size.lost == 1


# After a step that was lost


def settled(steps=5):
    """A controller that has found its rate."""
    size = StepSize(target=TARGET)
    for _ in range(steps):
        size.measured(Measurement(10 * size.rate**2, 0.0))
    return size


@pytest.mark.parametrize(
    "told",
    [lambda size: size.measured(Measurement(10 * size.rate**2, 0.0)), StepSize.too_small, StepSize.not_told],
    ids=["measured", "lost in rounding", "says nothing"],
)
def test_after_a_step_that_was_lost_and_a_cautious_one_the_rate_is_near_what_it_was(told):
    size = settled()
    before = size.rate
    for _ in range(2):
        size.taken_back(1e-5)
        assert size.rate < 1e-5 * before
        told(size)
        assert size.rate == pytest.approx(before / LARGEST_CHANGE, rel=1e-3) and size.lost == 0
        for _ in range(2):
            size.measured(Measurement(10 * size.rate**2, 0.0))


def test_a_rate_that_a_cautious_step_tells_to_be_too_large_is_not_taken_up_again():
    size = settled()
    before = size.rate
    size.taken_back(1e-5)
    size.measured(Measurement(1e7 * size.rate**2, 0.0))
    assert size.rate < 1e-2 * before


@pytest.mark.parametrize("steps", [0, 5])
def test_steps_that_say_nothing_lead_back_to_the_rate_that_was_found_or_given_and_no_further(steps):
    size = settled(steps)
    before = size.rate
    size.taken_back(1e-2)
    for _ in range(6):
        size.not_told()
    assert size.rate == pytest.approx(before, rel=1e-3) and size.lost == 0


def test_the_state_is_all_there_is_but_the_target():
    size = settled()
    size.taken_back(0.5)
    again, other = StepSize(target=TARGET), StepSize(target=1e-2)
    for each in (again, other):
        each.load_state_dict(size.state_dict())
    assert again == size and other.target == 1e-2
