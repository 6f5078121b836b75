"""Where ISOPO must change nothing: rule `none`, and the invariances that every rule keeps."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import oracle, tiny, training


def made(model, folder, kind=ISOPOTrainer, **settings):
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, **settings}
    trainer = training.build(folder, model, kind=kind, data=tiny.prompts(8), **settings)
    return training.prepared(trainer, trainer.args.gradient_accumulation_steps)


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


def halves_of(batch):
    """Two microbatches; the normaliser is that of the whole generation batch."""
    halves = [batch.part(slice(0, 4)), batch.part(slice(4, 8))]
    for half in halves:
        half.extra["num_items_in_batch"] = batch.completion_mask.sum()
    return halves


def assert_close(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        difference = (left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-12)
        assert difference < tolerance, f"{name}: {difference}"


@pytest.mark.parametrize(
    ("family", "loss_type"),
    [
        *(("llama", loss_type) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
        *(("gemma3", "grpo"), ("gpt2", "bnpo")),
    ],
)
def test_rule_none_gives_the_gradient_of_grpo_for_every_parameter(family, loss_type, tmp_path):
    batch = batch_of(4)
    expected = gradients(made(family, tmp_path, GRPOTrainer, loss_type=loss_type), [batch])
    assert_close(gradients(made(family, tmp_path, rule="none", loss_type=loss_type), [batch]), expected)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2", {"gradient_checkpointing": False}), ("gemma2", {"gradient_accumulation_steps": 2})],
)
def test_rule_none_trains_to_the_weights_of_grpo(family, settings, tmp_path):
    """Two optimizer steps of real training, generation included."""
    settings = {**settings, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    trainers = []
    for kind, rule in ((GRPOTrainer, {}), (ISOPOTrainer, {"rule": "none"})):  # each seeds the generations of its run
        trainers.append(made(family, tmp_path, kind, **rule, **settings))
        trainers[-1].train()
    expected, actual = (dict(trainer.model.named_parameters()) for trainer in trainers)
    assert_close(actual, expected)
    assert not any(torch.equal(actual[name], p) for name, p in tiny.model(family).named_parameters())
    losses = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_coefficients_of_the_relative_scale_do_not_see_a_constant_in_the_loss(rule, tmp_path):
    """`dr_grpo` divides by `max_completion_length`: a constant, and nothing else."""
    settings = {"rule": rule, "loss_type": "dr_grpo"}
    trainers = [made("llama", tmp_path, **settings, max_completion_length=length) for length in (8, 800)]
    small, large = (gradients(trainer, [batch_of(4)]) for trainer in trainers)
    assert_close({name: 100 * g for name, g in large.items()}, small, tolerance=1e-4)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # Without lambda, which refers to the microbatch's own means as long as there are no others
        ({"rule": "none"}, 1),
        ({"rule": "euclidean", "scale": "paper", "regularization": 0}, 1),
        ({"rule": "euclidean", "regularization": 0}, 2),  # once there is a history
    ],
)
def test_the_cut_into_microbatches_does_not_matter_to_rules_that_look_at_one_sequence(settings, steps, tmp_path):
    whole = made("qwen3", tmp_path, **settings, per_device_train_batch_size=8)
    cut = made("qwen3", tmp_path, **settings, gradient_accumulation_steps=2)
    for step in range(steps):  # no optimizer step in between: the weights stay the same
        batch = batch_of(8, seed=step)
        results = gradients(cut, halves_of(batch)), gradients(whole, [batch])
        whole.isopo.step()
        cut.isopo.step()
    assert_close(*results, tolerance=1e-4)


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", torch.float32), ("gemma3", torch.bfloat16)], ids=str)
def test_rule_none_gives_the_gradient_of_grpo_under_autocast(family, dtype, tmp_path):
    batch, settings = batch_of(4), {"bf16": True}
    expected = gradients(made(tiny.model(family, dtype=dtype), tmp_path, GRPOTrainer, **settings), [batch])
    actual = gradients(made(tiny.model(family, dtype=dtype), tmp_path, rule="none", **settings), [batch])
    assert_close(actual, expected, tolerance=0.05)


def test_the_shorter_last_accumulation_window_is_not_mistaken_for_larger_gradients(tmp_path):
    """TRL divides the loss by the window's own length, so that a short window makes as large a step as a full one."""
    trainer = made("llama", tmp_path, gradient_accumulation_steps=4, fisher_samples=10_000)
    batch = batch_of(4)
    for _ in range(2):
        full = gradients(trainer, [batch] * 4)
        trainer.isopo.step()
    trainer.current_gradient_accumulation_steps = 1
    # dapo's own normaliser follows the window as well
    assert_close(gradients(trainer, [batch]), full, tolerance=1e-4)


# bf16


RULES = ("none", "fisher", "interacting", "fig4")


def rounded_model(lora, dtype, seed):
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


def by_the_formula(lora, dtype, autocast, seed):
    """
    A batch, and for each rule the gradient of each parameter: the formula, in float64, on the gradients of single
    positions that plain PyTorch computes in the given precision.
    """
    generator = torch.Generator().manual_seed(seed)
    # Two tokens at least: of one alone, queries and keys have no gradient but rounding, which a rule would divide by
    batch = oracle.random_batch(*torch.randint(2, 5, (2, 3), generator=generator).tolist(), 100, seed=seed)
    batch.advantages = batch.advantages.float()
    model = rounded_model(lora, dtype, seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        G = oracle.position_gradients(model, batch, oracle.token_weights(batch), rounding=None)
    G = {name: rows.double() for name, rows in G.items()}
    expected = {rule: oracle.expected_gradients(model, G, batch, None, rule) for rule in RULES}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return batch, {rule: {name: of_rule[p] for name, p in parameters} for rule, of_rule in expected.items()}


@pytest.mark.parametrize(("autocast", "lora"), [(True, False), (False, True)], ids=["autocast-full", "weights-lora"])
def test_bf16_loses_no_more_than_plain_pytorch_does(lora, autocast, tmp_path):
    """
    What a rule makes of bf16's roundings depends on the batch: they grow where sequences cancel, and by `N / F` where
    a small `F` divides. So the measure is the rule's formula in float64 on the gradients that plain PyTorch computes
    in bf16, position by position; its error and ours are two draws from the same roundings, on whatever machine. Their
    ratio scatters around one, for a single parameter by a factor of two and more; no bound holds for one draw.

    So the ratio's logarithm is averaged over parameters and batches. The parameters of one batch share the roundings
    that come down from the head, batches share none: the mean over one batch has a standard deviation below 0.5 bits,
    that over 4 batches one below 0.25. Four of these are the one bit that is allowed: independent roundings add up in
    squares, so that a bit more is lost by four times as many of them.
    """
    dtype = torch.float32 if autocast else torch.bfloat16
    settings = {"bf16": autocast, "fisher_samples": 10_000}
    trainers = {rule: made(rounded_model(lora, dtype, seed=0), tmp_path, rule=rule, **settings) for rule in RULES}
    bits = {rule: [] for rule in RULES}
    for seed in range(4):
        batch, exact = by_the_formula(lora, torch.float32, False, seed)
        _, plain = by_the_formula(lora, dtype, autocast, seed)
        weights = rounded_model(lora, dtype, seed).state_dict()
        for rule, trainer in trainers.items():
            trainer.model.load_state_dict(weights)
            ours = gradients(trainer, [batch])
            assert ours.keys() == exact[rule].keys()
            for name, expected in exact[rule].items():
                error, measure = ((found[name].double() - expected).norm() for found in (ours, plain[rule]))
                bits[rule].append(math.log2(error / measure))
    means = {rule: sum(values) / len(values) for rule, values in bits.items()}
    assert max(means.values()) < 1, means
