"""Validation while training: what is measured is what it says, and training does not notice."""

import asyncio
import copy
import json
import struct

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.validation import ValidationCallback
from isopo_trl.validation.initial_policy import InitialPolicy
from tests import tiny, training
from tests.validation.validating import (
    FIGURES,
    SAMPLING,
    adapter,
    assert_equal,
    greedy,
    logged,
    model,
    shaken,
    validating,
    weights,
)


pytestmark = pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)'")

TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


# When


@pytest.mark.parametrize("every,last,expected", [(2, 3, [0, 2, 3]), (2, 4, [0, 2, 4]), (9, 2, [0, 2])])
def test_validation_is_before_training_every_so_many_steps_and_once_at_the_end(every, last, expected, tmp_path):
    trainer, callback = validating(tmp_path, steps=every, max_steps=last, kl_prompts=2)
    trainer.train()
    lines = [line for line in trainer.state.log_history if FIGURES[0] in line]
    assert [line["step"] for line in lines] == expected == list(callback.completions)
    for line, kept in zip(lines, callback.history, strict=True):
        assert {name: line[name] for name in (*FIGURES, "step")} == kept
        assert "reward" not in line and "loss" not in line
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(1, last + 1))


def test_a_second_run_of_the_same_trainer_validates_at_its_end_too(tmp_path):
    trainer, callback = validating(tmp_path, steps=2, max_steps=3, kl_prompts=0)
    for _ in range(2):
        trainer.train()
        assert list(logged(trainer, FIGURES[0])) == [0, 2, 3]


def test_validation_can_be_asked_for_at_any_time(tmp_path):
    trainer, callback = validating(tmp_path)
    assert callback.validate() == logged_line(trainer, 0) == callback.validate()


def order(trainer):
    """Steps of the log, those of validations as negative numbers."""
    lines = [line for line in trainer.state.log_history if "reward" in line or FIGURES[0] in line]
    return [line["step"] if "reward" in line else -line["step"] for line in lines]


@pytest.mark.usefixtures("drawn")
def test_a_validation_is_logged_after_its_step_and_the_picture_has_the_last_reward(tmp_path, figures):
    trainer, callback = validating(tmp_path, steps=2, max_steps=4, kl_prompts=0)
    trainer.train()
    assert order(trainer) == [0, 1, 2, -2, 3, 4, -4]
    rewards, accuracies = (list(panel.lines[0].get_xdata()) for panel in figures[-1].axes)
    assert rewards == [1, 2, 3, 4] and accuracies == [0, 2, 4]
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert "train_runtime" in log[-1] and log == trainer.state.log_history  # written again at the very end


def test_a_step_that_is_not_logged_is_validated_all_the_same(tmp_path):
    class Quiet(TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # after that of the validation
            control.should_log = control.should_log and state.global_step != 2

    trainer, callback = validating(tmp_path, steps=1, max_steps=5, kl_prompts=0, logging_steps=2)
    trainer.add_callback(Quiet())
    trainer.train()
    assert list(callback.completions) == list(range(6))
    assert order(trainer) == [0, -1, -2, -3, 4, -4, -5, 5]  # what was left is logged when training ends


def test_a_bar_counts_the_completions_of_a_validation_unless_bars_are_off(tmp_path, capfd):
    for hidden in (False, True):
        trainer, callback = validating(tmp_path, batch_size=2, kl_prompts=2, disable_tqdm=hidden)
        shaken(trainer.model)
        callback.validate()
        said = capfd.readouterr().err
        assert ("validation:" in said and "/5 [" in said) != hidden


def logged_line(trainer, step):
    return {name: logged(trainer, name)[step] for name in FIGURES}


# Training does not notice

RUNS = {
    "fisher": (ISOPOTrainer, {"rule": "fisher", "logging_steps": 2}, None),
    "interacting, lora": (ISOPOTrainer, {"rule": "interacting", "kl_in_reward": True, "beta": 0.1}, 0.3),
    "grpo, lora": (GRPOTrainer, {"gradient_checkpointing": False, "logging_steps": 2}, 0.3),
    "grpo": (GRPOTrainer, {"steps_per_generation": 2}, None),
}


@pytest.mark.usefixtures("drawn")
def test_training_is_bit_for_bit_the_same_without_the_callback_that_draws(tmp_path):
    assert_training_is_the_same("fisher", tmp_path)


@pytest.mark.parametrize("run", [run for run in RUNS if run != "fisher"])
def test_training_is_bit_for_bit_the_same_without_the_callback(run, tmp_path):
    assert_training_is_the_same(run, tmp_path)


def assert_training_is_the_same(run, tmp_path):
    kind, settings, dropout = RUNS[run]

    def figures(validation):
        torch.manual_seed(0)  # of the adapter's first values
        options = {} if dropout is None else {"peft_config": adapter(dropout)}
        trainer = training.build(tmp_path, model(), kind, options=options, max_steps=2, **settings)
        if validation:
            trainer.add_callback(ValidationCallback(trainer, tiny.prompts(3), tiny.reward, steps=1, batch_size=2))
        trainer.train()
        lines = [
            {name: value for name, value in line.items() if name not in TIMES}
            for line in trainer.state.log_history
            if FIGURES[0] not in line
        ]
        return weights(trainer), lines, trainer

    (plain, plain_lines, _), (validated, lines, trainer) = figures(False), figures(True)
    assert_equal(validated, plain)
    assert lines == plain_lines
    assert [line["step"] for line in lines if "loss" in line] == ([2] if "logging_steps" in settings else [1, 2])
    divergence = logged(trainer, "validation/kl")
    assert list(divergence) == [0, 1, 2] and divergence[0] == 0 < divergence[2]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_model_is_left_as_it_was(checkpointing, tmp_path):
    class After(TrainerCallback):
        seen = []

        def on_step_end(self, args, state, control, model, **_):
            modes = {module.training for module in model.modules()}
            self.seen.append((modes, model.is_gradient_checkpointing, control.should_log))

    trainer, callback = validating(tmp_path, gradient_checkpointing=checkpointing, steps=1)
    trainer.add_callback(After())
    trainer.train()
    assert After.seen == [({True}, checkpointing, True)] * 2
    before, stream = weights(trainer), torch.get_rng_state()
    trainer.model.eval()
    callback.validate()
    assert not trainer.model.training and torch.equal(torch.get_rng_state(), stream)
    assert_equal(weights(trainer), before)


@pytest.mark.parametrize("at", ["reward", "sampling", "policy", "initial policy"])
def test_an_exception_leaves_the_trainer_as_it_was(at, tmp_path):
    def reward(completions, **_):
        if at == "reward":
            raise RuntimeError("broken reward")
        return tiny.reward(completions)

    passes = {"reward": 0, "sampling": 0, "policy": 1, "initial policy": 2}

    def fail(module, args, kwargs):
        seen.append(kwargs.get("fused_lm_head", False))
        if at == "sampling" and trainer.generation_config.do_sample or sum(seen) == passes[at] > 0:
            raise RuntimeError(f"broken {at}")

    seen = []
    trainer, callback = validating(tmp_path, reward=reward, **SAMPLING)
    shaken(trainer.model)
    trainer.model.register_forward_pre_hook(fail, with_kwargs=True)
    before, stream = weights(trainer), torch.get_rng_state()
    settings = (trainer.generation_config.to_dict(), dict(trainer.generation_kwargs))
    with pytest.raises(RuntimeError, match=f"broken {at}"):
        callback.validate()
    assert_equal(weights(trainer), before)
    assert trainer.model.training and torch.equal(torch.get_rng_state(), stream)
    assert (trainer.generation_config.to_dict(), trainer.generation_kwargs) == settings
    assert callback.history == [] and trainer.state.log_history == []


# Accuracy


@pytest.mark.parametrize("conversational,batch_size", [(False, 2), (True, 3), (False, None)])
def test_accuracy_is_the_mean_reward_of_greedy_completions(conversational, batch_size, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(7)
    data = data.add_column("weight", [1.0, 2.0, 0.5, 3.0, -1.0, 0.25, 4.0])
    batches = []

    def reward(completions, prompts, weight, **_):
        batches.append(prompts)
        return [w * value for w, value in zip(weight, tiny.reward(completions), strict=True)]

    policy = model()
    policy.generation_config.update(do_sample=True, temperature=1.5, top_k=20)  # many models on the Hub have such
    trainer, callback = validating(
        tmp_path,
        policy,
        data=data,
        reward=reward,
        batch_size=batch_size,
        kl_prompts=0,
        max_completion_length=6,
        **SAMPLING,
    )
    settings = (trainer.generation_config, copy.deepcopy(trainer.generation_config), dict(trainer.generation_kwargs))
    figures = callback.validate()

    policy, tokenizer = model(), tiny.tokenizer()
    ids = [greedy(policy, prompt) for prompt in data["prompt"]]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = [w * value for w, value in zip(data["weight"], tiny.reward(texts), strict=True)]
    assert callback.completions[0] == texts
    assert figures["validation/accuracy"] == pytest.approx(sum(rewards) / 7, rel=1e-12)
    assert figures["validation/length"] == sum(map(len, ids)) / 7
    assert len(set(texts)) > 3 and len(set(map(len, ids))) > 1  # else this would say little

    sizes = {2: [2, 2, 2, 1], 3: [3, 3, 1], None: [3, 3, 1]}[batch_size]
    assert list(map(len, batches)) == sizes and sum(batches, []) == list(data["prompt"])
    assert trainer.generation_config is settings[0] and trainer.generation_config == settings[1]
    assert trainer.generation_kwargs == settings[2]


def test_accuracy_follows_the_training(tmp_path):
    trainer, callback = validating(tmp_path, steps=1, learning_rate=0.05, kl_prompts=0)
    trainer.train()
    policy = model()
    policy.load_state_dict(trainer.model.state_dict())
    texts = tiny.tokenizer().batch_decode(
        [greedy(policy, prompt) for prompt in tiny.prompts(3)["prompt"]], skip_special_tokens=True
    )
    assert callback.completions[2] == texts != callback.completions[0]
    assert logged(trainer, "validation/accuracy")[2] == pytest.approx(sum(tiny.reward(texts)) / 3, rel=1e-12)


@pytest.fixture
def always_sampled(monkeypatch):
    """The divergence is sampled even where no parameter has moved, and it must be zero."""
    monkeypatch.setattr(InitialPolicy, "differs_from", lambda *_: True)


def test_dropout_is_off_in_validation(tmp_path, always_sampled):
    trained = shaken(get_peft_model(model(), adapter(dropout=0.5)))
    trainer, callback = validating(tmp_path, trained)
    assert trainer.model.training and callback.validate()["validation/kl"] == 0
    ids = [greedy(trained.eval(), prompt) for prompt in tiny.prompts(3)["prompt"]]
    assert callback.completions[0] == tiny.tokenizer().batch_decode(ids, skip_special_tokens=True)


def test_dropout_stays_off_with_continuous_batching(tmp_path, always_sampled):
    """TRL puts the model into training mode after each such generation."""
    trained = shaken(get_peft_model(model(), adapter(dropout=0.5)))
    settings = {"num_blocks": 8, "max_batch_tokens": 64}  # of a cache that is quick to set up
    trainer, callback = validating(
        tmp_path,
        trained,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=settings,
        batch_size=2,
    )
    assert callback.validate()["validation/kl"] == 0
    ids = [greedy(trained.eval(), prompt) for prompt in tiny.prompts(3)["prompt"]]
    assert callback.completions[0] == tiny.tokenizer().batch_decode(ids, skip_special_tokens=True)


def test_completions_of_conversations_come_to_the_reward_as_messages(tmp_path):
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return tiny.reward(completions)

    _, callback = validating(tmp_path, data=tiny.conversational_prompts(2), reward=reward, kl_prompts=0)
    callback.validate()
    assert seen == [[{"role": "assistant", "content": text}] for text in callback.completions[0]]


def test_a_reward_of_none_is_left_out_of_the_accuracy(tmp_path):
    def reward(completions, score, **_):
        return score

    data = Dataset.from_dict({"prompt": ["one", "two", "three", "four"], "score": [1.0, None, 0.0, 1.0]})
    _, callback = validating(tmp_path, data=data, reward=reward, batch_size=3, kl_prompts=0)
    assert callback.validate()["validation/accuracy"] == pytest.approx(2 / 3)


def test_an_accuracy_of_nothing_is_not_logged_and_the_reader_is_told(tmp_path, caplog):
    def silent(completions, **_):
        return [None] * len(completions)

    trainer, callback = validating(tmp_path, data=tiny.prompts(3), reward=silent, kl_prompts=0)
    with caplog.at_level("WARNING"):
        figures = callback.validate()
    assert list(figures) == ["validation/length"] and logged(trainer, "validation/accuracy") == {}
    assert "'silent' returned None for each of the 3 validation prompts" in caplog.text


def test_a_reward_function_that_returns_no_list_is_named(tmp_path):
    def scalar(completions, **_):
        return 0.5

    _, callback = validating(tmp_path, data=tiny.prompts(2), reward=scalar, kl_prompts=0)
    with pytest.raises(ValueError, match="The reward function 'scalar' returned 0.5 of type float"):
        callback.validate()


def test_the_reward_is_that_of_gsm8k_unless_another_is_given(tmp_path):
    policy = model()
    with torch.no_grad():
        for character, token in tiny.VOCABULARY.items():
            policy.lm_head.weight[token] *= 5 * character.isdigit()
    data = tiny.prompts(3)
    texts = [tiny.tokenizer().decode(greedy(policy, prompt)) for prompt in data["prompt"]]
    assert all(text.isdigit() for text in texts)
    data = data.add_column("answer", [texts[0], f"#### {int(texts[1]) + 1}", f"So it is.\n#### {texts[2]}"])
    trainer = training.build(tmp_path, policy)
    assert ValidationCallback(trainer, data, kl_prompts=0).validate()["validation/accuracy"] == pytest.approx(2 / 3)


async def asynchronous(completions, **_):
    return tiny.reward(completions)


def demanding(completions, prompts, completion_ids, trainer_state, log_metric, log_extra, **_):
    log_metric("of validation", 1.0)
    log_extra("number", [trainer_state.global_step] * len(completion_ids))
    return tiny.reward(completions)


@pytest.mark.parametrize("reward", [asynchronous, demanding])
def test_a_reward_function_that_training_takes_is_taken_by_validation(reward, tmp_path):
    trainer, callback = validating(tmp_path, reward=reward, kl_prompts=0)
    trainer.train()
    assert logged(trainer, FIGURES[0])[0] == pytest.approx(sum(tiny.reward(callback.completions[0])) / 3)
    assert not logged(trainer, "of validation")


def test_an_asynchronous_reward_function_is_taken_in_a_notebook_too(tmp_path):
    async def cell():  # of a notebook, which runs in an event loop
        return callback.validate()

    _, callback = validating(tmp_path, reward=asynchronous, kl_prompts=0)
    assert asyncio.run(cell())[FIGURES[0]] == pytest.approx(sum(tiny.reward(callback.completions[0])) / 3)


# What a user finds afterwards


@pytest.mark.usefixtures("drawn")
def test_log_and_picture_are_in_the_output_folder(tmp_path):
    trainer, callback = validating(tmp_path / "new", kl_prompts=2)
    callback.validate()
    assert (tmp_path / "new" / "validation.png").exists()
    trainer.train()
    log = json.loads((tmp_path / "new" / "trainer_state.json").read_text())["log_history"]
    assert log == trainer.state.log_history and log[-1]["step"] == 2 and any(FIGURES[0] in line for line in log[-2:])
    picture = (tmp_path / "new" / "validation.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and picture[12:16] == b"IHDR" and picture[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000 and height > 300  # three panels
    assert len(picture) > 5000


# Refusals


@pytest.mark.parametrize(
    "data,settings,message",
    [
        (tiny.prompts(3).select([]), {}, "has 0 rows"),
        (tiny.prompts(3).rename_column("prompt", "question"), {}, r"columns \['question'\].*needs.*column `prompt`"),
        (tiny.prompts(3), {"steps": 0}, "steps=0.*at least 1"),
        (tiny.prompts(3), {"batch_size": 0}, "batch_size=0.*at least 1"),
        (tiny.prompts(3), {"kl_prompts": -1}, "kl_prompts=-1.*at least 0"),
    ],
)
def test_what_cannot_be_validated_is_refused_at_construction(data, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ValidationCallback(training.build(tmp_path), data, tiny.reward, **settings)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Counter:
    """An environment."""

    def reset(self, **_) -> str:
        return "Count."

    def up(self) -> int:
        """
        Count up.
        """
        return 1

    def get_reward(self) -> float:
        return 0.0


def rollout(prompts, trainer):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    "option",
    [{"tools": [add]}, {"rollout_func": rollout}, {"environment_factory": Counter}],
    ids=lambda x: next(iter(x)),
)
def test_completions_that_are_not_the_models_alone_are_refused(option, tmp_path):
    trainer = training.build(tmp_path, data=tiny.conversational_prompts(6), options=option, max_completion_length=96)
    with pytest.raises(ValueError, match="completes each prompt once.*pass an `eval_dataset`"):
        ValidationCallback(trainer, tiny.conversational_prompts(2), tiny.reward)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("file", ["validation.png", "trainer_state.json"])
def test_training_goes_on_where_the_curves_cannot_be_written_which_is_said_once(file, tmp_path, caplog):
    (tmp_path / file).mkdir()  # cannot be opened, as on a full disk
    trainer, callback = validating(tmp_path, steps=1, max_steps=2, kl_prompts=0)
    trainer.train()
    assert trainer.state.global_step == 2 and list(logged(trainer, FIGURES[0])) == [0, 1, 2]
    (said,) = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert str(tmp_path) in said and "Training goes on" in said
    (tmp_path / file).rmdir()
    callback.validate()
    assert (tmp_path / "validation.png").is_file() and (tmp_path / "trainer_state.json").is_file()
