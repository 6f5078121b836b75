"""Which positions of a step are sampled, however it is cut."""

import pytest
import torch

from isopo_trl.geometry import reservoir
from isopo_trl.geometry.sequences import Sequences


def mixed(x):
    """The finaliser of SplitMix64, on Python's integers."""
    x %= 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64():
    numbers = [0, 1, -1, 12345, 2**62, -(2**63)]
    assert [x % 2**64 for x in reservoir.mixed(torch.tensor(numbers)).tolist()] == [mixed(x) for x in numbers]


def test_a_key_is_of_the_tokens_and_not_of_the_padding():
    ids = torch.tensor([[0, 5, 6, 7, 0], [5, 6, 7, 9, 9], [5, 7, 6, 0, 0], [5, 6, 7, 7, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    keys = reservoir.content_keys(ids, mask).tolist()
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_priorities_follow_positions_from_the_first_real_token_and_change_with_every_step():
    keys, step = torch.tensor([3, 3, 4]), reservoir.salt(0, 1)
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    values = reservoir.position_priorities(real, keys, step)
    assert (values[~real] == reservoir.ABSENT).all() and (values[real] >= 0).all()
    assert values[0, 2:].tolist() == values[1, :2].tolist() and len(set(values[1:, :2].flatten().tolist())) == 4
    for of in ((0, 2), (1, 1), (1, 0), (0, 0)):
        other = reservoir.position_priorities(real, keys, reservoir.salt(*of))
        assert not set(other[real].tolist()) & set(values[real].tolist())


def test_packed_sequences_have_the_priorities_of_padded_ones():
    keys, step = torch.tensor([8, 9]), reservoir.salt(5, 5)
    padded = reservoir.position_priorities(torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]).bool(), keys, step)
    there, rows = reservoir.grid(torch.ones(1, 6), Sequences.from_ids(torch.tensor([-1, 0, 0, 1, 1, 0]), 2))
    packed = reservoir.position_priorities(there, keys, step)
    assert packed[0].tolist() == padded[0, :3].tolist() and packed[1, :2].tolist() == padded[1, 2:].tolist()
    assert rows[0].tolist() == [1, 2, 5] and rows[1, :2].tolist() == [3, 4] and not there[1, 2]


@pytest.mark.parametrize("cut", [[30], [1] * 30, [10, 20]], ids=len)
@pytest.mark.parametrize("n", [7, 64])
def test_the_reservoir_ends_with_the_best_of_all(n, cut):
    values = torch.randperm(1000, generator=torch.Generator().manual_seed(n))[:30]
    x = values.double().unsqueeze(1) * torch.tensor([1.0, -2.0])  # rows that tell whose they are
    held, buffer = torch.full((n,), reservoir.ABSENT), torch.zeros(n, 2, dtype=torch.float64)
    for offered, rows in zip(values.split(cut), x.split(cut), strict=True):
        best, samples = reservoir.best(offered, torch.arange(len(offered)), n)
        held, source = reservoir.replaced(held, best, samples.rows)
        reservoir.Source(source, fills=True).put(buffer, rows)
    expected = values.sort().values[:n].tolist()
    assert held.sort().values[: len(expected)].tolist() == expected
    full = held != reservoir.ABSENT
    assert torch.equal(buffer[full], held[full].double().unsqueeze(1) * torch.tensor([1.0, -2.0]))
    assert not buffer[~full].any() and full.sum() == min(n, 30)


def test_rows_are_put_in_their_slots_times_a_factor_and_others_are_left():
    buffer, x = torch.full((4, 2), 9.0), torch.arange(6.0).view(3, 2)
    source = torch.tensor([2, reservoir.KEEP, reservoir.NOTHING, 0])
    reservoir.Source(source).moved(torch.tensor([1, 0, -1])).put(buffer, x, 0.5)
    assert buffer.tolist() == [[0, 0], [9, 9], [0, 0], [1, 1.5]]


def test_absent_positions_are_never_drawn():
    real = torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()
    values = reservoir.position_priorities(real, torch.tensor([1, 2]), 0)
    best, samples = reservoir.best(values, torch.arange(6).view(2, 3), 4)
    held, source = reservoir.replaced(torch.full((4,), reservoir.ABSENT), best, samples.rows)
    assert sorted(source.tolist()) == [-1, -1, -1, 1] and (held != reservoir.ABSENT).sum() == 1
    assert samples.absent.tolist() == [False, True, True, True]
    of_sequences = reservoir.sequence_priorities(real, torch.tensor([1, 2]), 0)
    assert (of_sequences == reservoir.ABSENT).tolist() == [False, True]
