"""Numbers that are not finite stop the run before they reach the weights or the running statistics."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl.rules import Needs, NonInteracting, registry
from isopo_trl.token_weights import Unscaled
from isopo_trl.token_weights.p3o import P3O
from isopo_trl.token_weights.weighting import WEIGHTINGS
from tests import tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


# Completions that need no model, so that a broken one gets as far as the loss
ROLLOUT = {"rollout_func": fixed_rollout(lambda row: [20 + row, 30, 40 + 2 * row])}


def run_that_breaks(trainer, action):
    """Trains until the `action` after the first step breaks the run; returns the error and the weights before it."""
    weights = {}

    class AfterTheFirst(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            action()
            weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer.add_callback(AfterTheFirst)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    assert trainer.state.global_step == 1
    trainer.remove_callback(AfterTheFirst)
    return str(error.value), weights


def assert_untouched(trainer, weights):
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=0, equal_nan=True, msg=name)
    running = trainer.isopo.state_dict()["running"]
    assert running is None or torch.isfinite(running["mean"]).all()
    assert trainer.isopo.current is None


@pytest.mark.parametrize(("rule", "accumulation"), [("fisher", 1), ("none", 2)])
def test_broken_weight_stops_the_run_before_the_optimizer_and_it_can_go_on(rule, accumulation, tmp_path):
    settings = {"rule": rule, "gradient_accumulation_steps": accumulation}
    settings["skip_zero_advantage"] = False  # so that it is known how many there are
    trainer = training.build(tmp_path, options=ROLLOUT, **settings)

    weight = trainer.model.model.layers[0].mlp.up_proj.weight.data[3]
    message, weights = run_that_breaks(trainer, lambda: weight.fill_(math.nan))
    assert "log-probabilities are not finite for 3 sequences" in message and "learning rate" in message
    assert_untouched(trainer, weights)
    weight.zero_()
    training.train(trainer)


@dataclass(frozen=True, kw_only=True)
class Fragile(NonInteracting):
    """A rule of one's own, which returns NaN once it is told to."""

    breaks: ClassVar[list[bool]] = []
    needs = Needs(overlap=True)
    degree = 0.0

    def multiplier(self, norms, mean_squares):
        return torch.full_like(norms.fisher, math.nan if self.breaks else 1.0)


@pytest.fixture
def fragile(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    monkeypatch.setattr(Fragile, "breaks", [])
    registry.register_rule("fragile", Fragile)


def test_a_rule_that_returns_nan_stops_the_run_and_is_named(tmp_path, fragile):
    settings = {"gradient_accumulation_steps": 2, "skip_zero_advantage": False}
    trainer = training.build(tmp_path, rule="fragile", options=ROLLOUT, **settings)
    message, weights = run_that_breaks(trainer, lambda: Fragile.breaks.append(True))
    assert "rule='fragile' returned coefficients that are not finite" in message and "learning rate" not in message
    assert_untouched(trainer, weights)


@pytest.mark.usefixtures("fragile")
@pytest.mark.parametrize(
    ("rule", "value"),
    [
        *(("fisher", math.nan), ("fig4", math.inf), ("interacting", math.inf), ("fragile", math.nan)),
    ],
)
def test_broken_gradient_stops_the_run_before_the_optimizer(rule, value, tmp_path):
    settings = {"rule": rule, "gradient_checkpointing": False}
    trainer = training.build(tmp_path, options=ROLLOUT, **settings)

    def poison(gradient):
        gradient = gradient.clone()
        gradient[1] = value
        return gradient

    def action():  # from here on, the second sequence's gradient is broken below the last layer
        trainer.model.model.layers[1].register_forward_pre_hook(
            lambda module, args: args[0].register_hook(poison) and None
        )

    message, weights = run_that_breaks(trainer, action)
    assert "not finite" in message and "learning rate" in message
    assert_untouched(trainer, weights)


def test_infinite_reward_is_refused_by_the_name_of_its_function(tmp_path):
    def exploding(completions, **_):
        return [0.0, -math.inf, 1.0]

    trainer = training.build(tmp_path, reward=[tiny.reward, exploding])
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


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
def test_rewards_too_large_for_the_summed_gradient_stop_the_run_before_the_optimizer(rule, tmp_path):
    trainer = training.build(tmp_path, reward=rewards_of(1e37), rule=rule, scale_rewards="none")
    message = assert_nothing_moves(trainer)
    assert "learning rate does not help" in message and "rewards" in message and "as they were" in message


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}], ids=str)
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


@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_a_pull_that_overflows_stops_the_run_before_the_optimizer(rule, tmp_path, monkeypatch):
    monkeypatch.setitem(WEIGHTINGS, EnormousPull.name, EnormousPull)
    options = {"rollout_func": fixed_rollout(lambda row: [20 + row, 30, 40], lambda row: [-9.0, -4.0, -1.0])}
    trainer = training.build(tmp_path, options=options, rule=rule, token_weights=EnormousPull.name)
    assert_nothing_moves(trainer)


def test_after_an_overflow_training_goes_on_or_is_resumed_from_the_checkpoint_before(tmp_path):
    def trainer(*sizes):
        sizes = iter(sizes)
        settings = {"scale_rewards": "none", "save_strategy": "steps", "save_steps": 1}
        return training.build(
            tmp_path, reward=lambda completions, **_: rewards_of(next(sizes))(completions), **settings
        )

    broken = trainer(1e37, 1.0, 1e37, 1.0, 1.0)
    assert_nothing_moves(broken)
    with pytest.raises(FloatingPointError, match="overflows"):
        broken.train()
    training.train(broken)
    resumed = trainer(1.0)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert resumed.state.global_step == 2
    assert all(torch.isfinite(p).all() for p in resumed.model.parameters())
