"""TRL's generation without its pass for an old policy, and what is asked of a sampler."""

import pytest
from trl import GRPOTrainer

from isopo_trl import ISOPOConfig
from isopo_trl.trl_seam.generation import samples_at_temperature, without_old_policy
from tests import tiny, training


PROMPTS = [dict(row) for row in tiny.prompts(3)]


@pytest.mark.parametrize("wanted", [False, True])
def test_old_policy_is_scored_only_where_it_is_wanted(wanted, tmp_path):
    rollouts, settings = [], {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = training.build(tmp_path, kind=GRPOTrainer, **settings)

    def generated(rollout):
        rollouts.append(rollout)
        return wanted

    with without_old_policy(trainer, single_turn=None, generated=generated):
        batch = trainer._generate_and_score_completions(PROMPTS)
    assert ("old_per_token_logps" in batch) == wanted
    (rollout,) = rollouts
    assert [len(ids) for ids in rollout.completion_ids] == batch["completion_mask"].sum(1).tolist()
    assert [len(ids) for ids in rollout.prompt_ids] == batch["prompt_mask"].sum(1).tolist()
    assert rollout.logps is None and rollout.tool_mask is None and len(rollout.completions) == 3


def test_trainer_is_as_it_was_after_a_generation_that_fails(tmp_path):
    trainer = training.build(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4)

    def broken(**_):
        raise KeyError("broken reward")

    trainer.reward_funcs = [broken]
    before = dict(vars(trainer))
    with pytest.raises(KeyError, match="broken reward"):
        trainer._generate_and_score_completions(PROMPTS)
    assert trainer.args.gradient_accumulation_steps == 2
    assert vars(trainer).keys() == before.keys() and all(vars(trainer)[name] is before[name] for name in before)


def test_generation_that_returns_something_else_is_refused(tmp_path):
    class Short(GRPOTrainer):
        def _generate(self, prompts):
            return super()._generate(prompts)[:7]

    trainer = training.build(tmp_path, kind=Short)
    with pytest.raises(RuntimeError, match="7 values instead of 8"):
        with without_old_policy(trainer, single_turn=None, generated=lambda rollout: False):
            trainer._generate_and_score_completions(PROMPTS)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}}, True),
        ({"generation_kwargs": {"temperature": 1.2}}, False),
        ({"generation_kwargs": {"min_p": 0.1}}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
    ids=str,
)
def test_sampler_that_is_not_the_policy_is_known_by_its_settings(settings, expected):
    assert samples_at_temperature(ISOPOConfig("unused", **training.SETTINGS, **settings)) == expected
