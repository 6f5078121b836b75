"""
Between generation and loss: sampling settings, reuse of a generation, no old policy, vLLM's correction, seeds.
"""

import functools
import random

import numpy
import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting", "none"]
WEIGHTS = ["sampler", "p3o", "kpo"]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
        {"generation_kwargs": {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}},
        {"cache_implementation": "dynamic"},
        {"pad_to_multiple_of": 8},
        {"steps_per_generation": 4},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"gradient_accumulation_steps": 2, "generation_batch_size": 12},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 3},
        {"num_iterations": 2},
        {"num_iterations": 2, "gradient_accumulation_steps": 2},
        {"shuffle_dataset": False},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items() if value is not True)[:60],
)
def test_setting_of_the_generation_trains(settings, tmp_path):
    training.train(training.build(tmp_path, **settings))


def test_chat_template_settings_reach_the_template(tmp_path):
    data = tiny.conversational_prompts(6)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% if shout %}!{% endif %}" + tokenizer.chat_template
    prompts = []

    def reward(prompts, completions, **_):
        return tiny.reward(completions)

    class Watch(ISOPOTrainer):
        def _tokenize_prompts(self, given):
            output = super()._tokenize_prompts(given)
            prompts.extend(self.processing_class.batch_decode(output[0]))
            return output

    options = {"processing_class": tokenizer}
    settings = {"chat_template_kwargs": {"shout": True}}
    training.train(training.build(tmp_path, kind=Watch, data=data, reward=reward, options=options, **settings))
    assert prompts and all(text.startswith("!") for text in prompts)


# How often the model runs


def scoring_passes(trainer):
    """Trains, and returns for each scoring pass of the model (not generation's) whether it recorded gradients."""
    passes = []

    def count(module, args, kwargs):
        if kwargs.get("fused_lm_head"):
            passes.append(torch.is_grad_enabled())

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return passes


@pytest.mark.parametrize(
    "settings, microbatches, extra",
    [
        ({}, 4, 0),
        ({"gradient_accumulation_steps": 2}, 8, 0),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 8, 8),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 16, 0),
        ({"num_iterations": 2}, 4, 2),
        ({"num_iterations": 2, "steps_per_generation": 2}, 4, 2),
    ],
    ids=str,
)
def test_no_forward_pass_is_spent_on_an_old_policy(settings, microbatches, extra, tmp_path):
    settings = {"max_steps": 4, "data": tiny.prompts(16), **settings}
    own = scoring_passes(training.build(tmp_path, **settings))
    plain = scoring_passes(training.build(tmp_path, kind=GRPOTrainer, **settings))
    assert own == [True] * microbatches
    # What ISOPO saves: one pass per generated microbatch, where GRPO's steps and generations do not line up
    assert plain.count(True) == microbatches and plain.count(False) == extra


def test_each_generation_is_used_as_often_as_in_grpo(tmp_path):
    def microbatches(kind):
        seen = []

        class Watch(kind):
            def _compute_loss(self, model, inputs):
                seen.append(inputs["completion_ids"].tolist())
                return super()._compute_loss(model, inputs)

        settings = {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 4}
        training.build(tmp_path, kind=Watch, num_generations=4, learning_rate=0.0, **settings).train()
        return seen

    own = microbatches(ISOPOTrainer)
    assert len(own) == 12 and own == microbatches(GRPOTrainer)


def test_training_arguments_are_as_the_user_set_them_after_a_generation(tmp_path):
    trainer = training.build(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4)

    def reward(completions, **_):
        raise KeyError("broken reward")

    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 2 and trainer.vllm_importance_sampling_correction
    trainer.reward_funcs = [reward]
    with pytest.raises(KeyError, match="broken reward"):
        trainer.train()
    assert trainer.args.gradient_accumulation_steps == 2 and trainer.vllm_importance_sampling_correction


# vLLM's correction, with a rollout function in the place of vLLM


def sampled(prompts, trainer):
    """
    Fixed completions, with log-probabilities that differ from the model's by up to 1.5, one that is missing, and
    tokens that an environment wrote.
    """
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    completions, logprobs = [], []
    for row, ids in enumerate(prompt_ids):
        completions.append([20 + row, 30, 40 + 3 * row, 50, 60][: 5 - row])
        logps = training.log_probabilities(trainer.model, ids, completions[-1])
        logprobs.append((logps + 3 * torch.rand(len(logps), generator=generator) - 1.5).tolist())
    logprobs[0][1] = None
    mask = [[1, 1, 0, 1, 1][: len(ids)] for ids in completions]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": mask}


def with_vllm(folder, kind, mode, **settings):
    """A trainer that believes its rollouts come from vLLM, inside a step."""
    if kind is ISOPOTrainer:
        settings = {"token_weights": "sampler", **settings}
    settings = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 2.0,
        **settings,
    }
    trainer = training.prepared(training.build(folder, kind=kind, options={"rollout_func": sampled}, **settings))
    trainer.use_vllm = True
    trainer._last_loaded_step = 0
    return trainer


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampler_correction_is_that_of_trl_without_its_forward_pass(mode, loss_type, tmp_path):
    prompts = [{"prompt": text} for text in ["What?", "Is it so?", "No"]]
    plain = with_vllm(tmp_path, GRPOTrainer, mode, loss_type=loss_type)
    batch = plain._generate_and_score_completions(prompts)
    assert torch.isnan(batch["sampling_per_token_logps"]).any()
    expected, corrected = training.gradients(plain, batch)

    own = with_vllm(tmp_path, ISOPOTrainer, mode, loss_type=loss_type, rule="none")
    own_batch = own._generate_and_score_completions(prompts)
    assert "old_per_token_logps" not in own_batch and "importance_sampling_ratio" not in own_batch
    loss, gradients = training.gradients(own, own_batch)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert training.distance(gradients, corrected) < 1e-5

    metrics = {name: values for name, values in plain._metrics["train"].items() if name.startswith("sampling/")}
    assert len(metrics) == 5
    for name, values in metrics.items():
        assert own._metrics["train"][name] == pytest.approx(values, rel=1e-4), name
    # The correction changes something, and the caller's batch is left as it was
    without = with_vllm(tmp_path, ISOPOTrainer, mode, loss_type=loss_type, rule="none", token_weights="none")
    assert training.distance(training.gradients(without, own_batch)[1], corrected) > 0.1
    assert "importance_sampling_ratio" not in own_batch


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_sampler_correction_trains(rule, tmp_path):
    trainer = with_vllm(tmp_path, ISOPOTrainer, "token_truncate", rule=rule, learning_rate=1e-3)
    trainer.vllm_generation = type("NoVLLM", (), {"sync_weights": lambda self: None})()
    lines = training.train(trainer)
    # All four are averages of finite numbers, though one of the sampler's log-probabilities is not a number
    for name in ("sampling_logp_difference/mean", "importance_sampling_ratio/mean"):
        assert all(line[f"sampling/{name}"] > 0 for line in lines)


def test_sampler_correction_works_in_evaluation(tmp_path):
    own = with_vllm(tmp_path, ISOPOTrainer, "token_truncate", loss_type="grpo")
    plain = with_vllm(tmp_path, GRPOTrainer, "token_truncate", loss_type="grpo")
    losses = []
    for trainer in (own, plain):
        trainer.model.eval()
        batch = trainer._generate_and_score_completions([{"prompt": text} for text in ["What?", "Is it so?", "No"]])
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, batch).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    figures = {f"off_policy/{name}" for name in ("ess", "ratio_mean", "kl")}
    assert own._metrics["eval"].keys() == plain._metrics["eval"].keys() | figures


def test_switched_off_correction_is_not_computed(tmp_path):
    settings = {"vllm_importance_sampling_correction": False, "token_weights": None}
    trainer = with_vllm(tmp_path, ISOPOTrainer, "token_truncate", **settings)
    trainer.vllm_generation = type("NoVLLM", (), {"sync_weights": lambda self: None})()
    lines = training.train(trainer)
    assert not any(name.startswith(("sampling/", "off_policy/")) for line in lines for name in line)


@pytest.mark.parametrize("threshold", [0.0, 100.0])
def test_off_policy_mask_compares_with_the_sampler(threshold, tmp_path):
    settings = {"off_policy_mask_threshold": threshold, "loss_type": "grpo"}
    prompts = [{"prompt": text} for text in ["What?", "Is it so?", "No"]]
    results = []
    for kind, rule in ((ISOPOTrainer, {"rule": "none"}), (GRPOTrainer, {})):
        trainer = training.build(tmp_path, kind=kind, options={"rollout_func": sampled}, **settings, **rule)
        training.prepared(trainer)
        results.append(training.gradients(trainer, trainer._generate_and_score_completions(prompts))[1])
    assert training.distance(*results) < 1e-5


# The random stream


def random_states():
    kind, keys, position, *_ = numpy.random.get_state()
    return torch.get_rng_state().tolist(), keys.tolist(), position, random.getstate()


def completions_of_a_run(folder, kind, options=None, **settings):
    """Token ids of all completions of a run that does not move the weights, and the random states on the way."""
    seen = []

    def reward(completion_ids, completions, **_):
        seen.append(completion_ids)
        return tiny.reward(completions)

    trainer = training.build(
        folder, kind=kind, reward=reward, options=options, learning_rate=0.0, max_steps=3, seed=7, **settings
    )
    constructed = random_states()
    trainer.train()
    return seen, constructed, random_states()


@pytest.fixture(scope="module")
def of_grpo(tmp_path_factory):
    """What GRPO draws with so many iterations, of one run for all tests that compare with it."""

    @functools.cache
    def run(iterations):
        settings = {"gradient_accumulation_steps": 2, "num_iterations": iterations}
        return completions_of_a_run(tmp_path_factory.mktemp("grpo"), GRPOTrainer, **settings)

    return run


@pytest.mark.parametrize("weights", WEIGHTS)
def test_token_weights_draw_nothing_from_the_random_stream(weights, of_grpo, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "num_iterations": 2}
    assert completions_of_a_run(tmp_path, ISOPOTrainer, token_weights=weights, **settings) == of_grpo(2)


@pytest.mark.parametrize("rule", RULES)
def test_rule_draws_nothing_from_the_random_stream(rule, of_grpo, tmp_path):
    assert completions_of_a_run(tmp_path, ISOPOTrainer, gradient_accumulation_steps=2, rule=rule) == of_grpo(1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_the_same_with_and_without_isopo(checkpointing, tmp_path):
    lora = {"peft_config": LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear")}
    settings = {"gradient_checkpointing": checkpointing}
    expected = completions_of_a_run(tmp_path, GRPOTrainer, options=lora, **settings)
    lora = {"peft_config": LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear")}
    assert completions_of_a_run(tmp_path, ISOPOTrainer, options=lora, **settings) == expected


def test_same_seed_gives_the_same_run(tmp_path):
    def run():
        trainer = training.build(tmp_path, fisher_samples=5, seed=3)
        training.train(trainer)
        return trainer.model.state_dict()

    one, other = run(), run()
    assert all(torch.equal(one[name], other[name]) for name in one)
