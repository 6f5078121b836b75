"""Where ISOPO must change nothing: rule `none`, and the invariances that every rule keeps."""

import copy

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import oracle, tiny


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
}


def grpo(model, tmp_path, **settings):
    args = GRPOConfig(str(tmp_path), **{**SETTINGS, **settings})
    return ready(GRPOTrainer(model, tiny.reward, args, tiny.prompts(8), processing_class=tiny.tokenizer()))


def isopo(model, tmp_path, peft_config=None, **settings):
    args = ISOPOConfig(str(tmp_path), **{**SETTINGS, **settings})
    return ready(
        ISOPOTrainer(
            model, tiny.reward, args, tiny.prompts(8), processing_class=tiny.tokenizer(), peft_config=peft_config
        )
    )


def ready(trainer):
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def gradients(trainer, batches):
    trainer.model.zero_grad()
    for batch in batches:
        trainer.compute_loss(trainer.model, batch.for_trl()).backward()
        if isinstance(trainer, ISOPOTrainer):
            trainer.isopo.end()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def batch_of(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (2, n), generator=generator).tolist()
    batch = oracle.random_batch(*lengths, 100, seed=seed)
    batch.advantages = batch.advantages.float()
    return batch


def assert_close(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        difference = (left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-12)
        assert difference < tolerance, f"{name}: {difference}"


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "phi3"])
def test_rule_none_gives_the_gradient_of_grpo_for_every_parameter(family, loss_type, tmp_path):
    batch = batch_of(4)
    expected = gradients(grpo(tiny.model(family), tmp_path, loss_type=loss_type), [batch])
    actual = gradients(isopo(tiny.model(family), tmp_path, rule="none", loss_type=loss_type), [batch])
    assert_close(actual, expected)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": False}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_rule_none_trains_to_the_weights_of_grpo(family, settings, tmp_path):
    """Three optimizer steps of real training, generation included."""
    settings = {**settings, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "save_strategy": "no"}
    trainers = []
    for make, rule in ((grpo, {}), (isopo, {"rule": "none"})):  # each constructor seeds the generations of its run
        trainers.append(make(tiny.model(family), tmp_path, **rule, **settings))
        trainers[-1].train()
    expected, actual = (dict(trainer.model.named_parameters()) for trainer in trainers)
    start = dict(tiny.model(family).named_parameters())
    assert_close(actual, expected)
    assert all(not torch.equal(actual[name], start[name]) for name in start)
    losses = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_coefficients_of_the_relative_scale_do_not_see_a_constant_in_the_loss(rule, tmp_path):
    """`dr_grpo` divides by `max_completion_length`: a constant, and nothing else."""
    batch = batch_of(4)
    small, large = (
        gradients(
            isopo(tiny.model("llama"), tmp_path, rule=rule, loss_type="dr_grpo", max_completion_length=length), [batch]
        )
        for length in (8, 800)
    )
    assert_close({name: 100 * g for name, g in large.items()}, small, tolerance=1e-4)


@pytest.mark.parametrize("rule", ["none", "euclidean"])
def test_the_cut_into_microbatches_does_not_matter_to_rules_that_look_at_one_sequence(rule, tmp_path):
    batch = batch_of(8)
    model = tiny.model("qwen3")
    whole = isopo(copy.deepcopy(model), tmp_path, rule=rule, scale="paper", per_device_train_batch_size=8)
    cut = isopo(copy.deepcopy(model), tmp_path, rule=rule, scale="paper", gradient_accumulation_steps=2)
    halves = [batch.part(slice(0, 4)), batch.part(slice(4, 8))]
    for half in halves:  # the normaliser is that of the whole generation batch
        half.extra["num_items_in_batch"] = batch.completion_mask.sum()
    assert_close(gradients(cut, halves), gradients(whole, [batch]))


def test_the_cut_does_not_matter_to_the_relative_scale_once_there_is_a_history(tmp_path):
    first, second = batch_of(8, seed=1), batch_of(8, seed=2)
    trainers = [
        isopo(tiny.model("llama"), tmp_path, rule="euclidean", per_device_train_batch_size=8),
        isopo(tiny.model("llama"), tmp_path, rule="euclidean", gradient_accumulation_steps=2),
    ]
    results = []
    for trainer, parts in zip(trainers, [[slice(0, 8)], [slice(0, 4), slice(4, 8)]], strict=True):
        for batch in (first, second):  # no optimizer step in between: the weights stay the same
            cuts = [batch.part(part) for part in parts]
            for cut in cuts:
                cut.extra["num_items_in_batch"] = batch.completion_mask.sum()
            result = gradients(trainer, cuts)
            trainer.isopo.step()
        results.append(result)
    assert_close(*results, tolerance=1e-4)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["float32 weights", "bf16 weights"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_rule_none_gives_the_gradient_of_grpo_under_autocast(family, weights, tmp_path):
    batch = batch_of(4)
    expected = gradients(grpo(tiny.model(family, dtype=weights), tmp_path, bf16=True), [batch])
    actual = gradients(isopo(tiny.model(family, dtype=weights), tmp_path, rule="none", bf16=True), [batch])
    assert_close(actual, expected, tolerance=0.05)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_bf16_loses_no_more_than_plain_grpo_does(lora, autocast, tmp_path):
    """
    bf16 keeps 8 bits; what the tiny model's plain gradient loses by it is the measure. A coefficient that is a power
    of norms multiplies their errors.
    """
    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian") if lora else None
    batch = batch_of(4)
    dtype = torch.float32 if autocast else torch.bfloat16

    def errors(rule):
        settings = {"rule": rule, "fisher_samples": 10_000}
        exact = gradients(isopo(tiny.model("qwen3"), tmp_path, peft_config, **settings), [batch])
        trainer = isopo(tiny.model("qwen3", dtype=dtype), tmp_path, peft_config, bf16=autocast, **settings)
        rounded = gradients(trainer, [batch])
        return {
            name: ((rounded[name].float() - exact[name]).norm() / exact[name].norm()).item()
            for name in exact
            if exact[name].norm() > 0
        }

    plain = errors("none")
    for rule, powers in {"fisher": 1, "euclidean": 1, "interacting": 2, "fig4": 5}.items():
        for name, error in errors(rule).items():
            bound = (1 + powers) * plain[name] + 0.03
            assert error < bound, f"{rule}, {name}: {error}, plain {plain[name]}"


def test_the_shorter_last_accumulation_window_is_not_mistaken_for_larger_gradients(tmp_path):
    """TRL divides the loss by the window's own length, so that a short window makes as large a step as a full one."""
    trainer = isopo(tiny.model("llama"), tmp_path, gradient_accumulation_steps=4, fisher_samples=10_000)
    batch = batch_of(4)
    gradients(trainer, [batch] * 4)
    trainer.isopo.step()
    full = gradients(trainer, [batch] * 4)
    trainer.isopo.step()
    trainer.current_gradient_accumulation_steps = 1
    batch.extra["num_items_in_batch"] = batch.completion_mask.sum()
    short = gradients(trainer, [batch])
    # dapo's own normaliser follows the window as well
    assert_close(short, full, tolerance=1e-4)
