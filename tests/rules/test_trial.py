"""A rule of one's own that does not do what it says is refused by name, before it is used, with what to change."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.rules import Coefficients, Needs, NonInteracting, PowerRule, Rule, make_rule, rule_names


@dataclass(frozen=True, kw_only=True)
class Own(NonInteracting):
    """`f = 1 / F`, in a form that can be spoilt."""

    needs = Needs(overlap=True)
    degree = -1.0

    def multiplier(self, norms, mean_squares):
        return (1 / norms.fisher).masked_fill(norms.fisher == 0, 0)


class Plain(Own):
    degree = 0.0


class Squared(Own):
    degree = -1

    def multiplier(self, norms, mean_squares):
        return super().multiplier(norms, mean_squares) ** 2


class Unasked(Own):
    def multiplier(self, norms, mean_squares):
        return super().multiplier(norms, mean_squares) * norms.norm


class UnaskedMean(Own):
    @property
    def needs(self):
        return Needs(norm=True)

    def multiplier(self, norms, mean_squares):
        return norms.norm / mean_squares["fisher"].sqrt()


class UnaskedKernel(Rule):
    needs, degree = Needs(overlap=True), 2.0

    def coefficients(self, statistics, advantages, history, loss_scale=1.0):
        return Coefficients(c=statistics.ntk @ advantages)


class Unmasked(Own):
    def multiplier(self, norms, mean_squares):
        return 1 / norms.fisher


class Root(Own):
    def multiplier(self, norms, mean_squares):
        return (norms.fisher - mean_squares["fisher"].sqrt()).sqrt()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Plain, "degree=0, but it is there to the power -1: set `degree = -1`"),
        (Squared, "degree=-1, but it is there to the power -2: set `degree = -2`"),
        (Unasked, r"does not ask for.*set `needs = Needs\(overlap=True, norm=True\)`"),
        (UnaskedMean, r"does not ask for.*set `needs = Needs\(overlap=True, norm=True\)`"),
        (UnaskedKernel, r"does not ask for.*set `needs = Needs\(overlap=True, ntk=True\)`"),
        (Unmasked, r"not finite for a sequence without a gradient.*return 0 there"),
        (Root, r"not finite from statistics that are \(\[.*nan"),
    ],
)
def test_a_rule_that_is_not_what_it_says_is_refused_by_its_name_with_what_to_change(kind, message):
    for rule, name in ((kind(name="mine"), "mine"), (kind(scale="relative"), kind.__name__)):
        with pytest.raises(ValueError, match=f"rule='{name}' .*{message}"):
            ISOPO(nn.Linear(2, 2), rule)


class Absolute(Own):
    """Regularised by a constant: no power of a factor is in it, and no degree is wrong."""

    def multiplier(self, norms, mean_squares):
        return 1 / (norms.fisher + 0.1)


class Guarded(Own):
    def multiplier(self, norms, mean_squares):
        return norms.fisher / (norms.fisher**2 + 1e-12)


class Doubled(PowerRule):
    """A formula of the package's, changed: its degree stays."""

    def multiplier(self, norms, mean_squares):
        return 2 * super().multiplier(norms, mean_squares)


class Solved(Rule):
    """Cannot be computed where a sequence has no gradient: that is not what is tried here."""

    needs, degree = Needs(ntk=True), -2.0

    def coefficients(self, statistics, advantages, history, loss_scale=1.0):
        return Coefficients(c=torch.linalg.solve(statistics.ntk, advantages))


class Keeps(Own):
    """Keeps what it has seen, which a trial is not to add to."""

    @property
    def seen(self):
        return self.__dict__.setdefault("list", [])

    def multiplier(self, norms, mean_squares):
        self.seen.append(norms)
        return super().multiplier(norms, mean_squares)


def test_rules_that_are_what_they_say_are_taken():
    kinds = [Own, Absolute, Guarded, Solved, Keeps]
    rules = [*(kind() for kind in kinds), Doubled(fisher_power=-0.5, norm_power=0.25), *map(make_rule, rule_names())]
    for rule in rules:
        ISOPO(nn.Linear(2, 2), rule)
        assert not getattr(rule, "seen", [])
