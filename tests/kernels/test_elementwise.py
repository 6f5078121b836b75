"""The gradient of an elementwise parameter against the same in plain PyTorch."""

import pytest
import torch

from isopo_trl.geometry.sequences import Sequences
from isopo_trl.kernels import elementwise
from isopo_trl.kernels.coefficients import Entry
from isopo_trl.rules import make_rule
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EUCLIDEAN,
    FIG4,
    FISHER,
    GRADIENT,
    INTERACTING,
    KNOWN,
    UNKNOWN,
    Run,
    batch,
    check_elementwise,
    close,
    filled_ledger,
    named,
    run_elementwise,
    thinned,
)


pytestmark = batches.of_kernels


SHAPES = [(1, 1, 1, 1), (3, 7, 5, 130), (8, 64, 16, 64), (17, 65, 33, 5), (3, 130, 130, 130), (2, 1100, 5, 9)]


@pytest.mark.parametrize(
    ("shape", "rule"),
    thinned(
        2,
        SHAPES,
        [FIG4, INTERACTING, make_rule("none")],
        names=lambda x: str(x) if isinstance(x, tuple) else named(x),
    ),
)
def test_an_elementwise_parameter_has_the_gradient_of_the_formula(shape, rule):
    m, T, d, n = shape
    given = batch(m, T, d, 1, n)
    check_elementwise(given, Run.of(given, rule, KNOWN if m == 8 else UNKNOWN))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("rule", [FISHER, EUCLIDEAN, FIG4, INTERACTING], ids=named)
def test_an_elementwise_parameter_has_its_gradient_in_every_type(rule, dtype):
    given = batch(3, 65, 70, 1, 33, dtype=dtype)
    check_elementwise(given, Run.of(given, rule))


@pytest.mark.parametrize("rule", [FISHER, EUCLIDEAN, FIG4, INTERACTING], ids=named)
def test_many_blocks_are_added_in_several_steps(rule, monkeypatch):
    monkeypatch.setattr(elementwise, "_LAST", 2**8)
    elementwise._elementwise_plan.cache_clear()
    given = batch(3, 2, 1100, 1, 5)
    check_elementwise(given, Run.of(given, rule))
    elementwise._elementwise_plan.cache_clear()


@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_an_elementwise_gradient_comes_in_the_type_of_the_parameter(out):
    given = batch(3, 7, 5, 1, 4)
    run = Run.of(given, FIG4)
    result = run_elementwise(given, run, out)
    assert result.dtype == out
    close(result, run_elementwise(given, run), GRADIENT[out])


def test_the_widest_elementwise_parameter_has_a_counter_for_every_block(monkeypatch):
    launches = []
    monkeypatch.setattr(elementwise, "launch", lambda kernel, plan, *_: launches.append(plan.grid))
    ledger = filled_ledger(1)
    v = torch.zeros(1, elementwise.MOST_FEATURES, device=DEVICE)
    elementwise.elementwise_gradient(v, Sequences.regular(1, 1), None, Entry(ledger, 0), v.dtype)
    assert [1 + grid[0] for grid in launches] == [len(ledger.counter)]
