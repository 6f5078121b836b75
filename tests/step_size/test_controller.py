"""The controller of steps, on plain numbers."""

import math

import numpy as np
import pytest

from isopo_trl.step_size import controller
from isopo_trl.step_size.controller import LARGEST_CHANGE, Measurement, StepSize, is_too_long, shortened


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


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0, 1e4])
def test_a_quadratic_step_reaches_the_target_from_any_start(start):
    size = StepSize(target=1e-3)
    for _ in range(1 + math.ceil(abs(math.log(start * 100)) / math.log(LARGEST_CHANGE))):
        kl = 10 * (start * size.rate) ** 2
        size.measured(Measurement(kl, 0.1 * kl))
    assert start * size.rate == pytest.approx(0.01, rel=1e-6)


def test_one_measurement_does_not_change_the_rate_by_more_than_the_bound():
    size = StepSize(target=1e-3)
    for kl, expected in ((1e-12, LARGEST_CHANGE), (10.0, 1 / LARGEST_CHANGE)):
        before = size.rate
        size.measured(Measurement(kl, 0.0))
        assert size.rate / before == pytest.approx(expected)


def test_a_level_that_jumps_is_believed_sooner_than_one_that_wanders():
    size = StepSize(target=1e-3, level=math.log(1e-3), variance=0.01)
    size.measured(Measurement(1e-3 * math.exp(12), 0.0))
    assert size.level - math.log(1e-3) > 0.95 * 12


def test_an_uncertain_measurement_moves_the_rate_less():
    moved = []
    for relative in (0.1, 0.5, 1.0):
        size = StepSize(target=1e-3, level=math.log(1e-3), variance=0.1)
        size.measured(Measurement(2e-3, relative * 2e-3))
        moved.append(1 - size.rate)
    assert moved[0] > moved[1] > moved[2] > 0


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
    target = 1e-3
    whole = Measurement(curve(1.0), 0.0)
    assert is_too_long(whole, target)
    kept, tried, latest = shortened(target, whole, lambda share: Measurement(curve(share), 0.0))
    assert kept == tried and 0 < kept < 1
    assert latest.kl == curve(kept) == pytest.approx(target, rel=controller.CLOSE)


def test_a_share_that_was_short_enough_is_kept_where_no_other_comes_near_the_target():
    """As where weights in bf16, or choices of experts, change at once: nothing is between too short and too long."""
    shares = []

    def measured_at(share):
        shares.append(share)
        return Measurement(1e-5 if share <= 0.04 else 1e-2, 0.0)

    kept, tried, latest = shortened(1e-3, Measurement(1e-2, 0.0), measured_at)
    assert kept == tried == shares[-1] and latest.kl == 1e-5
    assert kept in shares[:-1] and len(shares) == controller.SHORTENINGS + 1
    assert sorted(shares[:3], reverse=True) == shares[:3] and max(shares[3:]) < shares[1]  # known to be too long


def test_a_share_that_is_lost_in_rounding_is_kept_and_the_next_step_is_longer_than_that():
    shares = []
    kept, tried, latest = shortened(
        1e-8,
        Measurement(1e-4, 0.0),
        lambda share: shares.append(share) or Measurement(1e-4 if share > 0.1 else 0.0, 0.0),
    )
    assert [kept] == [tried] == shares == [pytest.approx(1e-2)] and latest.kl == 0
    size = StepSize(target=1e-8)
    size.too_small(kept)
    assert size.rate == kept * LARGEST_CHANGE


def test_what_stays_too_long_is_given_up_after_a_stated_number_of_measurements():
    shares = []
    kept, tried, _ = shortened(
        1e-3, Measurement(math.nan, 0.0), lambda share: shares.append(share) or Measurement(math.nan, 0.0)
    )
    assert kept == 0 and len(shares) == controller.SHORTENINGS and tried == shares[-1]
    size = StepSize(target=1e-3)
    size.taken_back(tried)
    assert size.rate == pytest.approx(tried / LARGEST_CHANGE) and size.lost == 1


def test_after_a_step_that_was_lost_and_a_cautious_one_the_rate_is_near_what_it_was():
    size = StepSize(target=1e-3)
    for _ in range(5):
        size.measured(Measurement(10 * size.rate**2, 0.0))
    before = size.rate
    for lost in (1, 2):
        size.taken_back(1e-5)
        assert size.rate < 1e-5 * before
        size.measured(Measurement(10 * size.rate**2, 0.0))
        assert size.rate == pytest.approx(before / LARGEST_CHANGE, rel=1e-3), lost
        for _ in range(2):
            size.measured(Measurement(10 * size.rate**2, 0.0))
    # Where the cautious step is lost in rounding, it tells nothing else
    size.taken_back(1e-5)
    size.too_small()
    assert size.rate == pytest.approx(before / LARGEST_CHANGE, rel=1e-3) and size.lost == 0
    for _ in range(2):
        size.measured(Measurement(10 * size.rate**2, 0.0))
    # Nor does one that says nothing
    size.taken_back(1e-5)
    size.not_told()
    assert size.rate == pytest.approx(before / LARGEST_CHANGE, rel=1e-3) and size.lost == 0
    for _ in range(2):
        size.not_told()
    assert size.rate == pytest.approx(before, rel=1e-3)  # and no further
    # Where the cautious step tells that the rate was too large, it is not taken up again
    size.taken_back(1e-5)
    size.measured(Measurement(1e7 * size.rate**2, 0.0))
    assert size.rate < 1e-2 * before


def test_steps_that_say_nothing_lead_back_to_the_rate_that_was_given():
    size = StepSize(target=1e-3)
    size.not_told()
    assert size.rate == 1
    size.taken_back(1e-2)
    for _ in range(5):
        size.not_told()
    assert size.rate == 1 and size.lost == 0


def test_the_state_is_all_there_is_but_the_target():
    size = StepSize(target=1e-3)
    for kl in (1e-2, 3e-3, 5e-4):
        size.measured(Measurement(kl, 0.3 * kl))
    again = StepSize(target=1e-3)
    again.load_state_dict(size.state_dict())
    assert again == size
    other = StepSize(target=1e-2)
    other.load_state_dict(size.state_dict())
    assert other.target == 1e-2
