"""Rows of sequences in both layouts, and the draw of the positions at which the Fisher metric is taken."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopo_trl.geometry.sequences import Samples, Sequences, draw_samples


def rows_of(ids, s):
    """The rows of sequence s, in order, by going through all rows."""
    return [row for row, owner in enumerate(ids.tolist()) if owner == s]


@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 5), rows=st.integers(1, 14))
def test_packed_rows_go_to_their_own_sequence(data, count, rows):
    # Any assignment: shuffled, sequences without rows, rows of no sequence
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, count - 1), min_size=rows, max_size=rows)))
    sequences = Sequences.from_ids(ids, count)
    x = torch.arange(1.0, 2 * rows + 1, dtype=torch.float64).view(rows, 2)
    c = torch.arange(1.0, count + 1, dtype=torch.float64)

    padded, sums, scaled = sequences.padded(x), sequences.sums(x.t()), sequences.scaled(x, c)
    assert (sequences.count, sequences.rows) == (count, rows)
    assert padded.shape == (count, sequences.length, 2)
    assert sequences.length == max(1, max(len(rows_of(ids, s)) for s in range(count)))
    for s in range(count):
        own = rows_of(ids, s)
        torch.testing.assert_close(padded[s, : len(own)], x[own])
        assert padded[s, len(own) :].abs().sum() == 0
        torch.testing.assert_close(sums[:, s], sum((x[row] for row in own), torch.zeros(2, dtype=x.dtype)))
    for row, owner in enumerate(ids.tolist()):
        assert torch.equal(scaled[row], x[row] * c[owner] if owner >= 0 else torch.zeros_like(x[row]))
    assert torch.equal(sequences.scaled(x[:, 0], c), scaled[:, 0])
    torch.testing.assert_close(sequences.scaled(x, c, x.flip(0)), scaled + x.flip(0))  # of no sequence as well


def test_shuffled_packed_rows_give_what_the_regular_layout_gives():
    count, length, generator = 3, 4, torch.Generator().manual_seed(0)
    N = count * length
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    c = torch.randn(count, generator=generator, dtype=torch.float64)
    regular = Sequences.regular(count, length)
    torch.testing.assert_close(regular.padded(x), torch.stack([x[s * length :][:length] for s in range(count)]))
    torch.testing.assert_close(regular.sums(x.t()), regular.padded(x).sum(1).t())
    torch.testing.assert_close(regular.scaled(x, c), x * c.repeat_interleave(length).unsqueeze(1))
    shuffle = torch.randperm(N, generator=generator)
    ids = torch.arange(count).repeat_interleave(length)[shuffle]
    by_ids = Sequences.from_ids(ids, count)
    by_index = Sequences.from_index(shuffle.argsort().view(count, length), N)
    assert by_index.ids.tolist() == ids.tolist()
    for packed in (by_ids, by_index):
        torch.testing.assert_close(packed.sums(x[shuffle].t()), regular.sums(x.t()))
        torch.testing.assert_close(packed.scaled(x[shuffle], c), regular.scaled(x, c)[shuffle])
    # `from_index` also says in which order
    torch.testing.assert_close(by_index.padded(x[shuffle]), regular.padded(x))


def test_index_with_gaps_leaves_out_rows_of_no_sequence():
    # Sequence 1 has no rows; gaps may stand anywhere; rows 1 and 4 belong to nobody
    index = torch.tensor([[-1, 5, 0], [-1, -1, -1], [2, -1, 3]])
    sequences = Sequences.from_index(index, 6)
    x = torch.arange(10.0, 16.0, dtype=torch.float64)
    assert sequences.ids.tolist() == [0, -1, 2, 2, -1, 0]
    assert sequences.padded(x).tolist() == [[0, 15, 10], [0, 0, 0], [12, 0, 13]]
    assert sequences.sums(x).tolist() == [25, 0, 25]
    assert sequences.scaled(torch.ones(6), torch.tensor([2.0, 3.0, 5.0])).tolist() == [2, 0, 5, 5, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.long])
def test_rearranging_rows_keeps_their_dtype(dtype):
    for sequences in (Sequences.regular(2, 2), Sequences.from_ids(torch.tensor([1, 0, -1, 1]), 2)):
        x = torch.tensor([1, 2, 3, 4], dtype=dtype)
        assert sequences.padded(x).dtype == sequences.sums(x).dtype == sequences.scaled(x, x[:2]).dtype == dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_stays_in_its_own_sequence(value):
    # Row 0 stands in for "no row" inside the packed layout, and must not be seen through it
    sequences = Sequences.from_ids(torch.tensor([0, 0, 0, 1, 2, 2]), 3)
    x = torch.tensor([value, 1, 1, 2, 3, 3], dtype=torch.float64)
    assert sequences.padded(x)[1:].tolist() == [[2, 0, 0], [3, 3, 0]]
    assert sequences.sums(x)[1:].tolist() == [2, 6]


# The draw of positions


@pytest.mark.parametrize("number", [4, 7, 8, 1000])
def test_real_positions_are_drawn_once_and_all_where_more_are_asked_for(number):
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    for seed in range(20):
        samples = draw_samples(real, number, seed)
        rows = samples.rows[~samples.absent].tolist()
        assert len(rows) == len(set(rows)) == min(number, 7) and set(rows) <= {2, 3, 4, 5, 6, 7, 8}
        assert len(samples.rows) == min(number, 10)


def test_nothing_but_padding_gives_no_sample():
    samples = draw_samples(torch.zeros(2, 3), 4, seed=0)
    assert samples.absent.all()
    assert samples.masked(samples.of(torch.ones(6, 2))).abs().sum() == 0


def test_every_real_position_is_drawn_equally_often():
    real = torch.arange(30) % 3 > 0  # 20 real positions
    draws, number = 1000, 5
    counts, first = torch.zeros(2, 30)
    for seed in range(draws):
        samples = draw_samples(real, number, seed)
        counts[samples.rows] += 1
        first[samples.rows[0]] += 1
    chance = number / 20
    five_sigma = 5 * (draws * chance * (1 - chance)) ** 0.5
    assert (counts[real] - draws * chance).abs().max() < five_sigma
    assert (first[real] - draws / 20).abs().max() < 5 * (draws / 20) ** 0.5
    assert counts[~real].sum() == 0


def test_a_seed_gives_the_same_positions_again_and_the_global_random_streams_are_left_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = [tuple(draw_samples(torch.ones(50), 10, seed).rows.tolist()) for seed in (*range(20), *range(20))]
    assert drawn[:20] == drawn[20:] and len(set(drawn)) == 20
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(new, old) for new, old in zip(np.random.get_state(), before[2], strict=True))


def test_absent_samples_read_zero_even_where_the_row_is_not_finite():
    x = torch.tensor([[1.0, 2.0], [float("nan"), 3.0], [5.0, 6.0]])
    samples = Samples(rows=torch.tensor([2, 1, 0]), absent=torch.tensor([False, True, False]))
    assert samples.masked(samples.of(x)).tolist() == [[5, 6], [0, 0], [1, 2]]
    assert samples.masked(samples.of(x[:, 1])).tolist() == [6, 0, 2]
    parts = [part.masked(part.of(x)) for part in samples.split(2)]
    assert [len(part) for part in parts] == [2, 1]
    assert torch.equal(torch.cat(parts), samples.masked(samples.of(x)))


def test_moved_samples_name_the_same_positions():
    # Rows 0 .. 5 of which 1, 3 and 5 are kept, in another order
    kept = torch.tensor([13.0, 15.0, 11.0])
    samples = Samples(rows=torch.tensor([5, 0, 1, 3, 2]), absent=torch.tensor([False, False, False, True, False]))
    moved = samples.moved(torch.tensor([-1, 2, -1, 0, -1, 1]))
    assert moved.masked(moved.of(kept)).tolist() == [15, 0, 11, 0, 0]
    assert moved.rows.min() >= 0 and moved.rows.max() < 3
