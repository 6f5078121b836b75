"""
Between generation and loss: sampling settings, reuse of a generation, no old policy, vLLM's correction, seeds.
"""

import functools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


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
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 4, 4),
        ({"num_iterations": 2}, 2, 1),
    ],
    ids=str,
)
def test_no_forward_pass_is_spent_on_an_old_policy(settings, microbatches, extra, tmp_path):
    settings = {"data": tiny.prompts(16), **settings}
    own = scoring_passes(training.build(tmp_path, **settings))
    plain = scoring_passes(training.build(tmp_path, kind=GRPOTrainer, **settings))
    assert own == [True] * microbatches
    # What ISOPO saves: one pass per generated microbatch, where GRPO's steps and generations do not line up
    assert plain.count(True) == microbatches and plain.count(False) == extra


def test_each_generation_is_used_as_often_as_in_grpo(tmp_path):
    seen = {GRPOTrainer: [], ISOPOTrainer: []}
    for kind, microbatches in seen.items():

        class Watch(kind):
            def _prepare_inputs(self, generation_batch, microbatches=microbatches):
                inputs = super()._prepare_inputs(generation_batch)
                microbatches.append(inputs["completion_ids"].tolist())
                return inputs

        settings = {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 3}
        training.build(tmp_path, kind=Watch, num_generations=4, learning_rate=0.0, **settings).train()
    assert len(seen[ISOPOTrainer]) == 9 and seen[ISOPOTrainer] == seen[GRPOTrainer]


# vLLM's correction, with a rollout function in the place of vLLM


PROMPTS = [{"prompt": text} for text in ("What?", "Is it so?", "No")]


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


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [("token_truncate", "dapo"), ("token_mask", "grpo"), ("sequence_truncate", "grpo"), ("sequence_mask", "dapo")],
)
def test_sampler_correction_is_that_of_trl_without_its_forward_pass(mode, loss_type, tmp_path):
    plain = with_vllm(tmp_path, GRPOTrainer, mode, loss_type=loss_type)
    batch = plain._generate_and_score_completions(PROMPTS)
    assert torch.isnan(batch["sampling_per_token_logps"]).any()
    expected, corrected = training.gradients(plain, batch)

    own = with_vllm(tmp_path, ISOPOTrainer, mode, loss_type=loss_type, rule="none")
    own_batch = own._generate_and_score_completions(PROMPTS)
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


def test_sampler_correction_works_in_evaluation(tmp_path):
    own = with_vllm(tmp_path, ISOPOTrainer, "token_truncate", loss_type="grpo")
    plain = with_vllm(tmp_path, GRPOTrainer, "token_truncate", loss_type="grpo")
    losses = []
    for trainer in (own, plain):
        trainer.model.eval()
        batch = trainer._generate_and_score_completions(PROMPTS)
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, batch).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    figures = {f"off_policy/{name}" for name in ("ess", "ratio_mean", "kl")}
    assert own._metrics["eval"].keys() == plain._metrics["eval"].keys() | figures


def test_switched_off_correction_is_not_computed(tmp_path):
    settings = {"vllm_importance_sampling_correction": False, "token_weights": None}
    trainer = with_vllm(tmp_path, ISOPOTrainer, "token_truncate", **settings)
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    lines = training.train(trainer)
    assert not any(name.startswith(("sampling/", "off_policy/")) for line in lines for name in line)


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


@pytest.mark.parametrize(
    "settings",
    [
        *({"rule": rule} for rule in ("fisher", "interacting")),
        *({"token_weights": weights, "num_iterations": 2} for weights in ("p3o", "kpo")),
    ],
    ids=str,
)
def test_neither_rules_nor_token_weights_draw_from_the_random_stream(settings, of_grpo, tmp_path):
    own = completions_of_a_run(tmp_path, ISOPOTrainer, gradient_accumulation_steps=2, **settings)
    assert own == of_grpo(settings.get("num_iterations", 1))


def test_dropout_is_the_same_with_and_without_isopo(tmp_path):
    runs = []
    for kind in (GRPOTrainer, ISOPOTrainer):
        options = {"peft_config": LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear")}
        runs.append(completions_of_a_run(tmp_path, kind, options=options, gradient_checkpointing=True))
    assert runs[0] == runs[1]


def test_same_seed_gives_the_same_run(tmp_path):
    runs = []
    for _ in range(2):
        runs.append(training.build(tmp_path, fisher_samples=5, seed=3))
        runs[-1].train()
    assert all(torch.equal(p, q) for p, q in zip(*(run.model.parameters() for run in runs), strict=True))
