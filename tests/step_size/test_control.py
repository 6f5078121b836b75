"""With `target_kl`, steps are as long as they are asked to be, wherever the learning rate starts."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import Adafactor
from transformers.optimization import AdafactorSchedule
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.step_size import taken_back
from isopo_trl.step_size.completion_length import AUTO_PLAIN, DECAY
from isopo_trl.step_size.control import PATIENCE, SHORT, StepControl
from isopo_trl.step_size.controller import CLOSE, LARGEST_CHANGE, OVERSHOOT, Measurement, StepSize
from isopo_trl.step_size.drift import DEFAULT
from isopo_trl.step_size.measurement import drawn
from isopo_trl.step_size.optimizers import REFUSED, UNMEASURED
from tests import oracle, tiny, training
from tests.step_size.enumeration import Recorded, Run, ratio_of_sums


TARGET = 1e-3


# On a model of a few weights, whose divergence is the square of what a step moves


class Square:
    """Stands in for what measures steps: the divergence is `10 |w - w_before|^2`, and what rounding adds to it."""

    def __init__(self, weights, rounding=0.0, added=0.0, knows=True):
        self.weights, self.rounding, self.added, self.knows = weights, rounding, added, knows

    def score(self, step):
        self.before = [weight.detach().clone() for weight in self.weights]

    def measure(self):
        moved = zip(self.weights, self.before, strict=True)
        kl = sum((10 * (weight.detach() - before).square()).sum().item() for weight, before in moved)
        return Measurement(kl + self.added, 0.1 * kl) if self.knows else Measurement(0.0, math.inf)

    def forget(self):
        pass

    reset = forget


class Steps:
    """Steps of an optimizer, and what is logged of each, beside the scheduler's rate."""

    def __init__(self, optimizer, schedule=None, target=TARGET, **measuring):
        self.optimizer, self.schedule, self.lines = optimizer, schedule, []
        accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=lambda number, reduction: number)
        kl = Square(list(taken_back.trained(optimizer)), **measuring)
        self.control = StepControl(kl, StepSize(target), None, accelerator, log=self.lines.append)

    def run_again(self, optimizer):
        self.control.reset()
        self.optimizer, self.control.kl.weights = optimizer, list(taken_back.trained(optimizer))

    def make(self, number, gradient=1.0):
        args = SimpleNamespace(target_kl=self.control.size.target)
        self.control.on_train_begin(args, None, None, optimizer=self.optimizer)
        for step in range(number):
            for p in taken_back.trained(self.optimizer):
                p.grad = torch.full_like(p, gradient)
            rates, count = [group["lr"] for group in self.optimizer.param_groups], len(self.lines)
            self.control.on_pre_optimizer_step(args, SimpleNamespace(global_step=step), None)
            self.optimizer.step()
            self.control.on_optimizer_step(args, None, None)
            assert [group["lr"] for group in self.optimizer.param_groups] == rates  # the schedule's own
            for line in self.lines[count:]:
                line |= {"scheduled": rates[0], "learning_rate": self.control.learning_rate}
            if self.schedule is not None:
                self.schedule.step()
        return self.lines


def weights(dtype=torch.float32):
    return [torch.nn.Parameter(torch.linspace(0.5, 1, 4).to(dtype)), torch.nn.Parameter(torch.ones(3).to(dtype))]


def kls(lines):
    return [line["kl"] for line in lines]


@pytest.mark.parametrize("start", [1e-6, 1e3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_steps_reach_the_target_from_any_learning_rate(kind, start):
    lines = Steps(kind(weights(), lr=start)).make(16)
    assert kls(lines)[-3:] == pytest.approx([TARGET] * 3, rel=0.3)
    assert all(kl <= OVERSHOOT * TARGET for kl in kls(lines))  # the first one as well
    if start > 1 and kind is not torch.optim.SGD:
        assert lines[0]["kl"] == pytest.approx(TARGET, rel=CLOSE)
        assert lines[0]["learning_rate"] == pytest.approx(start * lines[0]["kept"])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.1, "maximize": True}], ids=str)
@pytest.mark.parametrize("start", [1e-12, 1e-6, 1e3, 1e30])
def test_the_first_step_of_sgd_is_of_that_length_and_all_are_sgds_own(start, settings):
    """To the last bit those of a run with the rates that were found, in which nothing was measured or moved back."""
    own, others = weights(), weights()
    steps = Steps(torch.optim.SGD(own, lr=start, **settings))
    alone = torch.optim.SGD(others, lr=1.0, **settings)
    for number in range(4):
        (line,) = steps.make(1, gradient=0.3 + number)[number:]
        assert line["kl"] == pytest.approx(TARGET, rel=CLOSE) if not number else line["kl"] <= OVERSHOOT * TARGET
        for p in others:
            p.grad = torch.full_like(p, 0.3 + number)
        alone.param_groups[0]["lr"] = line["learning_rate"]
        alone.step()
        assert all(map(torch.equal, own, others))


def test_the_rate_is_searched_for_as_long_as_steps_say_nothing():
    """The first has no gradient, the second is not measured, and is a very short one then."""
    own = weights()
    steps = Steps(torch.optim.SGD(own, lr=0.1), knows=False)
    before = torch.cat([p.detach().clone() for p in own])
    none, unknown = steps.make(1, 0.0)[0], steps.make(1, 1.0)[1]
    assert none["learning_rate"] == 0.1
    moved = unknown["learning_rate"] * math.sqrt(len(before))
    assert moved == pytest.approx(SHORT * before.norm().item()) and steps.control.size.level is None
    steps.control.kl.knows = True
    assert steps.make(1, 1e-30)[2]["kl"] == pytest.approx(TARGET, rel=CLOSE)


def test_a_schedule_multiplies_the_target_and_does_not_make_it_larger():
    """Warmup, a cycle that begins at a 25th of its largest rate, and one that rises for ever."""

    def run(schedule, kind=torch.optim.SGD):
        optimizer = kind(weights(), lr=1e-3)
        return Steps(optimizer, schedule(optimizer)).make(14)

    def rise(each):
        return torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1, step / 10))

    warmup, of_others = run(rise), run(rise, torch.optim.RMSprop)
    cycle = run(lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 1e-3, total_steps=20, cycle_momentum=False))
    rising = run(lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: 2.0**step))
    assert len(warmup) == 13  # a rate of 0 is no step
    for lines in (warmup, cycle):
        for line in lines[5:]:
            assert line["kl"] == pytest.approx(TARGET * line["scheduled"] / 1e-3, rel=0.1)
    # The first rate is the one that was given: the schedule goes under the root
    assert of_others[0]["learning_rate"] == pytest.approx(1e-3 * math.sqrt(0.1) * of_others[0]["kept"])
    assert kls(rising)[5:] == pytest.approx([TARGET] * 9, rel=0.1)


def test_a_group_whose_own_schedule_is_low_leaves_the_others_their_steps():
    first, second = weights()
    optimizer = torch.optim.RMSprop([{"params": [first]}, {"params": [second]}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.0, lambda _: 1.0])
    lines = Steps(optimizer, schedule).make(16)
    assert kls(lines)[-1] == pytest.approx(TARGET, rel=0.3)
    assert lines[0]["learning_rate"] == pytest.approx(1e-2 * lines[0]["kept"])
    assert torch.equal(first, weights()[0])


def test_a_gradient_that_moves_nothing_raises_the_rate_and_a_step_that_says_nothing_does_not():
    for gradient, knows, rate in ((1.0, True, LARGEST_CHANGE**2), (0.0, True, 1.0), (1.0, False, 1.0)):
        steps = Steps(torch.optim.RMSprop(weights(), lr=1e-20), knows=knows)
        assert [line.get("kl") for line in steps.make(2, gradient)] == [0 if knows else None] * 2
        assert steps.control.size.rate == rate


@pytest.mark.parametrize("smallest", [taken_back.SMALL, 0], ids=["copied", "undone"])
def test_a_cut_is_along_the_step_and_leaves_the_moments(smallest, monkeypatch):
    """Beside a step of the same gradient that was not cut; in a second run, with another optimizer."""
    monkeypatch.setattr(taken_back, "SMALL", smallest)
    (cut, one), (whole, other) = ((own, torch.optim.AdamW(own, lr=0.5)) for own in (weights(), weights()))
    steps = Steps(torch.optim.AdamW(weights(), lr=0.1))
    steps.make(1)
    steps.run_again(one)
    share = steps.make(1)[1]["learning_rate"] / 0.5
    Steps(other, target=1e9).make(1)
    for p, q, start in zip(cut, whole, weights(), strict=True):
        torch.testing.assert_close(p, start + share * (q - start))
        assert share < 0.1 and torch.equal(one.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])


class Destructive(torch.optim.AdamW):
    """Leaves nothing of the weights in some of its steps."""

    def __init__(self, parameters, lr, steps):
        super().__init__(parameters, lr=lr, weight_decay=0.0)
        self.destructive, self.number = steps, 0

    def step(self, closure=None):
        super().step(closure)
        self.number += 1
        if self.number in self.destructive:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(torch.nan)


@pytest.mark.parametrize("rounding", [0.0, 1.0], ids=["measured", "lost in rounding"])
def test_a_run_goes_on_as_before_after_a_step_that_was_taken_back(rounding):
    optimizer = Destructive(weights(), 2e-3, steps=(5,))
    lines = Steps(optimizer, rounding=rounding, added=2 * TARGET * bool(rounding)).make(7)
    rates = [line["learning_rate"] for line in lines]
    assert [line["kept"] == 0 for line in lines] == [False] * 4 + [True] + [False] * 2
    assert lines[4]["kl"] == rates[4] == 0
    assert rates[5] < 1e-4 * rates[3]  # for caution's sake
    assert rates[6] == pytest.approx(rates[3] / LARGEST_CHANGE, rel=0.2)


def test_steps_that_cannot_be_made_are_taken_back_wholly_and_end_the_run_after_a_few():
    parameters = weights()
    steps = Steps(Destructive(parameters, 0.1, steps=range(99)))
    for run in (1, 2):  # another call of `train` has as much patience
        with pytest.raises(FloatingPointError, match=f"{PATIENCE} steps in a row .* 0.001 is the target"):
            steps.make(9)
        assert len(steps.lines) == run * PATIENCE
    assert all(map(torch.equal, parameters, weights()))


def test_weights_that_cannot_be_computed_back_end_the_run(monkeypatch):
    monkeypatch.setattr(taken_back, "SMALL", 0)
    optimizer = torch.optim.AdamW(weights(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0]["params"][0].data.fill_(torch.inf))
    with pytest.raises(FloatingPointError, match="target_kl_offload=True"):
        Steps(optimizer).make(1)


def test_weights_in_bf16_are_not_kept_twice_after_a_step():
    steps = Steps(torch.optim.RMSprop(weights(torch.bfloat16), lr=1.0))
    assert steps.make(1)[0]["kept"] < 1 and not steps.control._way_back._after


def test_steps_that_are_lost_in_rounding_are_neither_shortened_nor_learned_from(caplog):
    def run(rate, rounding=50 * TARGET, multiple=1.0):
        optimizer = torch.optim.SGD(weights(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: multiple)
        return Steps(optimizer, schedule, rounding=rounding).make(4)

    with caplog.at_level(logging.WARNING):
        lines = run(1e-2)
    assert all(TARGET < line["kl"] < 50 * TARGET and line["kept"] == 1 for line in lines)
    assert all(line["learning_rate"] == 1e-2 for line in lines)
    (said,) = [record.message for record in caplog.records if "rounding" in record.message]
    assert f"target_kl={TARGET:g}" in said and "attn_implementation='sdpa'" in said
    for line in run(1.0):  # what cannot be rounding is shortened
        assert line["kl"] == pytest.approx(50 * TARGET, rel=CLOSE)
        assert line["learning_rate"] == pytest.approx(line["kept"])
    # What is less than was asked for, with its rounding, is too short
    assert run(1e-5)[1]["learning_rate"] == pytest.approx(LARGEST_CHANGE * 1e-5)
    # Nor is the small target at the end of a schedule
    assert all(line["kept"] == 1 for line in run(3e-3, TARGET / 10, multiple=1e-2))


def test_an_automatic_target_that_is_not_known_yet_is_not_said_to_be_less_than_rounding(caplog):
    """As in a first step whose completions are all masked; the warning, which is given once, is kept for later."""
    steps = Steps(torch.optim.SGD(weights(), lr=1e-2), rounding=50 * TARGET)
    steps.control.size.target = 0.0
    with caplog.at_level(logging.WARNING):
        steps.make(1)
        assert not any("rounding" in record.message for record in caplog.records)
        steps.control.size.target = TARGET
        steps.make(1)
    assert any("rounding" in record.message for record in caplog.records)


# In a training run


SETTINGS = {"target_kl": TARGET, "step_kl_share": 1.0, "lr_scheduler_type": "constant"}


def steps(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def test_shortened_steps_are_of_that_length_by_enumeration(float64_throughout, tmp_path):
    run = Run(tmp_path, lambda: tiny.model("qwen3", dtype=torch.float64), learning_rate=0.1, **SETTINGS)
    assert run.lines[0]["step/kept"] < 1
    for step, line in enumerate(run.lines):
        exact = ratio_of_sums(run.divergences(step, [run.trainer.batches[step]])).kl
        assert exact == pytest.approx(line["step/kl"], rel=1e-6) and exact <= OVERSHOOT * TARGET
        if line["step/kept"] < 1:
            assert exact == pytest.approx(TARGET, rel=CLOSE)
            assert line["learning_rate"] < 0.1


@pytest.mark.parametrize(
    ("adapter", "plain"),
    [
        (None, {}),
        (
            LoraConfig(r=2, target_modules="all-linear"),
            {"optim": "sgd", "target_kl": "auto", "optim_args": "momentum=0.9"},
        ),
    ],
    ids=["adamw, full", "sgd, lora"],
)
def test_a_resumed_run_goes_on_with_the_same_numbers(plain, adapter, tmp_path, monkeypatch):
    settings = {**SETTINGS, "learning_rate": 0.05, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **plain}
    settings |= {"num_iterations": 4, "behaviour_kl": 1.0}  # in the middle of a generation
    if adapter is None:
        monkeypatch.setattr(taken_back, "SMALL", 0)
    whole, again = (training.build(tmp_path / "run", options={"peft_config": adapter}, **settings) for _ in range(2))
    expected = steps(whole)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.step_control.state_dict() == whole.step_control.state_dict()
    resumed = [line for line in again.state.log_history if "loss" in line]
    for line, other in zip(resumed[2:], expected[2:], strict=True):
        names = ["learning_rate", *(name for name in line if name.startswith("step/"))]
        assert len(names) > 1 and all(line[name] == other[name] for name in names)
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_sgd_has_a_target_per_completion_where_nothing_is_said_and_reaches_it_at_once(tmp_path):
    """The gradient's scale does not matter, and the target follows the mean length of all completions."""
    given = {"optim": "sgd", "learning_rate": ISOPOConfig.learning_rate, "step_kl_share": 1.0, "max_steps": 4}
    given |= {"rule": "interacting", "scale": "paper", "lr_scheduler_type": "constant", "num_iterations": 2}
    trainer = training.build(tmp_path, kind=Recorded, data=tiny.prompts(12), **given)
    assert trainer.args.target_kl == "auto" and trainer.args.bounds_drift
    mean = None
    for line, batch in zip(steps(trainer), trainer.batches, strict=True):
        own = batch["completion_mask"].sum(1).float().mean().item()
        mean = own if mean is None else DECAY * mean + (1 - DECAY) * own
        assert line["step/kl_per_completion"] == pytest.approx(mean * line["step/kl"], rel=1e-6)
        assert line["step/kl_per_completion"] <= OVERSHOOT * AUTO_PLAIN
    assert trainer.state.log_history[0]["step/kl_per_completion"] == pytest.approx(AUTO_PLAIN, rel=CLOSE)
    assert trainer.step_control.size.target == pytest.approx(AUTO_PLAIN / mean)
    assert trainer.step_control.behaviour.bound == pytest.approx(DEFAULT * AUTO_PLAIN / mean)


@pytest.mark.parametrize(
    "settings,target",
    [
        ({"optim": "sgd"}, "auto"),
        ({"optim": "sgd", "learning_rate": 0.1}, None),
        ({"optim": "sgd", "target_kl": "2e-4"}, 2e-4),  # a text, as from a command line
        ({"target_kl": "auto"}, "auto"),
        ({}, None),
    ],
    ids=str,
)
def test_which_target_there_is(settings, target, tmp_path):
    assert ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings).target_kl == target


class Failing(torch.optim.AdamW):
    """Its second step fails half-way."""

    number = 0

    def step(self, closure=None):
        self.number += 1
        if self.number == 2:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_a_step_that_fails_leaves_the_learning_rates_of_the_schedule(tmp_path):
    model = tiny.model("qwen3")
    optimizer = Failing(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = training.build(tmp_path, model, options={"optimizers": (optimizer, schedule)}, **SETTINGS)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert trainer.step_control.size.rate != 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


@pytest.mark.parametrize("skip", [False, True])
def test_what_momentum_does_without_a_gradient_does_not_change_the_rate(skip, tmp_path):
    """Else it would go on at full length for as long as no completion is better than another."""
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        return tiny.reward(completions) if len(calls) == 1 else [1.0] * len(completions)

    settings = {**SETTINGS, "learning_rate": 1e-3, "max_steps": 4, "skip_zero_advantage": skip}
    lines = steps(training.build(tmp_path, reward=reward, **settings))
    assert [line["grad_norm"] > 0 for line in lines] == [True] + [False] * 3
    assert all(line["step/kl"] > 0 for line in lines)  # of the moments
    rates = [line["learning_rate"] / line["step/kept"] for line in lines]
    assert rates[1] != rates[0] and rates[2:] == pytest.approx([rates[1]] * 2)


class ByHand(ISOPOTrainer):
    """Its microbatches, of one sequence, are those of a list."""

    def _generate_and_score_completions(self, inputs):
        return dict(self.generations.pop(0))


@pytest.mark.parametrize("place", [0, 2])
def test_steps_are_measured_by_completions_that_were_not_cut_off(place, tmp_path):
    """In every second step none is left, which tells nothing; in others one, which is drawn or is not."""
    seed = next(seed for seed in range(100) if drawn(3, 0.1, 1, seed) == [2])
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "mask_truncated_completions": True}
    settings |= {**SETTINGS, "step_kl_share": 0.1, "learning_rate": 1.0, "max_steps": 3, "seed": seed}
    trainer = training.build(tmp_path, kind=ByHand, **settings)
    lengths = [[0] * 3, [5 if number == place else 0 for number in range(3)], [0] * 3]
    advantages = torch.tensor([1.0, -1.0, 0.5])
    trainer.generations = [oracle.random_batch([3, 2, 4], each, 100, 0, advantages).for_trl() for each in lengths]
    nothing, far, after = steps(trainer)
    assert "step/kl" not in nothing and nothing["learning_rate"] == 1.0
    assert 0 < far["step/kl"] <= OVERSHOOT * TARGET and far["step/kept"] < 0.1  # far too long, and shortened
    assert "step/kl" not in after and after["learning_rate"] < 0.1


IN_TWO = {"gradient_accumulation_steps": 2, "step_kl_share": 1 / 3}


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "none", "token_weights": "kpo", "optim": "adafactor"},
        {"rule": "fig4", "lora": True, "loss_type": "cispo", "epsilon_high": 5.0, "entropy_coef": 0.01},
        {"rule": "interacting", "token_weights": "p3o", "num_iterations": 2, "family": "qwen3_moe"},
        {"skip_zero_advantage": True, "fisher_scope": "step", "group_microbatches": True, **IN_TWO},
    ],
    ids=str,
)
def test_every_rule_and_weighting_has_steps_of_that_length(settings, tmp_path):
    settings = {**SETTINGS, "learning_rate": 0.05, **settings}
    lora = LoraConfig(r=2, target_modules="all-linear") if settings.pop("lora", False) else None
    family = settings.pop("family", "qwen3")
    lines = steps(training.build(tmp_path, family, options={"peft_config": lora}, **settings))
    assert lines[0]["step/kept"] < 1
    assert all(0 < line["step/kl"] <= OVERSHOOT * TARGET for line in lines)


# Refused


class WithMasters(torch.optim.SGD):
    """Goes on from weights of its own."""

    def step(self, closure=None):
        super().step(closure)
        for p in taken_back.trained(self):
            self.state[p]["master_param"] = p.detach().clone()


class LayerByLayer(ISOPOTrainer):
    """Makes an optimizer of its own, as a subclass may."""

    def create_optimizer(self, model=None):
        self.optimizer = LayerWiseDummyOptimizer()
        return self.optimizer


def test_optimizers_without_such_steps_are_refused_at_construction_or_as_soon_as_they_are_known(tmp_path):
    model = tiny.model("qwen3")
    optimizer = Adafactor(model.parameters(), relative_step=True)
    options = {"optimizers": (optimizer, AdafactorSchedule(optimizer))}
    with pytest.raises(ValueError, match="Adafactor has none, or chooses its own"):
        training.build(tmp_path, model, options=options, **SETTINGS)
    with pytest.raises(ValueError, match="WithMasters as it is set: it keeps a copy .*'master_param' in its state"):
        Steps(WithMasters(weights(), lr=0.1)).make(1)
    trainer = training.build(tmp_path, "qwen3", LayerByLayer, log_step_kl=True)
    with pytest.raises(ValueError, match="The steps of LayerWiseDummyOptimizer cannot be measured"):
        trainer.train()


@pytest.mark.parametrize(
    "settings,said",
    [
        *(({"target_kl": value}, "nats per token") for value in (0.0, -1.0, math.inf, math.nan)),
        *(({"step_kl_share": value}, "share of a step's sequences") for value in (0.0, 1.5, math.nan)),
        ({"step_kl_share": 0.5}, "where steps are not measured"),
        ({"target_kl_offload": True}, "set target_kl, or leave it out"),
        ({"target_kl": 0.01, "learning_rate": 0.0}, "learning rate, which is 0"),
        ({"target_kl": "small"}, "target_kl='small' is of type str"),
        *(({"target_kl": 0.01, "optim": name}, f"does not work with optim='{name}'") for name in REFUSED),
        *(({"log_step_kl": True, "optim": name}, "log_step_kl=True does not work with") for name in UNMEASURED),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(settings, said, tmp_path):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)
