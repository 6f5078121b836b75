"""Statistics and sums of the sequences' gradients against the same in plain PyTorch."""

import pytest
import torch

from isopo_trl.geometry.statistics import Statistics
from isopo_trl.kernels import v
from isopo_trl.kernels.coefficients import COUNTERS, Entry
from isopo_trl.kernels.launch import INTERPRET
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EACH_DTYPE,
    EUCLIDEAN,
    EXACT,
    FIG4,
    GRADIENT,
    INTERACTING,
    KNOWN,
    STATISTIC,
    UNKNOWN,
    Run,
    batch,
    close,
    filled_ledger,
    named,
    plain_statistics,
    run_linear,
)


pytestmark = batches.of_kernels


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("rule", [FIG4, EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize(("m", "rows"), [(1, None), (3, 1), (8, 3), (17, None)])
def test_norms_and_kernels_of_gradients_in_any_number_of_blocks(m, rule, rows, dtype):
    given = batch(m, 5, 4, 33, 5, bias=m == 3, dtype=dtype)
    run = Run.of(given, rule, KNOWN if m == 8 else UNKNOWN)
    run_linear(given, run, rows)
    run.check(plain_statistics(given, rule.needs)[0], STATISTIC[dtype])


@pytest.mark.parametrize("rule", [EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize(("m", "p", "d"), [(2, 130, 130), (17, 70, 121), (17, 80, 128), (5, 1, 16384), (1, 70, 3)])
def test_gradients_that_take_several_programs(m, p, d, rule):
    """More than 2^13 elements, a multiple of that and not; blocks of unequal size; with a ledger and without one."""
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(m, p, d, generator=generator).to(DEVICE)
    given = batch(m, 1, 1, 1, 1)
    run = Run.of(given, rule)
    parts = [p] if p == 1 else [p - 65, 65]
    sums = v.VBlocks([part * d for part in parts], run.entry)
    without = v.VSums(rule)
    for part in V.split(parts, dim=1):
        sums.add(part.contiguous())
        without.add(part.contiguous())
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    run.check(Statistics(norm=ntk.diagonal(), ntk=ntk), STATISTIC[torch.float32])
    name, expected, other = ("ntk", ntk, "norm") if rule.needs.ntk else ("norm", ntk.diagonal(), "ntk")
    close(getattr(without.result, name), expected, STATISTIC[torch.float32])
    assert getattr(without.result, other) is without.result.overlap is without.result.sample_norm is None


@pytest.mark.parametrize(
    ("m", "changes"),
    [
        (3, {}),  # pairs, summed in two levels
        (3, {"pairs": False, "rows": 16, "warps": 1}),
        (17, {}),
        (17, {"grouped": False, "part": 2**13, "stages": 1}),
    ],
    ids=str,
)
def test_the_kernel_between_sequences_does_not_depend_on_how_it_is_cut(m, changes):
    """Blocks of unequal size, the last of which leaves some programs without any work."""
    given, run = batch(m, 1, 1, 1, 1), Run.of(batch(m, 1, 1, 1, 1), INTERACTING)
    V = torch.randn(m, 3, 1030, generator=torch.Generator().manual_seed(m)).to(DEVICE, given.g.dtype)
    small = {"width": 16, "least": 40, "programs": 45, "grouped": True}
    cut = v.tiling(m, V.dtype.itemsize, 2**16)._replace(**{**small, **changes})
    assert cut.programs_of(2060) == 45 and cut.programs_of(1030) == 26
    assert cut.group(45) == (7 if cut.grouped else 45) and cut.sums(45) == (52 if cut.grouped else 45)
    blocks = v.VBlocks([2060, 1030], run.entry, cut=cut)
    for part in V.split(2, dim=1):
        blocks.add(part.contiguous())
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    run.check(Statistics(norm=ntk.diagonal(), ntk=ntk), STATISTIC[EXACT])


def test_steps_under_way_fit_a_programs_shared_memory():
    stages = {(m, memory): v.tiling(m, 4, memory * 2**10).stages for m in (17, 64, 128) for memory in (0, 48, 99, 227)}
    assert stages == {
        **{(17, 0): 1, (17, 48): 4, (17, 99): 4, (17, 227): 4},
        **{(64, 0): 1, (64, 48): 2, (64, 99): 4, (64, 227): 4},
        **{(128, 0): 1, (128, 48): 1, (128, 99): 2, (128, 227): 4},
    }


def test_every_program_has_a_counter_among_those_of_a_ledger():
    for m in (2, 16, 17, 64, 128):
        cut = v.tiling(m, 4, 2**16)
        assert cut.rows >= m
        for programs in range(1, cut.programs + 1):
            groups = -(-programs // cut.group(programs))
            assert groups < COUNTERS and cut.sums(programs) <= programs + groups


@pytest.mark.parametrize("m", [17, 64])
def test_long_sums_between_sequences_are_rounded_not_cut_off(m, monkeypatch):
    """By one program, in float32: what a GPU's products add up by themselves loses part of a bit each time."""
    monkeypatch.setattr(v, "_tiling_of", lambda *_: v.tiling(m, 4, 2**16)._replace(programs=1))
    V = torch.rand(m, 2**8, 2**8, generator=torch.Generator().manual_seed(m)).to(DEVICE)
    sums = v.VSums(INTERACTING)
    sums.add(V)
    found, rows = sums.result.ntk, V.double().flatten(1)
    close(found, rows @ rows.T, 1e-5)
    assert torch.equal(found, found.T)


@pytest.mark.parametrize("m", [1, 3, 8, 17, 40])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (5, 33), (16, 16), (33, 130)])
def test_combined_is_the_sum_of_gradients_with_their_coefficients(m, p, d):
    dtype = torch.float64 if INTERPRET else torch.float32
    V = torch.randn(m, p, d, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    ledger = filled_ledger(m)
    expected = torch.einsum("m,mpd->pd", ledger.table[KNOWN, 0], V.double())
    for out in DTYPES:
        result = v.combined(V, Entry(ledger, KNOWN), out)
        assert result.dtype == out
        close(result, expected, max(GRADIENT[out], GRADIENT[dtype]))
