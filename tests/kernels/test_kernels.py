"""
The Triton kernels against the same functions in plain PyTorch, taken in float64 from the same numbers.

On a CPU they run under Triton's interpreter (`TRITON_INTERPRET=1`, see `tests/test_interpreted.py`); with a GPU this
file tests them as they are compiled there.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from isopo_trl.geometry.sequences import Sequences, draw_samples
from isopo_trl.geometry.statistics import Statistics, elementwise_statistics, linear_statistics, sequence_gradients
from isopo_trl.kernels import coefficients as coefficient_kernels
from isopo_trl.kernels import elementwise as elementwise_kernels
from isopo_trl.kernels import launch as launching
from isopo_trl.kernels import linear as row_kernels
from isopo_trl.kernels import rms_norm
from isopo_trl.kernels import v as v_kernels
from isopo_trl.microbatch import Microbatch
from isopo_trl.rules import make_rule, rule_names
from isopo_trl.rules.running import RunningStatistics
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
    KNOWN,
    LAYERS,
    STATISTIC,
    UNKNOWN,
    Run,
    batch,
    close,
    filled_ledger,
    named,
)


pytestmark = batches.needs_kernels


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    batches.poison_memory(monkeypatch)


def plain_statistics(given, needs, strategy="kept"):
    g, a = given.g.double(), given.a.double()
    return linear_statistics(g, a, given.bias, given.sequences, given.samples, needs, strategy)


def linear(given, run, rows=None):
    """A linear layer's statistics and coefficients from kernels alone; returns `V` where it was formed as a whole."""
    rule = run.running.rule
    explicit = rule.needs.norm or rule.needs.ntk
    overlap = V = None
    if rule.needs.overlap:
        arguments = (given.g, given.a, given.bias, given.sequences, given.samples, run.ledger, run.index)
        overlap = row_kernels.overlap_coefficients(*arguments, finish=not explicit)
    if explicit:
        p, d = given.g.shape[1], given.a.shape[1] + given.bias
        rows = rows or p
        sizes = [min(rows, p - start) * d for start in range(0, p, rows)]
        sums = v_kernels.VBlocks(sizes, run.ledger, run.index, overlap, len(given.samples.rows))
        for _, V in sequence_gradients(given.g, given.a, given.bias, given.sequences, rows):
            sums.add(V)
    return V


# m, T, p, d, n: no dimension is a multiple of a block everywhere
SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 7, 5, 33, 5),
    (3, 7, 33, 1, 130),  # fewer positions than samples
    (8, 64, 16, 16, 64),
    (3, 65, 130, 5, 64),
    (2, 130, 1, 130, 130),  # two blocks of samples
    (17, 7, 33, 5, 1),
]


# Overlaps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlaps_and_norms_of_samples_are_those_of_the_rows(shape, dtype):
    given = batch(*shape, bias=sum(shape) % 2 == 0, dtype=dtype)
    run = Run.of(given, FISHER)
    arguments = (given.g, given.a, given.bias, given.sequences, given.samples, run.ledger, run.index)
    result = row_kernels.overlap_coefficients(*arguments)
    expected, _ = plain_statistics(given, FISHER.needs, "ghost")
    m, n = shape[0], len(given.samples.rows)
    close(result[:n], expected.sample_norm, STATISTIC[dtype])
    close(result[n:].view(m, -1, n).sum(1).t(), expected.overlap, STATISTIC[dtype])
    run.check(expected, STATISTIC[dtype])

    if dtype != EXACT:
        return
    # Unfinished, for a rule that needs the Euclidean norm too: the same, and the ledger is left alone
    unfinished = Run.of(given, FIG4)
    arguments = (*arguments[:5], unfinished.ledger, unfinished.index)
    before = unfinished.ledger.table.clone()
    again = row_kernels.overlap_coefficients(*arguments, finish=False)
    assert torch.equal(again, result)
    assert torch.equal(unfinished.ledger.table, before) and not unfinished.ledger.counter.any()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_input_that_is_always_one_counts_in_samples_and_sequences(bias):
    given = replace(batch(3, 7, 5, 4, 6), bias=bias)
    run = Run.of(given, FIG4)
    linear(given, run)
    expected = run.check(plain_statistics(given, FIG4.needs, "ghost")[0], STATISTIC[EXACT])
    other = run.plain(plain_statistics(replace(given, bias=not bias), FIG4.needs, "ghost")[0])
    assert (expected.c - other.c).abs().max() > 1e-2  # the test would notice


# Explicit gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [FIG4, EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize(("m", "rows"), [(1, None), (3, 1), (8, 3), (17, None)])
def test_norms_and_kernels_of_gradients_in_any_number_of_blocks(m, rule, rows, dtype):
    given = batch(m, 5, 4, 33, 5, bias=m == 3, dtype=dtype)
    run = Run.of(given, rule, KNOWN if m == 8 else UNKNOWN)
    linear(given, run, rows)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[dtype])


@pytest.mark.parametrize("rule", [EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize(("m", "p", "d"), [(2, 130, 130), (17, 70, 121), (5, 1, 16384)])
def test_gradients_that_take_several_programs(m, p, d, rule):
    """More than 2^13 elements, a multiple of that and not; blocks of unequal size."""
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(m, p, d, generator=generator).to(DEVICE)
    given = batch(m, 1, 1, 1, 1)
    run = Run.of(given, rule)
    parts = [p] if p == 1 else [p - 65, 65]
    sums = v_kernels.VBlocks([part * d for part in parts], run.ledger, run.index)
    without = v_kernels.VSums(rule)
    for part in V.split(parts, dim=1):
        sums.add(part.contiguous())
        without.add(part.contiguous())
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    run.check(Statistics(norm=ntk.diagonal(), ntk=ntk), STATISTIC[torch.float32])
    if rule.needs.ntk:
        close(without.result.ntk, ntk, STATISTIC[torch.float32])
    else:
        close(without.result.norm, ntk.diagonal(), STATISTIC[torch.float32])


@pytest.mark.parametrize("rule", [FIG4, EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize("m", [1, 3, 8, 17])
def test_sums_without_a_ledger_are_the_statistics(m, rule):
    dtype = torch.float64 if launching.INTERPRET else torch.float32
    V = torch.randn(m, 7, 33, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    sums = v_kernels.VSums(rule)
    for part in V.split(3, dim=1):
        sums.add(part.contiguous())
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    assert (sums.result.ntk is None) != rule.needs.ntk and (sums.result.norm is None) == rule.needs.ntk
    close(sums.result.ntk if rule.needs.ntk else sums.result.norm, ntk if rule.needs.ntk else ntk.diagonal(), 1e-5)
    assert sums.result.overlap is None and sums.result.sample_norm is None


@pytest.mark.parametrize("m", [1, 3, 8, 17])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (5, 33), (16, 16), (33, 130)])
def test_combined_is_the_sum_of_gradients_with_their_coefficients(m, p, d):
    dtype = torch.float64 if launching.INTERPRET else torch.float32
    V = torch.randn(m, p, d, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    ledger = filled_ledger(m)
    expected = torch.einsum("m,mpd->pd", ledger.table[KNOWN, 0], V.double())
    for out in DTYPES:
        result = v_kernels.combined(V, ledger, KNOWN, out)
        assert result.dtype == out
        close(result, expected, max(GRADIENT[out], GRADIENT[dtype]))


# Rows times coefficients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "T", "d"), [(1, 1, 1), (3, 7, 5), (8, 65, 33), (17, 64, 16), (3, 130, 130), (2, 9, 1500)]
)
def test_scaled_rows_are_those_of_the_sequences(m, T, d, dtype):
    x = torch.randn(m * T, d, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    ledger, sequences = filled_ledger(m), Sequences.regular(m, T)
    result = row_kernels.scaled(x, sequences, ledger, KNOWN)
    assert result.dtype == dtype and result.is_contiguous()
    close(result, sequences.scaled(x.double(), ledger.table[KNOWN, 0]), GRADIENT[dtype])


# Memory layouts


LAYOUTS = {
    "columns of a wider tensor": lambda x: padded_columns(x)[:, 2:-1],
    "columns first": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "one column": lambda x: padded_columns(x[:, :1])[:, 2:-1],
}


def padded_columns(x):
    """Neighbours that must not be read are NaN, and an offset that spoils the alignment of the pointer."""
    spoilt = x.new_full((len(x), 2), math.nan)
    return torch.cat([spoilt, x, spoilt[:, :1]], dim=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_in_memory_in_any_way(layout, dtype):
    given = batch(3, 7, 5, 33, 8, dtype=dtype)
    turned = replace(given, g=LAYOUTS[layout](given.g), a=LAYOUTS[layout](given.a))
    plain = replace(given, g=turned.g.contiguous(), a=turned.a.contiguous())
    run, same = Run.of(turned, FISHER), Run.of(plain, FISHER)
    linear(turned, run)
    linear(plain, same)
    assert torch.equal(run.ledger.table, same.ledger.table)
    ledger = filled_ledger(3)
    expected = row_kernels.scaled(plain.a, given.sequences, ledger, 0)
    assert torch.equal(row_kernels.scaled(turned.a, given.sequences, ledger, 0), expected)
    of_turned, of_plain = (elementwise(x, Run.of(x, FIG4)) for x in (turned, plain))
    assert torch.equal(of_turned, of_plain)


# Elementwise parameters


def elementwise(given, run, dtype=None):
    samples = given.samples if run.running.rule.needs.overlap else None
    arguments = (given.g, given.sequences, samples, run.ledger, run.index, dtype or given.g.dtype)
    return elementwise_kernels.elementwise_gradient(*arguments)


def check_elementwise(given, run):
    dtype = given.g.dtype
    result = elementwise(given, run)
    statistics, V = elementwise_statistics(given.g.double(), given.sequences, given.samples, run.running.rule.needs)
    run.check(statistics, STATISTIC[dtype])
    # With the kernel's own coefficients: those of a broken sequence need not be the same ones
    close(result, run.ledger.table[run.index, 0] @ V, GRADIENT[dtype])
    assert result.dtype == dtype


@pytest.mark.parametrize("rule", [FIG4, INTERACTING, make_rule("none")], ids=named)
@pytest.mark.parametrize(
    ("m", "T", "d", "n"),
    [(1, 1, 1, 1), (3, 7, 5, 130), (8, 64, 16, 64), (17, 65, 33, 5), (3, 130, 130, 130), (2, 1100, 5, 9)],
)
def test_an_elementwise_parameter_has_the_gradient_of_the_formula(m, T, d, n, rule):
    given = batch(m, T, d, 1, n)
    check_elementwise(given, Run.of(given, rule, KNOWN if m == 8 else UNKNOWN))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("rule", [FISHER, EUCLIDEAN, FIG4, INTERACTING], ids=named)
def test_an_elementwise_parameter_has_its_gradient_in_every_type(rule, dtype):
    given = batch(3, 65, 70, 1, 33, dtype=dtype)
    check_elementwise(given, Run.of(given, rule))


@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_an_elementwise_gradient_comes_in_the_type_of_the_parameter(out):
    given = batch(3, 7, 5, 1, 4)
    run = Run.of(given, FIG4)
    result = elementwise(given, run, out)
    assert result.dtype == out
    close(result, elementwise(given, run), GRADIENT[out])


# Rules and their settings, at a layer with a history and at one without


def rules():
    """Every rule in both scales, with and without regularisation, of both kinds."""
    powers = {"fisher_power": 0.5, "norm_power": -1.25, "relative_power": -0.5}
    for scale in ("relative", "paper"):
        for name in rule_names():
            yield make_rule(name, scale=scale)
            if name != "none":
                yield make_rule(name, scale=scale, regularization=0.3)
            if name not in ("none", "interacting"):
                yield make_rule(name, scale=scale, regularization=0.3, keep_small=True)
        yield make_rule("none", scale=scale, **powers)
        yield make_rule("none", scale=scale, regularization=2.0, **powers)


ALL_RULES = list(rules())
A_FEW_RULES = [
    FISHER,
    make_rule("fisher", scale="paper"),
    make_rule("npg", regularization=0.3, keep_small=True),
    FIG4,
    make_rule("fig4", scale="paper", regularization=0.3),
    EUCLIDEAN,
    INTERACTING,
    make_rule("interacting", scale="paper", regularization=0.3),
]
WHERE = [(KNOWN, 0.25), (UNKNOWN, 0.5)]  # layer, constant of the loss


@pytest.mark.parametrize("rule", ALL_RULES, ids=named)
def test_every_setting_of_every_rule_enters_as_in_plain_pytorch(rule):
    given = batch(2, 7, 5, 4, 6)
    for where in WHERE if any(rule.needs) else ():
        run = Run.of(given, rule, *where)
        linear(given, run)
        run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    check_elementwise(given, Run.of(given, rule, *WHERE[rule.scale == "paper"]))


# Sequences without a gradient, and broken ones


def one_without(given):
    given.g[7:14] = 0


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
    "no sequence has a gradient": none_at_all,
    "no sample has a gradient": none_at_the_samples,
    "NaN in a sequence": spoil(math.nan, sampled=False),
    "infinity in a sequence": spoil(math.inf, sampled=False),
    "NaN at a sample": spoil(math.nan, sampled=True),
    "infinity at a sample": spoil(-math.inf, sampled=True),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("rule", A_FEW_RULES, ids=named)
def test_sequences_without_a_gradient_and_broken_ones_are_told_apart_as_in_plain_pytorch(rule, situation):
    given = batch(3, 7, 5, 4, 6)
    assert len(given.g[7:14].abs().sum(1).nonzero()) > 1
    SITUATIONS[situation](given)
    # A linear layer with a history and an elementwise one without, or the other way round
    place = len(situation) % 2
    run = Run.of(given, rule, *WHERE[place])
    linear(given, run)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    vector = Run.of(given, rule, *WHERE[1 - place])
    check_elementwise(given, vector)
    for one in (run, vector):
        one.running.add(one.ledger, [layer == one.index for layer in range(LAYERS)])
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
    linear(given, run)
    elementwise(given, vector)
    sequence = given.samples.rows[-1] // 7
    others = torch.arange(4, device=DEVICE) != sequence
    given.g[given.samples.rows[-1]] = math.nan
    spoilt, spoilt_vector = Run.of(given, make_rule(rule.name, scale="paper")), Run.of(given, rule)
    linear(given, spoilt)
    elementwise(given, spoilt_vector)
    for one, other in ((run, spoilt), (vector, spoilt_vector)):
        assert torch.equal(one.ledger.table[UNKNOWN, 1:3, others], other.ledger.table[UNKNOWN, 1:3, others])
        assert torch.isnan(other.ledger.table[UNKNOWN, 1, sequence])


# One launch after the other


@pytest.mark.parametrize("rule", [FISHER, FIG4, EUCLIDEAN, INTERACTING], ids=named)
def test_one_ledger_serves_layer_after_layer_and_gives_the_same_every_time(rule):
    one, other = batch(2, 70, 20, 17, 9), batch(2, 70, 70, 5, 9, seed=1)
    other = replace(other, advantages=one.advantages)
    run = Run.of(one, rule)
    tables = []
    for _ in range(2):
        for index, given in enumerate((one, other, one)):
            at = replace(run, index=index)
            linear(given, at, rows=40)
            assert not run.ledger.counter.any()
        tables.append(run.ledger.table.clone())
        vector = [elementwise(given, replace(run, index=i)) for i, given in enumerate((one, other, one))]
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
    assert coefficient_kernels.usable(torch.ones(1, 1, device=DEVICE), m, n, rule) == can


@pytest.mark.parametrize(
    ("m", "n", "rule"), [(64, 130, FISHER), (66, 1, FIG4), (64, 0, INTERACTING), (200, 0, EUCLIDEAN)]
)
def test_the_largest_tiles_that_the_kernels_accept(m, n, rule):
    given = batch(m, 1 if n < 128 else 2, 3, 2, max(n, 1))
    assert coefficient_kernels.usable(given.g, m, n, rule)
    run = Run.of(given, rule)
    linear(given, run)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
    if m == 64 or n == 1:
        check_elementwise(given, Run.of(given, rule))


def test_the_kernels_take_what_they_can_multiply():
    x = torch.ones(2, 2, device=DEVICE)
    taken = [dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)]
    taken = {dtype for dtype in taken if coefficient_kernels.usable(x.to(dtype), 2, 2, FISHER)}
    half = {torch.float16, torch.float32}
    # Triton's interpreter has no products of bf16, and on a GPU float64 is left to cuBLAS
    assert taken == (half | {torch.float64} if launching.INTERPRET else half | {torch.bfloat16})
    assert not coefficient_kernels.usable(x[:0], 2, 2, FISHER)
    if not launching.INTERPRET:
        assert not coefficient_kernels.usable(x.cpu(), 2, 2, FISHER)


def test_the_kernels_can_be_turned_off(monkeypatch):
    x = torch.ones(2, 2, device=DEVICE)
    assert coefficient_kernels.usable(x, 2, 2, FISHER)
    monkeypatch.setattr(launching, "ENABLED", False)
    assert not coefficient_kernels.usable(x, 2, 2, FISHER)


def test_packed_sequences_are_left_to_pytorch():
    x = torch.ones(6, 2, device=DEVICE)
    samples = draw_samples(torch.ones(6, device=DEVICE), 3, 0)
    running = RunningStatistics(1, 0.9, FISHER, DEVICE)
    advantages = torch.ones(2, device=DEVICE)
    packed = Sequences.from_ids(torch.tensor([0, 0, 1, 1, 1, -1], device=DEVICE), 2)
    assert Microbatch((2, 3), Sequences.regular(2, 3), samples, advantages, FISHER, running).kernels_take(x)
    assert not Microbatch((2, 3), packed, samples, advantages, FISHER, running).kernels_take(x)


def test_the_widest_elementwise_parameter_has_a_counter_for_every_block(monkeypatch):
    launches = []
    monkeypatch.setattr(elementwise_kernels, "launch", lambda kernel, plan, *_: launches.append(plan.grid))
    ledger = filled_ledger(1)
    v = torch.zeros(1, elementwise_kernels.MOST_FEATURES, device=DEVICE)
    elementwise_kernels.elementwise_gradient(v, Sequences.regular(1, 1), None, ledger, 0, v.dtype)
    assert [1 + grid[0] for grid in launches] == [len(ledger.counter)]


# Launching without Triton's inspection of the arguments, where what was compiled must fit


class FakeKernel:
    """Stands in for a kernel: notes how often it is compiled, and for which types it is launched."""

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps):
            self.compiled += 1
            return FakeCompiled(self)

        return compile_and_launch


class FakeCompiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))


def test_a_plan_launches_what_was_compiled_with_the_arguments_of_the_moment():
    kernel, plan = FakeKernel(), launching.Plan((3, 1, 1), ("constant",))
    x, y = torch.zeros(4), torch.ones(4)
    launching.launch(kernel, plan, (x, x), (7,))
    launching.launch(kernel, plan, (x, y), (8,))
    assert kernel.compiled == 1
    assert kernel.launched == [((3, 1, 1), x, y, 8, "constant")]


def test_a_kernel_compiled_for_aligned_pointers_is_not_launched_for_others():
    kernel, plan = FakeKernel(), launching.Plan((1, 1, 1), ())
    x = torch.zeros(8)
    launching.launch(kernel, plan, (x[1:],), ())
    launching.launch(kernel, plan, (x,), ())
    launching.launch(kernel, plan, (x, x[1:]), ())
    assert kernel.compiled == 3 and kernel.launched == []
    launching.launch(kernel, plan, (x[4:],), ())
    assert kernel.compiled == 3 and len(kernel.launched) == 1


def test_no_two_combinations_of_types_and_constants_share_a_plan(monkeypatch):
    """A plan remembers what was compiled for it: all that a compiled kernel depends on must tell plans apart."""
    seen = {}

    def launch(kernel, plan, tensors, numbers):
        assert all(type(number) is int and abs(number) < 2**31 for number in numbers)
        key = (kernel, plan.constants, tuple(x.dtype for x in tensors), tuple(plan.options.items()), plan.grid)
        assert seen.setdefault(id(plan), (plan, key))[1] == key

    for module in (row_kernels, v_kernels, elementwise_kernels, rms_norm):
        monkeypatch.setattr(module, "launch", launch)
    types = [torch.float32, torch.float16, torch.bfloat16]
    for rule, m, T, d in itertools.product(
        (FISHER, FIG4, EUCLIDEAN, INTERACTING, make_rule("none")), (1, 3), (7, 70), (5, 16)
    ):
        given = batch(m, T, d, 2 * d, 6, dtype=torch.float32)
        ledger = Run.of(given, rule).ledger
        samples = given.samples if rule.needs.overlap else None
        for dtype, out in itertools.product(types, types):
            g, a = given.g.to(dtype), given.a.to(dtype)
            n, overlap = len(given.samples.rows), None
            for finish, bias in itertools.product((True, False), (True, False)):
                if rule.needs.overlap:
                    arguments = (given.sequences, given.samples, ledger, 0)
                    overlap = row_kernels.overlap_coefficients(g, a, bias, *arguments, finish=finish)
            V = torch.zeros(m, d, 3, device=DEVICE)
            if rule.needs.norm or rule.needs.ntk:
                v_kernels.v_coefficients(V, ledger, 0, overlap, n)
                v_kernels.VBlocks([V[0].numel()] * 2, ledger, 0, overlap, n).add(V)
                v_kernels.VSums(rule).add(V)
            v_kernels.combined(V, ledger, 0, out)
            row_kernels.scaled(a, given.sequences, ledger, 0)
            elementwise_kernels.elementwise_gradient(g, given.sequences, samples, ledger, 0, out)
            x, weight = g.view(m, T, d), torch.ones(d, device=DEVICE, dtype=out)
            for flavour in (rms_norm.Flavour(1e-6, 0.0, True), rms_norm.Flavour(1e-6, 1.0, False)):
                y, scale = rms_norm.forward(x, weight, flavour)
                _, sums, v = rms_norm.backward(x, y, weight, scale, flavour, given.sequences, samples)
                elementwise_kernels.elementwise_gradient(v, given.sequences, samples, ledger, 0, out, sums)
    assert len(seen) > 100
