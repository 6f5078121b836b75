"""The test that decides: every parameter's gradient is what the definition says, in float64."""

import functools
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model

import isopo_trl.layers.linear
import isopo_trl.layers.lm_head
import isopo_trl.trainer
from isopo_trl import ISOPO
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle, tiny, training


pytestmark = pytest.mark.usefixtures("float64_throughout")

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mistral", "phi3"]
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting", "none"]
TOLERANCE = 1e-9


def build(family, lora=False, tie=None, **lora_settings):
    model = tiny.model(family, tie=tie, dtype=torch.float64)
    if lora or lora_settings:
        settings = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", **lora_settings}
        model = get_peft_model(model, LoraConfig(**settings)).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def trainer_for(model, folder, **settings):
    """A trainer inside a step of one microbatch of four sequences."""
    chosen = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    chosen |= {"gradient_checkpointing": False, "fisher_samples": 7, **settings}
    return training.prepared(training.build(folder, model, data=tiny.prompts(4), **chosen))


def backward(trainer, batch):
    """Gradients as the trainer makes them, added to those there are; returns the sampled rows."""
    trainer.compute_loss(trainer.model, batch.for_trl()).backward()
    rows = training.sampled_rows(trainer.isopo.current, batch.prompt_ids.shape[1])
    trainer.isopo.end()
    return rows


def check(model, expected, tolerance=TOLERANCE):
    error, name = oracle.worst_error(model, expected)
    assert error < tolerance, f"{name}: {error}"


BATCH = functools.partial(oracle.random_batch, [3, 1, 5, 4], [6, 8, 1, 4], 100)


@functools.cache
def reference(family, lora=False, tie=None):
    """The oracle's per-position gradients, the same for all rules."""
    batch = BATCH()
    return oracle.position_gradients(build(family, lora, tie), batch, oracle.token_weights(batch))


def compare(trainer, G, rule, batch=None, rows=(), **formula):
    """Of the trainer's gradients with what the formula makes of `G`; `rows` where not those that were sampled."""
    batch = BATCH() if batch is None else batch
    sampled = backward(trainer, batch)
    rows = sampled if rows == () else rows
    check(trainer.model, oracle.expected_gradients(trainer.model, G, batch, rows, rule, **formula))


class Called(torch.nn.Linear):
    """A linear layer, of another type."""


@pytest.mark.parametrize("bias", [False, True])
def test_the_oracle_has_of_linear_layers_what_it_has_of_any_module_called_position_by_position(bias):
    found, x = [], torch.randn(1, 5, 4, dtype=torch.float64)
    for kind in (torch.nn.Linear, Called):
        torch.manual_seed(0)
        module = kind(4, 3, bias).double()
        with oracle.remembered({"": module}) as seen:
            module(x).square().sum().backward()
        found.append(oracle.at_positions(module, list(module.parameters()), seen[""], 5))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def crossed():
    """One family of full weights and one with LoRA with every rule, others with one; the rest is slow."""
    every_rule = (("qwen3", False), ("qwen2", True))
    like_others = ("llama", "mistral", "qwen3", "gemma2")  # to LoRA: linear layers without biases, one by one
    for number, family in enumerate(FAMILIES):
        for lora in (False, True):
            for place, rule in enumerate(RULES):
                alone = place == (number + 3 * lora) % len(RULES) and not (lora and family in like_others)
                quick = (family, lora) in every_rule or alone
                name = f"{family}-{'lora' if lora else 'full'}-{rule}"
                yield pytest.param(family, lora, rule, marks=[] if quick else pytest.mark.slow, id=name)


@pytest.mark.parametrize(("family", "lora", "rule"), list(crossed()))
def test_gradient_is_the_definition(family, lora, rule, tmp_path):
    compare(trainer_for(build(family, lora), tmp_path, rule=rule), reference(family, lora), rule)


@pytest.mark.parametrize(  # biases, soft caps and scales, Conv1D
    ("family", "rule", "strategy"),
    [
        *(("qwen2", "fig4", strategy) for strategy in ("ghost", "whole", "blocks")),
        *(("gemma3", "fisher", "ghost"), ("gpt2", "interacting", "blocks")),
    ],
)
def test_every_strategy_gives_the_same_gradient(family, rule, strategy, tmp_path, monkeypatch):
    for module in (isopo_trl.layers.linear, isopo_trl.layers.lm_head):
        monkeypatch.setattr(module, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(isopo_trl.layers.lm_head, "_TILE", 23 * 10)  # several tiles, the last one narrower
    monkeypatch.setattr(isopo_trl.geometry.cost, "WHOLE_LIMIT", 4 * 17 * 5)
    compare(trainer_for(build(family), tmp_path, rule=rule), reference(family), rule)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "fisher", "regularization": 0.3, "scale": "paper"},
        {"rule": "fig4", "regularization": 0.3, "keep_small": True, "scale": "relative"},
        {"rule": "fig4", "regularization": 0.3, "keep_small": True, "scale": "paper"},
        {"rule": "interacting", "regularization": 0.1, "scale": "relative"},
        {"rule": "interacting", "regularization": 0.1, "scale": "paper"},
        {"rule": "npg", "fisher_power": -0.5, "norm_power": 0.25, "regularization": 2.0, "scale": "relative"},
        {"rule": "npg", "fisher_power": -0.5, "norm_power": 0.25, "regularization": 2.0, "scale": "paper"},
        {"rule": "fisher", "fisher_samples": 3},
        {"rule": "fisher", "fisher_samples": 10_000},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_every_setting_enters_as_the_formula_says(settings, tmp_path):
    names = ("regularization", "keep_small", "scale")
    formula = {name: value for name, value in settings.items() if name in names}
    rule = (-0.5, 0.25, -2) if settings["rule"] == "npg" else settings["rule"]
    rows = None if settings.get("fisher_samples") == 10_000 else ()  # the oracle takes all real positions
    compare(trainer_for(build("qwen2"), tmp_path, **settings), reference("qwen2"), rule, rows=rows, **formula)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("reentrant", "rule"), [(False, "interacting"), (True, "fisher")])
def test_gradient_checkpointing_changes_nothing(reentrant, rule, lora, tmp_path):
    kwargs = {"use_reentrant": reentrant}
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    trainer = trainer_for(build("qwen3", lora), tmp_path, rule=rule, **settings)
    trainer.model.gradient_checkpointing_enable(kwargs)
    if not lora:
        trainer.model.enable_input_require_grads()
    compare(trainer, reference("qwen3", lora), rule)


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_all_rows_give_the_same_gradient_at_the_head(rule, tmp_path, monkeypatch):
    """Where there is neither Triton nor a CPU, TRL hands its head every row, scored or not."""
    monkeypatch.setattr(isopo_trl.trainer, "scored_rows_alone", lambda head: nullcontext())
    compare(trainer_for(build("gemma2"), tmp_path, rule=rule), reference("gemma2"), rule)


@pytest.mark.parametrize(("family", "rule"), [("llama", "fisher"), ("gpt2", "interacting")])
def test_tied_embedding_and_head_are_two_uses(family, rule, tmp_path):
    model = build(family, tie=True)
    trainer = trainer_for(model, tmp_path, rule=rule)
    kinds = [row["kind"] for row in trainer.isopo.coverage() if row["shape"][0] == model.config.vocab_size]
    assert kinds == ["embedding", "lm head"]
    compare(trainer, reference(family, False, True), rule)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_every_normalisation(loss_type, tmp_path):
    batch = BATCH()
    weights = oracle.token_weights(batch, loss_type, max_completion_length=8)
    # All tokens of a sequence have the same weight, in which its gradients are linear
    factors = (weights[:, 0] / oracle.token_weights(batch)[:, 0]).view(-1, 1, 1)
    G = {name: factors * gradients for name, gradients in reference("llama").items()}
    compare(trainer_for(build("llama"), tmp_path, loss_type=loss_type, scale="paper"), G, "fisher", scale="paper")


DEGENERATE = {
    "one sequence": ([4], [5], [-0.7]),
    "one token each": ([2, 7, 3], [1, 1, 1], [1.0, -1.0, 0.5]),
    "empty completion and zero advantage": ([2, 5, 3, 4], [6, 0, 3, 2], [0.4, 1.0, -2.0, 0.0]),
    "all zero": ([3, 4], [3, 5], [0.0, 0.0]),
}


@functools.cache
def degenerate(name):
    prompts, completions, advantages = DEGENERATE[name]
    batch = oracle.random_batch(prompts, completions, 100, advantages=torch.tensor(advantages, dtype=torch.float64))
    return batch, oracle.position_gradients(build("qwen3"), batch, oracle.token_weights(batch))


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(("fisher", name) for name in DEGENERATE),
        *((rule, "empty completion and zero advantage") for rule in ("fig4", "interacting")),
        ("interacting", "all zero"),
    ],
)
def test_degenerate_microbatches(rule, name, tmp_path):
    batch, G = degenerate(name)
    compare(trainer_for(build("qwen3"), tmp_path, rule=rule), G, rule, batch)


@functools.cache
def microbatch_of_step(step, part):
    batch = oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=10 * step + part)
    return batch, oracle.position_gradients(build("llama"), batch, oracle.token_weights(batch, "grpo", accumulation=2))


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_running_means_over_microbatches_and_steps(rule, tmp_path):
    """Three steps of two microbatches each: the oracle keeps its own running means, 0.9 of the past."""
    model, settings, means = build("llama"), {"regularization": 0.5}, None
    trainer = trainer_for(model, tmp_path, rule=rule, fisher_samples=10_000, loss_type="grpo", **settings)
    training.prepared(trainer, accumulation=2)
    for step in range(3):
        model.zero_grad()
        expected, seen = {}, [microbatch_of_step(step, part) for part in range(2)]
        for batch, G in seen:
            share = oracle.expected_gradients(model, G, batch, None, rule, histories=means, **settings)
            expected = {p: expected.get(p, 0) + gradient for p, gradient in share.items()}
            backward(trainer, batch)
        check(model, expected)
        trainer.isopo.step()
        means = updated_means(model, seen, rule, settings, means)


def updated_means(model, seen, rule, settings, means):
    updated = {}
    for name in oracle.trained_modules(model):
        sums = dict.fromkeys(EXPECTATIONS, 0.0)
        for batch, G in seen:
            V = G[name].sum(1)
            samples = G[name].reshape(-1, V.shape[1])[batch.attention_mask.reshape(-1).bool()]
            history = None if means is None else means[name]
            raw_settings = {**settings, "scale": "paper", "history": history}
            f = oracle.coefficients(V, samples, torch.ones(len(V)), rule, **raw_settings)
            F = ((samples @ V.T).square().sum(0) / samples.square().sum()).sqrt()
            N = V.norm(dim=1)
            terms = {"fisher^2": F**2, "norm^2": N**2, "relative^2": (F / N) ** 2, "fx": f * F, "x": F}
            for term, values in terms.items():
                sums[term] += values.sum().item()
        count = sum(len(batch.advantages) for batch, _ in seen)
        now = {term: total / count for term, total in sums.items()}
        updated[name] = now if means is None else {t: 0.9 * means[name][t] + 0.1 * now[t] for t in now}
    return updated


# A loop of one's own


def test_without_the_trainer_the_same_gradient():
    """On logits, with the advantages' signs in the coefficients."""
    model, batch = build("qwen2"), BATCH()
    isopo = ISOPO(model, "fisher", fisher_samples=10_000)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        (-(oracle.token_logps(model, batch) * oracle.token_weights(batch)).sum()).backward()
    check(model, oracle.expected_gradients(model, reference("qwen2"), batch, None, "fisher"))


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_packed_sequences_give_the_same_gradient_as_padded_ones(rule):
    """Two sequences in one row, told apart by `sequence_ids`; the attention mask keeps them apart too."""
    model, batch = build("llama"), BATCH()
    ids, sequence_ids, positions, weights, mask = oracle.packed(batch, oracle.token_weights(batch))
    isopo = ISOPO(model, rule, fisher_samples=10_000)
    with isopo.microbatch(batch.advantages, sequence_ids=sequence_ids):
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-(logps * weights[:, 1:]).sum()).backward()
    check(model, oracle.expected_gradients(model, reference("llama"), batch, None, rule))
