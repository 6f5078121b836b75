"""Token weights in the trainer: what tokens were drawn with, which data is fresh, when an old policy is scored."""

import math

import pytest
import torch
from peft import LoraConfig

from isopo_trl import ISOPOTrainer
from tests import tiny, training
from tests.trainer.test_sampling import sampled, scoring_passes


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
WEIGHTS = ["sampler", "p3o", "kpo"]


def real(ids, mask):
    return [row[scored.bool()].tolist() for row, scored in zip(ids, mask, strict=True)]


class Watch(ISOPOTrainer):
    """Notes with what log-probabilities the model would draw the tokens it has just generated, at `heat`."""

    heat = 1.0

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.drawn = getattr(self, "drawn", {})
        self.microbatches = getattr(self, "microbatches", [])
        training_mode = self.model.training
        self.model.eval()
        prompts, completions = real(batch["prompt_ids"], batch["prompt_mask"]), self.completions(batch)
        for prompt, completion in zip(prompts, completions, strict=True):
            logps = training.log_probabilities(self.model, prompt, completion, self.heat)
            self.drawn[*prompt, *completion, int(batch["generated_after"])] = logps
        self.model.train(training_mode)
        return batch

    @staticmethod
    def completions(batch):
        return real(batch["completion_ids"], batch["completion_mask"])

    def _compute_loss(self, model, inputs):
        expected = []
        for prompt, completion in zip(
            real(inputs["prompt_ids"], inputs["prompt_mask"]), self.completions(inputs), strict=True
        ):
            expected.append(self.drawn[*prompt, *completion, int(inputs["generated_after"])])
        self.microbatches.append((inputs, expected))
        return super()._compute_loss(model, inputs)


def watch(folder, model="qwen3", heat=1.0, options=None, **settings):
    trainer = training.build(folder, model, kind=Watch, options=options, **settings)
    trainer.heat = heat
    return trainer


@pytest.mark.parametrize(
    "weights, settings, heat",
    [
        ("sampler", {}, 1.0),
        ("p3o", {}, 1.0),
        ("kpo", {}, 1.0),
        ("sampler", {"temperature": 0.7, "num_iterations": 2}, 0.7),
        ("kpo", {"generation_kwargs": {"temperature": 1.2}, "num_iterations": 2}, 1.2),
        ("p3o", {"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 1.0),
        ("kpo", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "pad_to_multiple_of": 8}, 1.0),
        ("p3o", {"num_iterations": 2, "gradient_checkpointing": True}, 1.0),
    ],
    ids=str,
)
def test_loss_gets_the_log_probabilities_that_tokens_were_drawn_with(weights, settings, heat, tmp_path):
    trainer = watch(tmp_path, heat=heat, token_weights=weights, max_steps=4, data=tiny.prompts(16), **settings)
    training.train(trainer)
    assert len(trainer.microbatches) == 4 * settings.get("gradient_accumulation_steps", 1)
    for inputs, expected in trainer.microbatches:
        assert "old_per_token_logps" not in inputs
        sampler = inputs["sampling_per_token_logps"]
        assert sampler.shape == inputs["completion_ids"].shape
        for row, logps in zip(sampler, expected, strict=True):
            torch.testing.assert_close(row[: len(logps)].double(), logps, atol=2e-5, rtol=0)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_adapters_are_part_of_the_policy_that_drew(weights, tmp_path):
    options = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}
    trainer = watch(tmp_path, options=options, token_weights=weights, num_iterations=2, max_steps=6, learning_rate=0.1)
    training.train(trainer)
    for inputs, expected in trainer.microbatches:
        for row, logps in zip(inputs["sampling_per_token_logps"], expected, strict=True):
            torch.testing.assert_close(row[: len(logps)].double(), logps, atol=2e-5, rtol=0)


def ratios_by_hand(trainer, model):
    """The first microbatch's ratios of the model, at temperature 1, to what its tokens were drawn with."""
    inputs, expected = trainer.microbatches[0]
    prompts = real(inputs["prompt_ids"], inputs["prompt_mask"])
    rows = zip(prompts, trainer.completions(inputs), expected, strict=True)
    return torch.cat([(training.log_probabilities(model, p, c) - drawn).exp() for p, c, drawn in rows])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_drawn_at_another_temperature_are_off_policy_from_the_start(weights, tmp_path):
    settings = {"generation_kwargs": {"temperature": 1.2}, "max_steps": 1}
    trainer = watch(tmp_path, heat=1.2, token_weights=weights, **settings)
    (line,) = training.train(trainer)
    r = ratios_by_hand(trainer, tiny.model("qwen3"))
    assert line["off_policy/ratio_mean"] == pytest.approx(r.mean().item(), rel=1e-4)
    assert line["off_policy/ess"] == pytest.approx((r.mean() ** 2 / r.square().mean()).item(), rel=1e-4)
    assert line["off_policy/kl"] == pytest.approx((r * r.log() - r + 1).mean().item(), rel=1e-3)
    assert line["off_policy/ess"] < 0.999


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "gradient_accumulation_steps": 2}], ids=str)
def test_fresh_data_is_exactly_on_policy(weights, settings, tmp_path):
    for line in training.train(training.build(tmp_path, token_weights=weights, **settings)):
        assert (line["off_policy/ess"], line["off_policy/ratio_mean"], line["off_policy/kl"]) == (1.0, 1.0, 0.0)
        if weights == "kpo":
            assert line["off_policy/filtered_ratio_mean"] == 1.0
        if weights == "sampler":
            assert line["sampling/importance_sampling_ratio/min"] == 1.0
            assert line["sampling/importance_sampling_ratio/max"] == 1.0
            assert line["sampling/sampling_logp_difference/max"] == 0.0


@pytest.mark.parametrize("weights", WEIGHTS)
def test_stale_data_is_off_policy_and_fresh_data_is_not(weights, tmp_path):
    settings = {"token_weights": weights, "num_iterations": 2, "max_steps": 4}
    lines = training.train(training.build(tmp_path, **settings))
    assert [line["off_policy/ess"] == 1.0 for line in lines] == [True, False, True, False]
    assert [line["off_policy/kl"] == 0.0 for line in lines] == [True, False, True, False]


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
@pytest.mark.parametrize("weights", ["sampler", "p3o"])
def test_weights_of_fresh_data_change_nothing_in_the_step(weights, rule, tmp_path):
    def after_a_step(weights):
        settings = {"max_steps": 1, "gradient_accumulation_steps": 2}
        trainer = training.build(tmp_path, rule=rule, token_weights=weights, **settings)
        training.train(trainer)
        return trainer.model.state_dict()

    own, plain = after_a_step(weights), after_a_step("none")
    assert all(torch.equal(own[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "settings", [{"min_p": 0.9}, {"no_repeat_ngram_size": 1}, {"suppress_tokens": [5, 6, 7]}], ids=str
)
def test_generation_settings_of_the_model_make_fresh_data_off_policy(settings, tmp_path):
    model = tiny.model("qwen3")
    model.generation_config.update(do_sample=True, **settings)
    (line,) = training.train(training.build(tmp_path, model, token_weights="p3o", max_steps=1))
    assert line["off_policy/ess"] < 1 and line["off_policy/ratio_mean"] != 1


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"generation_kwargs": {"temperature": 1.0}}, False),
        ({"generation_kwargs": {"temperature": 1.2}}, True),
        ({"generation_kwargs": {"min_p": 0.1}}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
    ],
    ids=str,
)
def test_filter_is_warned_of_a_sampler_that_is_not_the_policy(settings, warned, tmp_path, caplog):
    training.build(tmp_path, token_weights="kpo", **settings)
    assert ("not sampled from the distribution that is trained" in caplog.text) == warned


def test_rollout_that_uses_the_trainers_own_generation_keeps_its_log_probabilities(tmp_path):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 3)
        hotter = [[x - 0.1 * place for place, x in enumerate(row)] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": hotter}

    options = {"rollout_func": rollout}
    (line,) = training.train(training.build(tmp_path, token_weights="p3o", max_steps=1, options=options))
    assert line["off_policy/ess"] < 1 and line["off_policy/ratio_mean"] > 1


@pytest.mark.parametrize("rule", ["none", "fisher"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_advantage_that_is_not_finite_stops_the_run_before_the_weights_move(weights, rule, tmp_path):
    class Broken(ISOPOTrainer):
        def _compute_loss(self, model, inputs):
            if self.state.global_step == 1:  # the second use, where data is off-policy
                inputs = {**inputs, "advantages": inputs["advantages"] * math.nan}
            return super()._compute_loss(model, inputs)

    settings = {"rule": rule, "token_weights": weights, "num_iterations": 2, "max_steps": 4}
    trainer = training.build(tmp_path, kind=Broken, **settings)
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trainer.state.global_step == 1 and trainer.weighting.sums is None


def test_evaluation_between_two_uses_of_the_data_changes_nothing_in_training(tmp_path):
    def losses(**settings):
        trainer = training.build(tmp_path, token_weights="p3o", num_iterations=2, max_steps=2, **settings)
        torch.manual_seed(0)
        trainer.train()
        return [line["off_policy/ess"] for line in trainer.state.log_history if "off_policy/ess" in line]

    class InTrainMode(ISOPOTrainer):  # as TRL's continuous batching leaves the model after it has generated
        def _generate_single_turn(self, *args, **kwargs):
            output = super()._generate_single_turn(*args, **kwargs)
            self.model.train()
            return output

    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "options": {"eval_dataset": tiny.prompts(3)}}
    plain = losses()
    assert losses(**evaluating, per_device_eval_batch_size=3) == plain
    assert losses(**evaluating, per_device_eval_batch_size=3, kind=InTrainMode)[:2] == plain


def test_off_policy_mask_works_with_what_transformers_drew_with(tmp_path):
    settings = {"token_weights": "sampler", "num_iterations": 2, "off_policy_mask_threshold": 0.5}
    training.train(training.build(tmp_path, **settings))


def test_data_of_an_earlier_call_of_train_is_not_fresh(tmp_path):
    trainer = training.build(tmp_path, token_weights="p3o", max_steps=1, num_iterations=2)
    ess = []
    for _ in range(2):  # TRL goes on with the completions that it has
        trainer.train()
        ess += [line["off_policy/ess"] for line in trainer.state.log_history if "off_policy/ess" in line]
    assert ess[0] == 1 and ess[-1] < 1


def test_token_that_the_sampler_found_impossible_leaves_every_step_finite(tmp_path):
    def rollout(prompts, trainer):
        output = sampled(prompts, trainer)
        output["logprobs"][0][0] = -math.inf
        return output

    for weights in WEIGHTS:
        options = {"rollout_func": rollout}
        (line,) = training.train(training.build(tmp_path, token_weights=weights, max_steps=1, options=options))
        assert line["off_policy/ess"] < 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_evaluation_logs_its_own_figures(weights, tmp_path):
    options = {"eval_dataset": tiny.prompts(3)}
    settings = {"num_iterations": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    settings = {**settings, "per_device_eval_batch_size": 3, "token_weights": weights}
    trainer = training.build(tmp_path, options=options, **settings)
    lines = training.train(trainer)
    assert lines[1]["off_policy/ess"] < 1  # evaluation between generation and use changes nothing
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(evaluations) == 2
    for line in evaluations:
        assert math.isfinite(line["eval_loss"])
        assert line["eval_off_policy/ess"] == line["eval_off_policy/ratio_mean"] == 1.0
        assert line["eval_off_policy/kl"] == 0.0
        assert ("eval_off_policy/filtered_ratio_mean" in line) == (weights == "kpo")


def test_evaluation_at_another_temperature_is_off_policy(tmp_path):
    options = {"eval_dataset": tiny.prompts(3)}
    settings = {"generation_kwargs": {"temperature": 1.2}, "per_device_eval_batch_size": 3, "token_weights": "p3o"}
    figures = training.build(tmp_path, options=options, **settings).evaluate()
    assert 0 < figures["eval_off_policy/ess"] < 1 and figures["eval_off_policy/kl"] > 0


STALE = [
    # Of four steps: microbatches, and those among the generated that are scored for an old policy, if at all
    ({}, 4, 0),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 8, 8),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 16, 0),
    ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 12, 12),
    ({"num_iterations": 2}, 4, 2),
]


def stale():
    """Each weighting with one way to have stale data, each way with one weighting; the other pairs are slow."""
    cases = [case for case in STALE if case[2]]
    return [
        pytest.param(weights, *case, marks=[] if place == number else pytest.mark.slow, id=f"{weights}-{case[0]}")
        for number, weights in enumerate(WEIGHTS)
        for place, case in enumerate(cases)
    ]


@pytest.mark.parametrize("weights, settings, microbatches, extra", stale())
def test_no_forward_pass_is_spent_on_what_the_sampler_knows(weights, settings, microbatches, extra, tmp_path):
    settings = {"max_steps": 4, "data": tiny.prompts(16), "token_weights": weights, **settings}
    assert scoring_passes(training.build(tmp_path, **settings)) == [True] * microbatches


@pytest.mark.parametrize(
    "weights, settings, microbatches, extra",
    [
        # Without weights there is nothing to compute whatever the settings: those with the most are enough
        pytest.param(weights, *case, marks=pytest.mark.slow if weights == "none" and case[2] < 12 else [])
        for weights in ("none", "p3o")
        for case in STALE
    ],
    ids=str,
)
def test_old_policy_of_a_rollout_without_log_probabilities_is_computed_where_needed(
    weights, settings, microbatches, extra, tmp_path
):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + row, 30, 40 + 3 * row, 50, 60][: 5 - row % 3] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    settings = {"max_steps": 4, "data": tiny.prompts(16), "token_weights": weights, **settings}
    trainer = training.build(tmp_path, options={"rollout_func": rollout}, **settings)
    passes = scoring_passes(trainer)
    assert passes.count(True) == microbatches
    assert passes.count(False) == (0 if weights == "none" else extra)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    if weights == "none":
        assert not any(name.startswith("off_policy/") for line in lines for name in line)
    else:
        # Where it is needed, a generation serves for two steps, or begins in every second and reaches into the next
        fresh = [step % 2 == 0 or not extra for step in range(4)]
        assert [line["off_policy/ess"] == 1.0 for line in lines] == fresh


def test_beam_search_is_scored_once_where_data_will_be_stale(tmp_path):
    beams = {"generation_kwargs": {"num_beams": 2, "length_penalty": -0.1}, "token_weights": "p3o"}
    passes = scoring_passes(training.build(tmp_path, num_iterations=2, max_steps=4, **beams))
    assert passes.count(True) == 4 and passes.count(False) == 2
    assert scoring_passes(training.build(tmp_path, max_steps=2, **beams)) == [True, True]


def test_continuous_batching_is_scored_once_where_data_will_be_stale(tmp_path):
    batching = {"num_blocks": 8, "max_batch_tokens": 64}  # of a cache that is quick to set up
    settings = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": batching}
    trainer = training.build(tmp_path, num_iterations=2, max_steps=4, token_weights="p3o", **settings)
    passes = scoring_passes(trainer)
    assert passes.count(True) == 4 and passes.count(False) == 2
    ess = [line["off_policy/ess"] for line in trainer.state.log_history if "off_policy/ess" in line]
    assert [value == 1 for value in ess] == [True, False, True, False]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_log_probabilities_of_a_rollout_are_the_samplers(weights, tmp_path):
    trainer = training.build(tmp_path, options={"rollout_func": sampled}, token_weights=weights, max_steps=1)
    prompts = [{"prompt": text} for text in ["What?", "Is it so?", "No"]]
    batch = training.prepared(trainer)._generate_and_score_completions(prompts)
    assert "old_per_token_logps" not in batch
    training.gradients(trainer, batch)
    ratios = []
    given = sampled([row["prompt"] for row in prompts], trainer)
    for row in range(3):
        logps = training.log_probabilities(trainer.model, given["prompt_ids"][row], given["completion_ids"][row])
        for own, sampler, scored in zip(logps.tolist(), given["logprobs"][row], given["env_mask"][row], strict=True):
            if scored:
                ratios.append(1.0 if sampler is None else math.exp(own - sampler))
    assert len(ratios) == batch["tool_mask"].mul(batch["completion_mask"]).sum()
    trainer._log_step({"broken_sequences": 0})
    figures = {
        name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("off_policy/")
    }
    n, total, squares = len(ratios), sum(ratios), sum(r * r for r in ratios)
    assert figures["off_policy/ess"] == pytest.approx(total**2 / (n * squares), rel=1e-4)
    assert figures["off_policy/ratio_mean"] == pytest.approx(total / n, rel=1e-4)
    assert figures["off_policy/kl"] == pytest.approx(sum(r * math.log(r) - r + 1 for r in ratios) / n, rel=1e-4)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Calling(ISOPOTrainer):
    """Says fixed texts in two turns, of which the first calls a tool, with the model's own log-probabilities."""

    turns = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        call = '<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>'
        texts = [[call, "no idea", call], ["5 it is", "so"]][self.turns % 2]
        self.turns += 1
        say = [texts[row % len(texts)] for row in range(len(prompt_ids))]
        completions = [self.processing_class(text + tiny.EOS)["input_ids"] for text in say]
        pairs = zip(prompt_ids, completions, strict=True)
        return completions, [training.log_probabilities(self.model, p, c).tolist() for p, c in pairs]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_of_a_tool_do_not_shift_the_log_probabilities(weights, tmp_path):
    settings = {"max_completion_length": 128, "token_weights": weights, "data": tiny.conversational_prompts(6)}
    settings = {**settings, "generation_kwargs": {"temperature": 1.0}}  # so that fresh data is compared, too
    trainer = training.build(tmp_path, kind=Calling, options={"tools": [add]}, **settings)
    batch = training.prepared(trainer)._generate_and_score_completions(
        [dict(row) for row in tiny.conversational_prompts(3)]
    )
    assert (batch["tool_mask"] == 0).any()
    for row in range(3):
        prompt, completion = real(batch["prompt_ids"], batch["prompt_mask"])[row], Watch.completions(batch)[row]
        logps = training.log_probabilities(trainer.model, prompt, completion)
        scored = batch["tool_mask"][row, : len(completion)].bool()
        own = batch["sampling_per_token_logps"][row, : len(completion)]
        torch.testing.assert_close(own[scored].double(), logps[scored], atol=1e-5, rtol=0)
    training.gradients(trainer, batch)
    trainer._log_step({"broken_sequences": 0})
    assert trainer._metrics["train"]["off_policy/ess"][-1] == pytest.approx(1, abs=1e-6)
    assert trainer._metrics["train"]["off_policy/kl"][-1] == pytest.approx(0, abs=1e-6)


def test_sampler_correction_without_vllm_truncates_the_ratio(tmp_path):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1}
    settings = {**settings, "generation_kwargs": {"temperature": 1.5}, "max_steps": 1}
    trainer = watch(tmp_path, heat=1.5, token_weights="sampler", **settings)
    (line,) = training.train(trainer)
    r = ratios_by_hand(trainer, tiny.model("qwen3"))
    assert r.max() > 1.1
    assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.1)
    assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(r.min().item(), rel=1e-4)
    assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(r.clamp(max=1.1).mean().item(), rel=1e-4)
    assert line["sampling/sampling_logp_difference/mean"] == pytest.approx(r.log().abs().mean().item(), rel=1e-3)
