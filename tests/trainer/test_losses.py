"""Settings of the loss train, and the numbers in the log are those that a user of GRPO expects to read."""

import math

import pytest
import torch
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import oracle, tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
TOOLS = torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1] * 6, [1] * 6])


def batch(**extra):
    """Four sequences of different lengths, one of them with one token, one without an advantage."""
    advantages = torch.tensor([1.3, -0.7, 0.4, 0.0])
    return {**oracle.random_batch([3, 1, 5, 4], [6, 5, 1, 4], 100, advantages=advantages).for_trl(), **extra}


def ending(*rows):
    """A rollout in which the completions of these rows end in EOS."""
    eos = tiny.VOCABULARY[tiny.EOS]
    return fixed_rollout(lambda row: [20 + row, 30 + 3 * row, eos if row in rows else 50])


@pytest.mark.parametrize(("rule", "loss_type"), [("fisher", "dapo"), ("interacting", "grpo")])
def test_nothing_moves_when_every_completion_is_truncated(rule, loss_type, tmp_path):
    settings = {"mask_truncated_completions": True, "rule": rule, "loss_type": loss_type}
    trainer = training.build(tmp_path, options={"rollout_func": ending()}, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name
    for line in trainer.state.log_history[:2]:
        assert line["loss"] == 0 and line["grad_norm"] == 0
        assert all(math.isfinite(value) for name, value in line.items() if name.startswith("isopo/"))
    assert torch.isfinite(trainer.isopo.state_dict()["running"]["mean"]).all()


def test_truncated_step_does_not_spoil_the_next_ones(tmp_path):
    calls = []

    def rollout(prompts, trainer):
        calls.append(len(prompts))
        return (ending() if len(calls) == 2 else ending(0, 2))(prompts, trainer)

    settings = {"mask_truncated_completions": True, "max_steps": 3, "rule": "fig4"}
    lines = training.train(training.build(tmp_path, options={"rollout_func": rollout}, **settings))
    assert [line["grad_norm"] == 0 for line in lines] == [False, True, False]


# The loss and gradient of GRPO


@pytest.mark.parametrize(
    ("settings", "accumulation"),
    [
        ({"loss_type": "grpo"}, 1),
        ({"loss_type": "bnpo", "importance_sampling_level": "sequence"}, 3),
        ({"loss_type": "dr_grpo"}, 3),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, 1),
        ({"loss_type": "luspo"}, 2),
        ({"top_entropy_quantile": 0.3}, 1),
        ({"temperature": 0.7}, 1),
        ({"pad_to_multiple_of": 8}, 1),
        ({"mask_truncated_completions": True}, 1),
    ],
    ids=str,
)
def test_reported_loss_is_that_of_grpo_and_with_rule_none_the_gradient_too(settings, accumulation, tmp_path):
    inputs = batch(tool_mask=TOOLS)
    settings = {**settings, "gradient_accumulation_steps": accumulation, "num_generations": 4}
    settings["per_device_train_batch_size"] = 4
    plain, fisher, none = (
        training.prepared(training.build(tmp_path, kind=kind, **settings, **rule), accumulation)
        for kind, rule in ((GRPOTrainer, {}), (ISOPOTrainer, {"rule": "fisher"}), (ISOPOTrainer, {"rule": "none"}))
    )
    loss, gradients = training.gradients(plain, inputs)
    assert training.gradients(fisher, inputs)[0] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-3
    own_loss, own_gradients = training.gradients(none, inputs)
    assert own_loss == pytest.approx(loss, abs=1e-6) and training.distance(own_gradients, gradients) < 1e-5


def test_logged_loss_is_that_of_grpo_in_training(tmp_path):
    # With a learning rate of zero, both trainers see the same completions at every step. Three prompts, two at a time:
    # the last accumulation window has half the length.
    settings = {"learning_rate": 0.0, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    settings |= {"max_steps": -1, "num_train_epochs": 2, "loss_type": "bnpo"}
    losses = []
    for kind in (GRPOTrainer, ISOPOTrainer):
        trainer = training.build(tmp_path, data=tiny.prompts(3), kind=kind, **settings)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    plain, own = losses
    assert len(plain) == 4 and max(map(abs, plain)) > 1e-3 and own == pytest.approx(plain, abs=1e-6)


# The size of the step


def test_gradient_norm_is_comparable_with_that_of_grpo(tmp_path):
    same = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 0.0}

    def norm(**settings):
        trainer = training.build(tmp_path, max_completion_length=12, **same, **settings)
        trainer.train()
        return torch.tensor([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])

    of_grpo = norm(kind=GRPOTrainer)
    for rule, low, high in (
        ("fisher", 1 / 3, 3),
        ("npg", 1 / 6, 6),  # F, squared there, is smaller where a sequence's own positions are not in it
        # c0 (K + c0 I)^-1 commutes with K and has no eigenvalue above one: it only makes a layer's gradient shorter
        ("interacting", 0, 1),
    ):
        ratio = norm(rule=rule) / of_grpo
        assert (ratio > low).all() and (ratio < high).all(), (rule, ratio)


def test_metrics_of_isopo_are_logged_once_per_step_whatever_the_accumulation(tmp_path):
    trainer = training.build(tmp_path, gradient_accumulation_steps=2, logging_steps=2, max_steps=4, rule="fig4")
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = ["multiplier_mean", "multiplier_min", "multiplier_max", "effective_sequences"]
    names += ["fisher_norm", "euclidean_norm", "relative_norm", "skipped_fraction"]
    names += [f"share_{part}" for part in ("attention", "mlp", "norm", "embedding", "head")]
    assert len(lines) == 2
    for line in lines:
        logged = {name for name in line if name.startswith("isopo/")} - {"isopo/noise_scale"}  # six may not show it
        assert {f"isopo/{name}" for name in names} == logged
        assert line["isopo/multiplier_min"] <= line["isopo/multiplier_mean"] <= line["isopo/multiplier_max"]
        assert 1 <= line["isopo/effective_sequences"] <= 6


def test_no_layer_is_skipped_because_the_samples_missed_it(tmp_path):
    # Long prompts and short completions: few of the positions that samples are drawn from reach the last block's
    # query, output and feed-forward weights, or the LM head
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    inputs = oracle.random_batch([200] * 4, [5, 5, 4, 3], 100, advantages=advantages).for_trl()
    trainer = training.prepared(training.build(tmp_path, rule="npg", gradient_checkpointing=False))
    for _ in range(10):  # microbatches, each with its own samples
        _, gradients = training.gradients(trainer, inputs)
        skipped = [name for name, gradient in gradients.items() if not gradient.any()]
        assert not skipped, f"{len(skipped)} parameters have no gradient: {skipped[-1]}"
