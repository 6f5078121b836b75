"""The choice of a strategy from shapes: the table of costs, and what follows from it for real layers."""

import itertools

import pytest

from isopo_trl.geometry import cost
from isopo_trl.geometry.cost import WHOLE_BY_KERNELS, WHOLE_LIMIT, Needs, block_rows, choose_strategy, relative_costs


OVERLAP, NORM, NTK, BOTH = Needs(overlap=True), Needs(norm=True), Needs(ntk=True), Needs(overlap=True, norm=True)
# Microbatch of 16 x 1024 tokens with 64 samples
M, T, SAMPLES = 16, 1024, 64


@pytest.mark.parametrize(("p", "d"), [(1024, 3072), (14336, 4096), (16, 1024)])
def test_without_memory_traffic_costs_are_the_table(p, d, monkeypatch):
    monkeypatch.setitem(cost._BALANCE, "cpu", 0.0)
    t_star = p * d / (p + d)
    N = M * T
    table = {  # norm, overlap, NTK, a direction: ghost, keep all V, row blocks
        NORM: (T / t_star, 0.0, 1.0),
        OVERLAP: (SAMPLES / t_star, SAMPLES / T, 1 + SAMPLES / T),
        NTK: (N / t_star, M**2 / N, 1 + M**2 / N),
        Needs(direction=True): (1.0, 1 / T, 1 + 1 / T),
    }
    found = {needs: relative_costs(M, T, p, d, SAMPLES, needs) for needs in table}
    for needs, (ghost, kept, blocks) in table.items():
        # The table leaves out squaring V, one multiplication an element
        expected = {"ghost": ghost, "whole": kept, "blocks": blocks}
        assert found[needs] == pytest.approx(expected, abs=1 / T if needs == NORM else 1e-12)
    # Several statistics add up; blocks of V are formed once for all of them
    together = relative_costs(M, T, p, d, SAMPLES, Needs(True, True, True, True))
    for strategy in ("ghost", "whole"):
        assert together[strategy] == pytest.approx(sum(costs[strategy] for costs in found.values()))
    assert together["blocks"] == pytest.approx(1 + together["whole"])
    assert relative_costs(M, T, p, d, 0, Needs()) == {"ghost": 0, "whole": 0, "blocks": 1}


def test_traffic_is_counted_in_bytes_over_the_bytes_of_the_product(monkeypatch):
    """At a balance of one operation a byte, a cost is multiply-adds plus half the bytes, over `m T p d`."""
    monkeypatch.setitem(cost._BALANCE, "cpu", 1.0)
    m, length, p, d, n = 3, 50, 40, 20, 7
    N, V = m * length, m * p * d
    unit = 2 * N * p * d
    # V written, read for the norm, and read for the sum over sequences; in blocks only the first two
    costs = relative_costs(m, length, p, d, n, NORM)
    assert costs["whole"] == pytest.approx(1 / length + 12 * V / unit)
    assert costs["blocks"] == pytest.approx(1 + 1 / length + 8 * V / unit)
    # Rows read; products of either side written and read
    overlap = relative_costs(m, length, p, d, n, OVERLAP)["ghost"]
    assert overlap == pytest.approx(n * (p + d) / (p * d) + (2 * N * (p + d) + 16 * n * N) / unit)


LARGE = WHOLE_BY_KERNELS // (12288 * 4096) + 1  # sequences whose gradients at a large layer are too many


@pytest.mark.parametrize(
    ("m", "length", "shape", "needs", "device", "kernels", "chosen"),
    [
        # The overlap of a large layer never forms sequence gradients, a LoRA factor keeps its small ones
        *((M, T, shape, OVERLAP, "cpu", False, {"ghost"}) for shape in [(1024, 3072), (14336, 4096)]),
        *((M, T, (3072, 16), needs, "cpu", False, {"whole"}) for needs in (OVERLAP, NORM, NTK, BOTH)),
        (M, T, (4096, 4096), Needs(), "cpu", False, {"ghost"}),
        # Long sequences go in bounded blocks; for T < T*, [T, T] products are cheaper than forming V
        *((M, 4 * T, (14336, 4096), needs, "cpu", False, {"blocks"}) for needs in (NORM, NTK)),
        *((M, 16, (4096, 4096), NORM, device, device == "cuda", {"ghost"}) for device in ("cpu", "cuda")),
        # V as large as the activations: traffic costs a GPU more
        (16, 512, (2048, 1024), NORM, "cpu", False, {"whole"}),
        (16, 512, (2048, 1024), NORM, "cuda", False, {"ghost"}),
        # Kernels take gradients that can be kept, however small the microbatch, up to a limit of their own
        *((2, 512, (3072, 1024), needs, "cuda", False, {"ghost"}) for needs in (NORM, NTK, BOTH)),
        *((2, 512, (3072, 1024), needs, "cuda", True, {"whole"}) for needs in (NORM, NTK, BOTH)),
        (4, 2048, (12288, 4096), NTK, "cuda", True, {"whole"}),
        (4, 2048, (12288, 4096), NTK, "cuda", False, {"ghost", "blocks"}),
        (LARGE, 2048, (12288, 4096), NTK, "cuda", True, {"ghost", "blocks"}),
    ],
)
def test_real_layers_take_the_strategy_that_is_fast_for_them(m, length, shape, needs, device, kernels, chosen):
    assert choose_strategy(m, length, *shape, SAMPLES, needs, device, kernels) in chosen


def test_the_choice_is_the_cheapest_that_fits(monkeypatch):
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 2**10)
    shapes = [(4, 4), (16, 8), (64, 32)]
    kept = set()
    for m, length, (p, d), needs in itertools.product((1, 3, 8), (1, 60, 500), shapes, (OVERLAP, NORM, NTK, BOTH)):
        costs = relative_costs(m, length, p, d, 12, needs)
        fitting = {s: c for s, c in costs.items() if s != "whole" or m * p * d <= 2**10}
        chosen = choose_strategy(m, length, p, d, 12, needs)
        assert chosen in fitting and costs[chosen] == min(fitting.values())
        kept |= {m * p * d} if chosen == "whole" else set()
    assert max(kept) == 2**10  # the limit itself


@pytest.mark.parametrize(("m", "d"), [(8, 1024), (4, 12288), (3, 14337), (64, 151936)])
def test_a_block_of_rows_fits_the_limit_and_begins_where_matrix_products_are_fast(m, d):
    rows = block_rows(m, d)
    assert m * rows * d <= WHOLE_LIMIT < m * (rows + 128) * d
    assert rows % 128 == 0 or rows < 128
    assert block_rows(WHOLE_LIMIT, 2) == 1
