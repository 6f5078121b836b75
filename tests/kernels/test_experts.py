"""Statistics, coefficients and scaled rows of a mixture's experts, against the same functions in plain PyTorch."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional

from isopo_trl.geometry.routing import Routing, routed_statistics
from isopo_trl.geometry.sequences import SampleRows, Samples, Sequences
from isopo_trl.kernels import experts
from isopo_trl.kernels.coefficients import Entry, KernelLedger
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.rules import Coefficients, make_rule
from isopo_trl.rules.running import RunningStatistics
from isopo_trl.rules.stacked import stacked_coefficients
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EUCLIDEAN,
    EXACT,
    FIG4,
    FISHER,
    GRADIENT,
    INTERACTING,
    STATISTIC,
    close,
)


pytestmark = batches.of_kernels

FIRST = 2  # layers before the stack's, and as many behind
# m, T, E, k, p, d, n
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (3, 7, 4, 2, 5, 33, 5),
    (2, 70, 2, 1, 130, 5, 40),  # several blocks of rows and of samples at an expert
    (4, 9, 6, 3, 16, 16, 100),  # fewer positions than samples
    (17, 5, 3, 2, 33, 4, 16),
]


@dataclass
class Rows:
    g: torch.Tensor
    a: torch.Tensor
    bias: bool
    routing: Routing
    samples: Samples | SampleRows
    advantages: torch.Tensor


def rows(m, T, E, k, p, d, n, bias=False, dtype=EXACT):
    """
    The rows of a routing that favours some experts and leaves out the last (of several), and of which some samples are
    absent though their rows have a gradient.
    """
    given = batches.batch(m, T, p, d, n, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    liking = torch.rand(m * T, E, generator=generator) + torch.linspace(1, 0, E)
    if E > k:
        liking[:, -1] = -1
    routing = Routing.of(liking.topk(k).indices.to(DEVICE), E, Sequences.regular(m, T))
    weights = torch.rand(m * T * k, 1, generator=generator).to(DEVICE, dtype)
    g, a = routing.of_positions(given.g) * weights, routing.of_positions(given.a)
    return Rows(g, a, bias, routing, given.samples, given.advantages)


def ledgers(given, rule, loss_scale=0.5):
    """Two ledgers of a stack whose first half of experts has a history; the second is for plain PyTorch."""
    E = given.routing.experts
    running = RunningStatistics(E + 2 * FIRST, 0.9, rule, DEVICE)
    known = [place < FIRST + E / 2 for place in range(E + 2 * FIRST)]
    mean = torch.tensor(batches.HISTORY, dtype=torch.float64) * torch.tensor(known).unsqueeze(1)
    running.load_state_dict({**running.state_dict(), "mean": mean, "known": known})
    return running, *(running.open(given.advantages, loss_scale) for _ in range(2))


def exact(samples):
    if isinstance(samples, Samples):
        return samples
    return SampleRows(samples.g.double(), samples.inputs.double(), samples.choices)


def check(given, rule, names=None, own=None):
    dtype = given.g.dtype
    running, ours, plain = ledgers(given, rule)
    ledger = KernelLedger(ours, names)
    samples = given.samples if rule.needs.overlap else None
    experts.expert_coefficients(given.g, given.a, given.bias, given.routing, samples, Entry(ledger, FIRST))
    places = slice(FIRST, FIRST + given.routing.experts)
    statistics = routed_statistics(
        given.g.double(), given.a.double(), given.bias, given.routing, exact(given.samples), rule.needs
    )
    if own is not None:
        statistics.own = functional.pad(own, (0, 0, 0, statistics.overlap.shape[1] - len(own)))
    history, known = running.history[places], running.known[places]
    expected = stacked_coefficients(rule, statistics, plain.advantages, history, known, plain.loss_scale)
    plain.record(places, expected)
    for place, (mine, theirs) in enumerate(zip(ours.table, plain.table, strict=True)):
        for name, one, other in zip(Coefficients._fields, mine, theirs, strict=True):
            close(one, other, STATISTIC[dtype], f"{place} {name}")
            assert torch.equal(one == 0, other == 0), f"{place} {name}"
    return ledger, plain.table[places, 0]


def from_before(given, n, seed=7):
    """Rows of other positions at the experts that these were sent to; some of them are zero, as absent ones are."""
    generator = torch.Generator().manual_seed(seed)
    k = given.routing.choices.shape[1]
    g, a = (torch.randn(n, k, x.shape[1], generator=generator).to(x) for x in (given.g, given.a))
    choices = torch.rand(n, given.routing.experts, generator=generator).topk(k).indices.to(DEVICE)
    g[n // 2], a[n // 2], choices[n // 2] = 0, 0, 0
    return SampleRows(g, a, choices)


@pytest.mark.parametrize("rule", [FISHER, FIG4], ids=lambda rule: rule.name)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_samples_may_be_rows_from_before(shape, rule):
    given = rows(*shape, bias=sum(shape) % 2 == 0)
    check(replace(given, samples=from_before(given, shape[6])), rule, *batches.names_of(shape[6], shape[0]))


def is_quick(shape, rule, dtype):
    """Each combination is compiled, or interpreted, for seconds: those that have something of their own."""
    if INTERPRET:
        return dtype == EXACT and shape in SHAPES[1:3] and rule in (FIG4, INTERACTING)
    if rule == FIG4:
        return dtype == EXACT or shape == SHAPES[2]
    if rule == INTERACTING:
        return shape == SHAPES[2] or (dtype == EXACT and shape in (SHAPES[1], SHAPES[4]))
    return dtype == torch.bfloat16 and shape == SHAPES[1]


CASES = [
    pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.slow, id=f"{case[0]}-{case[1].name}-{case[2]}")
    for case in itertools.product(SHAPES, (FISHER, FIG4, EUCLIDEAN, INTERACTING), DTYPES)
]


@pytest.mark.parametrize(("shape", "rule", "dtype"), CASES)
def test_coefficients_and_scaled_rows_are_those_of_each_expert(shape, rule, dtype):
    given = rows(*shape, bias=sum(shape) % 2 == 0, dtype=dtype)
    ledger, c = check(given, rule)
    for x in (given.g, given.a):
        expected = given.routing.scaled(x.double(), c)
        close(experts.scaled(x, given.routing, Entry(ledger, FIRST)), expected, GRADIENT[dtype])
        added = experts.scaled(x, given.routing, Entry(ledger, FIRST), plus=x.flip(0))
        close(added, expected + x.flip(0).double(), GRADIENT[dtype])


@pytest.mark.parametrize(
    "rule", [FIG4, make_rule("interacting", scale="paper", regularization=0.3)], ids=["", "paper"]
)
def test_the_input_that_is_always_one_counts(rule):
    (_, with_bias), (_, without) = (check(rows(*SHAPES[1], bias=bias), rule) for bias in (True, False))
    assert (with_bias - without).abs().max() > 1e-3  # the test would notice


def test_rows_with_gaps_between_them_are_read_in_their_places():
    given = rows(*SHAPES[1])
    wide = {name: torch.cat([getattr(given, name)] * 2, 1)[:, : getattr(given, name).shape[1]] for name in ("g", "a")}
    assert not wide["g"].is_contiguous()
    ledger, c = check(replace(given, **wide), FIG4)
    close(
        experts.scaled(wide["g"], given.routing, Entry(ledger, FIRST)),
        given.routing.scaled(given.g, c),
        GRADIENT[EXACT],
    )


def test_an_expert_with_what_is_not_finite_leaves_the_others_alone():
    given = rows(*SHAPES[1])
    given.g[0, 0] = math.nan  # the first row of the first expert
    _, ours, _ = ledgers(given, FIG4)
    clean = replace(given, g=given.g.nan_to_num(0.0))
    expected, _ = check(clean, FIG4)
    experts.expert_coefficients(
        given.g, given.a, False, given.routing, given.samples, Entry(KernelLedger(ours), FIRST)
    )
    assert not torch.isfinite(ours.table[FIRST]).all()
    assert torch.equal(ours.table[FIRST + 1 :], expected.table[FIRST + 1 :])
