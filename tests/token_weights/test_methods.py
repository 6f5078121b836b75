"""The methods of the field: weights are what a loop over tokens says, in float64."""

import math

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import named
from tests import training
from tests.token_weights.definition import METHODS, Token, bapo_bounds, m2po_bound, method_weights, scored_as_tokens


def weighting(method, **settings):
    return named(method)(ISOPOConfig("unused", token_weights=method, **training.SETTINGS, **settings))


def microbatch(seed, spread=1.5, shape=(6, 9)):
    """Likely and unlikely tokens, ratios far from 1, unscored and unknown ones, advantages of each sign and none."""
    generator = torch.Generator().manual_seed(seed)
    logps = torch.rand(shape, generator=generator, dtype=torch.float64).square().log().clamp(min=-6)
    behaviour = logps - spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    behaviour = behaviour.clamp(max=-1e-6)
    behaviour[0, 0] = behaviour[2, 3] = math.nan
    mask = (torch.rand(shape, generator=generator) < 0.8).long()
    behaviour[mask == 0] = -50.0
    advantages = torch.tensor([1.13, -0.5, 0.0, -1.2, 0.34, 0.79], dtype=torch.float64)
    return logps, behaviour, mask, advantages[torch.randperm(6, generator=generator)]


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_the_formula_for_each_token_of_a_step(method):
    """With the numbers of the sources; each microbatch among those before it, and alone in an evaluation."""
    own, before, differ, gated = weighting(method), [], 0, 0
    for seed, spread in ((3, 0.25), (4, 0.6), (5, 2.0)):
        logps, behaviour, mask, advantages = microbatch(seed, spread)
        tokens = scored_as_tokens(logps, behaviour, mask, advantages)
        alone = method_weights(method, {}, tokens, mask.shape)
        expected = method_weights(method, {}, tokens, mask.shape, before)
        with torch.no_grad():
            evaluated = own(logps, behaviour, mask, advantages).weights
        weights = own(logps.clone().requires_grad_(), behaviour, mask, advantages).weights
        assert not weights.requires_grad and weights.isfinite().all()
        for found, by_loops in ((evaluated, alone), (weights, expected)):
            assert ((found - by_loops).abs() * mask).max() < 1e-9
        before += tokens.values()
        differ += (alone != expected).sum().item()
        gated += ((expected == 0) & mask.bool()).sum().item()
    assert (differ > 0) == (method in ("m2po", "bapo"))
    assert (gated > 3) == (method != "pspo")
    figures = own.step()
    if method == "bapo":
        low, high = bapo_bounds(before, 1.0)
        assert (figures["clip_low"].item(), figures["clip_high"].item()) == pytest.approx((low, high))
    elif method != "pspo":
        assert figures["gated"].item() == pytest.approx(gated / len(before))
    assert own.step() == {}


@pytest.mark.parametrize("method", ["m2po", "bapo"])
def test_with_the_scope_of_a_microbatch_each_has_bounds_of_its_own(method):
    own, bounds = weighting(method, token_weights_scope="microbatch"), []
    for seed, spread in ((3, 0.25), (4, 0.6), (5, 2.0)):
        logps, behaviour, mask, advantages = microbatch(seed, spread)
        tokens = scored_as_tokens(logps, behaviour, mask, advantages)
        weights = own(logps.clone().requires_grad_(), behaviour, mask, advantages).weights
        assert ((weights - method_weights(method, {}, tokens, mask.shape)).abs() * mask).max() < 1e-9
        bounds.append(bapo_bounds(tokens.values(), 1.0))
    figures = own.step()
    if method == "bapo":
        found = [figures[f"clip_{name}"].item() for name in ("low", "high")]
        assert found == pytest.approx([sum(values) / 3 for values in zip(*bounds, strict=True)])
        assert len(set(bounds)) > 1


def test_m2po_sees_how_far_off_a_token_is_beyond_where_ratios_are_cut():
    """Among 5000 tokens a log-ratio of 20 is over the budget, and one of 10, at which ratios are cut, is not."""
    logps, behaviour = torch.full((2, 1, 5001), -20.0, dtype=torch.float64)
    behaviour -= 0.05
    mask, advantages = torch.ones(1, 5001), torch.ones(1, dtype=torch.float64)
    for last, expected in ((-30.0, math.exp(10)), (-40.0, 0.0), (-math.inf, 0.0)):
        behaviour[0, -1] = last
        weights = weighting("m2po")(logps, behaviour, mask, advantages).weights[0]
        assert weights[-1].item() == pytest.approx(expected)
        assert weights[:-1].tolist() == pytest.approx([math.exp(0.05)] * 5000)
    tokens = [Token(-20.0, -20.05, 1.0)] * 5000
    bounds = [m2po_bound([*tokens, Token(-20.0, last, 1.0)], 0.04) for last in (-30.0, -40.0)]
    assert bounds == [math.inf, pytest.approx(0.05**2)]


@pytest.mark.parametrize("method", METHODS)
def test_sequences_without_an_advantage_change_nothing_for_the_others(method):
    """So that they may be left out."""
    whole, parts = weighting(method), weighting(method)
    assert not whole.looks_across_sequences
    for seed, spread in ((3, 0.25), (4, 0.6), (5, 2.0)):
        rows = microbatch(seed, spread)
        kept = rows[3] != 0
        alone = parts(*(row[kept] for row in rows)).weights
        torch.testing.assert_close(whole(*rows).weights[kept], alone, rtol=1e-12, atol=0)


def test_bounds_of_bapo_rise_until_the_target_is_met_or_there_is_no_step_left():
    found = []
    for target in (0.9, 1.0, 5.0):
        own, batch = weighting("bapo", bapo_target=target), microbatch(4, 0.6)
        own(*batch)
        figures = own.step()
        found.append([figures[f"clip_{name}"].item() for name in ("low", "high")])
        assert found[-1] == pytest.approx(bapo_bounds(scored_as_tokens(*batch).values(), target))
    start, between, end = found
    assert start == pytest.approx([0.6, 1.2]) and 1.2 < between[1] < 2 and end == pytest.approx([0.8, 2.0])


@pytest.mark.parametrize("method", METHODS)
def test_on_fresh_data_all_tokens_count_alike(method):
    logps, _, mask, advantages = microbatch(5)
    weights = weighting(method)(logps, logps.clone(), mask, advantages).weights
    assert torch.equal(weights, torch.full_like(weights, 0.9 if method == "pspo" else 1.0))


@pytest.mark.parametrize("method", ["m2po", "bapo"])
def test_a_step_that_was_given_up_leaves_nothing_behind(method):
    one, other = weighting(method), weighting(method)
    one(*microbatch(3))
    one.reset()
    assert torch.equal(one(*microbatch(4)).weights, other(*microbatch(4)).weights)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "pspo"])
def test_sides_without_advantages_are_an_error(method):
    with pytest.raises(ValueError, match="pass `advantages`"):
        weighting(method)(*microbatch(3)[:3])
