"""`kl_in_reward`: the reward loses beta times the KL divergence to the reference model, the loss has no KL term."""

import logging
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.trl_seam.scoring import score_completions
from tests import oracle, tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
BETA = 0.3
SETTINGS = {"beta": BETA, "kl_in_reward": True, "learning_rate": 0.05, "max_steps": 3, "temperature": 0.8}


def adapter():
    return LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")


def adapted(model, seed=1):
    """The model with an adapter that already does something."""
    model = get_peft_model(model, adapter())
    generator = torch.Generator().manual_seed(seed)
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


class Recording(ISOPOTrainer):
    """Keeps what the last generation was made of, and the weights that made it."""

    def _generate(self, prompts):
        output = super()._generate(prompts)
        weights = {name: value.clone() for name, value in self.model.state_dict().items() if ".ref." not in name}
        self.last = {"prompt_ids": output[0], "completion_ids": output[1], "weights": weights}
        return output

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.last["advantages"] = batch["advantages"]
        return batch


@pytest.mark.parametrize("case", ["full", "lora", "adapter"])
def test_reward_loses_beta_times_the_divergence(case, tmp_path):
    model, options, policy, reference = policy_and_reference(case, tmp_path)
    trainer = training.build(tmp_path, model, Recording, options=options, **SETTINGS)
    lines = training.train(trainer, still=(".ref.",))
    # The policy as it was when it generated the last completions, two optimizer steps after the reference
    last = trainer.last
    policy.load_state_dict(last["weights"])
    rows = list(zip(last["prompt_ids"], last["completion_ids"], strict=True))
    divergence = [
        (training.log_probabilities(policy, *row, 0.8) - training.log_probabilities(reference, *row, 0.8)).sum()
        for row in rows
    ]
    divergence = torch.stack(divergence)
    assert divergence.abs().min() > 0.01  # the optimizer has moved the policy away
    torch.testing.assert_close(
        torch.tensor(trainer._logs["rewards"]["kl_to_reference"], dtype=torch.float64),
        divergence,
        rtol=1e-3,
        atol=1e-4,
    )
    rewards = torch.tensor(trainer._logs["rewards"]["reward"], dtype=torch.float64) - BETA * divergence
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(last["advantages"].double(), expected, rtol=1e-3, atol=1e-3)
    tokens = sum(len(ids) for _, ids in rows)
    assert lines[-1]["kl"] == pytest.approx(divergence.sum().item() / tokens, rel=1e-3, abs=1e-5)
    assert lines[-1]["reward"] == pytest.approx(rewards.mean().item(), rel=1e-3)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("case", ["full", "lora", "adapter"])
def test_other_scoring_passes_are_not_taken_for_the_references(case, tmp_path):
    """Neither the old policy's, which token weights ask TRL for, nor one that a reward function makes."""

    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + row, 30, 40, 50] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    class Rollouts(Recording):
        passes = 0

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.passes += not torch.is_grad_enabled()
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def scoring(completions, **_):
        ids = torch.arange(12).view(3, 4) + 20
        with torch.no_grad():
            score_completions(trainer, trainer.model, ids, torch.ones_like(ids), 2)
        return tiny.reward(completions)

    model, options, policy, reference = policy_and_reference(case, tmp_path)
    settings = {**SETTINGS, "num_iterations": 2, "token_weights": "p3o", "skip_zero_advantage": False}
    options = {**options, "rollout_func": rollout}
    trainer = training.build(tmp_path, model, Rollouts, reward=scoring, options=options, **settings)
    trainer.train()
    assert trainer.passes == 2 * 4  # of each generation: old policy, reference, reward, and the divergence's own
    last = trainer.last
    policy.load_state_dict(last["weights"])
    rows = zip(last["prompt_ids"], last["completion_ids"], strict=True)
    expected = [
        (training.log_probabilities(policy, *row, 0.8) - training.log_probabilities(reference, *row, 0.8)).sum()
        for row in rows
    ]
    torch.testing.assert_close(
        torch.tensor(trainer._logs["rewards"]["kl_to_reference"], dtype=torch.float64),
        torch.stack(expected),
        rtol=1e-3,
        atol=1e-4,
    )
    assert torch.stack(expected).abs().min() > 0.01


def test_nothing_of_a_generation_is_kept_after_it(tmp_path):
    trainer = training.build(tmp_path, options={"peft_config": adapter()}, **SETTINGS)
    trainer.train()
    with pytest.raises(RuntimeError, match="made no pass of the reference model"):
        trainer.kl_reward(prompts=[], completions=[])


def test_divergence_leaves_tokens_of_the_environment_out(tmp_path):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + row, 30, 40, 50] for row in range(len(prompts))]
        logprobs = [[-1.0, -2.0, None, -3.0] for _ in completions]
        mask = [[1, 0, 1, 1]] * len(prompts)
        trainer.last = prompt_ids, completions
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": mask}

    path = tiny.save(tmp_path / "model", "qwen3")
    options = {"rollout_func": rollout}
    trainer = training.build(tmp_path, path, options=options, **{**SETTINGS, "max_steps": 1})
    training.train(trainer)
    # The sampler's log-probabilities stand for the policy's; the token that it gave none for does not count
    expected = []
    for row in zip(*trainer.last, strict=True):
        logps = training.log_probabilities(tiny.model("qwen3"), *row, 0.8)
        expected.append((-1.0 - logps[0]) + (-3.0 - logps[3]))
    expected = torch.stack(expected)
    torch.testing.assert_close(
        torch.tensor(trainer._logs["rewards"]["kl_to_reference"]), expected.float(), rtol=1e-4, atol=1e-4
    )


def test_divergence_costs_one_pass_of_policy_and_reference_per_generation(tmp_path):
    model, options, *_ = policy_and_reference("full", tmp_path)
    trainer = training.build(tmp_path, model, options=options, **SETTINGS)
    passes = {"policy": 0, "reference": 0, "training": 0}

    def count(name):
        def hook(module, args, kwargs):
            if kwargs.get("fused_lm_head"):
                passes["training" if torch.is_grad_enabled() else name] += 1

        return hook

    trainer.model.register_forward_pre_hook(count("policy"), with_kwargs=True)
    trainer.ref_model.register_forward_pre_hook(count("reference"), with_kwargs=True)
    trainer.train()
    assert passes == {"policy": 3, "reference": 3, "training": 3}


@pytest.mark.parametrize(
    ("settings", "passes_of_policy"),
    [({}, 0), ({"top_p": 0.5}, 1), ({"generation_kwargs": {"temperature": 1.3}}, 1)],
    ids=str,
)
def test_divergence_is_the_policys_where_another_distribution_drew(settings, passes_of_policy, tmp_path):
    """What tokens were drawn with, which token weights ask for, saves the policy's pass only if the policy drew."""
    kl, passes = {}, {}
    for weights in ("none", "p3o"):
        model, options, *_ = policy_and_reference("full", tmp_path)
        own = {**SETTINGS, **settings, "max_steps": 1, "token_weights": weights}
        trainer = training.build(tmp_path, model, options=options, **own)
        passes[weights] = 0

        def count(module, args, kwargs, weights=weights):
            passes[weights] += bool(kwargs.get("fused_lm_head")) and not torch.is_grad_enabled()

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
        kl[weights] = trainer.state.log_history[0]["kl"]
    assert kl["p3o"] == pytest.approx(kl["none"], abs=1e-5)  # 0: the policy is still the reference
    assert passes == {"none": 1, "p3o": passes_of_policy}


@pytest.mark.parametrize("case", ["full", "adapter"])
def test_loss_has_no_divergence_in_it(case, tmp_path):
    inputs = oracle.random_batch([3, 1, 5], [6, 5, 2], 100, advantages=[1.3, -0.7, 0.4]).for_trl()
    inputs["advantages"] = inputs["advantages"].float()
    inputs["ref_per_token_logps"] = torch.full(inputs["completion_ids"].shape, -7.0)
    model, options, *_ = policy_and_reference(case, tmp_path)
    own = training.build(tmp_path, model, options=options, **SETTINGS, rule="none")
    model, options, *_ = policy_and_reference(case, tmp_path)
    plain = training.build(tmp_path, model, GRPOTrainer, options=options, temperature=0.8)
    (loss, gradient), (expected, expected_gradient) = (
        training.gradients(training.prepared(trainer), inputs) for trainer in (own, plain)
    )
    assert loss == pytest.approx(expected, abs=1e-6)
    assert training.distance(gradient, expected_gradient) < 1e-5
    assert own.beta == BETA


def test_reference_follows_the_policy_with_sync_ref_model(tmp_path):
    path = tiny.save(tmp_path / "model", "qwen3")
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    trainer = training.build(tmp_path, path, **SETTINGS, **settings)
    before = {name: p.detach().clone() for name, p in trainer.ref_model.named_parameters()}
    training.train(trainer)
    for name, p in trainer.ref_model.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_reference_of_lora_is_the_base_model_and_stays(tmp_path):
    model, options, *_ = policy_and_reference("adapter", tmp_path)
    trainer = training.build(tmp_path, model, options=options, **SETTINGS)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if ".ref." in name}
    assert before and not any(".ref." in row["parameter"] for row in trainer.isopo.coverage())
    training.train(trainer, still=(".ref.",))
    for name, p in trainer.model.named_parameters():
        if ".ref." in name:
            assert torch.equal(p, before[name]), name


def test_divergence_is_part_of_evaluation(tmp_path):
    path = tiny.save(tmp_path / "model", "qwen3")
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
    options = {"eval_dataset": tiny.prompts(2)}
    trainer = training.build(tmp_path, path, options=options, **SETTINGS, **settings)
    training.train(trainer)
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == 3 and all(math.isfinite(line["eval_kl"]) for line in lines)


def test_completion_without_a_reward_stays_without_one(tmp_path):
    def none_for_one(completions, **_):
        return [None, *tiny.reward(completions[1:])]

    path = tiny.save(tmp_path / "model", "qwen3")
    trainer = training.build(tmp_path, path, Recording, reward=none_for_one, **SETTINGS)
    training.train(trainer)
    assert trainer.last["advantages"][0] == 0 and (trainer.last["advantages"][1:] != 0).all()


def test_divergence_is_weighted_beside_other_rewards(tmp_path):
    def constant(completions, **_):
        return [2.0] * len(completions)

    path = tiny.save(tmp_path / "model", "qwen3")
    settings = {**SETTINGS, "reward_weights": [0.5, 3.0]}
    lines = training.train(training.build(tmp_path, path, reward=[tiny.reward, constant], **settings))
    for line in lines:
        expected = 0.5 * line["rewards/reward/mean"] + 3.0 * 2.0 - BETA * line["rewards/kl_to_reference/mean"]
        assert line["reward"] == pytest.approx(expected, rel=1e-5)


def test_list_of_rewards_of_the_user_is_left_as_it_was(tmp_path):
    rewards, tokenizers = [tiny.reward], [None]
    path = tiny.save(tmp_path / "model", "qwen3")
    options = {"reward_processing_classes": tokenizers}
    training.build(tmp_path, path, reward=rewards, options=options, **SETTINGS)
    assert rewards == [tiny.reward] and tokenizers == [None]


def test_warning_that_all_rewards_are_none_is_not_lost(tmp_path, caplog):
    def always_none(completions, **_):
        return [None] * len(completions)

    trainer = training.build(tmp_path, tiny.save(tmp_path / "model", "qwen3"), reward=always_none, **SETTINGS)
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        trainer.train()
    assert "All reward functions returned None" in caplog.text
