"""Every normalisation of the loss trains, and the numbers in the log are those that a user of GRPO expects to read."""

import math

import pytest
import torch
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import oracle, tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting", "none"]


def batch(seed=0):
    """Four sequences of different lengths, one of them with one token, one without an advantage."""
    return oracle.random_batch([3, 1, 5, 4], [6, 5, 1, 4], 100, seed=seed, advantages=[1.3, -0.7, 0.4, 0.0])


def float_batch(**extra):
    result = batch().for_trl()
    return {**result, "advantages": result["advantages"].float(), **extra}


# Runs


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_type_trains_with_accumulation(loss_type, tmp_path):
    training.train(training.build(tmp_path, loss_type=loss_type, gradient_accumulation_steps=2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", ["relative", "paper"])
def test_rule_trains(rule, scale, tmp_path):
    training.train(training.build(tmp_path, rule=rule, scale=scale))


@pytest.mark.parametrize("settings", [{"regularization": 1.0}, {"regularization": 1.0, "keep_small": True}])
def test_regularized_rule_trains(settings, tmp_path):
    training.train(training.build(tmp_path, rule="fig4", **settings))


@pytest.mark.parametrize("scale_rewards", [True, False, "group", "batch", "none"])
def test_scaling_of_rewards_trains(scale_rewards, tmp_path):
    training.train(training.build(tmp_path, scale_rewards=scale_rewards))


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "loss_type": "luspo", "num_iterations": 2},
        {"top_entropy_quantile": 0.2},
        {"max_completion_length": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
        {"num_generations": 6, "gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.0},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_setting_trains(settings, tmp_path):
    training.train(training.build(tmp_path, **settings))


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_one_sequence_per_microbatch_trains(rule, tmp_path):
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_completion_length": 1}
    training.train(training.build(tmp_path, rule=rule, **settings))


def ending(ends):
    """A rollout whose completions end in EOS where `ends` says so."""

    def rollout(prompts, trainer):
        eos = trainer.processing_class.eos_token_id
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + row, 30 + 3 * row, eos if ends[row] else 50] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    return rollout


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_truncated_completions_are_left_out(loss_type, tmp_path):
    settings = {"mask_truncated_completions": True, "loss_type": loss_type}
    options = {"rollout_func": ending([True, False, True])}
    training.train(training.build(tmp_path, options=options, **settings))


@pytest.mark.parametrize(
    ("loss_type", "rule"),
    [
        pytest.param(loss_type, rule, marks=[] if (place + number) % 2 == 0 else pytest.mark.slow)
        for place, loss_type in enumerate(("dapo", "grpo"))
        for number, rule in enumerate(RULES)
    ],
)
def test_nothing_moves_when_every_completion_is_truncated(rule, loss_type, tmp_path):
    settings = {"mask_truncated_completions": True, "rule": rule, "loss_type": loss_type}
    trainer = training.build(tmp_path, options={"rollout_func": ending([False] * 3)}, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name
    for line in trainer.state.log_history[:2]:
        assert line["loss"] == 0 and line["grad_norm"] == 0
        assert all(math.isfinite(value) for name, value in line.items() if name.startswith("isopo/"))
    assert torch.isfinite(trainer.isopo._running.mean).all()


def test_truncated_step_does_not_spoil_the_next_ones(tmp_path):
    calls = []

    def rollout(prompts, trainer):
        calls.append(len(prompts))
        return ending([len(calls) != 2] * 3)(prompts, trainer)

    trainer = training.build(
        tmp_path, options={"rollout_func": rollout}, mask_truncated_completions=True, max_steps=3, rule="fig4"
    )
    lines = training.train(trainer)
    assert [line["grad_norm"] == 0 for line in lines] == [False, True, False]


# The reported loss


def crossed(accumulations):
    """Both levels with every loss type, each with one of the two accumulations; with the other one it is slow."""
    return [
        pytest.param(level, loss_type, accumulation, marks=[] if (row + column + place) % 2 == 0 else pytest.mark.slow)
        for row, level in enumerate(("token", "sequence"))
        for column, loss_type in enumerate(LOSS_TYPES)
        for place, accumulation in enumerate(accumulations)
    ]


@pytest.mark.parametrize(("level", "loss_type", "accumulation"), crossed([1, 3]))
def test_reported_loss_is_that_of_grpo(level, loss_type, accumulation, tmp_path):
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
    }
    inputs = float_batch()
    plain = training.prepared(training.build(tmp_path, kind=GRPOTrainer, **settings), accumulation)
    loss, _ = training.gradients(plain, inputs)
    own = training.prepared(training.build(tmp_path, rule="fisher", **settings), accumulation)
    assert training.gradients(own, inputs)[0] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.3},
        {"temperature": 0.7},
        {"pad_to_multiple_of": 8},
        {"mask_truncated_completions": True},
    ],
    ids=str,
)
def test_reported_loss_is_that_of_grpo_under_other_settings(settings, tmp_path):
    inputs = float_batch(tool_mask=torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1] * 6, [1] * 6]))
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, **settings}
    loss, _ = training.gradients(training.prepared(training.build(tmp_path, kind=GRPOTrainer, **settings)), inputs)
    own = training.prepared(training.build(tmp_path, **settings))
    assert training.gradients(own, inputs)[0] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-3


@pytest.mark.parametrize(("level", "loss_type", "accumulation"), crossed([1, 2]))
def test_rule_none_has_the_gradient_of_grpo(level, loss_type, accumulation, tmp_path):
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "max_grad_norm": 0.0}
    inputs = float_batch(tool_mask=torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1] * 6, [1] * 6]))
    plain = training.prepared(training.build(tmp_path, kind=GRPOTrainer, **settings), accumulation)
    own = training.prepared(training.build(tmp_path, rule="none", **settings), accumulation)
    assert training.distance(training.gradients(own, inputs)[1], training.gradients(plain, inputs)[1]) < 1e-5


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_logged_loss_is_that_of_grpo_in_training(rule, tmp_path):
    def losses(**settings):
        # With a learning rate of zero, both trainers see the same completions at every step. Three prompts, two at a
        # time: the last accumulation window has half the length.
        trainer = training.build(
            tmp_path,
            data=tiny.prompts(3),
            learning_rate=0.0,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
            max_steps=-1,
            num_train_epochs=2,
            loss_type="bnpo",
            **settings,
        )
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    plain = losses(kind=GRPOTrainer)
    assert len(plain) == 4 and max(map(abs, plain)) > 1e-3
    assert losses(rule=rule) == pytest.approx(plain, abs=1e-6)


def test_evaluation_reports_the_loss_of_grpo(tmp_path):
    def loss(kind):
        trainer = training.prepared(training.build(tmp_path, kind=kind, loss_type="grpo"))
        trainer.model.eval()
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, float_batch()).item()

    assert loss(ISOPOTrainer) == pytest.approx(loss(GRPOTrainer), abs=1e-7)


# The size of the step


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    "settings, low, high",
    [
        ({"rule": "fisher"}, 1 / 3, 3),
        ({"rule": "npg", "fisher_scope": "microbatch"}, 1 / 3, 3),
        ({"rule": "npg"}, 1 / 6, 6),  # F, squared there, is smaller where a sequence's own positions are not in it
        ({"rule": "interacting"}, 0, 1),
    ],
    ids=lambda x: " ".join(x.values()) if isinstance(x, dict) else "",
)
def test_gradient_norm_is_comparable_with_that_of_grpo(settings, low, high, seed, tmp_path):
    def norm(**settings):
        trainer = training.build(
            tmp_path,
            tiny.model("qwen3", seed=seed),
            seed=seed,
            max_steps=3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            learning_rate=0.0,
            **settings,
        )
        trainer.train()
        return torch.tensor([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])

    ratio = norm(**settings) / norm(kind=GRPOTrainer)
    # c0 (K + c0 I)^-1 commutes with K and has no eigenvalue above one: it only makes a layer's gradient shorter
    assert (ratio > low).all() and (ratio < high).all(), ratio


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


@pytest.mark.parametrize("rule", ["fisher", "npg"])
def test_no_layer_is_skipped_because_the_samples_missed_it(rule, tmp_path):
    # Long prompts and short completions: few of the positions that samples are drawn from reach the last block's
    # query, output and feed-forward weights, or the LM head
    inputs = oracle.random_batch([200] * 4, [5, 5, 4, 3], 100, advantages=[1.0, -1.0, 0.5, -0.5]).for_trl()
    inputs["advantages"] = inputs["advantages"].float()
    trainer = training.prepared(training.build(tmp_path, rule=rule, gradient_checkpointing=False))
    for _ in range(20):  # microbatches, each with its own samples
        _, gradients = training.gradients(trainer, inputs)
        skipped = [name for name, gradient in gradients.items() if not gradient.any()]
        assert not skipped, f"{len(skipped)} parameters have no gradient: {skipped[-1]}"
