"""
Every kind of adapter of PEFT's, in the trainer: exact against the oracle in float64, or refused in a way that helps.

The table in `docs/adapters.md` has one line for each of them and is held against what is found here; `python -m
tests.gradients.test_peft` writes it.
"""

import dataclasses
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)

from isopo_trl import ISOPO
from tests import oracle, tiny, training


PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
LINEAR = ["q_proj", "v_proj", "up_proj"]


def lora(**settings):
    return LoraConfig(**{"r": 2, "target_modules": LINEAR, **settings})


def virtual_tokens(kind, **settings):
    return kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)


# What the table calls it: the configuration
METHODS = {
    "LoRA": lambda: lora(),
    "rsLoRA": lambda: lora(use_rslora=True),
    "PiSSA": lambda: lora(init_lora_weights="pissa"),
    "OLoRA": lambda: lora(init_lora_weights="olora"),
    "LoRA with biases (`bias`, `lora_bias`)": lambda: lora(bias="lora_only", lora_bias=True),
    "LoRA with `modules_to_save`": lambda: lora(modules_to_save=["lm_head", "embed_tokens"]),
    "LoRA on the embedding": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
    "LoRA on the LM head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "LoRA with `trainable_token_indices`": lambda: lora(trainable_token_indices=[5, 7, 9]),
    "DoRA": lambda: lora(use_dora=True),
    "DoRA on the embedding": lambda: lora(use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    "AdaLoRA": lambda: AdaLoraConfig(init_r=4, target_r=2, target_modules=LINEAR, total_step=10),
    "trainable tokens": lambda: TrainableTokensConfig(token_indices=[5, 7, 9], target_modules=["embed_tokens"]),
    "IA3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: VeraConfig(r=2, target_modules=["q_proj"]),
    "LoHa": lambda: LoHaConfig(r=2, target_modules=LINEAR),
    "LoKr": lambda: LoKrConfig(r=2, target_modules=LINEAR),
    "OFT": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "BOFT": lambda: BOFTConfig(boft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "HRA": lambda: HRAConfig(r=2, target_modules=["q_proj"]),
    "norms (`LNTuningConfig`)": lambda: LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "prompt tuning": lambda: virtual_tokens(PromptTuningConfig),
    "P-tuning": lambda: virtual_tokens(PromptEncoderConfig, encoder_hidden_size=8),
    "prefix tuning": lambda: virtual_tokens(PrefixTuningConfig),
}
VIRTUAL = ("prompt tuning", "P-tuning", "prefix tuning")


def adapted(method, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = dataclasses.replace(METHODS[method](), **changes)
        model = get_peft_model(tiny.model("qwen2", tie=False, dtype=torch.float64), config).double()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:  # many begin at zero, where others have no gradient
                    p.add_(0.1 * torch.randn_like(p))
    return model


def row(method, folder, rule="fisher", reentrant=None):
    """Its line in the table; raises if a gradient is not that of the definition."""
    model = adapted(method)
    checkpointing = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    settings = {"rule": rule, "fisher_samples": 10_000, "gradient_checkpointing": reentrant is not None}
    try:
        trainer = training.prepared(training.build(folder, model, **settings, **checkpointing))
    except ValueError as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        by = "ISOPO" if "isopo_trl" in raised_in else "TRL"
        return f"| {method} | refused by {by}: {str(error).split(': ')[0]} | |"
    # Without padding on the left: PEFT's virtual tokens stand in front of it
    prompts = [3, 3, 3] if method in VIRTUAL else [3, 1, 4]
    batch = oracle.random_batch(prompts, [5, 6, 1], 100)
    if reentrant is not None:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trainer.model.enable_input_require_grads()
    _, found = training.gradients(trainer, batch.for_trl())
    layers = trainer.isopo.layers
    whole = {
        layer.name: [holder.get_parameter(name) for holder, name in layer.places]
        for layer in layers
        if layer.kind == "any module"
    }
    trainer.isopo.detach()
    model.gradient_checkpointing_disable()
    inputs = (lambda s, columns: {}) if method in VIRTUAL else None
    G = oracle.position_gradients(model, batch, oracle.token_weights(batch), whole=whole, inputs=inputs)
    expected = oracle.expected_gradients(model, G, batch, None, rule, whole=whole)
    model.zero_grad()
    for name, p in model.named_parameters():
        p.grad = found.get(name)
    error, name = oracle.worst_error(model, expected)
    assert error < 1e-9, f"{method}, {name}: {error}"
    kinds = ", ".join(sorted({f"`{layer.kind}`" for layer in layers}))
    return f"| {method} | exact | {kinds} |"


# LoRA but for how it begins or what it is multiplied by, and adapters that are taken as those that stay are
RARE = ("rsLoRA", "PiSSA", "OLoRA", "BOFT", "HRA", "AdaLoRA", "P-tuning", "LoKr", "DoRA on the embedding")


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m in RARE)) for m in METHODS])
def test_the_table_of_adapters_is_what_they_do(method, tmp_path):
    assert row(method, tmp_path) in PAGE.read_text().splitlines()


def test_the_table_of_adapters_has_no_other_line():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(METHODS)


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(("rule", "reentrant"), [("fig4", False), ("interacting", True), ("none", None)])
@pytest.mark.parametrize("method", METHODS)
def test_adapters_under_other_rules_and_checkpointing(method, rule, reentrant, tmp_path):
    if method in VIRTUAL and reentrant is not None:
        pytest.skip("see below")
    row(method, tmp_path, rule, reentrant)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(("method", "reentrant"), [("DoRA", True), ("IA3", False)])
def test_gradient_checkpointing_changes_nothing(method, reentrant, tmp_path):
    assert "exact" in row(method, tmp_path, "interacting", reentrant)


@pytest.mark.usefixtures("float64_throughout")
def test_virtual_tokens_under_checkpointing(tmp_path):
    assert "exact" in row("prompt tuning", tmp_path, "fisher", False)
    with pytest.raises(RuntimeError, match="use_reentrant.: False"):
        row("prompt tuning", tmp_path, "fisher", True)


@pytest.mark.parametrize("method", ["DoRA", "prefix tuning"])
def test_adapters_train(method, tmp_path):
    model = get_peft_model(tiny.model("qwen2", tie=False), METHODS[method]())
    settings = {"gradient_checkpointing": False} if method == "prefix tuning" else {}
    training.train(training.build(tmp_path, model, **settings), still=("lora_A",))


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("both", [False, True], ids=["one active", "both active"])
def test_several_adapters(both):
    """Those that are active are trained, each with coefficients of its own."""
    model = adapted("LoRA")
    model.add_adapter("second", lora(use_dora=True))
    model = model.double()
    model.base_model.set_adapter(["default", "second"] if both else ["second"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "second" in name and "lora_B" in name:
                p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p))
    isopo = ISOPO(model, "fisher", fisher_samples=10_000)
    assert {"default" in row["parameter"] for row in isopo.coverage()} == ({False, True} if both else {False})
    check_dora(model, isopo)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(("bias", "rule"), [("lora_only", "fisher"), ("all", "interacting")])
def test_trained_biases_beside_dora(bias, rule):
    """Without dropout, PEFT subtracts the bias from what the base layer returns, so that it is read in two places."""
    model = adapted("DoRA", bias=bias)
    isopo = ISOPO(model, rule, fisher_samples=10_000)
    assert sum("q_proj.base_layer.bias" in row["parameter"] for row in isopo.coverage()) == 2

    def with_dropout():  # of nothing: then the oracle finds the bias in one place
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.0)
        model.train()

    check_dora(model, isopo, with_dropout)


@pytest.mark.usefixtures("float64_throughout")
def test_base_layer_that_is_trained_whole_beside_dora_is_refused():
    model = adapted("DoRA", bias="lora_only")
    model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight").requires_grad_(True)
    with pytest.raises(RuntimeError, match="freeze one of the two"):
        check_dora(model, ISOPO(model))


def check_dora(model, isopo, before_oracle=lambda: None):
    """Gradients of a microbatch against the oracle, with gradients per sequence for the magnitudes."""
    batch = oracle.random_batch([3, 1, 4], [5, 6, 1], 100)
    weights = oracle.token_weights(batch)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()
    found = {p: p.grad for p in model.parameters()}
    isopo.detach()
    before_oracle()
    magnitudes = {n: [p] for n, p in model.named_parameters() if p.requires_grad and "magnitude" in n}
    G = oracle.position_gradients(model, batch, weights, whole=magnitudes)
    expected = oracle.expected_gradients(model, G, batch, None, isopo.rule.name, whole=magnitudes)
    for p, gradient in found.items():
        p.grad = gradient
    error, name = oracle.worst_error(model, expected)
    assert error < 1e-9, f"{name}: {error}"


def write_table():
    """Put the lines into the page in place of those that are there."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        lines = [row(method, os.path.join(folder, str(i))) for i, method in enumerate(METHODS)]
    text = PAGE.read_text().splitlines()
    table = [i for i, line in enumerate(text) if line.startswith("|")]
    PAGE.write_text("\n".join([*text[: table[0] + 2], *lines, *text[table[-1] + 1 :]]) + "\n")


if __name__ == "__main__":
    sys.exit(write_table())
