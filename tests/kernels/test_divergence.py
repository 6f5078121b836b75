"""Divergences of distributions by one kernel: those of plain PyTorch in float64."""

import math

import pytest
import torch

from isopo_trl.kernels import divergence, launch
from isopo_trl.step_size import measurement
from tests.kernels import batches
from tests.kernels.batches import DEVICE


pytestmark = batches.of_kernels


def logits(rows, size, scale, change, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    before = scale * torch.randn(rows, size, generator=generator)
    after = before + change * torch.randn(rows, size, generator=generator) + torch.randn(rows, 1, generator=generator)
    return before.to(DEVICE, dtype), after.to(DEVICE, dtype)


def exact(before, after):
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("change", [1e-3, 1e-2, 0.3, 3.0])
@pytest.mark.parametrize("size", [2, 90, 4096, 4097, 20_000])
def test_divergences_are_those_of_float64(size, change):
    for scale in (1, 8):
        before, after = logits(3, size, scale, change)
        assert divergence.takes_both(before, after)
        found = measurement.of_distributions(before, after)
        assert found.dtype == torch.float32 and (found >= 0).all()
        torch.testing.assert_close(found.double(), exact(before, after), rtol=3e-3, atol=1e-11)


@pytest.mark.parametrize("change", [0.05, 0.2, 0.24, 0.26, 0.9, 1.1, 95.0, 200.0])
def test_changes_of_all_sizes(change):
    """By the series, without it, and where the exponential is too large for float32."""
    before = torch.tensor([[0.0, 0.0, 1.0], [0.0, -change, -1.0]], device=DEVICE)
    after = before + torch.tensor([[change, -change, 0.0], [-change, change, 0.0]], device=DEVICE)
    expected = exact(before, after)
    torch.testing.assert_close(divergence.divergences(before, after).double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, *([] if launch.INTERPRET else [torch.bfloat16])], ids=str)
def test_narrow_logits_are_compared_in_float32(dtype):
    before, after = logits(2, 500, 3, 0.5, dtype)
    torch.testing.assert_close(divergence.divergences(before, after).double(), exact(before, after), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [7, 5000])
def test_tokens_that_cannot_occur_are_as_in_plain_pytorch(size, monkeypatch):
    """Before, after, in both; with logits far below zero beside them, and with what is no number."""
    before, after = logits(7, size, 1, 0.3)
    before[0, :3] = after[1, 1] = before[2, -1] = after[2, -1] = -math.inf
    before[3, : size // 2], after[3, : size // 2] = -math.inf, -math.inf
    before[3:5] -= 1000
    after[3:5] -= 900
    before[5, 1] = math.nan
    after[6, 2] = math.inf
    found = measurement.of_distributions(before, after)
    monkeypatch.setattr(launch, "ENABLED", False)
    assert not divergence.takes_both(before, after)
    expected = measurement.of_distributions(before, after)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-3, atol=1e-9)
    assert found[[0, 2, 3, 4]].isfinite().all() and found[1] == math.inf and found[5:].isnan().all()


def test_other_logits_take_the_plain_way():
    before, after = logits(4, 10, 1, 0.1)
    assert not divergence.takes_both(before.double(), after.double())
    assert not divergence.takes_both(before[:, :5], after[:, :5])
    assert not divergence.takes_both(before[:0], after[:0])
    found = measurement.of_distributions(before[:, :5], after[:, :5])
    torch.testing.assert_close(found.double(), exact(before[:, :5], after[:, :5]), rtol=1e-4, atol=0)
