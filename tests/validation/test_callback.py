"""Validation while training: what is measured is what it says, and training does not notice."""

import asyncio
import io
import json
import sys

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from isopo_trl import ISOPOTrainer
from isopo_trl.validation import ValidationCallback
from isopo_trl.validation.initial_policy import InitialPolicy
from tests import tiny, training
from tests.trainer.test_rollouts import Counter, add, call, scripted
from tests.validation.runs import png_size
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


BEFORE = [tiny.VOCABULARY["<|assistant|>"]]  # a completion of messages
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


# When


@pytest.mark.parametrize("every,last,expected", [(2, 3, [0, 2, 3]), (2, 2, [0, 2])])
def test_validation_is_before_training_every_so_many_steps_and_once_at_the_end(every, last, expected, tmp_path):
    trainer, callback = validating(tmp_path, steps=every, max_steps=last, kl_prompts=2)
    trainer.train()
    lines = [line for line in trainer.state.log_history if FIGURES[0] in line]
    assert [line["step"] for line in lines] == expected == list(callback.completions)
    for line, kept in zip(lines, callback.history, strict=True):
        assert {name: line[name] for name in (*FIGURES, "step")} == kept
        assert "reward" not in line and "loss" not in line
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(1, last + 1))
    trainer.train()  # a second run of the same trainer
    assert list(logged(trainer, FIGURES[0])) == expected


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("steps,logging,expected", [(2, 1, [0, 1, 2, -2]), (1, 2, [0, -1, 2, -2])])
def test_a_validation_is_logged_after_its_step_and_the_output_folder_has_log_and_picture(
    steps, logging, expected, tmp_path, figures
):
    folder = tmp_path / "new"
    trainer, callback = validating(folder, steps=steps, max_steps=2, kl_prompts=0, logging_steps=logging)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line or FIGURES[0] in line]
    assert [line["step"] if "reward" in line else -line["step"] for line in lines] == expected
    rewards, accuracies, _ = (list(panel.lines[0].get_xdata()) for panel in figures[-1].axes)
    assert rewards == list(range(logging, 3, logging)) and accuracies == list(range(0, 3, steps))
    assert callback.picture == str(folder / "curves.png") and png_size(folder / "curves.png")[0] > 500
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert "train_runtime" in log[-1] and log == trainer.state.log_history  # written again at the very end


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("file", ["curves.png", "trainer_state.json"])
def test_training_goes_on_where_the_curves_cannot_be_written_which_is_said_once(file, tmp_path, caplog):
    (tmp_path / file).mkdir()  # cannot be opened, as on a full disk
    trainer, callback = validating(tmp_path, steps=1, max_steps=1, kl_prompts=0)
    trainer.train()
    assert trainer.state.global_step == 1 and list(logged(trainer, FIGURES[0])) == [0, 1]
    (said,) = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert str(tmp_path) in said and "Training goes on" in said
    (tmp_path / file).rmdir()
    callback.validate()
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "trainer_state.json").is_file()


@pytest.mark.parametrize(("terminal", "disabled"), [(True, False), (True, True), (False, False)])
def test_a_bar_counts_the_completions_of_a_validation_on_a_terminal_unless_bars_are_off(
    terminal, disabled, tmp_path, monkeypatch
):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    trainer, callback = validating(tmp_path, batch_size=2, kl_prompts=2, disable_tqdm=disabled)
    shaken(trainer.model)
    callback.validate()
    said = shown.getvalue()
    assert ("validation:" in said and "/5 [" in said) == (terminal and not disabled)


# Training does not notice

RUNS = {
    "fisher": (ISOPOTrainer, {"rule": "fisher", "logging_steps": 2}, None),
    "interacting, lora": (ISOPOTrainer, {"rule": "interacting", "kl_in_reward": True, "beta": 0.1}, 0.3),
    "grpo, lora": (GRPOTrainer, {"gradient_checkpointing": False, "logging_steps": 2}, 0.3),
}


@pytest.mark.parametrize("run", RUNS)
def test_training_is_bit_for_bit_the_same_without_the_callback(run, tmp_path):
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


def greedy_texts(policy, prompts):
    return tiny.tokenizer().batch_decode([greedy(policy, prompt) for prompt in prompts], skip_special_tokens=True)


@pytest.mark.parametrize("conversational,batch_size", [(False, 2), (True, 3), (False, None)])
def test_accuracy_is_the_mean_reward_of_greedy_completions(conversational, batch_size, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(7)
    data = data.add_column("weight", [1.0, 2.0, 0.5, 3.0, -1.0, 0.25, 4.0])
    batches, given = [], []

    def reward(completions, prompts, weight, **_):
        batches.append(prompts)
        given.extend(completions)
        return [w * value for w, value in zip(weight, tiny.reward(completions), strict=True)]

    policy = model()
    policy.generation_config.update(do_sample=True, temperature=1.5, top_k=20)  # many models on the Hub have such
    trainer, callback = validating(
        tmp_path, policy, data=data, reward=reward, batch_size=batch_size, kl_prompts=0, **SAMPLING
    )
    config = trainer.generation_config
    settings = (config.to_dict(), dict(trainer.generation_kwargs))
    figures = callback.validate()
    assert trainer.generation_config is config and (config.to_dict(), trainer.generation_kwargs) == settings

    ids = [greedy(model(), prompt) for prompt in data["prompt"]]
    texts = tiny.tokenizer().batch_decode(ids, skip_special_tokens=True)
    # Of messages, the reward sees what it sees in training: what the tokenizer's own template reads
    expected = [[parse_response(tiny.tokenizer(), row, BEFORE)] for row in ids] if conversational else texts
    rewards = [w * value for w, value in zip(data["weight"], tiny.reward(expected), strict=True)]
    assert callback.completions[0] == texts and given == expected
    assert figures["validation/accuracy"] == pytest.approx(sum(rewards) / 7, rel=1e-12)
    assert figures["validation/length"] == sum(map(len, ids)) / 7
    assert len(set(texts)) > 3 and len(set(map(len, ids))) > 1  # else this would say little
    sizes = {2: [2, 2, 2, 1], 3: [3, 3, 1], None: [3, 3, 1]}[batch_size]
    assert list(map(len, batches)) == sizes and sum(batches, []) == list(data["prompt"])


# TRL puts the model into training mode after each generation by continuous batching; the cache is quick to set up
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 8, "max_batch_tokens": 64},
}


@pytest.mark.parametrize("settings", [{}, CONTINUOUS], ids=["generate", "continuous batching"])
def test_dropout_is_off_in_validation(settings, tmp_path, monkeypatch):
    # The divergence is sampled even where no parameter has moved, and it must be zero
    monkeypatch.setattr(InitialPolicy, "differs_from", lambda *_: True)
    trained = shaken(get_peft_model(model(), adapter(dropout=0.5)))
    trainer, callback = validating(tmp_path, trained, batch_size=2, **settings)
    assert trainer.model.training and callback.validate()["validation/kl"] == 0
    assert callback.completions[0] == greedy_texts(trained.eval(), tiny.prompts(3)["prompt"])


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


def test_the_reward_is_that_of_gsm8k_unless_another_is_given(tmp_path):
    policy = model()
    with torch.no_grad():
        for character, token in tiny.VOCABULARY.items():
            policy.lm_head.weight[token] *= 5 * character.isdigit()
    data = tiny.prompts(3)
    texts = greedy_texts(policy, data["prompt"])
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
    async def cell():  # of a notebook, which runs in an event loop
        return callback.validate()

    trainer, callback = validating(tmp_path, reward=reward, kl_prompts=0)
    figures = [callback.validate(), asyncio.run(cell())]
    accuracy = sum(tiny.reward(callback.completions[0])) / 3
    assert [line[FIGURES[0]] for line in figures] == pytest.approx([accuracy] * 2)
    assert not logged(trainer, "of validation")


def test_a_reward_function_that_returns_no_list_is_named(tmp_path):
    def scalar(completions, **_):
        return 0.5

    _, callback = validating(tmp_path, data=tiny.prompts(2), reward=scalar, kl_prompts=0)
    with pytest.raises(ValueError, match="The reward function 'scalar' returned 0.5 of type float"):
        callback.validate()


# Turns


class KeepingTurns(ValidationCallback):
    def _complete(self, rows):
        self.last = super()._complete(rows)
        return self.last


def test_tools_are_called_and_what_they_wrote_is_nobodys_policy(tmp_path):
    """One call that works, one that fails, one answer at once."""
    first, second = [call("add", a=2, b=3), call("add", a=2, c=3), "no idea"], ["5 it is", "sorry"]
    seen, policy, data = [], model(), tiny.conversational_prompts(3)

    def reward(completions, **_):
        seen.extend(completions)
        return [float(len(messages)) for messages in completions]

    settings = {"options": {"tools": [add]}, "max_completion_length": 128, "callback": KeepingTurns}
    kind = scripted(ISOPOTrainer, [first, second])
    trainer, callback = validating(tmp_path, policy, data=data, reward=reward, kind=kind, **settings)
    shaken(policy)
    figures = callback.validate()
    assert [len(messages) for messages in seen] == [3, 3, 1] and figures["validation/accuracy"] == 7 / 3
    assert seen[0][1]["content"] == "5" and "error" in seen[1][1]["content"]
    assert not any(name.startswith(("tools/", "completions/")) for name in trainer._metrics["eval"])
    kl, length = 0.0, 0
    said = [
        first[0] + tiny.EOS + second[0] + tiny.EOS,
        first[1] + tiny.EOS + second[1] + tiny.EOS,
        first[2] + tiny.EOS,
    ]
    for text, prompt, ids, mask in zip(said, *callback.last[:3], strict=True):
        own = torch.tensor(mask).bool()
        assert tiny.tokenizer().decode(torch.tensor(ids)[own]) == text
        then, now = (training.log_probabilities(each, prompt, ids)[own] for each in (model(), policy))
        kl += ((then - now).exp() - 1 - (then - now)).sum().item()
        length += int(own.sum())
    assert figures["validation/length"] == length / 3
    assert figures["validation/kl"] == pytest.approx(kl / 3, rel=1e-4)


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_environments_begin_anew_and_the_reward_function_sees_them(tmp_path):
    def reward(environments, **_):
        return [each.get_reward() for each in environments]

    texts = [[call("up", by=1), call("up", by=4), "nothing"], ["done"]]
    settings = {"options": {"environment_factory": Counter}, "max_completion_length": 96, "kl_prompts": 0}
    data, kind = tiny.conversational_prompts(3), scripted(ISOPOTrainer, texts)
    _, callback = validating(tmp_path, data=data, reward=reward, kind=kind, **settings)
    for _ in range(2):
        assert callback.validate()["validation/accuracy"] == pytest.approx(0.5 / 3)


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


def test_the_default_reward_is_refused_where_nothing_says_what_is_right(tmp_path):
    with pytest.raises(ValueError, match=r"columns \['prompt'\].*gsm8k_reward.*needs a column `answer`"):
        ValidationCallback(training.build(tmp_path), tiny.prompts(3).select_columns(["prompt"]))


def test_a_rollout_function_is_refused_which_nobody_can_tell_to_be_greedy(tmp_path):
    trainer = training.build(tmp_path)
    trainer.rollout_func = print
    with pytest.raises(ValueError, match="completes prompts greedily.*pass an `eval_dataset`"):
        ValidationCallback(trainer, tiny.prompts(2), tiny.reward)
