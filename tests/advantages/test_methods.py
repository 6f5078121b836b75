"""Each transform of advantages is its formula, by plain loops over completions."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.advantages import Chain, Generation
from isopo_trl.advantages.cppo import number_trained
from isopo_trl.advantages.simpletir import has_void_turn
from tests import training
from tests.advantages import definition


GROUP = 5
# Groups: mixed, all wrong, with one that nobody scored, all right
RIGHT = [1, 0, 0, 1, 0] + [0] * 5 + [1, None, 0, 1, 1] + [1] * 5
# Any number; equal ones whose mean is off by a rounding
ANY = [0.3, -1.7, 0.9, 0.25, 2.0] + [0.1] * 5 + [0.4, None, 0.2, 0.8, 0.8] + [1.1, 1.0, 1.2, 0.7, 1.3]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generation(rewards, masked=(), scale="group", **asked):
    """A generation with TRL's advantages, some of it `masked`; `asked`: what can be asked of it."""
    numbers = torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)
    advantages = torch.tensor(definition.grpo([*rewards], GROUP, scale), dtype=torch.float64)
    has_tokens = torch.tensor([i not in masked for i in range(len(rewards))])
    return Generation(numbers, advantages, GROUP, SimpleNamespace(has_tokens=has_tokens, **asked))


def config(**settings):
    batch = {"per_device_train_batch_size": GROUP, "num_generations": GROUP}
    return ISOPOConfig("unused", **{**training.SETTINGS, **batch, **settings})


def applied(generation, name, **settings):
    chain = Chain(config(advantage_transform=name, **settings))
    return chain.apply(generation).tolist()


def close(values):
    return pytest.approx(values, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("settings", [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}], ids=str)
def test_redit_without_noise_is_grpo_and_its_noise_is_within_its_reach_and_new_each_time(settings):
    expected = definition.grpo(ANY, GROUP, settings.get("scale_rewards", "group"))
    chosen = {"redit_scale": 0.0, **settings}
    assert applied(generation(ANY), "redit", **chosen) == close(expected)
    chain, noises = Chain(config(advantage_transform="redit", **settings)), []
    for _ in range(2):
        one = generation(ANY)
        before = one.rewards.clone()
        result = chain.apply(one).tolist()
        noises.append((one.rewards - before).nan_to_num(nan=0.0))
        changed = [None if math.isnan(r) else r for r in one.rewards.tolist()]
        assert result == close(definition.grpo(changed, GROUP, settings.get("scale_rewards", "group")))
    assert all(0.02 < noise.abs().max() <= 0.05 for noise in noises) and not torch.equal(*noises)


def test_redits_gaussian_noise_has_the_deviation_that_is_asked_for():
    one = generation([0.5] * 4000)
    applied(one, "redit", redit_noise="gaussian", redit_scale=0.3)
    assert one.rewards.mean().item() == pytest.approx(0.5, abs=0.02)
    assert one.rewards.std().item() == pytest.approx(0.3, rel=0.05)


def test_dcpo_standardises_over_the_visits_of_a_prompt():
    chain, seen = Chain(config(advantage_transform="dcpo")), []
    for number, rewards in enumerate((ANY[:5], ANY[15:], [0.7] * 5, [0.1] * 5, random(5).tolist())):
        # Beside it a prompt that never comes again, and one whose rewards are always the same
        new, same = random(5, seed=10 + number).tolist(), [0.1] * 5
        seen.append(rewards)
        one = generation([*rewards, *new, *same], prompts=torch.tensor([7, 1000 + number, -3]))
        result = chain.apply(one).tolist()
        assert result[:5] == close(definition.dcpo(seen))
        assert result[5:10] == close(definition.dcpo([new]))
        assert result[10:] == [0.0] * 5
        assert one.figures == {"prompts_seen_before": 0 if number == 0 else pytest.approx(2 / 3)}
        if number in (2, 3):
            assert all(result[:5]), "a group of equal rewards tells something beside its earlier visits"


def test_dcpo_counts_a_prompt_that_comes_twice_as_two_visits_and_leaves_out_what_nobody_scored():
    rewards = [0.0, 1.0, 1.0, 2.0, None, 1.0, 0.0, 4.0, None, 1.0]
    result = applied(generation(rewards, prompts=torch.tensor([5, 5])), "dcpo")
    first, second = [[r for r in rewards[i : i + 5] if r is not None] for i in (0, 5)]
    assert [result[i] for i in range(4)] == close(definition.dcpo([first]))
    assert [result[i] for i in (5, 6, 7, 9)] == close(definition.dcpo([first, second]))
    assert result[4] == result[8] == 0


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_pacs_is_a_weighted_residual_less_that_of_the_others(beta):
    ratios = random(len(RIGHT)) * 2
    result = applied(generation(RIGHT, log_ratios=ratios), "pacs", pacs_beta=beta)
    assert result == close(definition.pacs(RIGHT, ratios.tolist(), GROUP, beta))
    assert result[5] != 0, "a group of equal rewards has advantages where the policy has moved"
    fresh = applied(generation(RIGHT, log_ratios=torch.zeros(len(RIGHT), dtype=torch.float64)), "pacs")
    assert fresh[5:10] == fresh[15:] == [0.0] * 5, "and none where it has not, not even a rounding"
    assert fresh == close(definition.pacs(RIGHT, [0.0] * len(RIGHT), GROUP, 1.0))


# Completions without a scored token
MASKED = [{0, 7, 13}, {*range(5, 10)}, {*range(1, 5)}, {*range(20)}, {*range(20)} - {3}]


@pytest.mark.parametrize("masked", MASKED, ids=["some", "a group", "all but one of a group", "all", "all but one"])
def test_a_completion_without_scored_tokens_is_left_as_it_is_and_changes_no_other(masked):
    places = torch.tensor(sorted(masked))
    # As they are measured
    entropies, directions = random(20).exp().index_fill(0, places, 0), random(20, 7).index_fill(0, places, 0)
    one = generation(ANY, masked, entropies=entropies)
    before = one.advantages.tolist()
    result = applied(one, "empg")
    assert result == close(definition.empg(ANY, before, entropies.tolist(), 1.0, masked))
    assert [result[i] for i in masked] == [before[i] for i in masked]

    signs = [None if r is None else 2 * r - 1 for r in RIGHT]
    one = generation(signs, masked, sensitivities=directions)
    result = applied(one, "g2rl", g2rl_lambda=2.5)
    shaped = definition.g2rl(signs, directions.tolist(), GROUP, 2.5, masked)
    found = [None if math.isnan(r) else r for r in one.rewards.tolist()]
    assert found == [None if r is None else close(r) for r in shaped]
    assert [found[i] for i in masked] == [signs[i] for i in masked]
    assert result == close(definition.grpo(shaped, GROUP))

    one = generation(ANY, masked, "none", entropies=entropies)
    before = one.advantages.tolist()
    result = applied(one, "gtpo", scale_rewards="none")
    assert result == close(definition.gtpo(ANY, entropies.tolist(), GROUP, 0.1, math.log(2), masked))
    assert [result[i] for i in masked] == [before[i] for i in masked]


def test_the_weights_of_empg_are_those_without_a_masked_completion():
    entropies = torch.tensor([1.0, 1.1, 1.2, 0.0, 0.0], dtype=torch.float64)
    one = generation([1.0, 0.0, 0.0, 1.0, 0.0], {3, 4}, entropies=entropies)
    A, result = one.advantages.tolist(), applied(one, "empg")
    modulated = [g * a for g, a in zip((1.519441, 0.921588, 0.558971), A, strict=False)]  # e^-k H over its mean
    middle = sum(modulated) / 3
    assert result == pytest.approx([*(a - middle for a in modulated), *A[3:]], abs=1e-5)


def test_empg_weighs_completions_by_their_certainty_and_leaves_no_mean():
    entropies = random(len(ANY)).exp()
    one = generation(ANY, entropies=entropies)
    before = one.advantages.tolist()
    result = applied(one, "empg", empg_k=0.7)
    assert result == close(definition.empg(ANY, before, entropies.tolist(), 0.7))
    same = generation(ANY, entropies=torch.ones(len(ANY), dtype=torch.float64))
    scored = [i for i, r in enumerate(ANY) if r is not None]
    middle = sum(before[i] for i in scored) / len(scored)
    assert [x for i, x in enumerate(applied(same, "empg")) if i in scored] == close(
        [before[i] - middle for i in scored]
    )


def test_g2rl_scales_rewards_by_novelty():
    signs = [None if r is None else 2 * r - 1 for r in RIGHT]
    directions = random(len(signs), 7)
    one = generation(signs, sensitivities=directions)
    result = applied(one, "g2rl", g2rl_lambda=2.5)
    shaped = definition.g2rl(signs, directions.tolist(), GROUP, 2.5)
    assert max(r for r in shaped if r is not None) == 3, "no reward is cut, so the bound is not tested"
    found = [None if math.isnan(r) else r for r in one.rewards.tolist()]
    assert [r is None for r in found] == [r is None for r in shaped]
    assert [r for r in found if r is not None] == close([r for r in shaped if r is not None])
    assert result == close(definition.grpo(shaped, GROUP))
    # Of the same direction all are equally new
    same = generation(signs, sensitivities=directions[:1].expand(len(signs), -1) * torch.arange(1, 21)[:, None])
    assert applied(same, "g2rl", g2rl_lambda=2.5) == pytest.approx(definition.grpo(signs, GROUP), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.0, 0.79, 0.9])
def test_cppo_keeps_the_largest_advantages_of_each_group(share):
    one = generation(ANY)
    before = one.advantages.tolist()
    assert applied(one, "cppo", cppo_pruning=share) == definition.cppo(before, GROUP, share)


def test_cppo_prunes_as_many_as_its_authors_and_no_one_less_for_a_rounding():
    kept = {(7, 0.5): 4, (8, 0.5): 4, (8, 0.3): 6, (8, 0.9): 1, (3, 0.7): 1, (2, 0.5): 1, (16, 0.875): 2}
    kept |= {(10, 0.3): 7, (100, 0.29): 71, (100, 0.57): 43, (3, 1 - 1e-12): 1}
    assert any(int(group * share) != group - number for (group, share), number in kept.items()), "none is rounded"
    assert {case: number_trained(*case) for case in kept} == kept


def test_gtpo_takes_away_a_part_of_the_entropy_and_drops_uncertain_completions():
    entropies = random(len(ANY)).exp()
    entropies[3] = math.log(2)  # of which there may be as much
    one = generation(ANY, scale="none", entropies=entropies)
    before, dropped = one.advantages.tolist(), (entropies > math.log(2)).tolist()
    assert 3 < sum(dropped) < 17 and all(before[:5])
    result = applied(one, "gtpo", scale_rewards="none")
    assert result == close(definition.gtpo(ANY, entropies.tolist(), GROUP, 0.1, math.log(2)))
    assert result[3] != 0 and [a == 0 for a in result[15:]] == dropped[15:]
    again = generation(ANY, scale="none", entropies=entropies)
    settings = {"gtpo_entropy": 0.0, "gtpo_threshold": math.inf}
    assert applied(again, "gtpo", scale_rewards="none", **settings) == close(before)


def messages(*contents):
    """What a model and a tool wrote in turns; `None` is a call."""
    turns = []
    for content in contents:
        call = {"tool_calls": [{"function": {"name": "run"}}]} if content is None else {"content": content}
        turns += [{"role": "assistant", **call}, {"role": "tool", "content": "no \\boxed{}"}]
    return turns[:-1]


TURNS = {
    "so it is \\boxed{3}": False,
    "```python\nprint(3)\n```": False,
    "let me see ```py\nprint(3)\n``` and": False,
    "```\nprint(3)\n```": False,
    "```python\nprint(3)": True,  # never closed
    "so it is 3": True,
    "": True,
}


def test_a_turn_is_void_with_neither_an_answer_nor_a_closed_code_block():
    answer = re.compile(ISOPOConfig.simpletir_answer)
    for text, void in TURNS.items():
        assert has_void_turn(text, answer) == void, text
        assert has_void_turn(messages("\\boxed{1}", None, text), answer) == void, text
        assert has_void_turn([{"role": "assistant", "content": [{"type": "text", "text": text}]}], answer) == void
    assert not has_void_turn("#### 3", re.compile("####"))


def test_simpletir_leaves_out_void_turns_and_groups_without_a_deviation():
    rewards = [*ANY[:15], *[1.0, 1.0, 1.0005, 1.0, 1.0]]
    void = (random(len(rewards)) > 0.3).tolist()
    one = generation(rewards, which=lambda holds: torch.tensor([holds("" if x else "\\boxed{1}") for x in void]))
    before = one.advantages.tolist()
    result = applied(one, "simpletir")
    assert result == close(definition.simpletir(rewards, before, void, GROUP, 1e-3))
    assert any(result) and not any(result[15:]) and any(before[15:])
    assert one.figures == {"void_fraction": pytest.approx(sum(void) / len(void))}
    kept = applied(generation(rewards, which=one.rollout.which), "simpletir", simpletir_deviation=0.0)
    assert any(kept[15:])


def test_several_are_applied_one_after_another_and_none_is_given_to_who_has_no_reward():
    entropies = random(len(ANY))
    chain = Chain(config(advantage_transform="dcpo, empg,cppo"))
    one = generation(ANY, entropies=entropies, prompts=torch.arange(4))
    first = definition.dcpo([ANY[:5]]) + [0.0] * 5
    third = definition.dcpo([[r for r in ANY[10:15] if r is not None]])
    first += [third[0], 0.0, *third[1:]] + definition.dcpo([ANY[15:]])
    second = definition.empg(ANY, first, entropies.tolist(), 1.0)
    assert chain.apply(one).tolist() == close(definition.cppo(second, GROUP, 0.5))
    assert second[11] == 0
