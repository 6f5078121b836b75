"""Every way to compute the statistics against the definition, with `V_s` and each position's gradient written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isopo_trl.geometry import cost, statistics
from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.sequences import Samples, Sequences
from isopo_trl.geometry.statistics import (
    OneHotInputs,
    elementwise_statistics,
    fisher_norm,
    ghost_statistics,
    linear_statistics,
)


ALL = Needs(overlap=True, norm=True, ntk=True)
# What the rules ask for, alone and together
NEEDS = [Needs(), Needs(overlap=True), Needs(norm=True), Needs(ntk=True), Needs(overlap=True, norm=True), ALL]
STRATEGIES = ["ghost", "whole", "blocks"]
NAMES = ["overlap", "sample_norm", "norm", "ntk"]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Limits so small that even tiny tensors are cut into several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "WHOLE_LIMIT", 12)
        patch.setattr(statistics, "WHOLE_LIMIT", 12)
        patch.setattr(statistics, "_ROWS_AT_ONCE", 3)
        yield


def definition(G, ids, m, samples):
    """The statistics from each position's gradient `G` `[N, ...]`, by loops over positions and sequences."""
    G = G.double().reshape(len(G), -1)
    V = [sum((G[t] for t in range(len(G)) if ids[t] == s), torch.zeros_like(G[0])) for s in range(m)]
    sampled = [
        G[j] if here else torch.zeros_like(G[0])
        for j, here in zip(samples.rows.tolist(), (~samples.absent).tolist(), strict=True)
    ]
    return {
        "overlap": torch.stack([torch.stack([(x * v).sum() for v in V]) for x in sampled]),
        "sample_norm": torch.stack([(x * x).sum() for x in sampled]),
        "norm": torch.stack([(v * v).sum() for v in V]),
        "ntk": torch.stack([torch.stack([(v * w).sum() for w in V]) for v in V]),
    }, torch.stack(V)


def outer(g, a, bias=False):
    """Each position's gradient `g_t phi(a_t)^T`, `[N, p, d (+ 1)]`."""
    a = a.double()
    if bias:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    return torch.stack([torch.outer(g_t.double(), a_t) for g_t, a_t in zip(g, a, strict=True)])


def assert_same(result, expected, needs, rtol=1e-10, atol=1e-10):
    asked = {"overlap": needs.overlap, "sample_norm": needs.overlap, "norm": needs.norm, "ntk": needs.ntk}
    for name in NAMES:
        value = getattr(result, name)
        assert (value is not None) == asked[name], f"{name} was asked for: {asked[name]}"
        if value is not None:
            torch.testing.assert_close(
                value.double(), expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: n + m
            )


@st.composite
def layouts(draw):
    """m sequences over N rows, regular or packed, with n samples of which some are absent; and a generator."""
    m, T = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    if draw(st.booleans()):
        ids, sequences = torch.arange(m).repeat_interleave(T), Sequences.regular(m, T)
    else:  # ragged, in any order, with rows of no sequence and sequences without rows
        ids = torch.randint(-1, m, (m * T,), generator=generator)
        sequences = Sequences.from_ids(ids, m)
    n = draw(st.integers(1, m * T))
    present = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    samples = Samples(rows=torch.randperm(m * T, generator=generator)[:n], absent=~present)
    return ids, sequences, samples, generator


def cotangents(ids, p, generator, zeros):
    """Random cotangents, some of them zero, as are those of one whole sequence."""
    g = torch.randn(len(ids), p, generator=generator, dtype=torch.float64)
    if zeros:
        g[torch.rand(len(g), generator=generator) < 0.3] = 0
        g[ids == 0] = 0
    return g


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=50)
@given(layout=layouts(), p=st.integers(1, 5), d=st.integers(1, 5), bias=st.booleans(), zeros=st.booleans())
def test_linear_statistics_are_the_definition(strategy, layout, p, d, bias, zeros):
    ids, sequences, samples, generator = layout
    g = cotangents(ids, p, generator, zeros)
    a = torch.randn(len(ids), d, generator=generator, dtype=torch.float64)
    expected, V = definition(outer(g, a, bias), ids, sequences.count, samples)
    for needs in NEEDS:
        result, kept = linear_statistics(g, a, bias, sequences, samples, needs, strategy)
        assert_same(result, expected, needs)
        if strategy == "whole":
            torch.testing.assert_close(kept.flatten(1), V, rtol=1e-10, atol=1e-10)
        else:
            assert kept is None


@settings(max_examples=50)
@given(layout=layouts(), p=st.integers(1, 4), vocabulary=st.integers(1, 5), zeros=st.booleans())
def test_embedding_statistics_are_those_of_one_hot_inputs(layout, p, vocabulary, zeros):
    ids, sequences, samples, generator = layout
    g = cotangents(ids, p, generator, zeros)
    tokens = torch.randint(vocabulary, (len(ids),), generator=generator)
    expected, _ = definition(outer(g, torch.eye(vocabulary)[tokens]), ids, sequences.count, samples)
    for needs in NEEDS:
        assert_same(ghost_statistics(g, OneHotInputs(tokens), sequences, samples, needs), expected, needs)


@settings(max_examples=50)
@given(layout=layouts(), d=st.integers(1, 5), zeros=st.booleans())
def test_elementwise_statistics_are_the_definition(layout, d, zeros):
    ids, sequences, samples, generator = layout
    v = cotangents(ids, d, generator, zeros)
    expected, V = definition(v, ids, sequences.count, samples)
    for needs in NEEDS:
        result, kept = elementwise_statistics(v, sequences, samples, needs)
        assert_same(result, expected, needs)
        torch.testing.assert_close(kept, V, rtol=1e-10, atol=1e-10)


def test_blocks_are_several():
    # Guards the tests above: with the limit lowered, rows of V do come in pieces
    blocks = [
        block
        for block, _ in statistics.sequence_gradients(
            torch.ones(4, 5), torch.ones(4, 3), False, Sequences.regular(2, 2), cost.block_rows(2, 3)
        )
    ]
    assert [(block.start, block.stop) for block in blocks] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_samples_are_needed_where_the_overlap_is_not(strategy):
    g, a = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    nothing = Samples(rows=torch.tensor([0]), absent=torch.tensor([True]))
    needs = Needs(norm=True, ntk=True)
    expected, _ = definition(outer(g, a), ids, 2, nothing)
    result, _ = linear_statistics(g, a, False, Sequences.regular(2, 3), None, needs, strategy)
    assert_same(result, expected, needs)


# Precision


def in_bf16(layer):
    """A layer's statistics from bf16 rows: the result, the same rows in float64, and the rows before rounding."""
    generator = torch.Generator().manual_seed(0)
    m, T, p, d = 3, 64, 24, 16
    ids, sequences = torch.arange(m).repeat_interleave(T), Sequences.regular(m, T)
    samples = Samples(rows=torch.randperm(m * T, generator=generator)[:20], absent=torch.zeros(20, dtype=torch.bool))
    # A common part, so that sums do not cancel and a relative error says something
    g = 1 + torch.randn(m * T, p, generator=generator, dtype=torch.float64)
    a = 1 + torch.randn(m * T, d, generator=generator, dtype=torch.float64)
    tokens = torch.randint(5, (m * T,), generator=generator)
    g16, a16 = g.bfloat16(), a.bfloat16()
    if layer == "embedding":
        result = ghost_statistics(g16, OneHotInputs(tokens), sequences, samples, ALL)
        gradients = [outer(x, torch.eye(5)[tokens]) for x in (g16, g)]
    elif layer == "elementwise":
        result, _ = elementwise_statistics(g16, sequences, samples, ALL)
        gradients = [g16, g]
    else:
        result, _ = linear_statistics(g16, a16, True, sequences, samples, ALL, layer)
        gradients = [outer(g16, a16, True), outer(g, a, True)]
    return result, *(definition(G, ids, m, samples)[0] for G in gradients)


@pytest.mark.parametrize("layer", [*STRATEGIES, "embedding", "elementwise"])
def test_bf16_rows_are_multiplied_and_summed_in_float32(layer):
    result, of_rounded_rows, of_rows = in_bf16(layer)
    for name in NAMES:
        value = getattr(result, name)
        assert value.dtype == torch.float32, name
        scale = of_rounded_rows[name].abs().max()
        # Nothing but float32 rounding after the inputs were rounded (bf16 sums would be off by 1e-2) ...
        assert (value.double() - of_rounded_rows[name]).abs().max() < 1e-5 * scale, name
        # ... and bf16's own rounding of the inputs, eight bits, with respect to the exact ones
        assert (value.double() - of_rows[name]).abs().max() < 1e-2 * scale, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tiny_cotangents_do_not_underflow_in_float32(strategy):
    generator = torch.Generator().manual_seed(1)
    ids, sequences = torch.arange(3).repeat_interleave(4), Sequences.regular(3, 4)
    samples = Samples(rows=torch.arange(0, 12, 2), absent=torch.zeros(6, dtype=torch.bool))
    g = 1e-12 * torch.randn(12, 5, generator=generator)
    a = torch.randn(12, 4, generator=generator)
    expected, _ = definition(outer(g, a), ids, 3, samples)
    result, _ = linear_statistics(g, a, False, sequences, samples, ALL, strategy)
    fisher, informed = fisher_norm(result.overlap, result.sample_norm)
    assert informed
    exact = (expected["overlap"].square().sum(0) / expected["sample_norm"].sum()).sqrt()
    assert (exact > 1e-13).all() and (exact < 1e-10).all()
    torch.testing.assert_close(fisher, exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(result.norm.double(), expected["norm"], rtol=1e-4, atol=0)
    torch.testing.assert_close(result.ntk.double(), expected["ntk"], rtol=1e-3, atol=1e-30)


# The Fisher norm


def test_fisher_norm_is_the_formula():
    overlap = torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.0, 5.0]])
    sample_norm = torch.tensor([2.0, 3.0, 4.0])
    expected = [((1 + 9 + 0) / 9) ** 0.5, ((4 + 16 + 25) / 9) ** 0.5]
    result, informed = fisher_norm(overlap, sample_norm)
    assert informed and result.dtype == torch.float64
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_fisher_norm_without_a_gradient_at_any_sample_is_zero():
    fisher, informed = fisher_norm(torch.zeros(3, 2), torch.zeros(3))
    assert fisher.tolist() == [0, 0] and not informed


@pytest.mark.parametrize("layout", ["regular", "packed"])
@pytest.mark.parametrize("layer", [*STRATEGIES, "embedding", "elementwise"])
def test_a_broken_sequence_leaves_the_statistics_of_the_others_right(layer, layout):
    generator = torch.Generator().manual_seed(2)
    if layout == "regular":
        ids, sequences = torch.arange(3).repeat_interleave(4), Sequences.regular(3, 4)
    else:  # the broken one is the longest
        ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        sequences = Sequences.from_ids(ids, 3)
    g = torch.randn(len(ids), 3, generator=generator, dtype=torch.float64)
    a = torch.randn(len(ids), 2, generator=generator, dtype=torch.float64)
    tokens = torch.randint(2, (len(ids),), generator=generator)
    rows = torch.tensor([0, 2, 5, 6, 8, 9])
    samples = Samples(rows=rows, absent=ids[rows] == 0)  # none of the broken sequence
    G = {"embedding": outer(g, torch.eye(2)[tokens]), "elementwise": g}.get(layer, outer(g, a))
    expected, _ = definition(G, ids, 3, samples)

    g[ids == 0] = float("nan")
    if layer == "embedding":
        result = ghost_statistics(g, OneHotInputs(tokens), sequences, samples, ALL)
    elif layer == "elementwise":
        result, _ = elementwise_statistics(g, sequences, samples, ALL)
    else:
        result, _ = linear_statistics(g, a, False, sequences, samples, ALL, layer)
    fisher, informed = fisher_norm(result.overlap, result.sample_norm)
    assert informed
    exact = (expected["overlap"].square().sum(0) / expected["sample_norm"].sum()).sqrt()
    torch.testing.assert_close(fisher[1:], exact[1:])
    torch.testing.assert_close(result.norm[1:], expected["norm"][1:])
    torch.testing.assert_close(result.ntk[1:, 1:], expected["ntk"][1:, 1:])
