"""Token weights in the trainer: what tokens were drawn with, which data is fresh, when an old policy is scored."""

import math

import pytest
import torch
from peft import LoraConfig

from isopo_trl import ISOPOTrainer
from tests import tiny, training
from tests.trainer.fixed_rollout import fixed_rollout
from tests.trainer.test_rollouts import add, call
from tests.trainer.test_sampling import PROMPTS, sampled, scoring_passes


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
LORA = {"peft_config": LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")}
HOT = {"generation_kwargs": {"temperature": 1.2}}


def name_of(value):
    """What a test is called by, wherever it is collected: settings without objects."""
    return str({k: v for k, v in value.items() if k != "options"}) if isinstance(value, dict) else str(value)


def rows_of(batch):
    """Prompt and completion of each sequence, without padding."""
    parts = [(batch[f"{part}_ids"], batch[f"{part}_mask"].bool()) for part in ("prompt", "completion")]
    return list(zip(*([row[kept].tolist() for row, kept in zip(*part, strict=True)] for part in parts), strict=True))


def figures_of(ratios):
    """Effective sample size, mean and divergence of ratios `[n]`."""
    r = torch.as_tensor(ratios, dtype=torch.float64)
    figures = [r.mean() ** 2 / r.square().mean(), r.mean(), (r * r.log() - r + 1).mean()]
    return pytest.approx([figure.item() for figure in figures], rel=1e-3)


def logged(line):
    return [line[f"off_policy/{name}"] for name in ("ess", "ratio_mean", "kl")]


# What transformers' generation drew with


class Watch(ISOPOTrainer):
    """Notes with what log-probabilities the model would draw the tokens it has just generated, at `heat`."""

    heat = 1.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn, self.microbatches = {}, []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        training_mode = self.model.training
        self.model.eval()
        for prompt, completion in rows_of(batch):
            logps = training.log_probabilities(self.model, prompt, completion, self.heat)
            self.drawn[*prompt, *completion, int(batch["generated_after"])] = logps
        self.model.train(training_mode)
        return batch

    def _compute_loss(self, model, inputs):
        expected = [self.drawn[*p, *c, int(inputs["generated_after"])] for p, c in rows_of(inputs)]
        self.microbatches.append((inputs, expected))
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("settings", "every"),  # after so many steps data is fresh again
    [
        ({"token_weights": "p3o", "num_iterations": 3, "options": LORA}, 3),
        ({"token_weights": "p3o", "rule": "none", "steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3),
        ({"token_weights": "sampler", "temperature": 0.7, "num_iterations": 2}, 2),
        ({"token_weights": "kpo", "steps_per_generation": 4, "gradient_accumulation_steps": 2}, 2),
        ({"token_weights": "p3o", **HOT, "num_iterations": 2}, None),
    ],
    ids=name_of,
)
def test_loss_gets_what_tokens_were_drawn_with_and_no_pass_is_made_for_it(settings, every, tmp_path):
    """Fresh data is exactly on-policy, unless another distribution drew it, and reused data is not."""
    settings = {"max_steps": 4, "learning_rate": 0.05, "pad_to_multiple_of": 8, "data": tiny.prompts(16), **settings}
    trainer = training.build(tmp_path, kind=Watch, **settings)
    trainer.heat = 1.2 if every is None else settings.get("temperature", 1.0)
    assert scoring_passes(trainer) == [True] * 4 * settings.get("gradient_accumulation_steps", 1)
    for inputs, expected in trainer.microbatches:
        sampler = inputs["sampling_per_token_logps"]
        assert "old_per_token_logps" not in inputs and sampler.shape == inputs["completion_ids"].shape
        for row, logps in zip(sampler, expected, strict=True):
            torch.testing.assert_close(row[: len(logps)].double(), logps, atol=2e-5, rtol=0)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = {"ess", "ratio_mean", "kl"} | ({"filtered_ratio_mean"} if settings["token_weights"] == "kpo" else set())
    for step, line in enumerate(lines):
        assert {name for name in line if name.startswith("off_policy/")} == {f"off_policy/{name}" for name in names}
        figures = {name: line[f"off_policy/{name}"] for name in names}
        if every is not None and step % every == 0:
            assert figures == {name: 0.0 if name == "kl" else 1.0 for name in names}
        else:
            assert 0 < figures["ess"] < 1 and figures["kl"] > 0 and figures["ratio_mean"] != 1
    if every is None:
        inputs, drawn = trainer.microbatches[0]
        pairs = zip(rows_of(inputs), drawn, strict=True)
        ratios = [(training.log_probabilities(tiny.model("qwen3"), *row) - logps).exp() for row, logps in pairs]
        assert logged(lines[0]) == figures_of(torch.cat(ratios))


@pytest.mark.parametrize("settings", [{"min_p": 0.9}, {"suppress_tokens": [5, 6, 7]}], ids=str)
def test_generation_settings_of_the_model_make_fresh_data_off_policy(settings, tmp_path):
    model = tiny.model("qwen3")
    model.generation_config.update(do_sample=True, **settings)
    (line,) = training.train(training.build(tmp_path, model, token_weights="p3o", max_steps=1))
    assert line["off_policy/ess"] < 1 and line["off_policy/ratio_mean"] != 1


@pytest.mark.parametrize(("settings", "warned"), [({"temperature": 0.7}, False), ({"top_k": 20}, True)], ids=str)
def test_filter_is_warned_of_a_sampler_that_is_not_the_policy(settings, warned, tmp_path, caplog):
    training.build(tmp_path, token_weights="kpo", **settings)
    assert ("not sampled from the distribution that is trained" in caplog.text) == warned


def test_data_of_an_earlier_call_of_train_is_not_fresh(tmp_path):
    trainer = training.build(tmp_path, token_weights="p3o", max_steps=1, num_iterations=2)
    ess = []
    for _ in range(2):  # TRL goes on with the completions that it has
        trainer.train()
        ess += [line["off_policy/ess"] for line in trainer.state.log_history if "off_policy/ess" in line]
    assert ess[0] == 1 and ess[-1] < 1


def test_sampler_correction_without_vllm_truncates_the_ratio(tmp_path):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1}
    trainer = training.build(tmp_path, kind=Watch, token_weights="sampler", max_steps=1, **settings, **HOT)
    trainer.heat = 1.2
    (line,) = training.train(trainer)
    pairs = zip(rows_of(trainer.microbatches[0][0]), trainer.microbatches[0][1], strict=True)
    ratios = [(training.log_probabilities(tiny.model("qwen3"), *row) - logps).exp() for row, logps in pairs]
    r = torch.cat(ratios)
    figures = [line[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    assert r.max() > 1.1
    assert figures == pytest.approx([r.min().item(), r.clamp(max=1.1).mean().item(), 1.1], rel=1e-4)
    assert line["sampling/sampling_logp_difference/mean"] == pytest.approx(r.log().abs().mean().item(), rel=1e-3)


# Evaluation


def test_evaluation_has_figures_of_its_own_and_changes_nothing_in_training(tmp_path):
    class InTrainMode(ISOPOTrainer):  # as TRL's continuous batching leaves the model after it has generated
        def _generate_single_turn(self, *args, **kwargs):
            output = super()._generate_single_turn(*args, **kwargs)
            self.model.train()
            return output

    def run(**settings):
        trainer = training.build(tmp_path, token_weights="kpo", num_iterations=2, **settings)
        torch.manual_seed(0)
        trainer.train()
        return trainer.state.log_history

    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "options": {"eval_dataset": tiny.prompts(3)}}
    evaluating["per_device_eval_batch_size"] = 3
    plain, evaluated, in_train_mode = run(), run(**evaluating), run(**evaluating, kind=InTrainMode)
    for lines in (evaluated, in_train_mode):
        # Between the two uses of the data
        ess = [[line["off_policy/ess"] for line in each if "off_policy/ess" in line][:2] for each in (lines, plain)]
        assert ess[0] == ess[1] and ess[0][1] < 1
    names = ("ess", "ratio_mean", "filtered_ratio_mean", "kl")
    evaluations = [line for line in evaluated if "eval_loss" in line]
    assert len(evaluations) == 2
    for line in evaluations:
        assert math.isfinite(line["eval_loss"])
        assert [line[f"eval_off_policy/{name}"] for name in names] == [1.0, 1.0, 1.0, 0.0]


def test_evaluation_at_another_temperature_is_off_policy(tmp_path):
    options = {"eval_dataset": tiny.prompts(3)}
    settings = {"per_device_eval_batch_size": 3, "token_weights": "p3o", **HOT}
    figures = training.build(tmp_path, options=options, **settings).evaluate()
    assert 0 < figures["eval_off_policy/ess"] < 1 and figures["eval_off_policy/kl"] > 0


# Samplers that say nothing


ROLLOUT = {"options": {"rollout_func": fixed_rollout(lambda row: [20 + row, 30, 40 + 3 * row, 50, 60][: 5 - row % 3])}}
BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 8, "max_batch_tokens": 64},  # quick to set up
}


@pytest.mark.parametrize(
    "settings, microbatches, extra",
    # Of four steps: microbatches, and those among the generated that are scored for an old policy
    [
        ({**ROLLOUT, "token_weights": "p3o"}, 4, 0),
        ({**ROLLOUT, "token_weights": "p3o", "gradient_accumulation_steps": 3, "steps_per_generation": 2}, 12, 12),
        ({**ROLLOUT, "num_iterations": 2}, 4, 0),
        ({**ROLLOUT, "num_iterations": 2, "epsilon": 0.2}, 4, 2),
        ({**BATCHING, "token_weights": "p3o", "num_iterations": 2}, 4, 2),
        ({"generation_kwargs": {"num_beams": 2}, "token_weights": "p3o", "num_iterations": 2}, 4, 2),
    ],
    ids=name_of,
)
def test_old_policy_is_scored_once_where_nobody_says_what_drew_and_somebody_asks(
    settings, microbatches, extra, tmp_path
):
    trainer = training.build(tmp_path, max_steps=4, data=tiny.prompts(16), **settings)
    passes = scoring_passes(trainer)
    assert passes.count(True) == microbatches and passes.count(False) == extra
    lines = [line for line in trainer.state.log_history if "loss" in line]
    # Where it is needed, a generation serves for two steps, or begins in every second and reaches into the next
    assert [line.get("off_policy/ess", 1) == 1 for line in lines] == [n % 2 == 0 or not extra for n in range(4)]
    assert ("off_policy/ess" in lines[0]) == ("token_weights" in settings or "epsilon" in settings)


# Rollouts


def test_log_probabilities_of_a_rollout_are_the_samplers(tmp_path):
    trainer = training.build(tmp_path, options={"rollout_func": sampled}, token_weights="p3o", max_steps=1)
    batch = training.prepared(trainer)._generate_and_score_completions(PROMPTS)
    assert "old_per_token_logps" not in batch
    training.gradients(trainer, batch)
    ratios, given = [], sampled([row["prompt"] for row in PROMPTS], trainer)
    for row in range(3):
        logps = training.log_probabilities(trainer.model, given["prompt_ids"][row], given["completion_ids"][row])
        for own, sampler, scored in zip(logps.tolist(), given["logprobs"][row], given["env_mask"][row], strict=True):
            if scored:
                ratios.append(1.0 if sampler is None else math.exp(own - sampler))
    trainer._log_step({"broken_sequences": 0})
    assert logged({name: values[-1] for name, values in trainer._metrics["train"].items()}) == figures_of(ratios)


def test_rollout_that_uses_the_trainers_own_generation_keeps_its_log_probabilities(tmp_path):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 3)
        hotter = [[x - 0.1 * place for place, x in enumerate(row)] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": hotter}

    options = {"rollout_func": rollout}
    (line,) = training.train(training.build(tmp_path, token_weights="p3o", max_steps=1, options=options))
    assert line["off_policy/ess"] < 1 and line["off_policy/ratio_mean"] > 1


@pytest.mark.parametrize(("weights", "rule"), [("sampler", "none"), ("p3o", "none"), ("kpo", "fisher")])
def test_advantage_that_is_not_finite_stops_the_run_before_the_weights_move(weights, rule, tmp_path):
    class Broken(ISOPOTrainer):
        def _compute_loss(self, model, inputs):
            if self.state.global_step == 1:  # the second use, where data is off-policy
                inputs = {**inputs, "advantages": inputs["advantages"] * math.nan}
            return super()._compute_loss(model, inputs)

    trainer = training.build(tmp_path, kind=Broken, rule=rule, token_weights=weights, num_iterations=2)
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters()) and trainer.state.global_step == 1


# Tools


class Calling(ISOPOTrainer):
    """Says fixed texts in two turns, of which the first calls a tool, with the model's own log-probabilities."""

    turns = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = call("add", a=2, b=3)
        texts = [[first, "no idea", first], ["5 it is", "so"]][self.turns % 2]
        self.turns += 1
        say = [texts[row % len(texts)] for row in range(len(prompt_ids))]
        completions = [self.processing_class(text + tiny.EOS)["input_ids"] for text in say]
        pairs = zip(prompt_ids, completions, strict=True)
        return completions, [training.log_probabilities(self.model, p, c).tolist() for p, c in pairs]


def test_tokens_of_a_tool_do_not_shift_the_log_probabilities(tmp_path):
    # A temperature of its own, so that fresh data is compared, too
    settings = {"max_completion_length": 128, "token_weights": "p3o", "generation_kwargs": {"temperature": 1.0}}
    data = tiny.conversational_prompts(3)
    trainer = training.prepared(
        training.build(tmp_path, kind=Calling, data=data, options={"tools": [add]}, **settings)
    )
    batch = trainer._generate_and_score_completions([dict(row) for row in data])
    assert (batch["tool_mask"] == 0).any()
    for row, (prompt, completion) in enumerate(rows_of(batch)):
        logps = training.log_probabilities(trainer.model, prompt, completion)
        scored = batch["tool_mask"][row, : len(completion)].bool()
        own = batch["sampling_per_token_logps"][row, : len(completion)]
        torch.testing.assert_close(own[scored].double(), logps[scored], atol=1e-5, rtol=0)
    training.gradients(trainer, batch)
    trainer._log_step({"broken_sequences": 0})
    figures = logged({name: values[-1] for name, values in trainer._metrics["train"].items()})
    assert figures == pytest.approx([1, 1, 0], abs=1e-5)


# Learning


def different_letters(completions, **_):
    """How many different small letters there are, over 8: more than a policy without entropy can have."""
    return [len({letter for letter in text if letter.islower()}) / 8 for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["none", "p3o", "kpo"])
def test_token_weights_keep_learning_from_stale_data_that_leads_plain_updates_astray(weights, tmp_path):
    """Sixteen big steps with each batch."""
    settings = {"max_steps": 96, "num_iterations": 16, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 8, "seed": 1}
    settings |= {"reward": different_letters, "data": tiny.prompts(8), "gradient_checkpointing": False}
    trainer = training.build(tmp_path, token_weights=weights, rule="none", **settings)
    trainer.train()
    lines = trainer.state.log_history
    rewards = [line["reward"] for line in lines if "reward" in line]
    entropy = [line["entropy"] for line in lines if "entropy" in line][-1]
    learned = sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    assert (learned, entropy > 1) == (weights != "none", weights != "none"), (rewards, entropy)
