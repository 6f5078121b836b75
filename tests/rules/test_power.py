"""The power rules: their coefficients against the formula in plain floats (`oracle.coefficients`)."""

import math
from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules import PowerRule, make_rule
from isopo_trl.rules.rule import KernelForm
from isopo_trl.rules.running import RunningStatistics
from tests import oracle
from tests.rules.gradients import ADVANTAGES, HISTORY, POWERS, computed, example, rule_of


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize(("regularization", "keep_small"), [(None, False), (0.0, False), (10.0, False), (0.3, True)])
@pytest.mark.parametrize("rule", [*POWERS, (0.5, -1.0, -0.5), (-2.0, 0.0, 1.0)], ids=str)
def test_coefficients_are_the_formula(rule, regularization, keep_small, scale, history):
    V, G = example()
    settings = {"regularization": regularization, "scale": scale, "keep_small": keep_small}
    result = computed(V, G, ADVANTAGES, rule_of(rule, **settings), history)
    expected = oracle.coefficients(V, G, ADVANTAGES, rule, history=history, **settings)
    torch.testing.assert_close(result.c, expected, rtol=1e-10, atol=1e-12)


def test_fisher_by_hand():
    # F = (2, 6), N unused: f = 1 / F, times E[F] / E[F f] = 4 / 1
    overlap = torch.tensor([[2.0, 6.0], [2.0, -6.0]])
    given = Statistics(overlap=overlap, sample_norm=torch.tensor([1.5, 0.5]))
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    relative = make_rule("fisher", regularization=0).coefficients(given, advantages, None)
    assert relative.c.tolist() == pytest.approx([2.0, -4 / 6])
    paper = make_rule("fisher", regularization=0, scale="paper").coefficients(given, advantages, None)
    assert paper.c.tolist() == pytest.approx([1 / 2, -1 / 6])
    # lambda = 1: reg2(F) = sqrt(F^2 + E[F^2]) with E[F^2] = 20
    reg = make_rule("fisher", regularization=1, scale="paper").coefficients(given, advantages, None)
    assert reg.c.tolist() == pytest.approx([1 / 24**0.5, -1 / 56**0.5])


@pytest.mark.parametrize("rule", POWERS)
def test_what_is_recorded_is_what_the_rule_used(rule):
    V, G = example()
    result = computed(V, G, ADVANTAGES, make_rule(rule, regularization=0, scale="paper"))
    needs, (p, q, r) = make_rule(rule).needs, oracle.EXPONENTS[rule]
    F = [(sum((g @ v) ** 2 for g in G) / sum(g @ g for g in G)).sqrt().item() for v in V]
    N = [v.norm().item() for v in V]
    assert result.fisher.tolist() == pytest.approx(F) if needs.overlap else result.fisher is None
    assert result.norm.tolist() == pytest.approx(N) if needs.norm else result.norm is None
    assert result.raw.tolist() == pytest.approx([f**p * n**q * (f / n) ** r for f, n in zip(F, N, strict=True)])


@pytest.mark.parametrize("scale", ["relative", "paper"])
def test_none_leaves_the_advantages_alone(scale):
    V, G = example()
    for history in (None, HISTORY):
        result = computed(V, G, ADVANTAGES, make_rule("none", scale=scale), history, loss_scale=0.1)
        assert torch.equal(result.c, ADVANTAGES) and result.raw is None


# Lambda bounds the multiplier


def heavy_tailed(m, generator):
    """Norms of m sequences, over many decades, some of them with one that is far from the others."""
    draw = torch.rand(m + 3, generator=generator, dtype=torch.float64)
    x = 10 ** (6 * (draw[3] - 0.5) + 8 * draw[0] * (draw[3:] - 0.5))
    if draw[1] < 0.5:
        x[0] *= 1e-9 if draw[2] < 0.5 else 1e6
    return x


@pytest.mark.parametrize("rule", ["euclidean", "fig4", (-3.0, 0.0, -1.0)], ids=str)
def test_no_multiplier_exceeds_the_bound_that_lambda_gives(rule):
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for trial in range(20):
        m, lam = 1 + trial % 16, 10.0 ** (trial % 5 - 3)
        made = rule_of(rule, regularization=lam)
        running = RunningStatistics(1, [0.0, 0.5, 0.9][trial % 3], made, torch.device("cpu"))
        past = {name: [] for name, e in zip(("fisher", "norm", "relative"), made.exponents, strict=True) if e}
        for _ in range(4):
            F, N = heavy_tailed(m, generator), heavy_tailed(m, generator)
            given = Statistics(overlap=F.unsqueeze(0), sample_norm=torch.ones(1), norm=N.square())
            ledger, history = running.open(torch.ones(m)), running.expectations(0)
            result = made.coefficients(given, ledger.advantages, history)
            bound, highest = 1.0, 1.0
            alive = ~result.noise  # the others are rounding noise beside them, or beside the history
            for (name, values), e in zip(past.items(), [e for e in made.exponents if e], strict=True):
                if not alive.any():
                    continue
                x = {"fisher": F, "norm": N, "relative": F / N}[name][alive]
                place = ("fisher", "norm", "relative").index(name)
                mean = x.square().mean() if history is None else history.mean_square[place]
                # The longest norm, and the highest mean square, that the scale is made of
                own = [(x.square().max().item(), mean.item())] if history is None else values
                long, high = max(long for long, _ in own) / mean, max(high for _, high in own) / mean
                bound *= ((long + lam * high) / lam) ** (-e / 2)
                highest *= (lam * mean) ** (e / 2)
                values.append((x.square().max().item(), mean.item()))
            if history is None:
                assert bound <= (1 + m / lam) ** (-sum(made.exponents) / 2) * (1 + 1e-9)
            assert (result.raw[alive] <= highest * (1 + 1e-9)).all()
            assert (result.c[alive] <= bound * (1 + 1e-9)).all()
            largest = max(largest, (result.c.max() / bound).item())
            ledger.record(0, result)
            running.add(ledger, [True])
            running.step()
    assert largest > 0.5  # it is no idle bound


# Settings


def test_the_rules_are_the_table():
    assert {rule: make_rule(rule).exponents for rule in oracle.EXPONENTS} == oracle.EXPONENTS
    assert make_rule("fisher", fisher_power=0.0, norm_power=-2).exponents == (0, -2, 0)


def test_lambda_is_a_tenth_wherever_there_is_something_to_regularise_and_one_where_that_is_steep():
    assert {rule: make_rule(rule).regularization for rule in POWERS} == dict.fromkeys(POWERS, 0.1) | {"fig4": 1}
    assert make_rule("none", norm_power=-1, relative_power=-2).regularization == 1  # whatever it is called
    assert make_rule("fisher", fisher_power=2.5).regularization == make_rule("fig4", norm_power=1).regularization == 1
    assert make_rule("fig4", norm_power=0).regularization == 0.1
    assert make_rule("none").regularization == make_rule("fisher", fisher_power=0.0).regularization == 0
    assert all(make_rule(rule, regularization=0).regularization == 0 for rule in oracle.EXPONENTS)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fisher_power": math.inf}, "fisher_power=inf"),
        ({"norm_power": math.nan}, "norm_power=nan"),
        ({"regularization": -0.1}, "regularization=-0.1"),
        ({"regularization": math.nan}, "regularization=nan"),
        ({"rule": "none", "regularization": 0.5}, "regularization=0.5"),
        ({"regularization": 1e-30}, "set it to 0.*at least 1e-12"),
        ({"regularization": 1e30}, "rule='none'"),
        ({"keep_small": True, "regularization": 0.0}, "keep_small=True"),
        ({"keep_small": True, "regularization": 1.0, "fisher_power": 0.0}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        make_rule(**{"rule": "fisher", **settings})


@dataclass(frozen=True, kw_only=True)
class OtherFormula(PowerRule):
    """The same settings, maybe another formula."""


def test_the_kernels_are_told_the_formula_but_not_of_a_subclass_that_may_have_changed_it():
    settings = {"norm_power": -1.0, "relative_power": -2.0, "regularization": 0.3, "keep_small": True}
    assert PowerRule(**settings).kernel_form == KernelForm(0.3, (0.0, -1.0, -2.0), True)
    assert OtherFormula(**settings).kernel_form is None
