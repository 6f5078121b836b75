"""Ways to run and to train a model: checkpointing, precision, LoRA and its relatives, dropout."""

import importlib.util

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig

from tests import oracle, tiny, training


def lora(**settings):
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": "all-linear", **settings})


def float_batch():
    return oracle.random_batch([3, 1, 5], [6, 5, 2], 100, advantages=torch.tensor([1.3, -0.7, 0.4])).for_trl()


# Running it


@pytest.mark.parametrize(
    ("family", "rule", "adapter"),
    [("gemma3", "fisher", False), ("qwen3", "interacting", True)],
)
def test_autocast_to_bf16_trains_weights_in_float32(family, rule, adapter, tmp_path):
    options = {"peft_config": lora()} if adapter else {}
    trainer = training.build(tmp_path, family, rule=rule, bf16=True, max_steps=3, options=options)
    training.train(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("family", "adapter"), [("gemma2", False), ("qwen3", True)])
def test_model_loaded_in_bf16_trains(family, adapter, tmp_path):
    model = tiny.model(family, dtype=torch.bfloat16)
    options = {"peft_config": lora()} if adapter else {}
    # Steps that a norm's scale of about one can see in bf16
    training.train(training.build(tmp_path, model, options=options, bf16=True, learning_rate=0.1, max_steps=3))


@pytest.mark.parametrize(("dtype", "tie"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_head_cast_to_float32_trains(dtype, tie, tmp_path):
    model = tiny.model("gemma2", tie=tie, dtype=dtype)
    settings = {"cast_lm_head_to_fp32": True, "bf16": dtype == torch.bfloat16, "learning_rate": 0.1}
    trainer = training.build(tmp_path, model, **settings)
    training.train(trainer)
    assert trainer.model.lm_head.weight.dtype == torch.float32


# PEFT


def test_default_lora_moves_adapters_and_nothing_else(tmp_path):
    trainer = training.build(tmp_path, "gpt2", options={"peft_config": LoraConfig()})
    assert isinstance(trainer.model, PeftModel)
    training.train(trainer)


@pytest.mark.parametrize("from_disk", [False, True])
def test_ready_peft_model_trains(from_disk, tmp_path):
    model = get_peft_model(tiny.model("qwen3"), lora())
    if from_disk:
        model.save_pretrained(tmp_path / "adapter")
        model = PeftModel.from_pretrained(tiny.model("qwen3"), tmp_path / "adapter", is_trainable=True)
    training.train(training.build(tmp_path, model, gradient_checkpointing=from_disk))


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 23).view(2, 10)).logits


@pytest.mark.parametrize("name", ["olora", "pissa_niter_4"])
def test_reference_of_an_adapter_out_of_the_weights_is_the_model_it_was_made_of(name, tmp_path):
    """A second adapter made like the first would take its part out of the weights as well."""
    model = tiny.model("qwen2")
    initial = logits_of(model)
    model = get_peft_model(model, lora(init_lora_weights=name))
    trainer = training.build(tmp_path, model, beta=0.1, max_steps=2)
    assert model.peft_config["default"].init_lora_weights == name
    torch.testing.assert_close(logits_of(model), initial, rtol=1e-4, atol=1e-5)
    first, second = training.train(trainer)
    assert first["kl"] == 0 < second["kl"]
    model.set_adapter("ref")
    torch.testing.assert_close(logits_of(model), initial, rtol=1e-4, atol=1e-5)


def test_reference_without_the_part_that_an_adapter_took_is_refused(tmp_path):
    options = {"peft_config": lora(init_lora_weights="pissa")}
    with pytest.raises(ValueError, match=r"init_lora_weights='pissa'.*beta=0.1.*get_peft_model.*beta=0"):
        training.build(tmp_path, "qwen2", options=options, beta=0.1)


@pytest.mark.parametrize("disabled", [False, True])
def test_dropout_of_lora_is_active_in_the_loss_unless_it_is_disabled(disabled, tmp_path):
    options = {"peft_config": lora(lora_dropout=0.5)}
    trainer = training.build(tmp_path, options=options, disable_dropout=disabled)
    training.train(trainer)
    one, other = (training.gradients(training.prepared(trainer), float_batch())[1] for _ in range(2))
    assert (training.distance(one, other) > 0.01) == (not disabled)


def test_only_the_active_adapter_moves(tmp_path):
    model = get_peft_model(tiny.model("qwen3"), lora(modules_to_save=["lm_head"]))
    model.add_adapter("other", lora(r=3, modules_to_save=["lm_head"]))
    model.set_adapter("other")
    trainer = training.build(tmp_path, model)
    trained = {row["parameter"] for row in trainer.isopo.coverage()}
    assert trained and all(".other." in name for name in trained)
    training.train(trainer)


@pytest.mark.parametrize("trained", [("layers.1", "lm_head"), ("layers", "embed")], ids=["", "without the head"])
def test_model_with_frozen_parts_trains_the_rest(trained, tmp_path):
    model = tiny.model("qwen2")
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))
    training.train(training.build(tmp_path, model))


def test_detached_model_is_a_plain_model_again(tmp_path):
    trainer = training.build(tmp_path)
    trainer.train()
    trainer.isopo.detach()
    patched = [name for name, module in trainer.model.named_modules() if "forward" in vars(module)]
    assert patched == [""]  # which is TRL's: the forward of the whole model, with its fused head


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_quantised_base_layers_are_left_alone_under_lora(tmp_path):
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "peft_config": lora()}
    trainer = training.build(tmp_path / "run", tiny.save(tmp_path / "model", "llama"), options=options)
    quantised = {n: m.weight for n, m in trainer.model.named_modules() if type(m).__name__ == "Linear4bit"}
    adapters = {row["parameter"]: trainer.model.get_parameter(row["parameter"]) for row in trainer.isopo.coverage()}
    assert quantised and all("lora_" in name for name in adapters)
    before, start = ({name: p.clone() for name, p in each.items()} for each in (quantised, adapters))
    trainer.train()
    assert all(torch.equal(quantised[name], weight) for name, weight in before.items())
    assert all(torch.isfinite(p).all() and not torch.equal(p, start[name]) for name, p in adapters.items())
