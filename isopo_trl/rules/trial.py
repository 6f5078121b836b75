"""
A rule of one's own, tried on a few numbers before it is used: whether it has asked for what it uses, whether what it
returns is finite, and whether its degree is the one it says.

The paper's rules, which the kernels know, are left alone: tests hold them against the oracle.
"""

import copy
from dataclasses import replace

import torch

from ..geometry.cost import Needs
from ..geometry.statistics import Statistics
from .rule import Rule


# How Python puts it when a rule computes with a statistic that is `None`
_OF_NONE = (TypeError, AttributeError, AssertionError)
# By how much powers may differ and still be one: a small constant that keeps from dividing by zero is forgiven
_TOLERANCE = 1e-3


def verify_own_rule(rule: Rule) -> None:
    """Raise where a rule that is not the package's own does not do what it says of itself."""
    if rule.kernel_form is not None:
        return
    name = f"rule={rule.name or type(rule).__name__!r}"
    try:
        c = _coefficients(rule, rule.needs)
    except _OF_NONE as error:
        used = _used_unasked(rule)
        if used is None:
            return  # a mistake of another kind, which the first backward pass will show where it is
        asked = ", ".join(f"{name}=True" for name, needed in used._asdict().items() if needed)
        raise ValueError(
            f"{name} uses a statistic that it does not ask for, which is None then: set `needs = Needs({asked})`."
        ) from error
    except Exception:  # as above; or it looks at more than it is tried with
        return
    if not c.isfinite().all():
        empty = c[:-1].isfinite().all()
        raise ValueError(
            f"{name} returns coefficients that are not finite"
            + (
                " for a sequence without a gradient (norms of 0), such as LoRA's A has none in the first step: return "
                "0 there, as in `f.masked_fill(norms.fisher == 0, 0)`."
                if empty
                else f" from statistics that are ({c.tolist()} for five sequences, the last of which has no gradient)."
            )
        )
    # What power of it a direction carries, depends on what it was made of
    degree = None if rule.needs.direction else _found_degree(rule)
    if degree is not None and abs(degree - rule.degree) > _TOLERANCE:
        raise ValueError(
            f"{name} says that a constant factor of the loss is in its coefficients to the power degree="
            f"{rule.degree:g}, but it is there to the power {degree:g}: set `degree = {degree:g}`."
        )


def _coefficients(rule: Rule, needs: Needs, factor: float = 1.0) -> torch.Tensor:
    """Coefficients of five sequences, the last without a gradient, where the loss carries a constant factor."""
    generator = torch.Generator().manual_seed(0)
    V, G = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64) * factor
    V = V * torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64).unsqueeze(1)
    ntk = V @ V.T
    given = Statistics()
    if needs.overlap:
        given.overlap, given.sample_norm = G @ V.T, G.square().sum(1)
    if needs.norm:
        given.norm = ntk.diagonal().clone()
    if needs.ntk:
        given.ntk = ntk
    if needs.direction:
        given.projection = V @ torch.randn(7, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 1.0], dtype=torch.float64)
    return copy.deepcopy(rule).coefficients(given, advantages, None).c


def _used_unasked(rule: Rule) -> Needs | None:
    """What a rule has to ask for as well, to be computed at all; `None` where that is not what is wrong."""
    more = [rule.needs._replace(**{name: True}) for name in Needs._fields]
    both = rule.needs._replace(overlap=True, norm=True)
    for needs in (*more, both, Needs(True, True, True, rule.needs.direction), Needs(True, True, True, True)):
        other = copy.deepcopy(rule)
        other.__dict__.pop("needs", None)  # where that is cached
        # It goes by what it asks for
        object.__setattr__(other, "__class__", type(type(rule).__name__, (type(rule),), {"needs": needs}))
        try:
            _coefficients(other, needs)
        except Exception:
            continue
        return needs
    return None


def _found_degree(rule: Rule) -> float | None:
    """To which power a constant factor of the loss is in the coefficients; `None` if it is to none."""
    try:
        paper = replace(rule, scale="paper")
        one, two, four = (_coefficients(paper, rule.needs, factor)[:-1] for factor in (1.0, 2.0, 4.0))
    except Exception:  # it has no such scale
        return None
    powers = torch.cat([(two / one).log2(), (four / one).log2() / 2])[(one != 0).repeat(2)]
    if not len(powers) or not powers.max() - powers.min() < _TOLERANCE:
        return None
    return round(powers.mean().item(), 3)
