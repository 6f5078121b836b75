"""Rows sorted by expert and sequence, against a loop over experts, sequences and rows."""

import pytest
import torch

from isopo_trl.geometry import routing as geometry
from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.routing import Routing, routed_statistics
from isopo_trl.geometry.sequences import Samples, Sequences


E, K, P, D = 5, 2, 3, 4
IDS = torch.tensor([0, 0, 1, -1, 1, 0, 3, 3, 1, -1, 3, 0])  # sequence 2 has no row
SAMPLES = Samples(torch.tensor([1, 4, 6, 3, 0]), torch.tensor([False, False, False, False, True]))


def example():
    """Choices in which expert 3 has no row, rows in their order, and the sequences."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(len(IDS), E, generator=generator)
    scores[:, 3] = -1
    routing = Routing.of(scores.topk(K).indices, E, Sequences.from_ids(IDS, 4))
    g, a = (torch.randn(len(IDS) * K, size, generator=generator, dtype=torch.float64) for size in (P, D))
    return routing, g, a


def rows_of(routing, expert):
    """The rows of an expert as (row, position), found one by one."""
    choices = routing.choices.flatten()
    return [(row, flat // K) for row, flat in enumerate(routing.order.tolist()) if choices[flat] == expert]


def position_gradients(routing, g, a, bias, expert):
    """The gradient of each position at an expert, `[N, numbers]`, zero where it was not sent there."""
    inputs = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) if bias else a
    G = torch.zeros(len(IDS), g.shape[1] * inputs.shape[1], dtype=g.dtype)
    for row, position in rows_of(routing, expert):
        G[position] = torch.outer(g[row], inputs[row]).flatten()
    return G


def test_rows_are_sorted_by_expert_and_sequence():
    routing, _, _ = example()
    assert sorted(routing.order.tolist()) == list(range(len(IDS) * K))
    pairs = [(int(routing.choices.flatten()[flat]), int(IDS[flat // K]) % 5) for flat in routing.order]
    assert pairs == sorted(pairs)
    assert routing.order[routing.places].tolist() == list(range(len(IDS) * K))


@pytest.mark.parametrize("limit", [2**25, 1], ids=["at once", "in parts"])
@pytest.mark.parametrize("bias", [False, True])
def test_statistics_are_those_of_a_loop(bias, limit, monkeypatch):
    monkeypatch.setattr(geometry, "WHOLE_LIMIT", limit)
    routing, g, a = example()
    both = routed_statistics(g, a, bias, routing, SAMPLES, Needs(overlap=True, norm=True))
    ntk = routed_statistics(g, a, bias, routing, None, Needs(ntk=True, norm=True))
    for e in range(E):
        G = position_gradients(routing, g, a, bias, e)
        V = torch.stack([G[IDS == s].sum(0) for s in range(4)])
        sampled = G[SAMPLES.rows].clone()
        sampled[SAMPLES.absent] = 0
        n = len(sampled)
        torch.testing.assert_close(both.overlap[e, :n], sampled @ V.T)
        torch.testing.assert_close(both.sample_norm[e, :n], sampled.square().sum(1))
        assert not both.overlap[e, n:].any() and not both.sample_norm[e, n:].any()
        torch.testing.assert_close(both.norm[e], V.square().sum(1))
        torch.testing.assert_close(ntk.ntk[e], V @ V.T)
        torch.testing.assert_close(ntk.norm[e], V.square().sum(1))


def test_scaled_rows_give_the_multiple_of_each_sequence_at_each_expert():
    routing, g, a = example()
    c = torch.randn(E, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scaled = routing.scaled(g, c)
    torch.testing.assert_close(routing.scaled(g, c, g.flip(0)), scaled + g.flip(0))
    weight, bias = routing.outer(scaled, a), routing.expert_sums(scaled)
    for e in range(E):
        G = position_gradients(routing, g, a, True, e).view(len(IDS), P, D + 1)
        total = sum(c[e, s] * G[IDS == s].sum(0) for s in range(4))
        torch.testing.assert_close(weight[e], total[:, :-1])
        torch.testing.assert_close(bias[e], total[:, -1])


@pytest.mark.parametrize("dtype,size", [(torch.float64, 4), (torch.bfloat16, 4), (torch.bfloat16, 8)])
def test_products_are_those_of_a_loop(dtype, size):
    """In bfloat16 with sizes that it takes, it is PyTorch's grouped product."""
    routing, _, _ = example()
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(len(IDS) * K, size, generator=generator).to(dtype) for _ in range(2))
    matrices = torch.randn(E, size, size, generator=generator).to(dtype)
    assert geometry.takes_grouped(x, size) == (dtype is torch.bfloat16 and size == 8)
    between = matrices.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as LoRA's factors of all experts lie
    for M in (matrices, matrices.transpose(1, 2), between):
        rows = [x[row] @ M[e] for e in range(E) for row, _ in rows_of(routing, e)]
        torch.testing.assert_close(routing.product(x, M), torch.stack(rows))
    own = [[row for row, _ in rows_of(routing, e)] for e in range(E)]
    torch.testing.assert_close(routing.outer(x, y), torch.stack([x[rows].T @ y[rows] for rows in own]))
