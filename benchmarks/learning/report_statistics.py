"""The statistics of `learning.py report`: medians, paired differences with intervals, rank correlations, hulls."""

import functools
import math
import random
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np


RESAMPLES = 10_000
# Of fewer than so many seeds, resampling says next to nothing
FEWEST = 3


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Interval of the mean by resampling the values; None for fewer than `FEWEST`."""
    if len(values) < FEWEST:
        return None
    chosen, often = _draws(len(values))
    means = np.repeat([fmean(sample) for sample in np.array(values)[chosen].tolist()], often)
    means.sort()
    tail = (1 - level) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


@functools.cache
def _draws(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of so many values in each resample, `[samples, count]`, and how many resamples are that one."""
    chosen = random.Random(0).choices(range(count), k=RESAMPLES * count)
    return np.unique(np.sort(np.reshape(chosen, (RESAMPLES, count))), axis=0, return_counts=True)


@functools.cache
def _crossed_draws(seeds: int, problems: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """How often each problem is drawn, `[resamples, problems]`, and which seeds are, `[resamples, seeds]`."""
    draw, draws = np.random.default_rng(0), []
    for _ in range(0, RESAMPLES, 1_000):  # a thousand at a time, for the memory
        often = draw.multinomial(problems, np.full(problems, 1 / problems), 1_000)
        draws.append((often.astype(np.int16), draw.integers(seeds, size=(1_000, seeds))))
    return draws


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ordered values, by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def interval_over_problems(differences: Sequence[float]) -> tuple[float, float]:
    """Interval of the mean of one difference per problem: what another draw of as many problems could have given."""
    mean = fmean(differences)
    variance = sum((d - mean) ** 2 for d in differences) / max(1, len(differences) - 1)
    half = 1.96 * math.sqrt(variance / len(differences))
    return mean - half, mean + half


def crossed_interval(differences: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float] | None:
    """
    Interval of the mean of differences `[seeds][problems]`, by resampling both: what other seeds and another draw of
    problems could have given. None for fewer seeds than `FEWEST`.
    """
    if len(differences) < FEWEST:
        return None
    table = np.array(differences, dtype=float)
    seeds, problems = table.shape
    means = []
    for often, chosen in _crossed_draws(seeds, problems):
        means += (np.take_along_axis(often @ table.T, chosen, 1).mean(1) / problems).tolist()
    means.sort()
    tail = (1 - level) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


def bits(right: str, count: int) -> list[int]:
    """Which of so many problems were right, from hexadecimal digits, the first one first."""
    return [int(bit) for bit in f"{int(right, 16):0{count}b}"]


def ranks(values: Sequence[float]) -> np.ndarray:
    """From 1; equals share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation; None where one side has no spread."""
    first, second = (of_side - of_side.mean() for of_side in (ranks(x), ranks(y)))
    scale = math.sqrt((first @ first) * (second @ second))
    return float(first @ second) / scale if scale else None


def hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the convex hull, counter-clockwise; the points themselves where there are fewer than three."""
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered

    def half(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        corners: list[tuple[float, float]] = []
        for x, y in points:
            while len(corners) > 1:
                (ax, ay), (bx, by) = corners[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                corners.pop()
            corners.append((x, y))
        return corners[:-1]

    return half(ordered) + half(ordered[::-1])


__all__ = [
    "bits",
    "bootstrap_interval",
    "crossed_interval",
    "hull",
    "interval_over_problems",
    "median",
    "quantile",
    "ranks",
    "spearman",
]
