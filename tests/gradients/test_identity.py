"""Where ISOPO must change nothing: rule `none`, and the invariances that every rule keeps."""

import copy
import functools
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
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
    # Without lambda, which refers to the microbatch's own means as long as there are no others
    settings = {"rule": rule, "scale": "paper", "regularization": 0}
    whole = isopo(copy.deepcopy(model), tmp_path, **settings, per_device_train_batch_size=8)
    cut = isopo(copy.deepcopy(model), tmp_path, **settings, gradient_accumulation_steps=2)
    halves = [batch.part(slice(0, 4)), batch.part(slice(4, 8))]
    for half in halves:  # the normaliser is that of the whole generation batch
        half.extra["num_items_in_batch"] = batch.completion_mask.sum()
    assert_close(gradients(cut, halves), gradients(whole, [batch]))


def test_the_cut_does_not_matter_to_the_relative_scale_once_there_is_a_history(tmp_path):
    first, second = batch_of(8, seed=1), batch_of(8, seed=2)
    settings = {"rule": "euclidean", "regularization": 0}  # a mean of f from the first step has its lambda in it
    trainers = [
        isopo(tiny.model("llama"), tmp_path, **settings, per_device_train_batch_size=8),
        isopo(tiny.model("llama"), tmp_path, **settings, gradient_accumulation_steps=2),
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


def model_of(lora, dtype, seed):
    """Weights that bf16 holds exactly, so that what is lost is lost on the way."""
    model = tiny.model("qwen3", seed=seed)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:  # B starts at zero; here both factors have a gradient
                    p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return model.to(torch.bfloat16).to(dtype)


@functools.cache
def by_the_formula(lora, dtype, autocast, seed):
    """
    A batch, and for each rule the gradient of each parameter: the formula, in float64, on the gradients of single
    positions that plain PyTorch computes in the given precision.
    """
    generator = torch.Generator().manual_seed(seed)
    # Two tokens at least: of one alone, queries and keys have no gradient but rounding, which a rule would divide by
    lengths = torch.randint(2, 5, (2, 3), generator=generator).tolist()
    batch = oracle.random_batch(*lengths, 100, seed=seed)
    batch.advantages = batch.advantages.float()
    model = model_of(lora, dtype, seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        G = oracle.position_gradients(model, batch, oracle.token_weights(batch), rounding=None)
    G = {name: rows.double() for name, rows in G.items()}
    names = {p: name for name, p in model.named_parameters()}
    expected = {rule: oracle.expected_gradients(model, G, batch, None, rule) for rule in BF16_RULES}
    return batch, {rule: {names[p]: g for p, g in of_rule.items()} for rule, of_rule in expected.items()}


BF16_RULES = ("none", "fisher", "euclidean", "interacting", "fig4")


@pytest.mark.parametrize(
    ("autocast", "lora"),
    [
        pytest.param(True, False, id="autocast-full"),
        pytest.param(False, True, id="bf16 weights-lora"),
        pytest.param(False, False, id="bf16 weights-full", marks=pytest.mark.slow),
        pytest.param(True, True, id="autocast-lora", marks=pytest.mark.slow),
    ],
)
def test_bf16_loses_no_more_than_plain_pytorch_does(lora, autocast, tmp_path):
    """
    What a rule makes of bf16's roundings depends on the batch: they grow where sequences cancel, and by `N / F` where
    a small `F` divides. So the measure is the rule's formula in float64 on the gradients that plain PyTorch computes
    in bf16, position by position; its error and ours are two draws from the same roundings, on whatever machine. Their
    ratio scatters around one, for a single parameter by a factor of two and more; no bound holds for one draw.

    So the ratio's logarithm is averaged over parameters and batches. The parameters of one batch share the roundings
    that come down from the head, batches share none: the mean over one batch has a standard deviation below 0.5 bits,
    that over `n` batches one below `0.5 / sqrt(n)`. Five of these, for 6 batches, are the one bit that is allowed:
    independent roundings add up in squares, so that a bit more is lost by four times as many of them.
    """
    dtype = torch.float32 if autocast else torch.bfloat16
    settings = {"bf16": autocast, "fisher_samples": 10_000}
    trainers = {rule: isopo(model_of(lora, dtype, seed=0), tmp_path, rule=rule, **settings) for rule in BF16_RULES}
    bits = {rule: [] for rule in BF16_RULES}
    for seed in range(6):
        batch, exact = by_the_formula(lora, torch.float32, False, seed)
        _, plain = by_the_formula(lora, dtype, autocast, seed)
        weights = model_of(lora, dtype, seed).state_dict()
        for rule, trainer in trainers.items():
            trainer.model.load_state_dict(weights)
            ours = gradients(trainer, [batch])
            assert ours.keys() == exact[rule].keys()
            for name, expected in exact[rule].items():
                error = ((ours[name].double() - expected).norm() / expected.norm()).item()
                measure = ((plain[rule][name] - expected).norm() / expected.norm()).item()
                bits[rule].append(math.log2(error / measure))
    means = {rule: sum(values) / len(values) for rule, values in bits.items()}
    assert max(means.values()) < 1, means


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
