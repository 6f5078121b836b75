"""GTPO's weights are what a loop over completions and places says; through the trainer, in float64."""

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import named
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build, trainer_for
from tests.token_weights.definition import (
    compare,
    gtpo_weights,
    normalisation,
    off_policy,
    refer,
    scored_tokens,
)


GTPO = {"token_weights": "gtpo", "group_microbatches": True}


def weighting():
    return named("gtpo")(ISOPOConfig("unused", **GTPO, **training.SETTINGS))


def test_weights_are_those_of_runs_of_conflicts_from_either_end():
    """Of few different tokens, so that there are runs of any length; groups of several sizes and of one sign."""
    own, found = weighting(), set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 2, (9, 7), generator=generator)
        mask = (torch.rand(9, 7, generator=generator) < 0.95).long()
        mask *= torch.arange(7) < torch.randint(0, 8, (9, 1), generator=generator)
        advantages = torch.randn(9, generator=generator).round()
        prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
        logps = -torch.rand(9, 7, generator=generator)
        weights = own(logps.requires_grad_(), logps.detach(), mask, advantages, ids=ids, prompts=prompts).weights
        expected = gtpo_weights(ids, mask, advantages, prompts)
        assert torch.equal(weights * mask, expected.float())
        found |= set(expected[mask.bool()].tolist())
    assert found == {0.0, 1.0, 2.0, 4.0}


def in_conflict(model):
    """Two groups of completions that begin or end alike."""
    advantages = torch.tensor([0.8, -1.1, 0.6, -0.4], dtype=torch.float64)
    batch = oracle.random_batch([3, 3, 2, 2], [6, 5, 4, 5], 100, advantages=advantages)
    ids = batch.completion_ids
    ids[1, :2], ids[1, 4], ids[3, 2:5] = ids[0, :2], ids[0, 5], ids[2, 1:4]
    batch.extra["prompt_numbers"] = torch.tensor([4, 4, 7, 7])
    batch = off_policy(model, batch)
    weights = gtpo_weights(ids, scored_tokens(batch), advantages, batch.extra["prompt_numbers"])
    assert (weights == 2).sum() >= 6 and (weights == 1).sum() >= 4
    return batch


@pytest.mark.parametrize(("lora", "rule"), [(False, "fisher"), (True, "none")])
def test_gradient_is_the_definition(lora, rule, tmp_path, float64_throughout):
    model = build("llama", lora)
    batch = in_conflict(model)
    expected = refer(model, batch, "gtpo", normalisation(batch))
    compare(model, trainer_for(model, tmp_path, rule=rule, num_generations=2, **GTPO), expected, rule)


def test_training_tells_which_completions_are_of_one_prompt_and_an_evaluation_weighs_none(tmp_path):
    trainer = training.build(tmp_path, options={"eval_dataset": tiny.prompts(1)}, per_device_eval_batch_size=3, **GTPO)
    lines = training.train(trainer)
    assert all(0 <= line["off_policy/gated"] < 1 for line in lines)
    assert trainer.evaluate()["eval_off_policy/gated"] == 0


def test_a_batch_that_does_not_say_its_prompts_is_refused():
    logps = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="pass `ids` and `prompts`"):
        weighting()(logps, logps.detach(), torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="set group_microbatches=True"):
        ISOPOConfig("unused", token_weights="gtpo", **training.SETTINGS)
