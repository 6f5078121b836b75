"""Numbers that are not finite stop the run before they reach the weights or the running statistics."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl.token_weights import Unscaled
from isopo_trl.token_weights.p3o import P3O
from isopo_trl.token_weights.weighting import WEIGHTINGS
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
    settings["skip_zero_advantage"] = False  # so that it is known how many there are
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


# Gradients that are finite one by one, and not in their sum


def assert_nothing_moves(trainer, match="The gradient of this step overflows"):
    """Trains into an error, before which neither the weights nor the optimizer have moved."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(FloatingPointError, match=match) as error:
        trainer.train()
    assert trainer.state.global_step == 0 and not trainer.optimizer.state
    assert set(trainer.lr_scheduler.get_last_lr()) == {trainer.args.learning_rate}
    assert_untouched(trainer, before)
    return str(error.value)


def rewards_of(size):
    return lambda completions, **_: [size * (row % 3) for row in range(len(completions))]


@pytest.mark.parametrize("rule", [*RULES, "none"])
def test_rewards_too_large_for_the_summed_gradient_stop_the_run_before_the_optimizer(rule, tmp_path):
    trainer = training.build(tmp_path, reward=rewards_of(1e37), rule=rule, scale_rewards="none")
    message = assert_nothing_moves(trainer)
    assert "learning rate does not help" in message and "rewards" in message and "as they were" in message


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}], ids=str)
def test_an_exponent_that_overflows_stops_the_run_before_the_optimizer(settings, tmp_path):
    exponent = {"rule": "fisher", "fisher_power": -30.0, "scale": "paper", "regularization": 0}
    message = assert_nothing_moves(training.build(tmp_path, **exponent, **settings))
    assert "the largest multiplier is" in message and "scale='relative'" in message


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_norm_that_overflows_over_finite_entries_is_an_error(max_grad_norm, tmp_path):
    # Clipping would multiply by zero, and the run would go on without learning
    settings = {"rule": "none", "scale_rewards": "none", "max_grad_norm": max_grad_norm}
    trainer = training.build(tmp_path, reward=rewards_of(1e25), **settings)
    finite = []
    # Those of `register_hook` are not all called by PyTorch 2.8 under checkpointing that is not reentrant
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: finite.append(bool(p.grad.isfinite().all())))
        for p in trainer.model.parameters()
    ]
    assert_nothing_moves(trainer)
    assert len(finite) == len(hooks) and all(finite)


class EnormousPull(P3O):
    """P3O with a pull that float32 can hold token by token, but not its gradient's norm."""

    name = "enormous_pull"

    def weigh(self, tokens):
        weighted = super().weigh(tokens)

        def pull():
            term = weighted.unscaled()
            return Unscaled(term.value, 1e33 * term.slope)

        return replace(weighted, unscaled=pull)


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
def test_a_pull_that_overflows_stops_the_run_before_the_optimizer(rule, tmp_path, monkeypatch):
    def drawn(prompts, trainer):
        return {**rollout(prompts, trainer), "logprobs": [[-9.0, -4.0, -1.0] for _ in prompts]}

    monkeypatch.setitem(WEIGHTINGS, EnormousPull.name, EnormousPull)
    options = {"rollout_func": drawn}
    trainer = training.build(tmp_path, options=options, rule=rule, token_weights=EnormousPull.name)
    assert_nothing_moves(trainer)


def test_training_goes_on_after_an_overflow(tmp_path):
    sizes = iter([1e37, 1.0])
    trainer = training.build(
        tmp_path,
        reward=lambda completions, **_: rewards_of(next(sizes))(completions),
        scale_rewards="none",
        max_steps=1,
    )
    assert_nothing_moves(trainer)
    training.train(trainer)


def test_the_checkpoint_before_an_overflow_is_resumed_from(tmp_path):
    def trainer(*sizes):
        sizes = iter(sizes)
        settings = {"scale_rewards": "none", "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        return training.build(
            tmp_path, reward=lambda completions, **_: rewards_of(next(sizes))(completions), **settings
        )

    with pytest.raises(FloatingPointError, match="overflows"):
        trainer(1.0, 1e37).train()
    resumed = trainer(1.0)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert all(torch.isfinite(p).all() for p in resumed.model.parameters())
