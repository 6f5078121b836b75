"""The power rules: their coefficients against the formula in plain floats (`oracle.coefficients`)."""

import math
from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules import PowerRule, make_rule
from isopo_trl.rules.rule import KernelForm
from tests import oracle
from tests.rules.gradients import ADVANTAGES, HISTORY, POWERS, computed, example, rule_of


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("regularization", [None, 0.3, 10.0])
@pytest.mark.parametrize("rule", [*oracle.EXPONENTS, (0.5, -1.0, -0.5), (0.0, 1.0, 0.0), (-2.0, 0.0, 1.0)], ids=str)
def test_coefficients_are_the_formula(rule, regularization, scale, history):
    if rule == "none":
        regularization = None
    V, G = example()
    settings = {"regularization": regularization, "scale": scale}
    result = computed(V, G, ADVANTAGES, rule_of(rule, **settings), history)
    expected = oracle.coefficients(V, G, ADVANTAGES, rule, history=history, **settings)
    torch.testing.assert_close(result.c, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", [*POWERS, (0.5, -1.0, -0.5)], ids=str)
def test_keep_small_is_its_formula(rule, scale, history):
    V, G = example()
    settings = {"regularization": 0.3, "scale": scale, "keep_small": True}
    result = computed(V, G, ADVANTAGES, rule_of(rule, **settings), history)
    expected = oracle.coefficients(V, G, ADVANTAGES, rule, history=history, **settings)
    torch.testing.assert_close(result.c, expected, rtol=1e-10, atol=1e-12)


def test_fisher_by_hand():
    # F = (2, 6), N unused: f = 1 / F, times E[F] / E[F f] = 4 / 1
    overlap = torch.tensor([[2.0, 6.0], [2.0, -6.0]])
    given = Statistics(overlap=overlap, sample_norm=torch.tensor([1.5, 0.5]))
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    relative = make_rule("fisher").coefficients(given, advantages, None)
    assert relative.c.tolist() == pytest.approx([2.0, -4 / 6])
    assert relative.fisher.tolist() == pytest.approx([2.0, 6.0])
    assert relative.raw.tolist() == pytest.approx([1 / 2, 1 / 6])
    paper = make_rule("fisher", scale="paper").coefficients(given, advantages, None)
    assert paper.c.tolist() == pytest.approx([1 / 2, -1 / 6])
    # lambda = 1: reg2(F) = sqrt(F^2 + E[F^2]) with E[F^2] = 20
    reg = make_rule("fisher", regularization=1, scale="paper").coefficients(given, advantages, None)
    assert reg.c.tolist() == pytest.approx([1 / 24**0.5, -1 / 56**0.5])


@pytest.mark.parametrize("rule", oracle.EXPONENTS)
def test_what_is_recorded_is_what_the_rule_used(rule):
    V, G = example()
    result = computed(V, G, ADVANTAGES, make_rule(rule, scale="paper"))
    needs = make_rule(rule).needs
    F = [(sum((g @ v) ** 2 for g in G) / sum(g @ g for g in G)).sqrt().item() for v in V]
    N = [v.norm().item() for v in V]
    assert result.fisher.tolist() == pytest.approx(F) if needs.overlap else result.fisher is None
    assert result.norm.tolist() == pytest.approx(N) if needs.norm else result.norm is None
    if rule == "none":
        assert result.raw is None
    else:
        p, q, r = oracle.EXPONENTS[rule]
        assert result.raw.tolist() == pytest.approx([f**p * n**q * (f / n) ** r for f, n in zip(F, N, strict=True)])


@pytest.mark.parametrize("scale", ["relative", "paper"])
def test_none_leaves_the_advantages_alone(scale):
    V, G = example()
    assert torch.equal(computed(V, G, ADVANTAGES, make_rule("none", scale=scale)).c, ADVANTAGES)
    assert torch.equal(
        computed(V, G, ADVANTAGES, make_rule("none", scale=scale), HISTORY, loss_scale=0.1).c, ADVANTAGES
    )


# Settings


def test_the_rules_are_the_table():
    assert {rule: make_rule(rule).exponents for rule in oracle.EXPONENTS} == oracle.EXPONENTS
    assert all(make_rule(rule).regularization == 0 for rule in oracle.EXPONENTS)
    assert make_rule("fisher", fisher_power=0.0, norm_power=-2).exponents == (0, -2, 0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fisher_power": math.inf}, "fisher_power=inf"),
        ({"norm_power": math.nan}, "norm_power=nan"),
        ({"relative_power": -math.inf}, "relative_power=-inf"),
        ({"regularization": -0.1}, "regularization=-0.1"),
        ({"regularization": math.nan}, "regularization=nan"),
        ({"regularization": math.inf}, "regularization=inf"),
        ({"rule": "none", "regularization": 0.5}, "regularization=0.5"),
        ({"keep_small": True}, "keep_small=True"),
        ({"keep_small": True, "regularization": 0.0}, "keep_small=True"),
        ({"rule": "none", "keep_small": True, "regularization": 1.0}, "keep_small=True"),
        ({"keep_small": True, "regularization": 1.0, "fisher_power": 0.0}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError) as error:
        make_rule(**{"rule": "fisher", **settings})
    assert named in str(error.value)


@dataclass(frozen=True, kw_only=True)
class OtherFormula(PowerRule):
    """The same settings, another formula."""

    def multiplier(self, norms, mean_squares):
        return 2 * super().multiplier(norms, mean_squares)


def test_the_kernels_are_told_the_formula_but_not_of_a_subclass_that_may_have_changed_it():
    settings = {"norm_power": -1.0, "relative_power": -2.0, "regularization": 0.3, "keep_small": True}
    assert PowerRule(**settings).kernel_form == KernelForm(0.3, (0.0, -1.0, -2.0), True)
    assert OtherFormula(**settings).kernel_form is None
