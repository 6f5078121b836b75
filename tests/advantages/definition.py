"""The transforms of advantages by plain loops over completions, in Python's own numbers."""

import math
import statistics


def groups(values, group, masked=()):
    """The completions of each prompt, by their places; those without a reward are left out, and those `masked`."""
    for first in range(0, len(values), group):
        yield [i for i in range(first, first + group) if values[i] is not None and i not in masked]


def grpo(rewards, group, scale="group"):
    """TRL's advantages."""
    given = [r for r in rewards if r is not None]
    result = [0.0] * len(rewards)
    for places in groups(rewards, group):
        own = [rewards[i] for i in places]
        for i in places:
            deviation = 1.0 if scale == "none" else statistics.stdev(own if scale == "group" else given) + 1e-4
            result[i] = (rewards[i] - statistics.fmean(own)) / deviation
    return result


def dcpo(visits):
    """Advantages at the last of a prompt's `visits`, lists of rewards; the running numbers are made anew."""
    M = S = 0.0
    for i, rewards in enumerate(visits, 1):
        n, m, s = i - 1, statistics.fmean(rewards), statistics.stdev(rewards)
        S = math.sqrt((n * S**2 + s**2 + (n / i) * (m - M) ** 2) / i)
        M = (n * M + m) / i
    result = []
    for R in visits[-1]:
        a = (R - m) / s if s > 1e-12 else 0.0
        T = (R - M) / S if S > 1e-12 else 0.0
        x, y = ((i - 1) * a + T) / i, (a + (i - 1) * T) / i
        result.append(min(x, y, key=abs))
    return result


def pacs(rewards, log_ratios, group, beta):
    result = [0.0] * len(rewards)
    for places in groups(rewards, group):
        if len(places) < 2:
            continue

        def others(values, i, places=places):
            return statistics.fmean(values[j] for j in places if j != i)

        psi = {i: beta * log_ratios[i] for i in places}
        e = {}
        for i in places:
            n = sum(rewards[j] == rewards[i] for j in places)
            c = len(places) / (2 * n) if n < len(places) else 1.0
            e[i] = c * (rewards[i] - 1 / (1 + math.exp(-(psi[i] - others(psi, i)))))
        for i in places:
            result[i] = beta * (e[i] - others(e, i))
    return result


def empg(rewards, advantages, entropies, k, masked=()):
    places = [i for i, r in enumerate(rewards) if r is not None and i not in masked]
    if not places:
        return advantages
    low, high = min(entropies[i] for i in places), max(entropies[i] for i in places)
    g = {i: math.exp(-k * (entropies[i] - low) / (high - low or 1)) for i in places}
    mean = statistics.fmean(g.values())
    modulated = {i: advantages[i] * g[i] / mean for i in places}
    middle = statistics.fmean(modulated.values())
    return [modulated[i] - middle if i in modulated else advantages[i] for i in range(len(rewards))]


def g2rl(rewards, directions, group, strength, masked=()):
    """Rewards."""
    result = list(rewards)
    for places in groups(rewards, group, masked):
        if len(places) < 2:
            continue

        def cosine(i, j):
            dot, *norms = (
                sum(a * b for a, b in zip(directions[x], directions[y], strict=True))
                for x, y in ((i, j), (i, i), (j, j))
            )
            return dot / math.sqrt(norms[0] * norms[1])

        nu = {}
        for i in places:
            others = [j for j in places if j != i]
            total = sum(math.exp(rewards[j]) for j in others)
            nu[i] = max(1 - sum(math.exp(rewards[j]) / total * cosine(i, j) ** 2 for j in others), 0)
        low, high = min(nu.values()), max(nu.values())
        for i in places:
            scaled = (nu[i] - low) / (high - low) if high - low > 1e-6 else 0
            result[i] = max(-3, min(3, rewards[i] * (1 + strength * rewards[i] * scaled)))
    return result


def cppo(advantages, group, share):
    result = list(advantages)
    for first in range(0, len(advantages), group):
        places = sorted(range(first, first + group), key=lambda i: -abs(advantages[i]))
        pruned = math.floor(round(share * group, 9))
        for i in places[group - pruned :]:
            result[i] = 0.0
    return result


def simpletir(rewards, advantages, void, group, least):
    result = [0.0 if void[i] else a for i, a in enumerate(advantages)]
    for places in groups(rewards, group):
        if len(places) < 2 or statistics.stdev(rewards[i] for i in places) < least:
            for i in places:
                result[i] = 0.0
    return result


def gtpo(rewards, entropies, group, strength, threshold, masked=()):
    result = grpo(rewards, group, "none")
    for i, (R, H) in enumerate(zip(rewards, entropies, strict=True)):
        if R is not None and i not in masked:
            result[i] = 0.0 if H > threshold else result[i] - strength * H
    return result
