"""The test that decides: every parameter's gradient is what the definition says, in float64."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import oracle, tiny


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mistral", "phi3"]
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting", "none"]


@pytest.fixture(autouse=True)
def everything_in_float64(monkeypatch):
    """Models and TRL's fused head go to float32 in places, whatever the model is in; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


def build(family, lora=False, tie=None):
    model = tiny.model(family, tie=tie, dtype=torch.float64)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules="all-linear"))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        model.to(torch.float64)
    return model


def trainer_for(model, tmp_path, **settings):
    settings = {"gradient_checkpointing": False, "fisher_samples": 7, **settings}
    args = ISOPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        **settings,
    )
    trainer = ISOPOTrainer(model, tiny.reward, args, tiny.prompts(4), processing_class=tiny.tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def backward(trainer, batch):
    """Loss and gradients as the trainer makes them; returns the sampled rows."""
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch.for_trl()).backward()
    samples = trainer.isopo.current.samples
    trainer.isopo.end()
    return None if samples is None else samples.rows[samples.present]


BATCH = functools.partial(oracle.random_batch, [3, 1, 5, 4], [6, 8, 1, 4], 100)


@functools.cache
def reference(family, lora, tie=None):
    """The oracle's per-position gradients, the same for all rules."""
    model = build(family, lora, tie)
    batch = BATCH()
    return oracle.position_gradients(model, batch, oracle.token_weights(batch))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_is_the_definition(family, lora, rule, tmp_path):
    model = build(family, lora)
    trainer = trainer_for(model, tmp_path, rule=rule)
    batch = BATCH()
    rows = backward(trainer, batch)
    expected = oracle.expected_gradients(model, reference(family, lora), batch, rows, rule)
    error, name = oracle.worst_error(model, expected)
    assert error < 1e-9, f"{name}: {error}"
