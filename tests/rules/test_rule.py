"""What holds for the coefficients of every rule: sequences without a gradient, broken ones, invariances."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from isopo_trl.geometry.cost import Needs
from isopo_trl.rules import PowerRule, Rule, interacting, make_rule, non_interacting
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle
from tests.rules.gradients import (
    ADVANTAGES,
    HISTORY,
    POWERS,
    computed,
    example,
    given_history,
    rule_of,
    statistics,
)


RULES = [*POWERS, "interacting"]
each_rule = pytest.mark.parametrize("rule", RULES)
each_scale = pytest.mark.parametrize("scale", ["relative", "paper"])
each_history = pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])


@pytest.mark.parametrize(
    ("rule", "needs"),
    [
        ("fisher", Needs(overlap=True)),
        ("npg", Needs(overlap=True, norm=True)),
        ("fig4", Needs(overlap=True, norm=True)),
        ("euclidean", Needs(norm=True)),
        ("interacting", Needs(ntk=True)),
        ((0.0, 0.0, 0.0), Needs()),
        ((-1.0, -1.0, 0.0), Needs(overlap=True, norm=True)),
    ],
    ids=str,
)
def test_a_rule_asks_for_the_statistics_it_uses_and_no_others(rule, needs):
    assert rule_of(rule).needs == needs


def of(rule, regularization):
    """The lambda to try a rule with: the interacting one has none of 0."""
    return 0.3 if rule == "interacting" and regularization == 0 else regularization


# Sequences without a gradient, and broken ones


@pytest.mark.parametrize("regularization", [None, 0.0])
@each_scale
@each_rule
def test_a_sequence_without_a_gradient_or_a_broken_one_leaves_the_others_right(rule, scale, regularization):
    V, G = example()
    V[1] = 0
    rule = make_rule(rule, scale=scale, regularization=of(rule, regularization))
    others = [0, 2, 4]
    expected = oracle.coefficients(
        V[others], G, ADVANTAGES[others], rule.name, regularization=rule.regularization, scale=scale
    )
    for value in (math.nan, math.inf):
        given = statistics(V, G)
        given.overlap[:, 3] = given.norm[3] = given.ntk[3] = given.ntk[:, 3] = value
        result = rule.coefficients(given, ADVANTAGES, None)
        torch.testing.assert_close(result.c[others], expected, rtol=1e-10, atol=0)
        assert torch.isfinite(result.c[1])
        if rule.regularization == 0 or rule.needs.ntk:
            assert result.c[1] == 0


@each_history
@each_scale
@each_rule
def test_noise_is_no_gradient(rule, scale, history):
    V, G = example()
    made = make_rule(rule, scale=scale)
    V[1] *= 1e-16
    result = computed(V, G, ADVANTAGES, made, history, loss_scale=0.5)
    assert result.noise.tolist() == [False, True, False, False, False]
    V[1] = 0
    assert torch.equal(result.c, computed(V, G, ADVANTAGES, made, history, loss_scale=0.5).c)
    # All sequences may be noise beside the history, but not beside each other
    made = make_rule(rule, scale=scale, regularization=1 if rule == "interacting" else 0)
    small = computed(1e-16 * V[[0, 2]], G, ADVANTAGES[[0, 2]], made, history)
    assert small.noise.tolist() == [history is not None] * 2
    assert history is None or not small.c.any()


# How much smaller a gradient may be than the others and still be one
SMALL = [(1e-3, torch.float64), (1e-12, torch.float64), (1e-4, torch.float32)]


@each_history
@pytest.mark.parametrize(("size", "dtype"), SMALL)
@each_rule
def test_nothing_above_the_noise_changes_by_a_bit(rule, size, dtype, history, monkeypatch):
    V, G = example()
    V[1], V[3] = size * V[4], 2 * size * V[4]  # of the largest
    given = statistics(V, G)
    for name in ("overlap", "sample_norm", "norm", "ntk"):
        setattr(given, name, getattr(given, name).to(dtype))
    made = make_rule(rule, regularization=1e-3)
    expectations = None if history is None else given_history(history)
    result = made.coefficients(given, ADVANTAGES, expectations)
    assert not result.noise.any()
    if dtype == torch.float64:
        expected = oracle.coefficients(V, G, ADVANTAGES, rule, regularization=1e-3, history=history)
        torch.testing.assert_close(result.c, expected, rtol=1e-9, atol=0)
    for module in (interacting, non_interacting):
        monkeypatch.setattr(module, "below_noise", lambda x, *_: torch.zeros_like(x, dtype=torch.bool))
    for one, other in zip(result, made.coefficients(given, ADVANTAGES, expectations), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("history", [None, dict.fromkeys(EXPECTATIONS, 0.0)], ids=["first step", "zero history"])
@each_scale
@pytest.mark.parametrize(
    ("rule", "keep_small"), [*((rule, False) for rule in RULES), *((rule, True) for rule in POWERS)]
)
def test_a_layer_without_any_gradient_gets_finite_coefficients(rule, scale, history, keep_small):
    settings = {"regularization": 0.3, "keep_small": True} if keep_small else {}
    made = make_rule(rule, scale=scale, **settings)
    result = computed(torch.zeros(5, 4), torch.zeros(3, 4), ADVANTAGES, made, history)
    # Without a gradient at any sample the Fisher norm is not known; there is nothing to multiply either
    unknown = scale == "relative" and made.needs.overlap
    assert result.c.tolist() == (ADVANTAGES.tolist() if unknown else [0] * 5)


# Invariances


@each_history
@each_scale
@each_rule
def test_signs_may_stand_in_the_advantages_or_in_the_gradients(rule, scale, history):
    V, G = example()
    sign = torch.where(ADVANTAGES < 0, -1.0, 1.0).unsqueeze(1)
    signs_of_samples = torch.tensor([1.0, -1, -1, 1, 1, -1]).unsqueeze(1)
    rule = make_rule(rule, scale=scale)
    in_advantages = computed(V, G, ADVANTAGES, rule, history).c @ V
    in_gradients = computed(V * sign, G * signs_of_samples, ADVANTAGES.abs(), rule, history).c @ (V * sign)
    torch.testing.assert_close(in_gradients, in_advantages, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regularization", [None, 0.0])
@each_rule
def test_a_constant_factor_of_the_loss_leaves_relative_coefficients_unchanged(rule, regularization):
    V, G = example()
    rule = make_rule(rule, regularization=of(rule, regularization))
    expected = computed(V, G, ADVANTAGES, rule).c
    for factor in (1e-6, 1e4):
        found = computed(factor * V, factor * G, ADVANTAGES, rule).c
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def scaled(history, factor, rule):
    """The running means that a loss with a constant factor would have had, by the units of each."""
    p, q, _ = getattr(rule, "exponents", (0, 0, 0))
    degree = 0 if getattr(rule, "keep_small", False) else p + q
    units = {"fisher^2": 2, "norm^2": 2, "relative^2": 0, "fx": degree + 1, "x": 1}
    return {name: value * factor ** units[name] for name, value in history.items()}


@each_scale
@pytest.mark.parametrize(
    ("rule", "keep_small"), [*((rule, False) for rule in RULES), ("fig4", True), ((0.5, -1.0, -0.5), True)], ids=str
)
def test_loss_scale_is_taken_out_of_the_running_means_only(rule, scale, keep_small):
    V, G = example()
    factor = 0.25
    settings = {"regularization": 0.3, "scale": scale, "keep_small": keep_small}
    made = rule_of(rule, **settings)
    result = computed(factor * V, factor * G, ADVANTAGES, made, HISTORY, loss_scale=factor)
    # The formula, on the loss as it is, with running means in the same units
    expected = oracle.coefficients(
        factor * V, factor * G, ADVANTAGES, rule, history=scaled(HISTORY, factor, made), **settings
    )
    torch.testing.assert_close(result.c, expected, rtol=1e-10, atol=1e-12)
    # What goes into the running means is free of the factor
    without = computed(V, G, ADVANTAGES, made, HISTORY)
    for name in ("fisher", "norm", "raw"):
        if getattr(without, name) is not None:
            torch.testing.assert_close(getattr(result, name), getattr(without, name), rtol=1e-10, atol=1e-12)


# Settings


def test_an_unknown_scale_is_named_and_answered_with_the_choices():
    for name in ("fisher", "interacting"):
        with pytest.raises(ValueError, match="scale='papers' is unknown: choose one of 'relative', 'paper'"):
            make_rule(name, scale="papers")


def test_settings_are_what_a_checkpoint_knows_the_rule_by_and_cannot_be_changed():
    rule = make_rule("interacting", regularization=0.3, scale="paper")
    assert rule.settings == {"name": "interacting", "scale": "paper", "regularization": 0.3}
    assert PowerRule(fisher_power=-1.0).settings != make_rule("fisher").settings  # by another name
    with pytest.raises(FrozenInstanceError):
        rule.scale = "relative"


def test_the_kernels_know_no_rule_that_does_not_say_so():
    class Own(Rule):
        needs, degree, coefficients = Needs(), 0.0, None

    assert Own().kernel_form is None
