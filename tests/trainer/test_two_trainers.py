"""Two trainers in one process leave each other's gradients, state and generations alone."""

import pytest
import torch
from peft import LoraConfig

from tests import tiny, training
from tests.gradients.test_oracle import build, check, trainer_for
from tests.token_weights.definition import WEIGHTS, reference


# Of each trainer: the model's family, rule, token weights
SETTINGS = [("llama", "fisher", "p3o"), ("qwen2", "interacting", "kpo wide")]
pytestmark = pytest.mark.usefixtures("float64_throughout")


class Step:
    """A microbatch of one trainer, which is taken in two parts."""

    def __init__(self, folder, family, rule, name):
        self.rule = rule
        self.model = build(family)
        self.expected = reference(family, False, name)
        self.batch = self.expected.batch
        self.trainer = trainer_for(self.model, folder, rule=rule, **WEIGHTS[name])
        self.loss = None

    def advance(self):
        if self.loss is None:
            self.loss = self.trainer.compute_loss(self.trainer.model, self.batch.for_trl())
            return
        self.loss.backward()
        rows = training.sampled_rows(self.trainer.isopo.current, self.batch.prompt_ids.shape[1])
        self.trainer.isopo.end()
        check(self.model, self.expected.gradients(self.model, rows, self.rule))
        assert self.loss.item() == pytest.approx(self.expected.expected.loss, rel=1e-9)
        self.model.zero_grad()
        self.loss = None


@pytest.mark.parametrize("order", ["0101", "0110"])  # of forward and backward of each
def test_gradients_are_exact_however_two_trainers_take_turns(order, tmp_path):
    steps = [Step(tmp_path, *settings) for settings in SETTINGS]
    for place in map(int, order):
        steps[place].advance()
    for step in steps:
        step.trainer.isopo.step()
        step.trainer.weighting.step()
        step.advance()  # once more, with nothing left of the other
        step.trainer.isopo.detach()


def test_generation_between_forward_and_backward_of_the_other_changes_nothing(tmp_path):
    one, other = (Step(tmp_path, *settings) for settings in SETTINGS)
    one.advance()
    batch = other.trainer._generate_and_score_completions([dict(row) for row in tiny.prompts(4)])
    assert "sampling_per_token_logps" in batch
    one.advance()


def run(folder, **settings):
    """Weights after a run of two steps whose random numbers do not depend on what ran before."""
    trainer = training.build(folder, **{"num_iterations": 2, "max_steps": 2, **settings})
    torch.manual_seed(0)
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, trainer.state.log_history


def test_run_inside_another_trainers_reward_leaves_both_as_if_alone(tmp_path):
    inner = {"token_weights": "kpo", "rule": "fig4", "beta": 0.1, "kl_in_reward": True}
    inner["options"] = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}  # the base is the reference
    alone, alone_inner = run(tmp_path, token_weights="p3o"), run(tmp_path, **inner)
    runs = []

    def reward(completions, **_):
        with torch.random.fork_rng(devices=[]):
            runs.append(run(tmp_path, **inner))
        return tiny.reward(completions)

    weights, lines = run(tmp_path, token_weights="p3o", reward=reward)
    assert runs
    for (own, log), (expected, expected_log) in [((weights, lines), alone), *((r, alone_inner) for r in runs)]:
        assert all(torch.equal(own[name], expected[name]) for name in expected)
        figures = [
            [{k: v for k, v in line.items() if k.startswith(("isopo/", "off_policy/", "kl"))} for line in each]
            for each in (log, expected_log)
        ]
        assert figures[0] == figures[1]
