"""A bound on the drift from the policy that drew the data ends the use of a generation."""

import math

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.step_size.drift import DEFAULT, drift_sums, is_exhausted
from tests import tiny, training


SETTINGS = {"num_iterations": 4, "max_steps": 6, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "seed": 1}


class Counted(ISOPOTrainer):
    """Notes after how many steps it generated."""

    def _generate_and_score_completions(self, inputs):
        if self.model.training:
            self.__dict__.setdefault("generated_at", []).append(self.state.global_step)
        return super()._generate_and_score_completions(inputs)

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.__dict__.setdefault("batches", []).append(inputs)
        return inputs


class Weights(TrainerCallback):
    def __init__(self):
        self.before = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before.append({name: value.clone() for name, value in model.state_dict().items()})


def drift(batch, before, after):
    """Mean over the tokens of a batch, from each sequence alone under two sets of weights."""
    model, total, tokens = tiny.model("qwen3").eval(), 0.0, 0
    for place in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
        completion = batch["completion_ids"][place][batch["completion_mask"][place].bool()].tolist()
        logps = []
        for weights in (before, after):
            model.load_state_dict(weights)
            logps.append(training.log_probabilities(model, prompt, completion))
        change = logps[1] - logps[0]
        total, tokens = total + (change.exp() - 1 - change).sum().item(), tokens + len(completion)
    return total / tokens


def steps(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def test_drift_is_the_mean_over_tokens_that_somebody_knows_of():
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.0, -9.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, -2.0, math.nan], [-0.4, math.nan, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    expected = math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9
    total, tokens = drift_sums(logps, behaviour, mask).tolist()
    assert total == pytest.approx(expected, rel=1e-5) and tokens == 3


def test_steps_add_up_in_one_direction_at_most():
    assert not is_exhausted(4e-3, 1e-3, 9.1e-3) and is_exhausted(4e-3, 1e-3, 8.9e-3)
    assert not is_exhausted(0.0, 0.0, 1e-9)


def test_a_generation_is_used_until_its_drift_is_too_large(tmp_path):
    weights = Weights()
    options = {"callbacks": [weights]}
    free = training.build(tmp_path, "qwen3", Counted, behaviour_kl=1e9, options=options, **SETTINGS)
    lines = steps(free)
    assert lines[3]["step/behaviour_kl"] == pytest.approx(
        drift(free.batches[3], weights.before[0], weights.before[3]), rel=1e-3
    )
    assert free.generated_at == [0, 4] and all(line["step/stopped_early"] == 0 for line in lines)
    assert lines[0]["step/behaviour_kl"] == lines[4]["step/behaviour_kl"] == 0  # fresh
    drifts = [line["step/behaviour_kl"] for line in lines[:4]]
    assert drifts == sorted(drifts)
    bound = (drifts[1] + drifts[2]) / 2  # what the first step may do, and the second not
    tight = training.build(tmp_path, "qwen3", Counted, behaviour_kl=bound, **SETTINGS)
    lines = steps(tight)
    stopped = [line["step"] for line in lines if line["step/stopped_early"]]
    assert stopped and tight.generated_at == sorted({0, 4, *stopped} - {6})
    # Every step is one, and the run goes through its prompts as it would have
    assert tight.state.global_step == 6
    for one, two in zip(free.batches[::4], tight.batches[::4], strict=True):
        assert torch.equal(one["prompt_ids"], two["prompt_ids"])


def test_what_a_sampler_is_off_by_is_not_taken_for_drift(tmp_path):
    """Here the sampler draws at another temperature, which it tells."""
    settings = {**SETTINGS, "behaviour_kl": 1e9, "generation_kwargs": {"temperature": 0.7}}
    settings |= {"learning_rate": 1e-4, "max_steps": 2}
    trainer = training.build(tmp_path, "qwen3", **settings)
    lines = steps(trainer)
    assert lines[0]["step/behaviour_kl"] == 0 and trainer.step_control.behaviour.floor > 1e-3
    assert lines[1]["step/behaviour_kl"] < 0.5 * trainer.step_control.behaviour.floor


def silent_rollout(prompts, trainer):
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[20 + n, 30, 40 + n] for n in range(len(ids))], "logprobs": None}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_where_the_sampler_tells_nothing_steps_are_taken_to_go_in_one_direction(tmp_path):
    options = {"rollout_func": silent_rollout}
    trainer = training.build(tmp_path, "qwen3", behaviour_kl=1e9, options=options, **{**SETTINGS, "max_steps": 3})
    passes = []
    trainer.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    lines = steps(trainer)
    assert passes.count(True) == 3 and passes.count(False) == 6  # the steps', and two each to measure them
    path = 0.0
    for line in lines:
        assert line["step/behaviour_kl"] == pytest.approx(path**2)
        path += math.sqrt(line["step/kl"])


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_steps_before_a_generation_are_no_drift_from_it_though_it_began_inside_of_one(tmp_path):
    """Three microbatches per generation, two per step: the second step ends with what the third goes on with."""
    settings = {**SETTINGS, "num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    options = {"rollout_func": silent_rollout}
    trainer = training.build(tmp_path, "qwen3", Counted, behaviour_kl=1e9, options=options, **settings)
    lines = steps(trainer)
    assert trainer.generated_at == [0, 1, 3, 4]
    drifts = [line["step/behaviour_kl"] for line in lines]
    assert drifts == pytest.approx([0, 0, lines[1]["step/kl"], 0, 0, lines[4]["step/kl"]])


def test_a_run_that_stopped_early_resumes_with_the_same_numbers(tmp_path, caplog):
    settings = {**SETTINGS, "behaviour_kl": 1e-9, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = training.build(tmp_path / "run", "qwen3", Counted, **settings)
    expected = steps(whole)
    assert whole.generated_at == [0, 1, 2, 3]
    again = training.build(tmp_path / "run", "qwen3", Counted, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.generated_at == [2, 3]
    assert "cannot go on with them" not in caplog.text  # it was done with them
    resumed = [line for line in again.state.log_history if "loss" in line][2:]
    for line, other in zip(resumed, expected[2:], strict=True):
        assert line["loss"] == other["loss"] and line["step/kl"] == other["step/kl"]
    for one, two in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_bound_is_derived_from_the_target_and_is_there_for_stale_data_alone(tmp_path):
    def bound(**settings):
        return ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4, **settings).drift_bound

    stale = {"num_iterations": 2}
    assert bound(target_kl=1e-3, **stale) == DEFAULT * 1e-3
    assert bound(target_kl=1e-3, behaviour_kl=0.5, **stale) == 0.5
    assert bound(behaviour_kl=0.5, **stale) == 0.5
    assert bound(log_step_kl=True, **stale) is None
    assert bound(target_kl=1e-3, behaviour_kl=math.inf, **stale) is None
    assert bound(target_kl=1e-3) is None
    assert bound(target_kl=1e-3, gradient_accumulation_steps=2, steps_per_generation=4) == DEFAULT * 1e-3
    with pytest.raises(ValueError, match="behaviour_kl=0.0 is a bound"):
        bound(behaviour_kl=0.0)
    with pytest.raises(ValueError, match="completions serve for one step: raise num_iterations"):
        bound(behaviour_kl=0.5, gradient_accumulation_steps=4)


def test_a_bound_that_is_infinite_measures_nothing(tmp_path):
    args = ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_iterations=2, behaviour_kl=math.inf)
    assert not args.measures_steps
