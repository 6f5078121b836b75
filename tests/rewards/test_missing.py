"""Rewards of which nothing is learned are noticed: those that are no number, and those that are all the same."""

import math

import pytest
import torch
from accelerate import PartialState

from isopo_trl.rewards.missing import PATIENCE, MissingRewards, tells_nothing
from tests import tiny, training


ONES = torch.ones(2)
NAMES = ["one", "other"]


def rewards(*rows):
    return torch.tensor([[math.nan if x is None else float(x) for x in row] for row in rows])


@pytest.mark.parametrize(
    ("rows", "nothing", "nothing_by_function"),
    [
        ([(0, 1), (0, 1), (5, 0), (5, 0)], True, True),
        ([(0, 1), (1, 0), (0, 0), (0, 0)], True, False),  # equal in the sum alone
        ([(0, 0), (0, 0), (1, 0), (0, 0)], False, False),
        ([(None, None)] * 4, True, True),
        ([(None, 1), (None, 1), (2, None), (None, None)], True, True),  # who has none has no advantage, either
        ([(None, 1), (None, 2), (1, 0), (1, 0)], False, False),
    ],
)
def test_what_tells_no_completion_of_a_prompt_from_another_is_known(rows, nothing, nothing_by_function):
    for by_function, expected in ((False, nothing), (True, nothing_by_function)):
        assert tells_nothing(rewards(*rows), ONES, 2, by_function) == expected


def steps(missing, *generations):
    """Optimizer steps, each of so many generations: whether their rewards are the same, per step."""
    for step in generations:
        for same in step:
            missing.generated(rewards((0.0, 1.0), (0.0, 1.0 if same else 2.0)), ONES, NAMES, 2, False)
        missing.step()


def test_steps_in_a_row_without_an_advantage_are_said_once(caplog):
    PartialState()
    missing = MissingRewards()
    # Another reward comes in between, and one beside that tells nothing; a generation serves for several steps
    steps(missing, *[[True]] * (PATIENCE - 1), [False], *[[True]] * (PATIENCE - 1), [True, False], [True])
    assert not caplog.records
    steps(missing, *[[]] * (PATIENCE - 1))
    (record,) = caplog.records
    assert f"In {PATIENCE} optimizer steps in a row" in record.message and "'one' 0, 'other' 1)" in record.message
    steps(missing, [False], *[[True]] * (2 * PATIENCE))
    assert len(caplog.records) == 1
    steps(MissingRewards(), *[[]] * (2 * PATIENCE))  # before anything was generated nothing is known
    assert len(caplog.records) == 1


def test_a_run_hears_of_nan_and_of_equal_rewards_and_ends_where_there_are_none(tmp_path, caplog):
    calls = []

    def divides(completions, **_):
        calls.append(len(completions))
        if len(calls) == 1:
            return [math.nan, None, 1.0]
        return [0.5 if len(calls) <= 1 + PATIENCE else math.nan] * 3

    settings = {"max_steps": PATIENCE + 2, "max_completion_length": 1}
    trainer = training.build(tmp_path, reward=[divides, lambda completions, **_: [None] * 3], **settings)
    with pytest.raises(
        ValueError, match="No completion .* nothing to learn from it .'divides' returned NaN for 3 of 3"
    ):
        trainer.train()
    assert trainer.state.global_step == 1 + PATIENCE
    said = [record.message for record in caplog.records if record.name.startswith("isopo_trl")]
    assert "reward function 'divides' returned NaN for 1 of 3 completions" in said[0] and "None" in said[0]
    assert "optimizer steps in a row" in said[1] and "'divides' 0.5" in said[1] and len(said) == 2


def test_a_judge_that_is_a_model_is_heard_of_by_its_name(caplog):
    PartialState()
    missing = MissingRewards()
    for _ in range(2):
        missing.returned([math.nan, 1.0], "judge", of_all_ranks=True)
        missing.returned([None, 1.0], "other")
    (record,) = caplog.records
    assert "'judge' returned NaN for 1 of 2" in record.message


def test_rewards_of_nan_in_an_evaluation_end_nothing(tmp_path):
    calls = []

    def once(completions, **_):
        calls.append(len(completions))
        return [math.nan] * len(completions) if len(calls) == 1 else tiny.reward(completions)

    settings = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 5, "per_device_eval_batch_size": 3}
    options = {"eval_dataset": tiny.prompts(1)}
    trainer = training.build(tmp_path, reward=once, options=options, max_steps=1, **settings)
    trainer.train()
    assert trainer.state.global_step == 1
