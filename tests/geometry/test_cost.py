"""The choice of a strategy from shapes: the table of costs, and what follows from it for real layers."""

import pytest

from isopo_trl.geometry import cost
from isopo_trl.geometry.cost import WHOLE_BY_KERNELS, WHOLE_LIMIT, Needs, block_rows, choose_strategy, relative_costs


OVERLAP, NORM, NTK = Needs(overlap=True), Needs(norm=True), Needs(ntk=True)
# Microbatch of 16 x 1024 tokens with 64 samples; layers of a 0.6B and an 8B model, and a LoRA factor of rank 16
M, T, SAMPLES = 16, 1024, 64
LARGE = [(1024, 3072), (6144, 2048), (4096, 4096), (14336, 4096)]
LORA = [(16, 1024), (3072, 16), (8, 4096)]


@pytest.fixture
def arithmetic_alone(monkeypatch):
    """Memory traffic costs nothing."""
    monkeypatch.setitem(cost._BALANCE, "cpu", 0.0)


@pytest.mark.parametrize(("p", "d"), [*LARGE, *LORA])
def test_without_memory_traffic_costs_are_the_table(p, d, arithmetic_alone):
    t_star = p * d / (p + d)
    N = M * T
    table = {  # norm, overlap, NTK: ghost, keep all V, row blocks
        NORM: (T / t_star, 0.0, 1.0),
        OVERLAP: (SAMPLES / t_star, SAMPLES / T, 1 + SAMPLES / T),
        NTK: (N / t_star, M**2 / N, 1 + M**2 / N),
    }
    for needs, (ghost, kept, blocks) in table.items():
        costs = relative_costs(M, T, p, d, SAMPLES, needs)
        # The table leaves out squaring V, one multiplication an element
        expected = {"ghost": ghost, "whole": kept, "blocks": blocks}
        assert costs == pytest.approx(expected, abs=1 / T if needs == NORM else 1e-12)


def test_costs_of_several_statistics_add_up(arithmetic_alone):
    one = [relative_costs(4, 32, 48, 24, 10, needs) for needs in (OVERLAP, NORM, NTK)]
    together = relative_costs(4, 32, 48, 24, 10, Needs(True, True, True))
    assert together["ghost"] == pytest.approx(sum(costs["ghost"] for costs in one))
    assert together["whole"] == pytest.approx(sum(costs["whole"] for costs in one))
    # Blocks of V are formed once for all of them
    assert together["blocks"] == pytest.approx(1 + together["whole"])


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


def test_a_gpu_keeps_fewer_sequence_gradients_than_a_cpu_since_their_traffic_costs_more():
    # 16 sequences of 512: V is as large as the activations
    assert choose_strategy(16, 512, 2048, 1024, SAMPLES, NORM, "cpu") == "whole"
    assert choose_strategy(16, 512, 2048, 1024, SAMPLES, NORM, "cuda") == "ghost"


def test_the_second_product_of_a_narrow_layer_takes_as_long_as_reading_its_operands():
    costs = relative_costs(64, 128, 16, 1024, SAMPLES, NORM, "cuda")
    assert costs["whole"] < costs["blocks"]


@pytest.mark.parametrize(("p", "d"), LARGE)
def test_the_overlap_of_a_large_layer_never_forms_sequence_gradients(p, d):
    assert choose_strategy(M, T, p, d, SAMPLES, OVERLAP) == "ghost"


@pytest.mark.parametrize("needs", [OVERLAP, NORM, NTK, Needs(True, True)])
@pytest.mark.parametrize(("p", "d"), LORA)
def test_a_lora_factor_keeps_its_small_sequence_gradients(p, d, needs):
    assert choose_strategy(M, T, p, d, SAMPLES, needs) == "whole"


@pytest.mark.parametrize("needs", [NORM, NTK])
@pytest.mark.parametrize(("p", "d"), [(4096, 4096), (14336, 4096), (1024, 3072)])
def test_norm_and_ntk_of_a_large_layer_go_in_bounded_blocks(p, d, needs):
    assert choose_strategy(M, 4 * T, p, d, SAMPLES, needs) == "blocks"


def test_short_sequences_on_a_large_layer_take_the_norm_from_products():
    # T < T*: [T, T] products are cheaper than forming V
    assert choose_strategy(M, 16, 4096, 4096, SAMPLES, NORM) == "ghost"


def test_a_rule_without_statistics_forms_nothing():
    assert relative_costs(M, T, 4096, 4096, 0, Needs()) == {"ghost": 0, "whole": 0, "blocks": 1}
    assert choose_strategy(M, T, 4096, 4096, 0, Needs()) == "ghost"


def test_sequence_gradients_are_kept_up_to_the_limit_and_not_beyond():
    p, d = 64, 64
    m = WHOLE_LIMIT // (p * d)
    assert choose_strategy(m, 4096, p, d, SAMPLES, NORM) == "whole"
    assert choose_strategy(m + 1, 4096, p, d, SAMPLES, NORM) != "whole"


def test_the_choice_is_the_cheapest_that_fits(monkeypatch):
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 2**10)
    for m in (1, 3, 8):
        for length in (1, 7, 60, 500):
            for p, d in [(4, 4), (16, 8), (64, 32)]:
                for needs in (OVERLAP, NORM, NTK, Needs(True, True, False)):
                    costs = relative_costs(m, length, p, d, 12, needs)
                    fitting = {s: c for s, c in costs.items() if s != "whole" or m * p * d <= 2**10}
                    chosen = choose_strategy(m, length, p, d, 12, needs)
                    assert chosen in fitting and costs[chosen] == min(fitting.values())


@pytest.mark.parametrize(("m", "d"), [(1, 1), (8, 1024), (8, 4096), (4, 12288), (3, 14337), (64, 151936)])
def test_a_block_of_rows_fits_the_limit_and_many_more_rows_would_not(m, d):
    rows = block_rows(m, d)
    assert m * rows * d <= WHOLE_LIMIT < m * (rows + 128) * d


@pytest.mark.parametrize(("m", "d"), [(4, 12288), (3, 14337), (7, 4096)])
def test_blocks_begin_where_matrix_products_are_fast(m, d):
    assert (WHOLE_LIMIT // (m * d)) % 8 and block_rows(m, d) % 128 == 0


def test_a_block_has_at_least_one_row():
    assert block_rows(WHOLE_LIMIT, 2) == 1


@pytest.mark.parametrize("needs", [NORM, NTK, Needs(overlap=True, norm=True)])
def test_kernels_take_gradients_that_can_be_kept_however_small_the_microbatch(needs):
    """Two sequences of 512: by operations alone, products between rows would be cheaper at some layers."""
    chosen = {choose_strategy(2, 512, p, d, SAMPLES, needs, "cuda") for p, d in [(3072, 1024), (1024, 3072)]}
    assert chosen == {"ghost"}
    for p, d in [(3072, 1024), (1024, 3072)]:
        assert choose_strategy(2, 512, p, d, SAMPLES, needs, "cuda", kernels=True) == "whole"


@pytest.mark.parametrize("needs", [NORM, NTK])
def test_kernels_take_large_gradients_where_that_is_cheaper_up_to_a_limit_of_their_own(needs):
    p, d = 12288, 4096
    assert choose_strategy(4, 2048, p, d, SAMPLES, needs, "cuda", kernels=True) == "whole"
    assert choose_strategy(4, 2048, p, d, SAMPLES, needs, "cuda") != "whole"
    m = WHOLE_BY_KERNELS // (p * d) + 1
    assert choose_strategy(m, 2048, p, d, SAMPLES, needs, "cuda", kernels=True) != "whole"


def test_short_sequences_on_a_large_layer_take_the_norm_from_products_with_kernels_too():
    assert choose_strategy(4, 64, 12288, 4096, SAMPLES, NORM, "cuda", kernels=True) == "ghost"
