"""What TRL's trainer takes, this one takes: models, data sets, rewards, evaluation, logging, optimizers."""

import inspect
import logging
import math

import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


def test_trainer_is_a_drop_in_for_trls():
    assert issubclass(ISOPOTrainer, GRPOTrainer) and ISOPOTrainer._tag_names == ["trl", "isopo"]
    assert inspect.signature(ISOPOTrainer) == inspect.signature(GRPOTrainer)


# Models and data


@pytest.fixture
def bf16_is_available(monkeypatch):
    """TRL's default of bf16 asks for a GPU before anything else is known; the CPU computes in it as well."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)


def test_default_arguments_train_a_model_given_as_path(tmp_path, monkeypatch, bf16_is_available):
    monkeypatch.chdir(tmp_path)
    trainer = ISOPOTrainer(tiny.save("model", "gemma2"), tiny.reward, train_dataset=tiny.prompts(8))
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


@pytest.mark.parametrize(("prompts", "said"), [(0, "no prompts"), (1, "1 prompt,"), (3, "3 prompts")])
@pytest.mark.parametrize("max_steps", [-1, 2])
def test_a_run_with_too_few_prompts_for_a_step_is_refused(prompts, said, max_steps, tmp_path):
    settings = {"gradient_accumulation_steps": 4, "max_steps": max_steps}
    trainer = training.build(tmp_path, data=tiny.prompts(4).select(range(prompts)), **settings)
    with pytest.raises(ValueError, match=f"train_dataset has {said}.*one generation takes 4 .*give at least 4"):
        trainer.train()
    trainer.evaluate(tiny.prompts(1))


def test_as_many_prompts_as_a_generation_takes_are_enough(tmp_path):
    training.train(training.build(tmp_path, data=tiny.prompts(4), gradient_accumulation_steps=4))


def test_iterable_dataset_trains(tmp_path):
    data = tiny.conversational_prompts(6)
    stream = IterableDataset.from_generator(lambda: iter(data.to_list()))
    training.train(training.build(tmp_path, data=stream, gradient_accumulation_steps=2))


def test_worker_processes_of_the_data_loader_train(tmp_path):
    training.train(training.build(tmp_path, dataloader_num_workers=1))


def test_optimizer_of_the_user_is_used(tmp_path):
    model = tiny.model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training.train(training.build(tmp_path, model, options={"optimizers": (optimizer, None)}))


# Rewards


def test_a_reward_is_given_columns_and_state_and_logs_metrics_and_columns(tmp_path):
    seen = []

    def reward(completions, answer, trainer_state, log_metric, log_extra, **_):
        seen.append((answer, trainer_state.global_step))
        log_metric("half", 0.5)
        log_extra("size", [len(text) for text in completions])
        return tiny.reward(completions)

    data = Dataset.from_dict({"prompt": ["one", "three", "five!"], "answer": [1, 2, 3]})
    lines = training.train(training.build(tmp_path, data=data, reward=reward, log_completions=True))
    assert [step for _, step in seen] == [0, 1] and all(len(set(answers)) == 1 for answers, _ in seen)
    assert all(line["half"] == 0.5 for line in lines)
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    table = pandas.read_parquet(files[-1])
    assert {"step", "prompt", "completion", "reward", "size", "advantage"} <= set(table.columns)
    assert len(files) == 2 and len(table) == 3


def none_for_some(completions, **_):
    return [value if row % 2 else None for row, value in enumerate(tiny.reward(completions))]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_reward_of_none_leaves_a_completion_to_the_other_reward(aggregation, tmp_path):
    rewards = [none_for_some, tiny.reward]
    lines = training.train(training.build(tmp_path, reward=rewards, multi_objective_aggregation=aggregation))
    assert all(math.isfinite(line["rewards/none_for_some/mean"]) for line in lines)


def test_rewards_of_none_everywhere_move_nothing(tmp_path, caplog):
    trainer = training.build(tmp_path, reward=lambda completions, **_: [None] * len(completions))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        trainer.train()
    assert "All reward functions returned None" in caplog.text
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name


# Evaluation


def test_evaluation_reports_its_own_figures(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "eval_on_start": True}
    options = {"eval_dataset": tiny.prompts(2)}
    trainer = training.build(tmp_path, num_generations_eval=1, options=options, **settings)
    training.train(trainer)
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    for line in evaluations:
        assert math.isfinite(line["eval_loss"]) and math.isfinite(line["eval_reward"])
        assert not any("isopo" in name for name in line)


def test_evaluation_does_not_change_the_training(tmp_path):
    def figures(**settings):
        # Completions that do not depend on the random stream, from which evaluation draws as well
        rollout = fixed_rollout(lambda row: [20 + row, 30, 40 + 2 * row])
        options = {"eval_dataset": tiny.prompts(2), "rollout_func": rollout}
        last = training.train(training.build(tmp_path, options=options, **settings))[-1]
        return [value for name, value in last.items() if name.startswith("isopo/") or name == "grad_norm"]

    evaluated = figures(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3)
    assert evaluated == pytest.approx(figures(), rel=1e-4)


# What a user finds afterwards


def test_saved_model_loads_without_isopo(tmp_path):
    trainer = training.build(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved")
    for (name, p), q in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_checkpoint_of_another_trainer_is_refused_with_what_to_do(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    training.build(tmp_path, kind=GRPOTrainer, max_steps=1, **settings).train()
    with pytest.raises(FileNotFoundError, match=r"isopo_state.pt.*start a new run"):
        training.build(tmp_path, max_steps=2, **settings).train(resume_from_checkpoint=True)


def test_the_state_is_in_the_checkpoint_before_it_is_pushed_and_older_ones_go(tmp_path):
    seen = []

    class Plain(GRPOTrainer):
        def _save_checkpoint(self, model, trial):
            seen.append((tmp_path / f"checkpoint-{self.state.global_step}" / "isopo_state.pt").exists())
            super()._save_checkpoint(model, trial)

    kind = type("Saving", (ISOPOTrainer, Plain), {})
    training.build(tmp_path, kind=kind, save_strategy="steps", save_steps=1).train()
    assert seen == [True, True]


def test_a_multiplier_out_of_proportion_is_reported_once_by_the_number_of_its_step(tmp_path, caplog, monkeypatch):
    class Lower(TrainerCallback):
        """After the first step, any multiplier is out of proportion."""

        def on_step_end(self, args, state, control, **kwargs):
            monkeypatch.setattr("isopo_trl.isopo.OUT_OF_PROPORTION", 0.01)

    training.build(tmp_path, max_steps=3, options={"callbacks": [Lower()]}).train()
    (said,) = [record.message for record in caplog.records if "multiplier" in record.message]
    assert said.startswith("In step 2, ") and "regularization=1 (it is 0.1)" in said
