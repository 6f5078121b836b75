"""A bound on the drift from the policy that drew the data ends the use of a generation."""

import math
from types import SimpleNamespace

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.step_size.drift import DEFAULT, BehaviourBound, drift_sums
from tests import tiny, training
from tests.step_size.enumeration import Recorded, Weights, sequences


# On plain numbers


def test_drift_is_the_mean_over_tokens_that_somebody_knows_of():
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.0, -9.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, -2.0, math.nan], [-0.4, math.nan, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    total, tokens = drift_sums(logps, behaviour, mask).tolist()
    assert total == pytest.approx(math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9, rel=1e-5) and tokens == 3


class Bound(BehaviourBound):
    """Of a run that is inside a generation, or is not."""

    def __init__(self, bound=math.inf, inside=True):
        self.ended = []
        progress = SimpleNamespace(is_inside_generation=inside, end_generation=lambda: self.ended.append(True))
        accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=lambda sums, reduction: 2 * sums)  # two ranks
        super().__init__(bound, progress, accelerator)

    def step(self, *fresh, kl=0.0, sums=(0.0, 0.0)):
        for each in fresh:
            self.see(each)
        self.add(torch.tensor(sums))
        return self.close(kl)["behaviour_kl"]


def test_what_a_sampler_is_off_by_is_not_taken_for_drift():
    bound = Bound()
    assert bound.step(True, sums=(0.6, 3.0)) == 0
    assert bound.step(False, sums=(1.5, 3.0)) == pytest.approx(0.3)
    assert bound.step(True, False, sums=(0.9, 3.0)) == pytest.approx(0.1)  # not all of it is fresh
    again = Bound()
    again.load_state_dict(bound.state_dict())
    assert again.step(False, sums=(1.5, 3.0)) == pytest.approx(0.3)


def test_where_the_sampler_tells_nothing_steps_are_taken_to_go_in_one_direction():
    bound = Bound()
    assert bound.step(True, kl=4.0) == 0
    assert bound.step(False, kl=9.0) == pytest.approx(2**2)
    again = Bound()
    again.load_state_dict(bound.state_dict())
    for each in (bound, again):
        assert each.step(False, kl=1.0) == pytest.approx((2 + 3) ** 2)
    # A generation inside of a step: the next goes on with it
    assert bound.step(False, True, kl=4.0) == 0 and bound.step(False) == pytest.approx(4)


@pytest.mark.parametrize("inside", [True, False])
def test_a_generation_ends_before_a_step_in_the_same_direction_would_go_too_far(inside):
    bound = Bound(8.9e-3, inside)
    for kl, drift in ((0.0, 8e-3), (5e-4, 4e-3), (1e-3, 4e-3)):
        assert bound.step(False, kl=kl, sums=(drift, 1.0)) == pytest.approx(drift)
        assert bool(bound.ended) == (inside and kl == 1e-3)


# In a training run


SETTINGS = {"num_iterations": 4, "max_steps": 6, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "seed": 1}


class Counted(Recorded):
    """Notes after how many steps it generated."""

    def _generate_and_score_completions(self, inputs):
        self.__dict__.setdefault("generated_at", []).append(self.state.global_step)
        return super()._generate_and_score_completions(inputs)


def steps(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def drift(batch, *both):
    """Mean over the tokens of a batch, from each sequence alone under two sets of weights."""
    model, logps = tiny.model("qwen3").eval(), []
    for weights in both:
        model.load_state_dict(weights)
        each = [training.log_probabilities(model, *(x.tolist() for x in pair)) for pair in sequences(batch)]
        logps.append(torch.cat(each))
    change = logps[1] - logps[0]
    return (change.exp() - 1 - change).mean().item()


def test_a_generation_is_used_until_its_drift_is_too_large(tmp_path):
    weights = Weights()
    options = {"callbacks": [weights]}
    free = training.build(tmp_path, kind=Counted, behaviour_kl=1e9, options=options, **SETTINGS)
    drifts = [line["step/behaviour_kl"] for line in steps(free)]
    assert drifts[3] == pytest.approx(drift(free.batches[3], weights.before[0], weights.before[3]), rel=1e-3)
    assert free.generated_at == [0, 4] and drifts[0] == drifts[4] == 0  # fresh
    bound = (drifts[1] + drifts[2]) / 2  # what the first step may do, and the second not
    tight = training.build(tmp_path, kind=Counted, behaviour_kl=bound, **SETTINGS)
    stopped = [line["step"] for line in steps(tight) if line["step/stopped_early"]]
    assert stopped and tight.generated_at == sorted({0, 4, *stopped} - {6})
    # Every step is one, and the run goes through its prompts as it would have
    assert tight.state.global_step == 6
    for one, two in zip(free.batches[::4], tight.batches[::4], strict=True):
        assert torch.equal(one["prompt_ids"], two["prompt_ids"])


def silent_rollout(prompts, trainer):
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[20 + n, 30, 40 + n] for n in range(len(ids))], "logprobs": None}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_no_pass_is_made_for_a_sampler_that_tells_nothing(tmp_path):
    """Three microbatches per generation, two per step: the second step ends with what the third goes on with."""
    settings = {**SETTINGS, "num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    settings |= {"behaviour_kl": 1e9, "max_steps": 3, "options": {"rollout_func": silent_rollout}}
    trainer, passes = training.build(tmp_path, kind=Counted, **settings), []
    trainer.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    lines = steps(trainer)
    assert trainer.generated_at == [0, 1]
    assert passes.count(True) == 6 and passes.count(False) == 6  # the steps', and two each to measure them
    assert [line["step/behaviour_kl"] for line in lines] == pytest.approx([0, 0, lines[1]["step/kl"]])


def test_a_run_that_stopped_early_resumes_with_the_same_numbers(tmp_path, caplog):
    settings = {**SETTINGS, "behaviour_kl": 1e-9, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole, again = (training.build(tmp_path / "run", kind=Counted, **settings) for _ in range(2))
    expected = steps(whole)
    assert whole.generated_at == [0, 1, 2]
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.generated_at == [2]
    assert "cannot go on with them" not in caplog.text  # it was done with them
    line = [line for line in again.state.log_history if "loss" in line][-1]
    assert line["loss"] == expected[2]["loss"] and line["step/kl"] == expected[2]["step/kl"]
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"target_kl": 1e-3, "num_iterations": 2}, DEFAULT * 1e-3),
        ({"target_kl": 1e-3, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, DEFAULT * 1e-3),
        ({"target_kl": 1e-3, "num_iterations": 2, "behaviour_kl": 0.5}, 0.5),
        ({"num_iterations": 2, "behaviour_kl": 0.5}, 0.5),
        ({"num_iterations": 2, "behaviour_kl": math.inf}, None),
        ({"num_iterations": 2}, None),
        ({"target_kl": 1e-3}, None),
    ],
    ids=str,
)
def test_the_bound_is_derived_from_the_target_and_is_there_for_stale_data_alone(settings, bound, tmp_path):
    args = ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4, **settings)
    assert args.bounds_drift == (bound is not None) and args.measures_steps == (
        bound is not None or "target_kl" in settings
    )


@pytest.mark.parametrize(("bound", "said"), [(0.0, "is a bound"), (0.5, "serve for one step: raise num_iterations")])
def test_a_bound_that_cannot_be_is_refused(bound, said, tmp_path):
    with pytest.raises(ValueError, match=f"behaviour_kl={bound} .*{said}"):
        ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_accumulation_steps=4, behaviour_kl=bound)
