"""Statistics and sums of the sequences' gradients against the same in plain PyTorch."""

import pytest
import torch

from isopo_trl.geometry.statistics import Statistics
from isopo_trl.kernels import v
from isopo_trl.kernels.coefficients import Entry
from isopo_trl.kernels.launch import INTERPRET
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EACH_DTYPE,
    EUCLIDEAN,
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
@pytest.mark.parametrize(("m", "p", "d"), [(2, 130, 130), (17, 70, 121), (5, 1, 16384)])
def test_gradients_that_take_several_programs(m, p, d, rule):
    """More than 2^13 elements, a multiple of that and not; blocks of unequal size."""
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
    if rule.needs.ntk:
        close(without.result.ntk, ntk, STATISTIC[torch.float32])
    else:
        close(without.result.norm, ntk.diagonal(), STATISTIC[torch.float32])


@pytest.mark.parametrize("rule", [FIG4, EUCLIDEAN, INTERACTING], ids=named)
@pytest.mark.parametrize("m", [1, 3, 8, 17])
def test_sums_without_a_ledger_are_the_statistics(m, rule):
    dtype = torch.float64 if INTERPRET else torch.float32
    V = torch.randn(m, 7, 33, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    sums = v.VSums(rule)
    for part in V.split(3, dim=1):
        sums.add(part.contiguous())
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    assert (sums.result.ntk is None) != rule.needs.ntk and (sums.result.norm is None) == rule.needs.ntk
    close(sums.result.ntk if rule.needs.ntk else sums.result.norm, ntk if rule.needs.ntk else ntk.diagonal(), 1e-5)
    assert sums.result.overlap is None and sums.result.sample_norm is None


@pytest.mark.parametrize("m", [1, 3, 8, 17])
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
