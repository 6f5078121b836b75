"""The statistics of `learning.py report`, against numpy, enumeration and definitions."""

import itertools

import numpy as np
import pytest


@pytest.fixture(scope="module")
def report_statistics():
    import report_statistics

    return report_statistics


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.3, -0.2, 0.5, 0.9]])
def test_the_bootstrap_is_that_of_all_resamples(report_statistics, values):
    """Every resample is equally likely, and there are few enough to list."""
    means = [np.mean(resample) for resample in itertools.product(values, repeat=len(values))]
    for level in (0.5, 0.8):
        low, high = report_statistics.bootstrap_interval(values, level)
        # Shares of a discrete distribution below and above, whose steps the interval may stand on
        tail = (1 - level) / 2
        assert np.mean(np.less(means, low - 1e-9)) <= tail + 0.02 <= np.mean(np.less_equal(means, low + 1e-9)) + 0.04
        assert np.mean(np.greater(means, high + 1e-9)) <= tail + 0.02
        assert low < np.mean(values) < high
    assert report_statistics.bootstrap_interval(values[:2]) is None


def test_the_interval_over_seeds_and_problems_has_both_in_it(report_statistics):
    problems = [1.0, 0.0, 0.0, -1.0] * 100
    of_problems = report_statistics.interval_over_problems(problems)
    half = 1.96 * np.std(problems, ddof=1) / np.sqrt(len(problems))
    assert of_problems == pytest.approx((-half, half))
    # Seeds that agree: problems are all there is to it
    assert report_statistics.crossed_interval([problems] * 3) == pytest.approx(of_problems, abs=0.01)
    # Problems that agree: what seeds alone give
    seeds = [0.1, 0.5, 0.2, 0.9, 0.4]
    found = report_statistics.crossed_interval([[value] * 50 for value in seeds])
    assert found == pytest.approx(report_statistics.bootstrap_interval(seeds), abs=0.03)
    # Both: the variances add up
    low, high = report_statistics.crossed_interval([[x + y for y in problems] for x in seeds])
    assert (low + high) / 2 == pytest.approx(np.mean(seeds), abs=0.03)
    assert (high - low) / 2 == pytest.approx(np.hypot((found[1] - found[0]) / 2, half), rel=0.1)
    assert report_statistics.crossed_interval([problems] * 2) is None


def test_rank_correlation_is_that_of_ranks_with_ties_shared(report_statistics):
    x, y = [3.0, 1.0, 2.0, 2.0, 5.0], [10.0, 0.0, 7.0, 3.0, 3.0]
    expected = np.corrcoef([4, 1, 2.5, 2.5, 5], [5, 1, 4, 2.5, 2.5])[0, 1]
    assert report_statistics.spearman(x, y) == pytest.approx(expected)
    assert report_statistics.spearman(x, [1.0] * 5) is None
