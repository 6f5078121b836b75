"""The coefficient of each sequence against the formulas in plain floats (`oracle.coefficients`), for every rule."""

import math

import pytest
import torch

from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.guarded import alive_sequences
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules import Expectations, make_rule
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle


RULES = (*oracle.EXPONENTS, "interacting")


POWERS = [rule for rule in RULES if rule not in ("none", "interacting")]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5], dtype=torch.float64)
HISTORY = {"fisher^2": 3.0, "norm^2": 40.0, "relative^2": 0.05, "fx": 0.7, "x": 1.9}


def example(m=5, n=6, size=12, seed=0):
    """Gradients of m sequences and n sampled positions, of different lengths: `V` `[m, size]`, `G` `[n, size]`."""
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(m, size, generator=generator, dtype=torch.float64) * torch.arange(1.0, m + 1).unsqueeze(1)
    return V, torch.randn(n, size, generator=generator, dtype=torch.float64)


def statistics(V, G):
    """What the layers would hand over, from the gradients themselves."""
    overlap = torch.stack([torch.stack([sum(x * y for x, y in zip(g, v, strict=True)) for v in V]) for g in G])
    return Statistics(
        overlap=overlap,
        sample_norm=torch.stack([sum(x * x for x in g) for g in G]),
        norm=torch.stack([sum(x * x for x in v) for v in V]),
        ntk=torch.stack([torch.stack([sum(x * y for x, y in zip(v, w, strict=True)) for w in V]) for v in V]),
    )


def computed(V, G, A, rule, history=None, **kwargs):
    if history is not None:
        means = torch.tensor([history[name] for name in EXPECTATIONS[:3]], dtype=torch.float64)
        scale = history["x"] / history["fx"] if history["fx"] else 0.0
        multiplier = history["fx"] / history["x"] if history["x"] else 0.0
        history = Expectations(means, *torch.tensor([scale, multiplier], dtype=torch.float64))
    return rule.coefficients(statistics(V, G), A, history, **kwargs)


def rule_of(name, **settings):
    """A rule, also from a triple of exponents."""
    if isinstance(name, tuple):
        p, q, r = name
        return make_rule("none", fisher_power=p, norm_power=q, relative_power=r, **settings)
    return make_rule(name, **settings)


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("regularization", [None, 0.3, 10.0])
@pytest.mark.parametrize("rule", [*RULES, (0.5, -1.0, -0.5), (0.0, 1.0, 0.0), (-2.0, 0.0, 1.0)], ids=str)
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


@pytest.mark.parametrize("rule", RULES)
def test_what_is_recorded_is_what_the_rule_used(rule):
    V, G = example()
    result = computed(V, G, ADVANTAGES, make_rule(rule, scale="paper"))
    needs = make_rule(rule).needs
    F = [(sum((g @ v) ** 2 for g in G) / sum(g @ g for g in G)).sqrt().item() for v in V]
    N = [v.norm().item() for v in V]
    assert result.fisher.tolist() == pytest.approx(F) if needs.overlap else result.fisher is None
    assert result.norm.tolist() == pytest.approx(N) if needs.norm or needs.ntk else result.norm is None
    if rule in ("interacting", "none"):
        assert result.raw is None
    else:
        p, q, r = oracle.EXPONENTS[rule]
        assert result.raw.tolist() == pytest.approx([f**p * n**q * (f / n) ** r for f, n in zip(F, N, strict=True)])


@pytest.mark.parametrize(
    ("rule", "needs"),
    [
        ("fisher", Needs(overlap=True)),
        ("npg", Needs(overlap=True, norm=True)),
        ("fig4", Needs(overlap=True, norm=True)),
        ("euclidean", Needs(norm=True)),
        ("none", Needs()),
        ("interacting", Needs(ntk=True)),
        ((0.0, 0.0, 0.0), Needs()),
        ((-1.0, -1.0, 0.0), Needs(overlap=True, norm=True)),
    ],
    ids=str,
)
def test_a_rule_asks_for_the_statistics_it_uses_and_no_others(rule, needs):
    assert rule_of(rule).needs == needs


def test_the_rules_are_the_table():
    assert {rule: make_rule(rule).exponents for rule in oracle.EXPONENTS} == oracle.EXPONENTS
    assert {rule: make_rule(rule).regularization for rule in RULES} == {
        **dict.fromkeys(RULES, 0.0),
        "interacting": 1.0,
    }
    assert make_rule("fisher", fisher_power=0.0, norm_power=-2).exponents == (0, -2, 0)


@pytest.mark.parametrize("scale", ["relative", "paper"])
def test_none_leaves_the_advantages_alone(scale):
    V, G = example()
    assert torch.equal(computed(V, G, ADVANTAGES, make_rule("none", scale=scale)).c, ADVANTAGES)
    assert torch.equal(
        computed(V, G, ADVANTAGES, make_rule("none", scale=scale), HISTORY, loss_scale=0.1).c, ADVANTAGES
    )


# Sequences without a gradient, and broken ones


@pytest.mark.parametrize("regularization", [None, 0.3])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_a_sequence_without_a_gradient_neither_gets_one_nor_changes_the_others(rule, scale, regularization):
    V, G = example()
    V[1] = 0
    rule = make_rule(rule, scale=scale, regularization=regularization)
    others = [0, 2, 3, 4]
    result = computed(V, G, ADVANTAGES, rule)
    alone = computed(V[others], G, ADVANTAGES[others], rule)
    torch.testing.assert_close(result.c[others], alone.c, rtol=1e-12, atol=0)
    assert torch.isfinite(result.c).all()
    if rule.regularization == 0 or rule.needs.ntk:
        assert result.c[1] == 0


@pytest.mark.parametrize("history", [None, dict.fromkeys(EXPECTATIONS, 0.0)], ids=["first step", "zero history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize(
    ("rule", "keep_small"), [*((rule, False) for rule in [*POWERS, "interacting"]), *((rule, True) for rule in POWERS)]
)
def test_a_layer_without_any_gradient_gets_finite_coefficients(rule, scale, history, keep_small):
    settings = {"regularization": 0.3, "keep_small": True} if keep_small else {}
    result = computed(
        torch.zeros(5, 4), torch.zeros(3, 4), ADVANTAGES, make_rule(rule, scale=scale, **settings), history
    )
    # Without a gradient at any sample the Fisher norm is not known; there is nothing to multiply either
    unknown = scale == "relative" and make_rule(rule).needs.overlap
    assert result.c.tolist() == (ADVANTAGES.tolist() if unknown else [0] * 5)


@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4"])
def test_every_sequence_gets_the_mean_multiplier_where_the_samples_say_nothing(rule):
    V, G = example()
    silent = torch.zeros_like(G)
    assert torch.equal(computed(V, silent, ADVANTAGES, make_rule(rule)).c, ADVANTAGES)
    assert torch.equal(computed(V, silent, ADVANTAGES, make_rule(rule), HISTORY).c, ADVANTAGES)
    paper = computed(V, silent, ADVANTAGES, make_rule(rule, scale="paper"), HISTORY, loss_scale=0.5)
    expected = ADVANTAGES * HISTORY["fx"] / HISTORY["x"] * 0.5 ** make_rule(rule).degree
    torch.testing.assert_close(paper.c, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("regularization", [None, 0.3])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_a_broken_sequence_leaves_the_coefficients_of_the_others_right(rule, scale, regularization, value):
    V, G = example()
    others = [0, 1, 2, 4]
    rule = make_rule(rule, scale=scale, regularization=regularization)
    expected = oracle.coefficients(
        V[others], G, ADVANTAGES[others], rule.name, regularization=regularization, scale=scale
    )
    given = statistics(V, G)
    given.overlap[:, 3] = given.norm[3] = given.ntk[3] = given.ntk[:, 3] = value
    result = rule.coefficients(given, ADVANTAGES, None)
    torch.testing.assert_close(result.c[others], expected, rtol=1e-10, atol=0)


def test_alive_are_the_sequences_with_a_finite_nonzero_value_of_what_is_asked_for():
    fisher = torch.tensor([1.0, 0.0, math.nan, math.inf, 1.0, 1.0])
    norm = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])
    for given, expected in (((fisher, None), [0, 4, 5]), ((None, norm), [0, 1, 2, 3]), ((fisher, norm), [0])):
        assert alive_sequences(*given).nonzero().flatten().tolist() == expected


# Invariances


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", RULES)
def test_signs_may_stand_in_the_advantages_or_in_the_gradients(rule, scale, history):
    V, G = example()
    sign = torch.where(ADVANTAGES < 0, -1.0, 1.0)
    signs_of_samples = torch.tensor([1.0, -1, -1, 1, 1, -1]).unsqueeze(1)
    rule = make_rule(rule, scale=scale)
    in_advantages = computed(V, G, ADVANTAGES, rule, history).c @ V
    in_gradients = computed(V * sign.unsqueeze(1), G * signs_of_samples, ADVANTAGES.abs(), rule, history).c @ (
        V * sign.unsqueeze(1)
    )
    torch.testing.assert_close(in_gradients, in_advantages, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factor", [1e-6, 0.25, 1e4])
@pytest.mark.parametrize("regularization", [None, 0.3])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_a_constant_factor_of_the_loss_leaves_relative_coefficients_unchanged(rule, regularization, factor):
    V, G = example()
    rule = make_rule(rule, regularization=regularization)
    expected = computed(V, G, ADVANTAGES, rule).c
    torch.testing.assert_close(computed(factor * V, factor * G, ADVANTAGES, rule).c, expected, rtol=1e-9, atol=0)


def scaled(history, factor, rule):
    """The running means that a loss with a constant factor would have had, by the units of each."""
    p, q, _ = getattr(rule, "exponents", (0, 0, 0))
    degree = 0 if getattr(rule, "keep_small", False) else p + q
    units = {"fisher^2": 2, "norm^2": 2, "relative^2": 0, "fx": degree + 1, "x": 1}
    return {name: value * factor ** units[name] for name, value in history.items()}


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize(
    ("rule", "keep_small"),
    [
        *((rule, False) for rule in [*POWERS, "interacting", (0.5, -1.0, -0.5)]),
        *((rule, True) for rule in [*POWERS, (0.5, -1.0, -0.5)]),
    ],
    ids=str,
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


@pytest.mark.parametrize("rule", ["fisher", "euclidean", "npg", "fig4"])
def test_relative_coefficients_keep_the_total_length(rule):
    # sum_s f_s x_s = sum_s x_s, with x the Fisher norm, or the Euclidean norm where that is all there is
    V, G = example()
    result = computed(V, G, torch.ones(5, dtype=torch.float64), make_rule(rule))
    x = result.fisher if make_rule(rule).needs.overlap else result.norm
    torch.testing.assert_close((result.c * x).sum(), x.sum(), rtol=1e-10, atol=0)


# The interacting rule


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("regularization", [None, 1e-3, 50.0])
def test_interacting_solves_the_kernel_system(regularization, history):
    V, G = example()
    K = V @ V.T
    mean_eigenvalue = torch.linalg.eigvalsh(K).mean() if history is None else history["norm^2"]
    c0 = (1 if regularization is None else regularization) * mean_eigenvalue
    solution = torch.linalg.solve(K + c0 * torch.eye(5, dtype=K.dtype), ADVANTAGES)
    for scale, expected in (("paper", solution), ("relative", c0 * solution)):
        rule = make_rule("interacting", regularization=regularization, scale=scale)
        torch.testing.assert_close(computed(V, G, ADVANTAGES, rule, history).c, expected, rtol=1e-9, atol=1e-14)


def test_a_sequence_with_zero_advantage_takes_part_in_the_interacting_rule():
    V, G = example()
    rule = make_rule("interacting")
    others = [0, 1, 3, 4]
    result = computed(V, G, ADVANTAGES, rule, HISTORY)
    without = computed(V[others], G, ADVANTAGES[others], rule, HISTORY)
    assert result.c[2].abs() > 1e-3
    assert (result.c[others] - without.c).abs().max() > 1e-3


def test_identical_sequences_share_the_interacting_coefficient():
    # K singular: rank one of m = 4, and still one solve
    V = torch.ones(4, 3, dtype=torch.float64)
    result = computed(V, V, torch.ones(4, dtype=torch.float64), make_rule("interacting"))
    # K = 3 (1 1^T), c0 = 3: c0 (K + c0)^-1 1 = 1 / (4 + 1)
    assert result.c.tolist() == pytest.approx([0.2] * 4)


# Settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rule": "fischer"}, "rule='fischer'"),
        ({"scale": "papers"}, "scale='papers'"),
        ({"fisher_power": math.inf}, "fisher_power=inf"),
        ({"norm_power": math.nan}, "norm_power=nan"),
        ({"relative_power": -math.inf}, "relative_power=-inf"),
        ({"regularization": -0.1}, "regularization=-0.1"),
        ({"regularization": math.nan}, "regularization=nan"),
        ({"regularization": math.inf}, "regularization=inf"),
        ({"rule": "interacting", "regularization": 0.0}, "regularization=0"),
        ({"rule": "none", "regularization": 0.5}, "regularization=0.5"),
        ({"rule": "interacting", "fisher_power": -1.0}, "fisher_power"),
        ({"rule": "interacting", "norm_power": 0.0}, "norm_power"),
        ({"rule": "interacting", "relative_power": -1.0}, "relative_power"),
        ({"keep_small": True}, "keep_small=True"),
        ({"keep_small": True, "regularization": 0.0}, "keep_small=True"),
        ({"rule": "interacting", "keep_small": True}, "keep_small=True"),
        ({"rule": "none", "keep_small": True, "regularization": 1.0}, "keep_small=True"),
        ({"keep_small": True, "regularization": 1.0, "fisher_power": 0.0}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError) as error:
        make_rule(**{"rule": "fisher", **settings})
    assert named in str(error.value)


def test_an_unknown_rule_or_scale_is_answered_with_the_choices():
    with pytest.raises(ValueError, match="'interacting'"):
        make_rule("other")
    with pytest.raises(ValueError, match="'paper'"):
        make_rule("fisher", scale="other")
