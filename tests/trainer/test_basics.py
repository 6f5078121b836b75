"""What TRL's trainer takes, this one takes: models, data sets, rewards, evaluation, logging, model cards."""

import asyncio
import glob
import inspect
import logging
import math

import pandas
import pytest
import torch
import yaml
from datasets import Dataset, IterableDataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


def length(completions, **_):
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]


def none_for_some(completions, **_):
    return [value if row % 2 else None for row, value in enumerate(tiny.reward(completions))]


def always_none(completions, **_):
    return [None] * len(completions)


async def slow_reward(completions, **_):
    await asyncio.sleep(0.001)
    return tiny.reward(completions)


def reward_model(seed=0):
    """A sequence classification model with random weights, as a reward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification(Qwen2Config(**tiny.SIZE, **tiny.IDS, num_labels=1))


# Models and data


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_model_given_as_path_trains(family, tmp_path):
    path = tiny.save(tmp_path / "model", family)
    trainer = training.build(tmp_path, path, options={"processing_class": None})
    training.train(trainer)


@pytest.fixture
def bf16_is_available(monkeypatch):
    """TRL's default of bf16 asks for a GPU before anything else is known; the CPU computes in it as well."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)


def test_default_arguments_train(tmp_path, monkeypatch, bf16_is_available):
    monkeypatch.chdir(tmp_path)
    path = tiny.save("model", "qwen3")
    trainer = ISOPOTrainer(path, tiny.reward, train_dataset=tiny.prompts(8))
    assert isinstance(trainer.args, ISOPOConfig) and trainer.args.rule == "fisher" and trainer.args.bf16
    assert trainer.args.output_dir == "model-ISOPO"
    trainer.args.max_steps = 1
    trainer.max_completion_length = trainer.generation_config.max_new_tokens = 4
    trainer.train()
    assert trainer.state.global_step == 1


def test_default_arguments_name_a_model_object_by_its_path(tmp_path, monkeypatch, bf16_is_available):
    monkeypatch.chdir(tmp_path)
    model = tiny.model("qwen3")
    model.config._name_or_path = "somebody/something"
    trainer = ISOPOTrainer(model, tiny.reward, train_dataset=tiny.prompts(8), processing_class=tiny.tokenizer())
    assert trainer.args.output_dir == "something-ISOPO"


def test_conversational_prompts_train(tmp_path):
    training.train(training.build(tmp_path, data=tiny.conversational_prompts(6)))


@pytest.mark.parametrize("conversational", [False, True])
def test_iterable_dataset_trains(conversational, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(6)
    stream = IterableDataset.from_generator(lambda: iter(data.to_list()))
    training.train(training.build(tmp_path, data=stream, gradient_accumulation_steps=2))


def test_worker_processes_of_the_data_loader_train(tmp_path):
    training.train(training.build(tmp_path, dataloader_num_workers=1))


def test_columns_of_the_dataset_reach_the_reward(tmp_path):
    seen = []

    def reward(completions, answer, trainer_state, **_):
        seen.append((answer, trainer_state.global_step))
        return tiny.reward(completions)

    data = Dataset.from_dict({"prompt": ["one", "three", "five!"], "answer": [1, 2, 3]})
    training.train(training.build(tmp_path, data=data, reward=reward))
    assert [step for _, step in seen] == [0, 1] and all(len(set(answers)) == 1 for answers, _ in seen)


# Rewards


@pytest.mark.parametrize("conversational", [False, True])
def test_several_rewards_are_weighted(conversational, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(6)
    trainer = training.build(tmp_path, data=data, reward=[tiny.reward, length], reward_weights=[0.7, 0.3])
    for line in training.train(trainer):
        mean = 0.7 * line["rewards/reward/mean"] + 0.3 * line["rewards/length/mean"]
        assert line["reward"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_aggregations_of_rewards_train(aggregation, tmp_path):
    training.train(training.build(tmp_path, reward=[tiny.reward, length], multi_objective_aggregation=aggregation))


def test_reward_of_none_leaves_a_completion_to_the_other_reward(tmp_path):
    lines = training.train(training.build(tmp_path, reward=[none_for_some, tiny.reward]))
    assert all(math.isfinite(line["rewards/none_for_some/mean"]) for line in lines)


def test_rewards_of_none_everywhere_move_nothing(tmp_path, caplog):
    trainer = training.build(tmp_path, reward=always_none)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        trainer.train()
    assert "All reward functions returned None" in caplog.text
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_synchronous_and_asynchronous_rewards_train_together(tmp_path):
    lines = training.train(training.build(tmp_path, reward=[tiny.reward, slow_reward]))
    for line in lines:
        assert line["rewards/slow_reward/mean"] == line["rewards/reward/mean"]


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_model_trains(conversational, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(6)
    options = {"reward_processing_classes": [tiny.tokenizer(), None]}
    rewards = [reward_model(), tiny.reward]
    weights = [p.detach().clone() for p in rewards[0].parameters()]
    trainer = training.build(tmp_path, data=data, reward=rewards, options=options)
    training.train(trainer)
    assert all(torch.equal(p, old) for p, old in zip(trainer.reward_funcs[0].parameters(), weights, strict=True))


def test_wrong_number_of_reward_processing_classes_is_refused(tmp_path):
    rewards = [reward_model(0), reward_model(1)]
    options = {"reward_processing_classes": tiny.tokenizer()}
    with pytest.raises(ValueError, match="must match"):
        training.build(tmp_path, reward=rewards, options=options)


def test_metrics_and_columns_of_a_reward_are_logged(tmp_path):
    def reward(completions, log_metric, log_extra, **_):
        log_metric("half", 0.5)
        log_extra("size", [len(text) for text in completions])
        return tiny.reward(completions)

    trainer = training.build(tmp_path, reward=reward, log_completions=True)
    assert all(line["half"] == 0.5 for line in training.train(trainer))
    files = sorted(glob.glob(str(tmp_path / "completions" / "*.parquet")))
    assert len(files) == 2
    table = pandas.read_parquet(files[-1])
    assert {"step", "prompt", "completion", "reward", "size", "advantage"} <= set(table.columns) and len(table) == 3


# Evaluation and callbacks


@pytest.mark.parametrize("num_generations_eval", [None, 1])
def test_evaluation_during_training_leaves_isopo_alone(num_generations_eval, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "eval_on_start": True}
    trainer = training.build(
        tmp_path,
        num_generations_eval=num_generations_eval,
        loss_type="grpo",
        options={"eval_dataset": tiny.prompts(2)},
        **settings,
    )
    training.train(trainer)
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    for line in evaluations:
        assert math.isfinite(line["eval_loss"]) and math.isfinite(line["eval_reward"])
        assert not any("isopo" in name for name in line)
    assert trainer.isopo._draws == 2


def test_evaluation_does_not_change_the_training(tmp_path):
    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + row, 30, 40 + 2 * row] for row in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def figures(**settings):
        # Completions that do not depend on the random stream, from which evaluation draws as well
        options = {"eval_dataset": tiny.prompts(2), "rollout_func": rollout}
        last = training.train(training.build(tmp_path, options=options, **settings))[-1]
        return [value for name, value in last.items() if name.startswith("isopo/") or name == "grad_norm"]

    evaluated = figures(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3)
    assert evaluated == pytest.approx(figures(), rel=1e-4)


def test_evaluation_alone_reports_a_loss(tmp_path):
    trainer = training.build(tmp_path, options={"eval_dataset": tiny.prompts(3)}, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"]) and trainer.isopo.current is None


def test_callbacks_are_called_with_figures_of_isopo(tmp_path):
    class Watch(TrainerCallback):
        logs, steps = [], 0

        def on_log(self, args, state, control, logs=None, **_):
            self.logs.append(logs)

        def on_step_end(self, args, state, control, **_):
            self.steps += 1

    watch = Watch()
    training.train(training.build(tmp_path, options={"callbacks": [watch]}))
    assert watch.steps == 2 and "isopo/effective_sequences" in watch.logs[0]


def test_optimizer_of_the_user_is_used(tmp_path):
    model = tiny.model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training.train(training.build(tmp_path, model, options={"optimizers": (optimizer, None)}))


# What a user finds afterwards


def test_model_card_names_method_and_paper(tmp_path):
    trainer = training.build(tmp_path, tiny.save(tmp_path / "model", "qwen3"))
    trainer.create_model_card(model_name="a-model", dataset_name="a-dataset", tags="extra")
    text = (tmp_path / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["model_name"] == "a-model" and {"trl", "isopo", "extra"} <= set(front["tags"])
    assert "grpo" not in front["tags"]
    assert (
        "ISOPO" in body
        and "huggingface.co/papers/2512.23353" in body
        and "Proximal policy gradients without pi-old" in body
    )
    assert "abrahamsen2025isopo" in body and "GRPO" not in body


def test_saved_model_loads_without_isopo(tmp_path):
    trainer = training.build(tmp_path)
    training.train(trainer)
    trainer.save_model(tmp_path / "saved")
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved")
    for (name, p), q in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_trainer_is_a_drop_in_for_trl():
    assert issubclass(ISOPOTrainer, GRPOTrainer)
    assert ISOPOTrainer._tag_names == ["trl", "isopo"]


def test_a_checkpoint_of_another_trainer_is_refused_with_what_to_do(tmp_path):
    settings = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": 4, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 4, "save_steps": 1}
    data, tokenizer = tiny.prompts(8), tiny.tokenizer()
    args = GRPOConfig(str(tmp_path), **settings)
    GRPOTrainer(tiny.model("llama"), tiny.reward, args, data, processing_class=tokenizer).train()
    args = ISOPOConfig(str(tmp_path), **{**settings, "max_steps": 2})
    trainer = ISOPOTrainer(tiny.model("llama"), tiny.reward, args, data, processing_class=tokenizer)
    with pytest.raises(FileNotFoundError, match="isopo_state.pt.*start a new run"):
        trainer.train(resume_from_checkpoint=True)


def test_the_state_is_in_the_checkpoint_before_older_checkpoints_go(tmp_path):
    settings = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": 4, "max_steps": 3}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 4, "save_steps": 1, "save_total_limit": 1}
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folders = sorted(tmp_path.glob("checkpoint-*"))
            seen.append([(folder / "isopo_state.pt").exists() for folder in folders])

    ISOPOTrainer(
        tiny.model("llama"),
        tiny.reward,
        ISOPOConfig(str(tmp_path), **settings),
        tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        callbacks=[Look()],
    ).train()
    assert len(seen) == 3 and all(all(states) and states for states in seen)


def test_the_constructor_shows_the_arguments_of_grpo():
    assert inspect.signature(ISOPOTrainer) == inspect.signature(GRPOTrainer)


def test_a_multiplier_out_of_proportion_is_reported_once_by_the_number_of_its_step(tmp_path, caplog, monkeypatch):
    class Lower(TrainerCallback):
        """After the first step, any multiplier is out of proportion."""

        def on_step_end(self, args, state, control, **kwargs):
            monkeypatch.setattr("isopo_trl.isopo.OUT_OF_PROPORTION", 0.01)

    training.build(tmp_path, max_steps=3, options={"callbacks": [Lower()]}).train()
    (said,) = [record.message for record in caplog.records if "multiplier" in record.message]
    assert said.startswith("In step 2, ") and "regularization=1 (it is 0.1)" in said


@pytest.mark.parametrize(("rule", "regularization"), [("interacting", 1e-4), ("interacting", 1e6), ("fisher", 1e6)])
def test_everything_moves_at_the_limits_of_lambda(rule, regularization, tmp_path):
    training.train(training.build(tmp_path, rule=rule, regularization=regularization))
