"""Gradients of a few sequences, and the coefficients that a rule makes of their statistics."""

import torch

from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules import Expectations, make_rule
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle


POWERS = [rule for rule in oracle.EXPONENTS if rule != "none"]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5], dtype=torch.float64)
HISTORY = {"fisher^2": 3.0, "norm^2": 40.0, "relative^2": 0.05, "fx": 0.7, "x": 1.9}


def example(m=5, n=6, size=12, seed=0):
    """Gradients of m sequences and n sampled positions, of different lengths: `V` `[m, size]`, `G` `[n, size]`."""
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(m, size, generator=generator, dtype=torch.float64) * torch.arange(1.0, m + 1).unsqueeze(1)
    return V, torch.randn(n, size, generator=generator, dtype=torch.float64)


def statistics(V, G, D=None):
    """What the layers would hand over, from the gradients themselves."""
    overlap = torch.stack([torch.stack([sum(x * y for x, y in zip(g, v, strict=True)) for v in V]) for g in G])
    return Statistics(
        overlap=overlap,
        sample_norm=torch.stack([sum(x * x for x in g) for g in G]),
        norm=torch.stack([sum(x * x for x in v) for v in V]),
        ntk=torch.stack([torch.stack([sum(x * y for x, y in zip(v, w, strict=True)) for w in V]) for v in V]),
        projection=None if D is None else torch.stack([sum(x * y for x, y in zip(v, D, strict=True)) for v in V]),
    )


def computed(V, G, A, rule, history=None, D=None, **kwargs):
    history = None if history is None else given_history(history)
    return rule.coefficients(statistics(V, G, D), A, history, **kwargs)


def given_history(history):
    """Running means by name, as a rule is given them."""
    means = torch.tensor([history[name] for name in EXPECTATIONS[:3]], dtype=torch.float64)
    scale = history["x"] / history["fx"] if history["fx"] else 0.0
    multiplier = history["fx"] / history["x"] if history["x"] else 0.0
    return Expectations(means, *torch.tensor([scale, multiplier], dtype=torch.float64))


def rule_of(name, **settings):
    """A rule, also from a triple of exponents."""
    if isinstance(name, tuple):
        p, q, r = name
        return make_rule("none", fisher_power=p, norm_power=q, relative_power=r, **settings)
    return make_rule(name, **settings)
