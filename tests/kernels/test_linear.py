"""Overlaps of rows, and rows times coefficients, against the same functions in plain PyTorch."""

import math
from dataclasses import replace

import pytest
import torch

from isopo_trl.geometry.sequences import Samples, Sequences
from isopo_trl.kernels import coefficients, linear
from isopo_trl.kernels.coefficients import Entry
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    EACH_DTYPE,
    EXACT,
    FIG4,
    FISHER,
    GRADIENT,
    KNOWN,
    STATISTIC,
    Run,
    batch,
    close,
    filled_ledger,
    plain_statistics,
    run_elementwise,
    run_linear,
)


pytestmark = batches.of_kernels

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


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlaps_and_norms_of_samples_are_those_of_the_rows(shape, dtype):
    given = batch(*shape, bias=sum(shape) % 2 == 0, dtype=dtype)
    run = Run.of(given, FISHER)
    arguments = (given.g, given.a, given.bias, given.sequences, given.samples, run.entry)
    linear.overlaps(*arguments, finish=True)
    found = linear.overlaps(*arguments)
    expected, _ = plain_statistics(given, FISHER.needs, "ghost")
    overlap, sample_norm = found.statistics(shape[0])
    close(sample_norm, expected.sample_norm, STATISTIC[dtype])
    close(overlap, expected.overlap, STATISTIC[dtype])
    run.check(expected, STATISTIC[dtype])

    if dtype != EXACT:
        return
    # Unfinished, for a rule that needs the Euclidean norm too: the same, and the ledger is left alone
    unfinished = Run.of(given, FIG4)
    arguments = (*arguments[:5], unfinished.entry)
    before = unfinished.ledger.table.clone()
    assert torch.equal(linear.overlaps(*arguments).sums, found.sums)
    assert torch.equal(unfinished.ledger.table, before) and not unfinished.ledger.counter.any()


@pytest.mark.parametrize("shape", [(3, 130, 33, 5, 64), (2, 65, 130, 5, 5)], ids=str)
def test_overlaps_are_the_same_by_more_rows_at_once(shape, monkeypatch):
    given = batch(*shape, bias=True, dtype=EXACT)
    expected, _ = plain_statistics(given, FISHER.needs, "ghost")
    blocks = []
    for side_by_side in (1, 10**6):
        monkeypatch.setattr(linear, "processors", lambda _, number=side_by_side: number)
        linear._overlap_plan.cache_clear()
        run = Run.of(given, FISHER)
        arguments = (given.g, given.a, given.bias, given.sequences, given.samples, run.entry)
        found = linear.overlaps(*arguments, finish=True)
        blocks.append(found.sums.numel())
        run.check(expected, STATISTIC[EXACT])
        close(found.statistics(shape[0])[0], expected.overlap, STATISTIC[EXACT])
    linear._overlap_plan.cache_clear()
    assert blocks[0] < blocks[1]


def test_other_samples_of_the_same_shapes_are_not_taken_for_those_before():
    given = batch(3, 7, 5, 4, 6)
    other = replace(given, samples=Samples(given.samples.rows.flip(0), given.samples.absent.flip(0)))
    entry = Run.of(given, FISHER).entry
    for one in (given, other, given):
        found = linear.overlaps(one.g, one.a, one.bias, one.sequences, one.samples, entry)
        overlap, _ = found.statistics(3)
        close(overlap, plain_statistics(one, FISHER.needs, "ghost")[0].overlap, STATISTIC[EXACT])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_input_that_is_always_one_counts_in_samples_and_sequences(bias):
    given = replace(batch(3, 7, 5, 4, 6), bias=bias)
    run = Run.of(given, FIG4)
    run_linear(given, run)
    expected = run.check(plain_statistics(given, FIG4.needs, "ghost")[0], STATISTIC[EXACT])
    other = run.plain(plain_statistics(replace(given, bias=not bias), FIG4.needs, "ghost")[0])
    assert (expected.c - other.c).abs().max() > 1e-2  # the test would notice


# Rows times coefficients


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize(
    ("m", "T", "d"), [(1, 1, 1), (3, 7, 5), (8, 65, 33), (17, 64, 16), (3, 130, 130), (2, 9, 1500)]
)
def test_scaled_rows_are_those_of_the_sequences(m, T, d, dtype):
    x = torch.randn(m * T, d, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    ledger, sequences = filled_ledger(m), Sequences.regular(m, T)
    result = linear.scaled(x, sequences, Entry(ledger, KNOWN))
    assert result.dtype == dtype and result.is_contiguous()
    close(result, sequences.scaled(x.double(), ledger.table[KNOWN, 0]), GRADIENT[dtype])
    other = x.flip(0)
    for plus in (other, torch.cat([other, x], 1)[:, :d]):  # and rows with gaps between them
        added = linear.scaled(x, sequences, Entry(ledger, KNOWN), plus)
        close(added, sequences.scaled(x.double(), ledger.table[KNOWN, 0]) + other.double(), GRADIENT[dtype])


def test_scaled_rows_of_layers_share_their_memory_unless_they_are_large(monkeypatch):
    ledger, sequences = filled_ledger(2), Sequences.regular(2, 3)
    x = torch.randn(6, 4, device=DEVICE)
    first = linear.scaled(x, sequences, Entry(ledger, 0))
    assert linear.scaled(x, sequences, Entry(ledger, 1)).data_ptr() == first.data_ptr()
    others = [linear.scaled(y, sequences, Entry(given, 0)) for y, given in ((x.half(), ledger), (x, filled_ledger(2)))]
    assert all(other.data_ptr() != first.data_ptr() for other in others)  # of another type, of another microbatch
    monkeypatch.setattr(coefficients, "MOST_SHARED", first.nbytes - 1)
    ledger = filled_ledger(2)
    first = linear.scaled(x, sequences, Entry(ledger, 0))
    assert linear.scaled(x, sequences, Entry(ledger, 0)).data_ptr() != first.data_ptr()


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
@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
def test_rows_may_lie_in_memory_in_any_way(layout, dtype):
    given = batch(3, 7, 5, 33, 8, dtype=dtype)
    turned = replace(given, g=LAYOUTS[layout](given.g), a=LAYOUTS[layout](given.a))
    plain = replace(given, g=turned.g.contiguous(), a=turned.a.contiguous())
    run, same = Run.of(turned, FISHER), Run.of(plain, FISHER)
    run_linear(turned, run)
    run_linear(plain, same)
    assert torch.equal(run.ledger.table, same.ledger.table)
    ledger = filled_ledger(3)
    expected = linear.scaled(plain.a, given.sequences, Entry(ledger, 0)).clone()  # the next one may take its place
    assert torch.equal(linear.scaled(turned.a, given.sequences, Entry(ledger, 0)), expected)
    of_turned, of_plain = (run_elementwise(x, Run.of(x, FIG4)) for x in (turned, plain))
    assert torch.equal(of_turned, of_plain)
