"""The sampler's correction against loops over tokens."""

import math

import pytest
import torch

from isopo_trl.token_weights.sampler import sampler_weights


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS = [(None, 3.0), (0.5, 3.0), (0.5, None), (0.9, 1.1)]


def example(seed=0):
    """Log-probabilities that differ by up to a few units, so that every bound is crossed; ragged masks."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(5, 7, generator=generator, dtype=torch.float64)
    sampler = logps + torch.randn(5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [1], [0]])).long()
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


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_trls(mode, low, high):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, low, high)
    assert weights.shape == ((5, 1) if mode.startswith("sequence") else (5, 7))
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, low, high))


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_masking_without_bounds_leaves_the_ratio_alone(mode):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, None, None)
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, None, None))
    assert (weights > 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_token_without_sampler_logprob_counts_as_on_policy(mode):
    logps, sampler, mask = example()
    sampler[0, 2] = sampler[1, 0] = sampler[4, 3] = float("nan")
    sampler[3] = float("nan")
    weights = sampler_weights(logps, sampler, mask, mode, 0.25, 4.0)
    torch.testing.assert_close(weights, weights_by_loop(logps, sampler, mask, mode, 0.25, 4.0))
    assert weights[3].tolist() == [1.0] * weights.shape[1]
    if mode.startswith("token"):
        assert weights[0, 2] == weights[1, 0] == 1


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_are_not_scored_do_not_matter(mode):
    logps, sampler, mask = example()
    weights = sampler_weights(logps, sampler, mask, mode, 0.25, 4.0)
    changed = torch.where(mask.bool(), sampler, -50.0)
    torch.testing.assert_close(sampler_weights(logps, changed, mask, mode, 0.25, 4.0), weights)


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_tokens_weigh_one(mode):
    logps, _, mask = example()
    assert (sampler_weights(logps, logps.clone(), mask, mode, 0.5, 2.0) == 1).all()


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
