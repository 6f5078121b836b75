"""Ways to run and to train a model: checkpointing, precision, LoRA and its relatives, dropout."""

import importlib.util

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import BitsAndBytesConfig
from trl import GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import oracle, tiny, training


def lora(**settings):
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": "all-linear", **settings})


def float_batch():
    result = oracle.random_batch([3, 1, 5], [6, 5, 2], 100, advantages=[1.3, -0.7, 0.4]).for_trl()
    return {**result, "advantages": result["advantages"].float()}


# Running it


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_gradient_is_the_same_under_checkpointing(rule, adapter, use_reentrant, tmp_path):
    def gradients(**settings):
        options = {"peft_config": lora()} if adapter else {}
        trainer = training.build(tmp_path, rule=rule, options=options, **settings)
        training.prepared(trainer)
        if trainer.args.gradient_checkpointing:  # as Trainer does at the start of a run
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        return training.gradients(trainer, float_batch())[1]

    plain = gradients(gradient_checkpointing=False)
    own = gradients(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert training.distance(own, plain) < 1e-6


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_checkpointing_trains(adapter, use_reentrant, tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    options = {"peft_config": lora()} if adapter else {}
    training.train(training.build(tmp_path, options=options, max_steps=3, **settings))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_autocast_to_bf16_trains(rule, family, tmp_path):
    trainer = training.build(tmp_path, family, rule=rule, bf16=True)
    training.train(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_autocast_to_bf16_trains_lora(tmp_path):
    training.train(training.build(tmp_path, options={"peft_config": lora()}, bf16=True, max_steps=3))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_model_loaded_in_bf16_trains(adapter, family, tmp_path):
    model = tiny.model(family, dtype=torch.bfloat16)
    options = {"peft_config": lora()} if adapter else {}
    # Steps that a norm's scale of about one can see in bf16
    training.train(training.build(tmp_path, model, options=options, bf16=True, learning_rate=0.1, max_steps=3))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_cast_to_float32_trains(dtype, tie, tmp_path):
    model = tiny.model("gemma2", tie=tie, dtype=dtype)
    settings = {"cast_lm_head_to_fp32": True, "bf16": dtype == torch.bfloat16, "learning_rate": 0.1}
    trainer = training.build(tmp_path, model, **settings)
    training.train(trainer)
    assert trainer.model.lm_head.weight.dtype == torch.float32


# PEFT


def test_lora_moves_adapters_and_nothing_else(tmp_path):
    trainer = training.build(tmp_path, options={"peft_config": lora()})
    assert isinstance(trainer.model, PeftModel)
    training.train(trainer)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_default_lora_trains(family, tmp_path):
    training.train(training.build(tmp_path, family, options={"peft_config": LoraConfig()}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ready_peft_model_trains(checkpointing, tmp_path):
    model = get_peft_model(tiny.model("qwen3"), lora())
    training.train(training.build(tmp_path, model, gradient_checkpointing=checkpointing))


LORA = [
    {"use_rslora": True},
    {"lora_bias": True},
    {"bias": "lora_only"},
    {"bias": "all"},
    {"init_lora_weights": "pissa"},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head", "embed_tokens"]},
    {"modules_to_save": ["norm"]},
    {"rank_pattern": {"q_proj": 4}, "layers_to_transform": [1], "target_modules": ["q_proj", "v_proj"]},
    {"task_type": TaskType.CAUSAL_LM},
]


def name_of(settings):
    return " ".join(f"{name}={value}" for name, value in settings.items())


@pytest.mark.parametrize("settings", [*LORA, {"lora_dropout": 0.2}], ids=name_of)
def test_lora_setting_trains(settings, tmp_path):
    training.train(training.build(tmp_path, "qwen2", options={"peft_config": lora(**settings)}))


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 23).view(2, 10)).logits


@pytest.mark.parametrize("name", ["pissa", "olora", "pissa_niter_4"])
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


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_reference_without_the_part_that_an_adapter_took_is_refused(name, tmp_path):
    options = {"peft_config": lora(init_lora_weights=name)}
    with pytest.raises(ValueError, match=f"init_lora_weights='{name}'.*beta=0.1.*get_peft_model.*beta=0"):
        training.build(tmp_path, "qwen2", options=options, beta=0.1)


@pytest.mark.parametrize("settings", LORA, ids=name_of)
def test_rule_none_has_the_gradient_of_grpo_with_lora(settings, tmp_path):
    def gradients(kind, **rule):
        trainer = training.build(tmp_path, "qwen2", kind, options={"peft_config": lora(**settings)}, **rule)
        with torch.no_grad():
            for name, p in trainer.model.named_parameters():
                if "lora_B" in name and name.endswith("weight"):
                    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
        return training.gradients(training.prepared(trainer), float_batch())[1]

    assert training.distance(gradients(ISOPOTrainer, rule="none"), gradients(GRPOTrainer)) < 1e-5


def test_dropout_of_lora_is_active_in_the_loss(tmp_path):
    trainer = training.prepared(training.build(tmp_path, options={"peft_config": lora(lora_dropout=0.5)}))
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    one, other = (training.gradients(trainer, float_batch())[1] for _ in range(2))
    assert training.distance(one, other) > 0.01


def test_disable_dropout_switches_dropout_off(tmp_path):
    options = {"peft_config": lora(lora_dropout=0.5)}
    trainer = training.build(tmp_path, options=options, disable_dropout=True)
    training.train(trainer)
    dropouts = [module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts and not any(dropouts)


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}], ids=["factors", "with head"])
def test_only_the_active_adapter_moves(extra, tmp_path):
    model = get_peft_model(tiny.model("qwen3"), lora(**extra))
    model.add_adapter("other", lora(r=3, **extra))
    model.set_adapter("other")
    trainer = training.build(tmp_path, model)
    trained = {name for row in trainer.isopo.coverage() for name in [row["parameter"]]}
    assert trained and all(".other." in name for name in trained)
    training.train(trainer)


def test_adapter_loaded_from_disk_trains(tmp_path):
    get_peft_model(tiny.model("qwen3"), lora()).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny.model("qwen3"), tmp_path / "adapter", is_trainable=True)
    training.train(training.build(tmp_path, model))


def test_model_with_frozen_parts_trains_the_rest(tmp_path):
    model = tiny.model("qwen3")
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1" in name or "lm_head" in name)
    training.train(training.build(tmp_path, model))


def test_frozen_head_is_left_alone(tmp_path):
    model = tiny.model("qwen2")
    model.lm_head.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    training.train(training.build(tmp_path, model))


@pytest.mark.parametrize(
    "target",
    [
        None,
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]},
    ],
    ids=["full", "attention", "all-linear", "experts and router"],
)
def test_a_mixture_of_experts_trains(target, tmp_path):
    options = {} if target is None else {"peft_config": lora(**target)}
    training.train(training.build(tmp_path, "qwen3_moe", options=options, router_aux_loss_coef=0.0))


def test_detached_model_is_a_plain_model_again(tmp_path):
    trainer = training.build(tmp_path)
    assert isinstance(trainer, ISOPOTrainer)
    training.train(trainer)
    trainer.isopo.detach()
    patched = [name for name, module in trainer.model.named_modules() if "forward" in module.__dict__]
    # What is left is TRL's: the forward of the whole model, with its fused head
    assert patched == [""]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_quantised_base_layers_are_left_alone_under_lora(tmp_path):
    args = ISOPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
    )
    trainer = ISOPOTrainer(
        tiny.save(tmp_path / "model", "llama"),
        tiny.reward,
        args,
        tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
    )
    quantised = {n: m.weight for n, m in trainer.model.named_modules() if type(m).__name__ == "Linear4bit"}
    assert quantised and all("lora_" in row["parameter"] for row in trainer.isopo.coverage())
    before = {name: weight.clone() for name, weight in quantised.items()}
    adapters = {row["parameter"]: trainer.model.get_parameter(row["parameter"]) for row in trainer.isopo.coverage()}
    start = {name: p.clone() for name, p in adapters.items()}
    trainer.train()
    assert all(torch.equal(quantised[name], weight) for name, weight in before.items())
    assert all(torch.isfinite(p).all() and not torch.equal(p, start[name]) for name, p in adapters.items())
