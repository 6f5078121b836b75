"""
Coefficients inside the kernels against the rules in plain PyTorch, in linear layers and in elementwise parameters.

On a CPU they run under Triton's interpreter (`TRITON_INTERPRET=1`, see `test_interpreted.py`); with a GPU these
files test them as they are compiled there.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from isopo_trl.geometry.statistics import elementwise_statistics
from isopo_trl.kernels import launch
from isopo_trl.kernels.coefficients import rule_is_in_kernels
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.rules import PowerRule, make_rule, rule_names
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    EUCLIDEAN,
    EXACT,
    FIG4,
    FISHER,
    INTERACTING,
    KNOWN,
    LAYERS,
    STATISTIC,
    UNKNOWN,
    Run,
    batch,
    check_elementwise,
    close,
    named,
    plain_statistics,
    run_elementwise,
    run_linear,
    thinned,
)


pytestmark = batches.of_kernels


# Rules and their settings, at a layer with a history and at one without


def rules():
    """
    Every rule that goes by statistics alone in both scales, with and without regularisation, of both kinds; those with
    a direction have tests of their own (`test_directions.py`).
    """
    powers = {"fisher_power": 0.5, "norm_power": -1.25, "relative_power": -0.5}
    for scale in ("relative", "paper"):
        for name in (name for name in rule_names() if not make_rule(name).needs.direction):
            yield make_rule(name, scale=scale, regularization=None if name == "interacting" else 0)
            if name != "none":
                yield make_rule(name, scale=scale, regularization=0.3)
            if name not in ("none", "interacting"):
                yield make_rule(name, scale=scale, regularization=0.3, keep_small=True)
        yield make_rule("none", scale=scale, regularization=0, **powers)
        yield make_rule("none", scale=scale, regularization=2.0, **powers)


ALL_RULES = list(rules())
# The least and the most that there may be
LIMITS = [make_rule(name, regularization=x) for name, x in (("fisher", 1e-12), ("interacting", 1e-4))]
LIMITS += [make_rule(name, regularization=1e6) for name in ("fisher", "interacting")]
A_FEW_RULES = [
    FISHER,
    make_rule("fisher", scale="paper", regularization=0),
    make_rule("npg", regularization=0.3, keep_small=True),
    FIG4,
    make_rule("fig4", scale="paper", regularization=0.3),
    EUCLIDEAN,
    INTERACTING,
    make_rule("interacting", scale="paper", regularization=0.3),
]
WHERE = [(KNOWN, 0.25), (UNKNOWN, 0.5)]  # layer, constant of the loss


# Each setting of each rule in one of the scales under the interpreter, in the other one it is slow there
@pytest.mark.parametrize(
    "rule", [*thinned(2, ALL_RULES, names=named), *(pytest.param(rule, id=named(rule)) for rule in LIMITS)]
)
def test_every_setting_of_every_rule_enters_as_in_plain_pytorch(rule):
    given = batch(2, 7, 5, 4, 6)
    for where in WHERE if any(rule.needs) else ():
        run = Run.of(given, rule, *where)
        run_linear(given, run)
        run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    check_elementwise(given, Run.of(given, rule, *WHERE[rule.scale == "paper"]))


# Sequences without a gradient, and broken ones


def one_without(given):
    given.g[7:14] = 0


def one_in_the_noise(given):
    given.g[7:14] *= 1e-16


def one_above_the_noise(given):
    given.g[7:14] *= 1e-3


def all_in_the_noise_of_the_history(given):
    given.g[:] *= 1e-16


def none_at_all(given):
    given.g[:] = 0


def none_at_the_samples(given):
    given.g[given.samples.rows] = 0


def spoil(value, sampled):
    def change(given):
        rows = given.samples.rows[~given.samples.absent].tolist()
        candidates = rows if sampled else sorted(set(range(7, 14)) - set(given.samples.rows.tolist()))
        given.g[candidates[0], 2] = value

    return change


SITUATIONS = {
    "a sequence has no gradient": one_without,
    "a sequence's is noise": one_in_the_noise,
    "a sequence's is small but real": one_above_the_noise,
    "all are noise beside the history": all_in_the_noise_of_the_history,
    "all are noise beside the history, the other way round": all_in_the_noise_of_the_history,
    "no sequence has a gradient": none_at_all,
    "no sample has a gradient": none_at_the_samples,
    "NaN in a sequence": spoil(math.nan, sampled=False),
    "infinity in a sequence": spoil(math.inf, sampled=False),
    "NaN at a sample": spoil(math.nan, sampled=True),
    "infinity at a sample": spoil(-math.inf, sampled=True),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize(
    ("rule", "situation"),
    thinned(5, A_FEW_RULES, SITUATIONS, names=lambda x: x if isinstance(x, str) else named(x)),
)
def test_sequences_without_a_gradient_and_broken_ones_are_told_apart_as_in_plain_pytorch(rule, situation):
    given = batch(3, 7, 5, 4, 6)
    assert len(given.g[7:14].abs().sum(1).nonzero()) > 1
    SITUATIONS[situation](given)
    # A linear layer with a history and an elementwise one without, or the other way round
    place = len(situation) % 2
    run = Run.of(given, rule, *WHERE[place])
    run_linear(given, run)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    vector = Run.of(given, rule, *WHERE[1 - place])
    check_elementwise(given, vector)
    for one in (run, vector):
        one.running.add(one.book, [layer == one.index for layer in range(LAYERS)])
        broken = one.running.step()["broken_sequences"]
        if "NaN" not in situation and "infinity" not in situation:
            assert broken == 0
        elif "sample" not in situation or not rule.needs.overlap:
            assert broken == 1
        else:
            assert broken >= 1


@pytest.mark.parametrize("rule", [FISHER, FIG4], ids=named)
def test_an_absent_sample_is_not_read_even_where_its_row_is_broken(rule):
    given = batch(4, 7, 5, 4, 6)
    given.samples.absent[-1] = True
    run, vector = Run.of(given, rule), Run.of(given, rule)
    run_linear(given, run)
    run_elementwise(given, vector)
    sequence = given.samples.rows[-1] // 7
    others = torch.arange(4, device=DEVICE) != sequence
    given.g[given.samples.rows[-1]] = math.nan
    spoilt, spoilt_vector = Run.of(given, make_rule(rule.name, scale="paper")), Run.of(given, rule)
    run_linear(given, spoilt)
    run_elementwise(given, spoilt_vector)
    for one, other in ((run, spoilt), (vector, spoilt_vector)):
        assert torch.equal(one.ledger.table[UNKNOWN, 1:3, others], other.ledger.table[UNKNOWN, 1:3, others])
        assert torch.isnan(other.ledger.table[UNKNOWN, 1, sequence])


# One launch after the other


@pytest.mark.parametrize("rule", thinned(2, [FIG4, FISHER, INTERACTING, EUCLIDEAN], names=named))
def test_one_ledger_serves_layer_after_layer_and_gives_the_same_every_time(rule):
    one, other = batch(2, 70, 20, 17, 9), batch(2, 70, 70, 5, 9, seed=1)
    other = replace(other, advantages=one.advantages)
    run = Run.of(one, rule)
    tables = []
    for _ in range(2):
        for index, given in enumerate((one, other, one)):
            at = replace(run, index=index)
            run_linear(given, at, rows=40)
            assert not run.ledger.counter.any()
        tables.append(run.ledger.table.clone())
        vector = [run_elementwise(given, replace(run, index=i)) for i, given in enumerate((one, other, one))]
        assert not run.ledger.counter.any()
        tables.append(run.ledger.table.clone())
    # Not a bit depends on what was there before, or on which program was the last
    assert torch.equal(tables[0], tables[2]) and torch.equal(tables[1], tables[3])
    assert all(torch.isfinite(x).all() for x in vector)
    for index, given in enumerate((one, other, one)):
        at = replace(run, index=index)
        expected = at.plain(elementwise_statistics(given.g.double(), given.sequences, given.samples, rule.needs)[0])
        close(tables[1][index, 0], expected.c, STATISTIC[EXACT])
        expected = at.plain(plain_statistics(given, rule.needs)[0])
        close(tables[0][index, 0], expected.c, STATISTIC[EXACT])


# Where the kernels are not to be used


@pytest.mark.parametrize(
    ("m", "n", "rule", "can"),
    [
        (64, 128, FIG4, True),
        (65, 128, FISHER, False),
        (65, 64, FISHER, True),
        (64, 1000, FISHER, True),  # samples are taken in blocks
        (2**10, 0, EUCLIDEAN, True),
        (2**10 + 1, 0, EUCLIDEAN, False),
        (64, 0, INTERACTING, True),
        (65, 0, INTERACTING, False),
    ],
)
def test_a_microbatch_of_too_many_sequences_is_left_to_pytorch(m, n, rule, can):
    assert rule_is_in_kernels(torch.ones(1, 1, device=DEVICE), m, n, rule) == can


@pytest.mark.parametrize(
    ("m", "n", "rule"),
    [
        (64, 130, FISHER),
        pytest.param(66, 1, FIG4, marks=pytest.mark.slow if INTERPRET else []),
        (64, 0, INTERACTING),
        (200, 0, EUCLIDEAN),
    ],
)
def test_the_largest_tiles_that_the_kernels_accept(m, n, rule):
    given = batch(m, 1 if n < 128 else 2, 3, 2, max(n, 1))
    assert rule_is_in_kernels(given.g, m, n, rule)
    run = Run.of(given, rule)
    run_linear(given, run)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    if m == 64 or n == 1:
        check_elementwise(given, Run.of(given, rule))


def test_the_kernels_take_what_they_can_multiply():
    x = torch.ones(2, 2, device=DEVICE)
    taken = [dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)]
    taken = {dtype for dtype in taken if rule_is_in_kernels(x.to(dtype), 2, 2, FISHER)}
    half = {torch.float16, torch.float32}
    # Triton's interpreter has no products of bf16, and on a GPU float64 is left to cuBLAS
    assert taken == (half | {torch.float64} if INTERPRET else half | {torch.bfloat16})
    assert not rule_is_in_kernels(x[:0], 2, 2, FISHER)
    if not INTERPRET:
        assert not rule_is_in_kernels(x.cpu(), 2, 2, FISHER)


def test_the_kernels_can_be_turned_off(monkeypatch):
    x = torch.ones(2, 2, device=DEVICE)
    assert rule_is_in_kernels(x, 2, 2, FISHER)
    monkeypatch.setattr(launch, "ENABLED", False)
    assert not rule_is_in_kernels(x, 2, 2, FISHER)


@dataclass(frozen=True, kw_only=True)
class OtherFormula(PowerRule):
    """Its formula may be another one than the kernels'."""


def test_a_rule_whose_formula_the_kernels_do_not_know_is_left_to_pytorch():
    x = torch.ones(2, 2, device=DEVICE)
    assert rule_is_in_kernels(x, 2, 2, PowerRule(fisher_power=-1.0))
    assert not rule_is_in_kernels(x, 2, 2, OtherFormula(fisher_power=-1.0))
