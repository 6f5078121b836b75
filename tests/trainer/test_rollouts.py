"""Completions that are not the model's alone: tools, environments, rollout functions."""

import math

import pytest
import torch
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


pytestmark = pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)'")


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def scripted(kind, texts):
    """A trainer whose model says these texts in turn, one list of them per turn, and then says nothing but `ok`."""

    class Scripted(kind):
        turns = 0

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            row_texts = texts[self.turns % len(texts)]
            self.turns += 1
            say = [row_texts[row % len(row_texts)] for row in range(len(prompt_ids))]
            return [self.processing_class(text + tiny.EOS)["input_ids"] for text in say], None

    return Scripted


def call(name, **arguments):
    inside = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<call>{{"name": "{name}", "arguments": {{{inside}}}}}</call>'


def tool_run(folder, kind, tool, **settings):
    """One call that works, one with a wrong argument, one answer without a call; then the answers to the results."""
    first = [call(tool.__name__, a=2, b=3), call(tool.__name__, a=2, c=3), "no idea"]
    kind = scripted(kind, [first, ["5 it is", "sorry"]])
    settings = {"max_completion_length": 128, **settings}
    options = {"tools": [tool]}
    return training.build(folder, kind=kind, data=tiny.conversational_prompts(6), options=options, **settings)


@pytest.mark.parametrize(("rule", "tool"), [("fisher", add), ("interacting", add_later)])
def test_tool_calls_train(rule, tool, tmp_path):
    results = []

    def reward(completions, **_):
        results.extend(message["content"] for messages in completions for message in messages[1:2])
        return [float(len(messages)) for messages in completions]

    trainer = tool_run(tmp_path, ISOPOTrainer, tool, rule=rule)
    trainer.reward_funcs = [reward]
    for line in training.train(trainer):
        assert line["tools/call_frequency"] == pytest.approx(2 / 3)
        assert line["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert results[0] == "5" and "error" in results[1]


def test_results_of_tools_are_not_trained_on(tmp_path):
    def gradients(kind, **rule):
        trainer = training.prepared(tool_run(tmp_path, kind, add, **rule))
        batch = trainer._generate_and_score_completions([dict(row) for row in tiny.conversational_prompts(3)])
        assert (batch["tool_mask"] == 0).any()
        return training.gradients(trainer, batch)

    (own, own_gradient), (plain, plain_gradient) = gradients(ISOPOTrainer, rule="none"), gradients(GRPOTrainer)
    assert own == pytest.approx(plain, abs=1e-6) and training.distance(own_gradient, plain_gradient) < 1e-5


class Counter:
    """An environment that counts up to a number that its prompt gives."""

    def reset(self, **_) -> str:
        self.count = 0
        return " Count."

    def up(self, by: int) -> int:
        """
        Count up.

        Args:
            by: By how much.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return self.count / 10


def test_environment_that_owns_the_reward_trains(tmp_path):
    texts = [[call("up", by=1), call("up", by=4), "nothing"], ["done"]]
    settings = {"reward": None, "data": tiny.conversational_prompts(6), "max_completion_length": 96}
    options = {"environment_factory": Counter}
    trainer = training.build(tmp_path, kind=scripted(ISOPOTrainer, texts), options=options, **settings)
    for line in training.train(trainer):
        assert line["rewards/Counter/mean"] == pytest.approx((0.1 + 0.4 + 0.0) / 3)


def test_environment_that_owns_the_data_trains(tmp_path):
    class Asking(Counter):
        def reset(self, **_) -> str:
            super().reset()
            return "How many?"

    texts = [[call("up", by=1), call("up", by=4), "nothing"], ["done"]]
    kind = scripted(ISOPOTrainer, texts)
    args = training.build(tmp_path, max_completion_length=96).args
    trainer = kind(tiny.model("qwen3"), args=args, processing_class=tiny.tokenizer(), environment_factory=Asking)
    training.train(trainer)


# Rollout functions


ROW = [20, 30, 40, 50, 60]
# Completions in which the environment wrote the second and third token of every other row
rollout = fixed_rollout(
    lambda row: [token + row for token in ROW[: 5 - row % 2]],
    lambda row: [-1.0] * (5 - row % 2),
    env_mask=lambda row: [1, row % 2, row % 2, 1, 1][: 5 - row % 2],
    hint=float,
)


def test_rollout_function_trains(tmp_path):
    def reward(hint, **_):
        return hint

    trainer = training.build(tmp_path, reward=reward, options={"rollout_func": rollout}, num_iterations=2)
    first = training.train(trainer)[0]
    assert first["rewards/reward/mean"] == 1.0
    assert first["completions/mean_length"] == pytest.approx((3 + 4 + 3) / 3)


def test_advantages_per_token_are_refused_by_name(tmp_path):
    trainer = training.prepared(training.build(tmp_path, options={"rollout_func": rollout}))
    batch = trainer._generate_and_score_completions([{"prompt": text} for text in ["What?", "Is it?", "No"]])
    batch["advantages"] = batch["advantages"].unsqueeze(1).expand(batch["completion_ids"].shape)
    with pytest.raises(ValueError, match="one advantage per sequence"):
        trainer.compute_loss(trainer.model, batch)
    # The refusal leaves nothing behind
    batch["advantages"] = batch["advantages"][:, 0]
    loss, gradients = training.gradients(trainer, batch)
    assert math.isfinite(loss) and all(torch.isfinite(gradient).all() for gradient in gradients.values())
