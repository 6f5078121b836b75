"""On a GPU: TRL's Triton path at the head, bf16, and no waiting for the device inside the backward."""

import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import oracle, tiny


pytestmark = pytest.mark.gpu


def trainer_for(model, tmp_path, kind="isopo", **settings):
    config, trainer_class = (ISOPOConfig, ISOPOTrainer) if kind == "isopo" else (GRPOConfig, GRPOTrainer)
    args = config(
        str(tmp_path),
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        gradient_checkpointing=False,
        **{"bf16": False, **settings},
    )
    trainer = trainer_class(model, tiny.reward, args, tiny.prompts(4), processing_class=tiny.tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch_on(device):
    batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    inputs = {name: value.to(device) for name, value in batch.for_trl().items()}
    return batch, {**inputs, "advantages": inputs["advantages"].float()}


@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "euclidean", "interacting", "none"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_gradient_on_the_gpu_is_the_definition(family, rule, tmp_path):
    exact = tiny.model(family, dtype=torch.float64)
    batch, inputs = batch_on("cuda")
    # Norms go to float32, whatever the model is in
    G = oracle.position_gradients(exact, batch, oracle.token_weights(batch), rounding=1e-4)
    trainer = trainer_for(tiny.model(family), tmp_path, rule=rule, fisher_samples=10_000)
    trainer.compute_loss(trainer.model, inputs).backward()
    trainer.isopo.end()
    expected = oracle.expected_gradients(exact, G, batch, None, rule)
    gradients = dict(trainer.model.named_parameters())
    for name, p in exact.named_parameters():
        error = (gradients[name].grad.cpu().double() - expected[p]).norm() / expected[p].norm()
        assert error < 1e-3, f"{name}: {error}"


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
@pytest.mark.parametrize("token_weights", ["sampler", "p3o", "kpo", "terms"])
def test_token_weights_and_terms_on_the_gpu_are_those_on_the_cpu(token_weights, rule, lora, tmp_path):
    chosen = {"token_weights": token_weights}
    if token_weights == "terms":  # for full weights, a reference model would have to be saved
        chosen = {"entropy_coef": 0.2, "beta": 0.3 if lora else 0.0}
    gradients = {}
    for device in ("cpu", "cuda"):
        model = tiny.model("qwen3", tie=True)
        if lora:
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        settings = {"use_cpu": device == "cpu", "rule": rule, "fisher_samples": 10_000}
        trainer = trainer_for(model, tmp_path / device, **settings, **chosen)
        trainer.model.to(device)
        _, inputs = batch_on(device)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(inputs["completion_ids"].shape, generator=generator) / 2 - math.log(100)
        inputs["sampling_per_token_logps"] = inputs["ref_per_token_logps"] = noise.to(device)
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer.isopo.end()
        gradients[device] = {n: p.grad.cpu() for n, p in trainer.model.named_parameters() if p.requires_grad}
    for name, expected in gradients["cpu"].items():
        error = (gradients["cuda"][name] - expected).norm() / expected.norm()
        assert error < 1e-3, f"{name}: {error}"


def waits(trainer, inputs):
    """How often a backward pass waits for the device."""
    for _ in range(2):  # once to compile and allocate
        loss = trainer.compute_loss(trainer.model, inputs)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if isinstance(trainer, ISOPOTrainer):
            trainer.isopo.end()
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_the_backward_waits_for_the_device_no_more_often_than_grpo(rule, lora, tmp_path):
    """TRL's own backward does once, to put the scored rows back in their places."""
    _, inputs = batch_on("cuda")
    counts = []
    for kind in ("grpo", "isopo"):
        model = tiny.model("qwen3", dtype=torch.bfloat16)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        settings = {} if kind == "grpo" else {"rule": rule}
        counts.append(waits(trainer_for(model, tmp_path, kind=kind, **settings), inputs))
    assert counts[1] <= counts[0]


def test_bf16_on_the_gpu_stays_close_to_float32(tmp_path):
    _, inputs = batch_on("cuda")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = trainer_for(tiny.model("llama", dtype=dtype), tmp_path, fisher_samples=10_000)
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer.isopo.end()
        results.append(torch.cat([p.grad.float().flatten() for p in trainer.model.parameters()]))
    assert (results[1] - results[0]).norm() / results[0].norm() < 0.1
