"""With `target_kl`, steps of the trainer are as long as they are asked to be, wherever the learning rate starts."""

import math

import pytest
import torch
from peft import LoraConfig
from transformers import Adafactor, TrainerCallback
from transformers.optimization import AdafactorSchedule
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.step_size import controller, measurement, taken_back
from isopo_trl.step_size.control import PATIENCE
from isopo_trl.step_size.measurement import drawn
from isopo_trl.step_size.optimizers import REFUSED, UNMEASURED
from tests import oracle, tiny, training
from tests.loss.test_zero_advantages import trained as by_hand
from tests.step_size.test_measurement import Recorded, Weights, exact_divergences


TARGET = 1e-3
SETTINGS = {"target_kl": TARGET, "step_kl_share": 1.0, "lr_scheduler_type": "constant"}


def steps(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


class Rates(TrainerCallback):
    """Learning rates that the optimizer is left with."""

    def __init__(self):
        self.seen = set()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.seen |= {group["lr"] for group in optimizer.param_groups}


def test_the_start_does_not_matter(tmp_path):
    """Learning rates six orders of magnitude apart; the later steps of each run are of the same length."""
    rates = []
    for start in (1e-5, 10.0):
        trainer, left = training.build(tmp_path, "qwen3", learning_rate=start, max_steps=9, **SETTINGS), Rates()
        trainer.add_callback(left)
        lines = steps(trainer)
        assert left.seen == {start}
        late = [line["step/kl"] for line in lines[-4:]]
        assert TARGET / 4 < math.exp(sum(map(math.log, late)) / 4) < 2 * TARGET, late
        # What every step is held to, the first one as well
        assert all(line["step/kl"] <= controller.OVERSHOOT * TARGET for line in lines)
        assert all(line["learning_rate"] == start for line in lines)  # the scheduler's own is left alone
        rates.append(lines[-1]["step/learning_rate"])
    assert 0.3 < rates[0] / rates[1] < 3


def test_a_step_that_goes_too_far_is_cut_to_the_target(tmp_path):
    lines = steps(training.build(tmp_path, "qwen3", learning_rate=0.1, max_steps=1, rule="none", **SETTINGS))
    assert lines[0]["step/kl"] == pytest.approx(TARGET, rel=controller.CLOSE)
    assert 0 < lines[0]["step/kept"] < 0.1
    assert lines[0]["step/learning_rate"] == pytest.approx(0.1 * lines[0]["step/kept"])


class Before(TrainerCallback):
    """Keeps the weights as they are before the step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("smallest", [taken_back.SMALL, 0])
def test_the_cut_is_along_the_step_and_leaves_the_moments(smallest, tmp_path, monkeypatch):
    """Beside a step of the same gradient that was not cut; with a copy of the weights, and without."""
    monkeypatch.setattr(taken_back, "SMALL", smallest)
    runs = []
    for settings in (SETTINGS, {"lr_scheduler_type": "constant"}):
        before = Before()
        model = tiny.model("qwen3", dtype=torch.float64)
        options = {"callbacks": [before]}
        trainer = training.build(tmp_path, model, learning_rate=0.1, max_steps=1, options=options, **settings)
        (line,) = steps(trainer)
        if trainer.step_control is not None:
            assert (trainer.step_control._kept.bytes > 0) == bool(smallest)
        moments = [state["exp_avg_sq"] for state in trainer.optimizer.state.values()]
        runs.append((before.weights, dict(model.named_parameters()), line, moments))
    (start, cut, line, moments), (_, whole, _, expected) = runs
    for name, weight in start.items():
        torch.testing.assert_close(
            cut[name], weight + line["step/kept"] * (whole[name] - weight), rtol=1e-9, atol=1e-12
        )
    assert all(torch.equal(*pair) for pair in zip(moments, expected, strict=True))


def test_a_schedule_multiplies_the_target(tmp_path):
    settings = {**SETTINGS, "lr_scheduler_type": "linear", "warmup_steps": 2}
    before = tiny.model("qwen3").state_dict()
    trainer = training.build(tmp_path, "qwen3", learning_rate=1e-3, max_steps=8, **settings)

    class Still(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                self.same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    still = Still()
    trainer.add_callback(still)
    lines = steps(trainer)
    # Warmup begins with nothing: no step, and nothing is learned from it
    assert still.same and lines[0]["learning_rate"] == 0 and "step/kl" not in lines[0]
    share = [line["learning_rate"] / 1e-3 for line in lines]
    assert share[1] == pytest.approx(0.5) and share[2] == 1 and share[-1] < 0.2
    # The first step is at the starting rate: the schedule goes under the root
    assert lines[1]["step/learning_rate"] == pytest.approx(1e-3 * math.sqrt(share[1]) * lines[1]["step/kept"])
    for line, factor in zip(lines[1:], share[1:], strict=True):
        assert line["step/kl"] <= controller.OVERSHOOT * TARGET * factor


@pytest.mark.parametrize("weights", ["copied", "undone", "lora"])
def test_a_resumed_run_goes_on_with_the_same_numbers(weights, tmp_path, monkeypatch):
    settings = {**SETTINGS, "learning_rate": 0.05, "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    if weights == "undone":
        monkeypatch.setattr(taken_back, "SMALL", 0)
    if weights == "lora":
        settings["options"] = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}
    whole = training.build(tmp_path / "run", "qwen3", **settings)
    expected = steps(whole)
    again = training.build(tmp_path / "run", "qwen3", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.step_control.size == whole.step_control.size
    resumed = [line for line in again.state.log_history if "loss" in line]
    for line, other in zip(resumed[3:], expected[3:], strict=True):
        names = [name for name in line if name.startswith("step/")]
        assert names and all(line[name] == other[name] for name in names)
    for one, two in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, two)


class Destructive(torch.optim.SGD):
    """Leaves nothing of the weights."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.fill_(torch.nan)


def test_steps_that_cannot_be_measured_are_taken_back_wholly_and_end_the_run_after_a_few(tmp_path):
    model = tiny.model("qwen3")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Destructive(model.parameters(), lr=0.1)
    options = {"optimizers": (optimizer, None)}
    trainer = training.build(tmp_path, model, max_steps=10, options=options, **SETTINGS)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=f"{PATIENCE} steps in a row"):
            trainer.train()
        assert trainer.state.global_step == PATIENCE - 1
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert all(line["step/kept"] == 0 and line["step/kl"] == 0 for line in lines)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class DestructiveOnce(torch.optim.AdamW):
    """Leaves nothing of the weights in its second step."""

    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            with torch.no_grad():
                for group in self.param_groups:
                    group["params"][0].fill_(torch.nan)


def test_a_run_goes_on_from_the_weights_before_a_step_that_could_not_be_measured(tmp_path):
    model, weights = tiny.model("qwen3"), []

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    options = {"optimizers": (DestructiveOnce(model.parameters(), lr=1e-3), None), "callbacks": [Noting()]}
    lines = steps(training.build(tmp_path, model, max_steps=4, options=options, **SETTINGS))
    assert [line["step/kept"] == 0 for line in lines] == [False, True, False, False]
    assert lines[1]["step/kl"] == 0
    assert all(torch.equal(p, weights[0][name]) for name, p in weights[1].items())
    # After a step for caution's sake the rate is about what it was
    assert lines[2]["step/learning_rate"] < 1e-4 * lines[0]["step/learning_rate"]
    assert lines[3]["step/learning_rate"] > 0.1 * lines[0]["step/learning_rate"]


def test_weights_that_cannot_be_computed_back_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(taken_back, "SMALL", 0)
    model = tiny.model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @optimizer.register_step_post_hook
    def destroy(*_):
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.inf)

    options = {"optimizers": (optimizer, None)}
    with pytest.raises(FloatingPointError, match="target_kl_offload=True"):
        training.build(tmp_path, model, options=options, **SETTINGS).train()


class Failing(torch.optim.AdamW):
    """Its second step fails half-way."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_a_step_that_fails_leaves_the_learning_rates_of_the_schedule(tmp_path):
    model = tiny.model("qwen3")
    optimizer = Failing(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    options = {"optimizers": (optimizer, schedule)}
    trainer = training.build(tmp_path, model, options=options, **SETTINGS)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert trainer.step_control.size.rate != 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


def test_a_gradient_of_zero_says_nothing_and_one_that_is_lost_in_rounding_raises_the_rate(tmp_path):
    settings = {**SETTINGS, "optim": "sgd", "max_steps": 2}
    for skip in (False, True):
        same = training.build(
            tmp_path,
            "qwen3",
            reward=lambda completions, **_: [1.0] * len(completions),
            skip_zero_advantage=skip,
            **settings,
        )
        lines = steps(same)
        assert same.step_control.size.rate == 1 and all(line["step/kl"] == 0 for line in lines)
    small = training.build(tmp_path, "qwen3", **{**settings, "learning_rate": 1e-20})
    small.train()
    assert small.step_control.size.rate == controller.LARGEST_CHANGE**2


@pytest.mark.parametrize("skip", [False, True])
def test_what_momentum_does_without_a_gradient_does_not_change_the_rate(skip, tmp_path):
    """Else it would go on at full length for as long as no completion is better than another."""
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        return tiny.reward(completions) if len(calls) <= 2 else [1.0] * len(completions)

    settings = {**SETTINGS, "learning_rate": 1e-3, "max_steps": 6, "skip_zero_advantage": skip}
    trainer = training.build(tmp_path, "qwen3", reward=reward, **settings)
    lines = steps(trainer)
    assert [line["grad_norm"] > 0 for line in lines] == [True] * 2 + [False] * 4
    assert all(line["step/kl"] > 0 for line in lines)  # of the moments
    rates = [line["step/learning_rate"] / line["step/kept"] for line in lines]
    assert rates[1] != rates[0] and rates[3:] == pytest.approx([rates[2]] * 3)
    assert trainer.step_control.size.rate == pytest.approx(rates[2] / 1e-3)


class Coarse(torch.optim.SGD):
    """Moves each weight to the next number there is."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))


def test_a_step_of_which_rounding_leaves_nothing_or_too_much_is_made_as_nothing(tmp_path):
    model = tiny.model("qwen3")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"optimizers": (Coarse(model.parameters(), lr=1.0), None)}
    trainer = training.build(tmp_path, model, options=options, **{**SETTINGS, "target_kl": 1e-30})
    lines = steps(trainer)
    assert all(line["step/kl"] == 0 and 0 < line["step/kept"] < 1 for line in lines)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    kept = math.prod(line["step/kept"] for line in lines)
    assert trainer.step_control.size.rate == pytest.approx(kept * controller.LARGEST_CHANGE**2)


MASKED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "mask_truncated_completions": True}


def test_a_step_that_no_token_tells_anything_of_leaves_the_rate(tmp_path):
    """Microbatches of one sequence; in every second step all have been cut off, and masked."""
    settings = {**SETTINGS, **MASKED, "max_steps": 6, "step_kl_share": 0.1}
    lengths = [[3, 5, 4] if step % 2 else [0, 0, 0] for step in range(6)]
    batches = [
        oracle.random_batch([3, 2, 4], each, 100, seed, torch.tensor([1.0, -1.0, 0.5])).for_trl()
        for seed, each in enumerate(lengths)
    ]
    trainer = by_hand(tmp_path, batches, tiny.model("qwen3"), **settings)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert ["step/kl" in line for line in lines] == [any(each) for each in lengths]
    rates = [line["step/learning_rate"] / line["step/kept"] for line in lines]
    assert rates[0] == rates[1] and rates[2] == pytest.approx(rates[3]) and rates[4] == pytest.approx(rates[5])


@pytest.mark.parametrize("place", range(3))
def test_a_step_whose_drawn_completions_are_masked_is_measured_by_others(place, tmp_path):
    """Whichever microbatch is drawn, and whichever has tokens: a first step that is far too long is shortened."""
    lengths = [5 if number == place else 0 for number in range(3)]
    advantages = torch.tensor([1.0, -1.0, 0.5])
    seen = set()
    for seed in range(6):
        settings = {**SETTINGS, **MASKED, "max_steps": 2, "step_kl_share": 0.1, "learning_rate": 1.0, "seed": seed}
        batch = oracle.random_batch([3, 2, 4], lengths, 100, seed, advantages).for_trl()
        trainer = by_hand(tmp_path, [batch, dict(batch)], tiny.model("qwen3"), **settings)
        lines = [line for line in trainer.state.log_history if "loss" in line]
        seen |= set(drawn(3, 0.1, 0, seed))
        assert all(0 < line["step/kl"] <= controller.OVERSHOOT * TARGET for line in lines)
        assert len(lines) == 2 and lines[0]["step/kept"] < 0.1
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("first", [0.0, 1e-6])
def test_a_group_whose_own_schedule_is_low_leaves_the_others_their_steps(first, tmp_path):
    model = tiny.model("qwen3")
    before = model.model.norm.weight.detach().clone()
    others = [p for p in model.parameters() if p is not model.model.norm.weight]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": [model.model.norm.weight]}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: first, lambda _: 1.0])
    options = {"optimizers": (optimizer, schedule)}
    lines = steps(training.build(tmp_path, model, options=options, max_steps=4, **SETTINGS))
    assert all(0 < line["step/kl"] <= controller.OVERSHOOT * TARGET for line in lines)
    assert lines[-1]["step/kl"] > TARGET / 10 and not torch.equal(model.model.norm.weight, before)
    assert lines[0]["step/learning_rate"] == pytest.approx(1e-2 * lines[0]["step/kept"])


@pytest.mark.parametrize("kind", ["one cycle", "rising"])
def test_a_schedule_does_not_make_the_target_larger(kind, tmp_path):
    model = tiny.model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "one cycle":  # which begins at a 25th of its largest rate
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=8, cycle_momentum=False)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**step)
    options = {"optimizers": (optimizer, schedule)}
    lines = steps(training.build(tmp_path, model, options=options, max_steps=8, **SETTINGS))
    for line in lines:
        multiple = line["learning_rate"] / 1e-3 if kind == "one cycle" else 1.0
        assert line["step/kl"] <= controller.OVERSHOOT * TARGET * multiple
    if kind == "rising":  # what it multiplies rates by beyond that is taken out of them
        assert math.prod(line["step/kl"] for line in lines[-4:]) > (TARGET / 4) ** 4


def test_steps_that_are_lost_in_rounding_are_neither_shortened_nor_learned_from(tmp_path, monkeypatch, caplog):
    lost = 50 * TARGET
    monkeypatch.setattr(measurement, "rounding", lambda trainer, as_trained: lost)
    lines = steps(training.build(tmp_path, "qwen3", learning_rate=2e-3, max_steps=4, **SETTINGS))
    assert all(TARGET < line["step/kl"] < lost and line["step/kept"] == 1 for line in lines)
    assert all(line["step/learning_rate"] == 2e-3 for line in lines)
    (said,) = [record.message for record in caplog.records if "rounding" in record.message]
    assert f"target_kl={TARGET:g}" in said and "attn_implementation='sdpa'" in said
    # What cannot be rounding is shortened
    for line in steps(training.build(tmp_path, "qwen3", learning_rate=0.1, max_steps=2, **SETTINGS)):
        assert line["step/kl"] == pytest.approx(lost, rel=controller.CLOSE)
        assert line["step/learning_rate"] == pytest.approx(0.1 * line["step/kept"])
    # What is less than was asked for, with its rounding, is too short
    lines = steps(training.build(tmp_path, "qwen3", learning_rate=1e-5, max_steps=2, **SETTINGS))
    assert lines[1]["step/learning_rate"] == pytest.approx(controller.LARGEST_CHANGE * 1e-5)
    # Nor does the end of a schedule go below it
    monkeypatch.setattr(measurement, "rounding", lambda trainer, as_trained: TARGET / 10)
    settings = {**SETTINGS, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 100}
    lines = steps(training.build(tmp_path, "qwen3", learning_rate=1e-3, max_steps=5, **settings))
    assert all(line["step/kept"] == 1 for line in lines if "step/kl" in line)


def test_a_run_in_which_rounding_hides_steps_goes_on_after_one_that_was_taken_back(tmp_path, monkeypatch):
    measure = measurement.StepKL.measure

    def rounded(kl):
        found = measure(kl)
        return controller.Measurement(found.kl + 2 * TARGET, found.stderr)

    monkeypatch.setattr(measurement, "rounding", lambda trainer, as_trained: 1.0)
    monkeypatch.setattr(measurement.StepKL, "measure", rounded)
    model = tiny.model("qwen3")
    options = {"optimizers": (DestructiveOnce(model.parameters(), lr=1e-3), None)}
    lines = steps(training.build(tmp_path, model, max_steps=4, options=options, **SETTINGS))
    assert [line["step/kept"] == 0 for line in lines] == [False, True, False, False]
    assert lines[2]["step/learning_rate"] < 1e-4 * lines[0]["step/learning_rate"]
    assert lines[3]["step/learning_rate"] == pytest.approx(lines[0]["step/learning_rate"] / controller.LARGEST_CHANGE)


def test_weights_in_bf16_are_not_kept_twice_after_a_step(tmp_path):
    model = tiny.model("qwen3", dtype=torch.bfloat16)
    trainer = training.build(tmp_path, model, learning_rate=0.1, max_steps=1, **SETTINGS)
    (line,) = steps(trainer)
    assert line["step/kept"] < 1 and not trainer.step_control._kept._after


def test_shortened_steps_are_of_that_length_by_enumeration(float64_throughout, tmp_path):
    weights, model = Weights(), tiny.model("qwen3", dtype=torch.float64)
    trainer = training.build(
        tmp_path,
        model,
        Recorded,
        options={"callbacks": [weights]},
        learning_rate=0.1,
        max_steps=2,
        model_init_kwargs=None,
        **SETTINGS,
    )
    lines = steps(trainer)
    assert lines[0]["step/kept"] < 1
    fresh = tiny.model("qwen3", dtype=torch.float64).eval()
    parts = zip(lines, trainer.batches, weights.before, weights.after, strict=True)
    for line, batch, before, after in parts:
        exact = torch.cat(exact_divergences(fresh, batch, before, after, trainer.temperature)).mean().item()
        assert exact == pytest.approx(line["step/kl"], rel=1e-6)
        if line["step/kept"] < 1:
            assert exact == pytest.approx(TARGET, rel=controller.CLOSE)


def run(tmp_path, **settings):
    lora = LoraConfig(r=2, target_modules="all-linear")
    options = {"peft_config": lora} if settings.pop("lora", False) else {}
    family = settings.pop("family", "qwen3")
    trainer = training.build(
        tmp_path, family, options=options, **{**SETTINGS, "max_steps": 2, "learning_rate": 0.05, **settings}
    )
    lines = steps(trainer)
    assert lines[0]["step/kept"] < 1
    assert all(0 < line["step/kl"] <= controller.OVERSHOOT * TARGET for line in lines)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "interacting", "token_weights": "p3o", "num_iterations": 2},
        {"rule": "none", "token_weights": "kpo", "optim": "adafactor"},
        {"rule": "fig4", "lora": True, "gradient_accumulation_steps": 2, "step_kl_share": 1 / 3},
        {"loss_type": "cispo", "epsilon_high": 5.0, "entropy_coef": 0.01},
        {"fisher_scope": "step", "token_weights": "p3o", "num_iterations": 2, "family": "qwen3_moe"},
        {"rule": "interacting", "group_microbatches": True, "gradient_accumulation_steps": 2},
        {"skip_zero_advantage": True, "fisher_scope": "step", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_every_rule_and_weighting_has_steps_of_that_length(settings, tmp_path):
    run(tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "euclidean", "interacting", "none"])
@pytest.mark.parametrize("weights", ["none", "sampler", "p3o", "kpo"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("lora", [False, True])
def test_every_combination_has_steps_of_that_length(rule, weights, loss_type, lora, tmp_path):
    run(tmp_path, rule=rule, token_weights=weights, loss_type=loss_type, lora=lora, num_iterations=2)


def test_an_optimizer_that_chooses_its_own_rate_is_refused_at_construction(tmp_path):
    model = tiny.model("qwen3")
    optimizer = Adafactor(model.parameters(), relative_step=True)
    options = {"optimizers": (optimizer, AdafactorSchedule(optimizer))}
    with pytest.raises(ValueError, match="Adafactor has none, or chooses its own"):
        training.build(tmp_path, model, options=options, **SETTINGS)


class WithMasters(torch.optim.SGD):
    """Goes on from weights of its own."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master_param"] = p.detach().clone()


class LayerByLayer(ISOPOTrainer):
    """Makes an optimizer of its own, as a subclass may."""

    def create_optimizer(self, model=None):
        self.optimizer = LayerWiseDummyOptimizer()
        return self.optimizer


def test_optimizers_that_a_trainer_finds_in_a_run_are_refused_as_well(tmp_path):
    model = tiny.model("qwen3")
    options = {"optimizers": (WithMasters(model.parameters(), lr=0.1), None)}
    with pytest.raises(ValueError, match="WithMasters as it is set: it keeps a copy .*'master_param' in its state"):
        training.build(tmp_path, model, options=options, **SETTINGS).train()
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
