"""Numbers that are not finite stop the run before they reach the weights or the running statistics."""

import math

import pytest
import torch
from transformers import TrainerCallback

from tests import tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting"]


def rollout(prompts, trainer):
    """Completions that need no model, so that a broken one gets as far as the loss."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[20 + row, 30, 40 + 2 * row] for row in range(len(prompts))]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


class AtStep(TrainerCallback):
    """Does something at the end of an optimizer step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.action()


def run_that_breaks(trainer, step, action):
    """Trains until the `action` after `step` breaks the run; returns the error and the weights before it."""
    weights = {}

    def act():
        action()
        weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer.add_callback(AtStep(step, act))
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    assert trainer.state.global_step == step
    return str(error.value), weights


def assert_untouched(trainer, weights):
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=0, equal_nan=True, msg=name)
    running = trainer.isopo._running
    assert torch.isfinite(running.mean).all() and torch.isfinite(running._sums).all()
    assert trainer.isopo.current is None


@pytest.mark.parametrize("rule", [*RULES, "none"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_broken_weight_stops_the_run_before_the_optimizer(accumulation, rule, tmp_path):
    settings = {"rule": rule, "gradient_accumulation_steps": accumulation, "max_steps": 4}
    trainer = training.build(tmp_path, options={"rollout_func": rollout}, **settings)

    def action():
        with torch.no_grad():
            trainer.model.model.layers[0].mlp.up_proj.weight[3, 4] = math.nan

    message, weights = run_that_breaks(trainer, 1, action)
    assert "log-probabilities are not finite for 3 sequences" in message and "learning rate" in message
    assert_untouched(trainer, weights)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_gradient_stops_the_run_before_the_optimizer(value, rule, tmp_path):
    trainer = training.build(tmp_path, options={"rollout_func": rollout}, rule=rule, max_steps=4)

    def poison(gradient):
        gradient = gradient.clone()
        gradient[1] = value
        return gradient

    def action():  # from here on, the second sequence's gradient is broken below the last layer
        trainer.model.model.layers[1].register_forward_pre_hook(
            lambda module, args: args[0].register_hook(poison) and None
        )

    trainer.model.gradient_checkpointing_disable()
    trainer.args.gradient_checkpointing = False
    message, weights = run_that_breaks(trainer, 1, action)
    assert "not finite" in message and "learning rate" in message
    assert_untouched(trainer, weights)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_reward_is_refused_by_the_name_of_its_function(value, tmp_path):
    def fine(completions, **_):
        return [1.0] * len(completions)

    def exploding(completions, **_):
        return [0.0, value, 1.0]

    trainer = training.build(tmp_path, reward=[fine, exploding])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match="'exploding' returned an infinite reward for 1 completions"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_reward_that_is_not_a_number_counts_as_none(tmp_path):
    def advantages(missing):
        def some(completions, **_):
            return [0.5, missing, 1.0]

        def only(completions, **_):
            return [1.0, missing, 3.0]

        trainer = training.build(tmp_path, reward=[some, only], learning_rate=0.0)
        trainer.train()
        return list(trainer._logs["advantages"])

    assert advantages(math.nan) == advantages(None)
    assert advantages(None)[1] == 0


def test_run_can_go_on_after_a_broken_microbatch(tmp_path):
    trainer = training.build(tmp_path, options={"rollout_func": rollout})
    with torch.no_grad():
        weight = trainer.model.model.layers[0].mlp.up_proj.weight
        kept = weight[3, 4].item()
        weight[3, 4] = math.nan
    with pytest.raises(FloatingPointError):
        trainer.train()
    with torch.no_grad():
        weight[3, 4] = kept
    training.train(trainer)


def test_padding_is_free_to_be_anything(tmp_path):
    # A log-probability of a token that is not scored may be infinite: nobody looks at it
    trainer = training.prepared(training.build(tmp_path, options={"rollout_func": rollout}))
    batch = trainer._generate_and_score_completions([{"prompt": text} for text in ["What?", "Is it?", "No"]])
    batch["completion_mask"][0, 2] = 0
    batch["completion_ids"][0, 2] = tiny.VOCABULARY[tiny.PAD]
    with torch.no_grad():
        trainer.model.lm_head.weight[tiny.VOCABULARY[tiny.PAD]] = 0.0
    loss, gradients = training.gradients(trainer, batch)
    assert math.isfinite(loss) and all(torch.isfinite(gradient).all() for gradient in gradients.values())
