"""`kl_in_reward`: the reward loses beta times the KL divergence to the reference model, the loss has no KL term."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.trl_seam.scoring import Scoring
from tests import oracle, tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
BETA = 0.3
SETTINGS = {"beta": BETA, "kl_in_reward": True, "learning_rate": 0.05, "max_steps": 3, "temperature": 0.8}


def adapter():
    return LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")


def adapted(model):
    """The model with an adapter that already does something."""
    model = get_peft_model(model, adapter())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def policy_and_reference(case, folder):
    """What to give to the trainer as the model, the trainer's options, and independent models for policy and ref."""
    if case == "full":
        return tiny.save(folder / "model", "qwen3"), {}, tiny.model("qwen3"), tiny.model("qwen3")
    if case == "lora":
        policy = get_peft_model(tiny.model("qwen3"), adapter())
        return tiny.model("qwen3"), {"peft_config": adapter()}, policy, tiny.model("qwen3")
    return adapted(tiny.model("qwen3")), {}, adapted(tiny.model("qwen3")), adapted(tiny.model("qwen3"))


@pytest.fixture
def saved(tmp_path):
    return tiny.save(tmp_path / "model", "qwen3")


class Recording(ISOPOTrainer):
    """Keeps what the last generation was made of, and the weights that made it; counts passes without gradient."""

    passes = 0

    def _generate(self, prompts):
        output = super()._generate(prompts)
        weights = {name: value.clone() for name, value in self.model.state_dict().items() if ".ref." not in name}
        self.last = {"prompt_ids": output[0], "completion_ids": output[1], "weights": weights}
        return output

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.last["advantages"] = batch["advantages"]
        return batch

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.passes += not torch.is_grad_enabled()
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def rewarded(trainer):
    """What the divergence's reward of the last generation was."""
    return torch.tensor(trainer._logs["rewards"]["kl_to_reference"], dtype=torch.float64)


def divergence(trainer, policy, reference):
    """The same by two independent models, the policy's as it was when it generated."""
    policy.load_state_dict(trainer.last["weights"])
    rows = zip(trainer.last["prompt_ids"], trainer.last["completion_ids"], strict=True)
    kl = [training.log_probabilities(policy, *r, 0.8) - training.log_probabilities(reference, *r, 0.8) for r in rows]
    kl = torch.stack([row.sum() for row in kl])
    assert kl.abs().min() > 0.01  # the optimizer has moved the policy away
    return kl


@pytest.mark.parametrize("case", ["full", "adapter"])
def test_reward_loses_beta_times_the_divergence(case, tmp_path):
    model, options, policy, reference = policy_and_reference(case, tmp_path)
    trainer = training.build(tmp_path, model, Recording, options=options, **SETTINGS)
    assert not any(".ref." in row["parameter"] for row in trainer.isopo.coverage())
    lines = training.train(trainer, still=(".ref.",))
    expected = divergence(trainer, policy, reference)
    torch.testing.assert_close(rewarded(trainer), expected, rtol=1e-3, atol=1e-4)
    rewards = torch.tensor(trainer._logs["rewards"]["reward"], dtype=torch.float64) - BETA * expected
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(trainer.last["advantages"].double(), advantages, rtol=1e-3, atol=1e-3)
    tokens = sum(map(len, trainer.last["completion_ids"]))
    assert lines[-1]["kl"] == pytest.approx(expected.sum().item() / tokens, rel=1e-3, abs=1e-5)
    assert lines[-1]["reward"] == pytest.approx(rewards.mean().item(), rel=1e-3)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)
    # Nothing of a generation is left for a call outside of one
    with pytest.raises(RuntimeError, match="made no pass of the reference model"):
        trainer.kl_reward(prompts=[], completions=[])


@pytest.mark.parametrize("case", ["full", "lora"])
def test_other_scoring_passes_are_not_taken_for_the_references(case, tmp_path):
    """Neither the old policy's, which token weights ask TRL for, nor one that a reward function makes."""

    def scoring(completions, **_):
        ids = torch.arange(12).view(3, 4) + 20
        Scoring(trainer).score_without_gradient(ids, torch.ones_like(ids), 2)
        return tiny.reward(completions)

    model, options, policy, reference = policy_and_reference(case, tmp_path)
    settings = {**SETTINGS, "num_iterations": 2, "token_weights": "p3o", "skip_zero_advantage": False}
    options = {**options, "rollout_func": fixed_rollout(lambda row: [20 + row, 30, 40, 50])}
    trainer = training.build(tmp_path, model, Recording, reward=scoring, options=options, **settings)
    trainer.train()
    assert trainer.passes == 2 * 4  # of each generation: old policy, reference, reward, and the divergence's own
    torch.testing.assert_close(rewarded(trainer), divergence(trainer, policy, reference), rtol=1e-3, atol=1e-4)


def test_divergence_leaves_tokens_of_the_environment_out(saved, tmp_path):
    rollout = fixed_rollout(
        lambda row: [20 + row, 30, 40, 50],
        lambda row: [-1.0, -2.0, None, -3.0],
        env_mask=lambda row: [1, 0, 1, 1],
    )
    options = {"rollout_func": rollout}
    trainer = training.build(tmp_path, saved, Recording, options=options, **{**SETTINGS, "max_steps": 1})
    trainer.train()
    # The sampler's log-probabilities stand for the policy's; the token that it gave none for does not count
    rows = zip(trainer.last["prompt_ids"], trainer.last["completion_ids"], strict=True)
    logps = [training.log_probabilities(tiny.model("qwen3"), *row, 0.8) for row in rows]
    expected = torch.stack([(-1.0 - row[0]) + (-3.0 - row[3]) for row in logps])
    torch.testing.assert_close(rewarded(trainer), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 2),
        ({"token_weights": "p3o"}, 1),
        ({"token_weights": "p3o", "top_p": 0.5}, 2),
        ({"token_weights": "p3o", "generation_kwargs": {"temperature": 1.3}}, 2),
    ],
    ids=str,
)
def test_divergence_costs_a_pass_of_the_policy_unless_it_said_what_it_drew_with(settings, passes, saved, tmp_path):
    """Beside the reference's. What tokens were drawn with, which token weights ask for, may be another's."""
    trainer = training.build(tmp_path, saved, Recording, **{**SETTINGS, "max_steps": 1}, **settings)
    trainer.train()
    assert trainer.passes == passes
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-5)  # the policy is still the reference


@pytest.mark.parametrize(("case", "terms"), [("full", {}), ("adapter", {"entropy_coef": 0.2})], ids=str)
def test_loss_has_no_divergence_in_it(case, terms, tmp_path):
    inputs = oracle.random_batch([3, 1, 5], [6, 5, 2], 100, advantages=torch.tensor([1.3, -0.7, 0.4])).for_trl()
    inputs["ref_per_token_logps"] = torch.full(inputs["completion_ids"].shape, -7.0)
    results = []
    for kind, settings in ((ISOPOTrainer, {**SETTINGS, "rule": "none"}), (GRPOTrainer, {"temperature": 0.8})):
        model, options, *_ = policy_and_reference(case, tmp_path)
        trainer = training.build(tmp_path, model, kind, options=options, **settings, **terms)
        results.append(training.gradients(training.prepared(trainer), inputs))
    (loss, gradient), (expected, expected_gradient) = results
    assert loss == pytest.approx(expected, abs=1e-6)
    assert training.distance(gradient, expected_gradient) < 1e-5


def test_divergence_is_weighted_beside_other_rewards_in_training_and_evaluation(saved, tmp_path):
    def constant(completions, **_):
        return [2.0] * len(completions)

    rewards, tokenizers = [tiny.reward, constant], [None, None]
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
    settings |= {**SETTINGS, "reward_weights": [0.5, 3.0], "max_steps": 2}
    options = {"eval_dataset": tiny.prompts(2), "reward_processing_classes": tokenizers}
    trainer = training.build(tmp_path, saved, reward=rewards, options=options, **settings)
    lines = [(line, "") for line in training.train(trainer)]
    lines += [(line, "eval_") for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == 3 and math.isfinite(lines[-1][0]["eval_kl"])
    for line, mode in lines:
        own, kl = (line[f"{mode}rewards/{name}/mean"] for name in ("reward", "kl_to_reference"))
        assert line[f"{mode}reward"] == pytest.approx(0.5 * own + 3.0 * 2.0 - BETA * kl, rel=1e-5)
    assert rewards == [tiny.reward, constant] and tokenizers == [None, None]  # the user's own lists


def test_completion_without_a_reward_stays_without_one_and_is_warned_of(saved, tmp_path, caplog):
    def none_for_one(completions, **_):
        return [None, *tiny.reward(completions[1:])]

    trainer = training.build(tmp_path, saved, Recording, reward=none_for_one, **SETTINGS)
    trainer.train()
    assert trainer.last["advantages"][0] == 0 and (trainer.last["advantages"][1:] != 0).all()
    assert "All reward functions returned None for 1 of 3 completions" in caplog.text
