"""The statistics of `learning.py report`: medians, paired differences with intervals, rank correlations, hulls."""

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
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - level) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


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
    table, draw, means = np.array(differences), np.random.default_rng(0), []
    seeds, problems = table.shape
    for _ in range(0, RESAMPLES, 1_000):  # a thousand at a time, for the memory
        often = draw.multinomial(problems, np.full(problems, 1 / problems), 1_000)
        chosen = draw.integers(seeds, size=(1_000, seeds))
        means += ((often @ table.T)[np.arange(1_000)[:, None], chosen].mean(1) / problems).tolist()
    means.sort()
    tail = (1 - level) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


def bits(right: str, count: int) -> list[int]:
    """Which of so many problems were right, from hexadecimal digits, the first one first."""
    return [int(bit) for bit in f"{int(right, 16):0{count}b}"]


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equals share the mean of theirs."""
    ordered = sorted(range(len(values)), key=lambda place: values[place])
    result = [0.0] * len(values)
    start = 0
    while start < len(ordered):
        end = start
        while end < len(ordered) and values[ordered[end]] == values[ordered[start]]:
            end += 1
        for place in ordered[start:end]:
            result[place] = (start + 1 + end) / 2
        start = end
    return result


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation; None where one side has no spread."""
    first, second = ranks(x), ranks(y)
    a, b = fmean(first), fmean(second)
    both = sum((i - a) * (j - b) for i, j in zip(first, second, strict=True))
    scale = math.sqrt(sum((i - a) ** 2 for i in first) * sum((j - b) ** 2 for j in second))
    return both / scale if scale else None


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
