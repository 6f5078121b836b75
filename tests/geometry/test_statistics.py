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
LAYERS = [*STRATEGIES, "embedding", "elementwise"]
NAMES = ["overlap", "sample_norm", "norm", "ntk"]
TOKENS = 5


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


def gradients(layer, g, a, tokens, bias):
    """Each position's gradient `g_t phi(a_t)^T`, `[N, p, d (+ 1)]`, or `g_t` itself."""
    if layer == "elementwise":
        return g
    a = torch.eye(TOKENS)[tokens].double() if layer == "embedding" else a.double()
    if bias and layer != "embedding":
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    return torch.stack([torch.outer(g_t.double(), a_t) for g_t, a_t in zip(g, a, strict=True)])


def computed(layer, g, a, tokens, bias, sequences, samples, needs):
    """The package's statistics, and the sequences' gradients where they are kept."""
    if layer == "embedding":
        return ghost_statistics(g, OneHotInputs(tokens), sequences, samples, needs), None
    if layer == "elementwise":
        return elementwise_statistics(g, sequences, samples, needs)
    return linear_statistics(g, a, bias, sequences, samples, needs, layer)


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


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=25)
@given(layout=layouts(), p=st.integers(1, 5), d=st.integers(1, 5), bias=st.booleans(), zeros=st.booleans())
def test_statistics_are_the_definition(layer, layout, p, d, bias, zeros):
    ids, sequences, samples, generator = layout
    g = torch.randn(len(ids), p, generator=generator, dtype=torch.float64)
    if zeros:  # at some positions, and at all of one sequence
        g[(torch.rand(len(g), generator=generator) < 0.3) | (ids == 0)] = 0
    a = torch.randn(len(ids), d, generator=generator, dtype=torch.float64)
    tokens = torch.randint(TOKENS, (len(ids),), generator=generator)
    expected, V = definition(gradients(layer, g, a, tokens, bias), ids, sequences.count, samples)
    for needs in NEEDS:
        given = samples if needs.overlap else None
        result, kept = computed(layer, g, a, tokens, bias, sequences, given, needs)
        asked = {"overlap": needs.overlap, "sample_norm": needs.overlap, "norm": needs.norm, "ntk": needs.ntk}
        for name in NAMES:
            value = getattr(result, name)
            assert (value is not None) == asked[name], f"{name} was asked for: {asked[name]}"
            if value is not None:
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: n + m)
        assert (kept is not None) == (layer in ("whole", "elementwise"))
        if kept is not None:
            torch.testing.assert_close(kept.flatten(1), V, rtol=1e-10, atol=1e-10)


def test_blocks_are_several():
    """Guards the test above: with the limit lowered, rows of V do come in pieces."""
    given = (torch.ones(4, 5), torch.ones(4, 3), False, Sequences.regular(2, 2), cost.block_rows(2, 3))
    blocks = [block for block, _ in statistics.sequence_gradients(*given)]
    assert [(block.start, block.stop) for block in blocks] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize("layer", LAYERS)
def test_bf16_rows_are_multiplied_and_summed_in_float32(layer):
    generator = torch.Generator().manual_seed(0)
    m, T = 3, 64
    ids, sequences = torch.arange(m).repeat_interleave(T), Sequences.regular(m, T)
    samples = Samples(rows=torch.randperm(m * T, generator=generator)[:20], absent=torch.zeros(20, dtype=torch.bool))
    # A common part, so that sums do not cancel and a relative error says something
    g, a = (1 + torch.randn(m * T, size, generator=generator).bfloat16() for size in (24, 16))
    tokens = torch.randint(TOKENS, (m * T,), generator=generator)
    result, _ = computed(layer, g, a, tokens, True, sequences, samples, ALL)
    exact, _ = definition(gradients(layer, g, a, tokens, True), ids, m, samples)
    for name in NAMES:
        value = getattr(result, name)
        assert value.dtype == torch.float32, name
        # bf16 sums would be off by 1e-2
        assert (value.double() - exact[name]).abs().max() < 1e-5 * exact[name].abs().max(), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tiny_cotangents_do_not_underflow_in_float32(strategy):
    generator = torch.Generator().manual_seed(1)
    ids, sequences = torch.arange(3).repeat_interleave(4), Sequences.regular(3, 4)
    samples = Samples(rows=torch.arange(0, 12, 2), absent=torch.zeros(6, dtype=torch.bool))
    g, a = 1e-12 * torch.randn(12, 5, generator=generator), torch.randn(12, 4, generator=generator)
    expected, _ = definition(gradients(strategy, g, a, None, False), ids, 3, samples)
    result, _ = linear_statistics(g, a, False, sequences, samples, ALL, strategy)
    fisher, informed = fisher_norm(result.overlap, result.sample_norm)
    exact = (expected["overlap"].square().sum(0) / expected["sample_norm"].sum()).sqrt()
    assert informed and (exact > 1e-13).all() and (exact < 1e-10).all()
    torch.testing.assert_close(fisher, exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(result.norm.double(), expected["norm"], rtol=1e-4, atol=0)
    torch.testing.assert_close(result.ntk.double(), expected["ntk"], rtol=1e-3, atol=1e-30)


def test_fisher_norm_is_the_formula_and_zero_without_a_gradient_at_any_sample():
    overlap = torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.0, 5.0]])
    result, informed = fisher_norm(overlap, torch.tensor([2.0, 3.0, 4.0]))
    assert informed and result.dtype == torch.float64
    assert result.tolist() == pytest.approx([((1 + 9 + 0) / 9) ** 0.5, ((4 + 16 + 25) / 9) ** 0.5])
    nothing, informed = fisher_norm(torch.zeros(3, 2), torch.zeros(3))
    assert nothing.tolist() == [0, 0] and not informed


@pytest.mark.parametrize("layout", ["regular", "packed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_broken_sequence_leaves_the_statistics_of_the_others_right(layer, layout):
    generator = torch.Generator().manual_seed(2)
    if layout == "regular":
        ids, sequences = torch.arange(3).repeat_interleave(4), Sequences.regular(3, 4)
    else:  # the broken one is the longest
        ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        sequences = Sequences.from_ids(ids, 3)
    g, a = (torch.randn(len(ids), size, generator=generator, dtype=torch.float64) for size in (3, 2))
    tokens = torch.randint(TOKENS, (len(ids),), generator=generator)
    rows = torch.tensor([0, 2, 5, 6, 8, 9])
    samples = Samples(rows=rows, absent=ids[rows] == 0)  # none of the broken sequence
    expected, _ = definition(gradients(layer, g, a, tokens, False), ids, 3, samples)
    g[ids == 0] = float("nan")
    result, _ = computed(layer, g, a, tokens, False, sequences, samples, ALL)
    others = slice(1, None)
    of_others = {"overlap": (..., others), "sample_norm": ..., "norm": others, "ntk": (others, others)}
    for name, place in of_others.items():
        torch.testing.assert_close(getattr(result, name)[place], expected[name][place])
