"""The sampler's correction against loops over tokens."""

import math

import pytest
import torch

from isopo_trl.token_weights.sampler import sampler_weights


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS = [(None, 3.0), (0.5, 3.0), (0.5, None), (0.9, 1.1)]


def example():
    """
    Log-probabilities that differ by up to a few units, so that every bound is crossed; ragged masks, tokens of which
    the sampler gave none, and nonsense where none is scored.
    """
    generator = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(5, 7, generator=generator, dtype=torch.float64)
    sampler = logps + torch.randn(5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [1], [0]])).long()
    sampler = torch.where(mask.bool(), sampler, -50.0)
    sampler[0, 2] = sampler[1, 0] = sampler[3, 0] = math.nan
    return logps, sampler, mask


def weights_by_loop(logps, sampler, mask, mode, low, high):
    def bounded(ratio):
        if mode.endswith("truncate"):
            ratio = ratio if low is None else max(ratio, low)
            return ratio if high is None else min(ratio, high)
        inside = (low is None or ratio >= low) and (high is None or ratio <= high)
        return ratio if inside else 0.0

    rows = []
    for b in range(len(logps)):
        differences = []
        for t in range(logps.shape[1]):
            difference = 0.0
            if mask[b, t] and not math.isnan(sampler[b, t]):
                difference = logps[b, t].item() - sampler[b, t].item()
            differences.append(difference)
        if mode.startswith("sequence"):
            rows.append([bounded(math.exp(sum(differences)))])
        else:
            rows.append([bounded(math.exp(difference)) for difference in differences])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        *((mode, *bounds) for mode in MODES for bounds in BOUNDS),
        *((mode, None, None) for mode in ("token_mask", "sequence_mask")),
    ],
)
def test_weights_are_trls(mode, low, high):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, low, high)
    assert weights.shape == ((5, 1) if mode.startswith("sequence") else (5, 7))
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, low, high))


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_the_sampler_found_impossible_is_capped_or_dropped(mode):
    logps, sampler, mask = example()
    sampler[0, 0] = -math.inf
    weight = sampler_weights(logps, sampler, mask, mode, None, 3.0)[0, 0]
    assert weight == (3.0 if mode.endswith("truncate") else 0.0)


def test_the_bounds_themselves_are_inside():
    logps = torch.tensor([[2.0, 0.5]]).log()
    weights = sampler_weights(logps, torch.zeros(1, 2), torch.ones(1, 2), "token_mask", 0.5, 2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5]]))
