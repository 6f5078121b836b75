"""
On a GPU: TRL's Triton path at the head, bf16, mixtures, adapters, and no waiting for the device inside the backward.

Where gradients of the two devices are compared, those of the CPU are held against the definition by other tests.
"""

import importlib.util
import itertools
import math
import threading
import warnings

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.geometry.cost import WHOLE_BY_KERNELS
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.integrations.autograd_thread import calling_thread
from isopo_trl.kernels import halves, launch, linear, v
from isopo_trl.kernels.coefficients import Entry
from isopo_trl.step_size import cuda_graphs, measurement, precise_forward
from isopo_trl.trl_seam.batch import Batch
from tests import oracle, tiny, training
from tests.gradients import architectures
from tests.kernels import batches
from tests.layers.harness import Holder


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


@pytest.mark.parametrize(
    ("family", "rule"),
    [  # compiling takes most of the time
        *itertools.product(("qwen3", "gpt2"), ("fisher", "npg", "fig4", "euclidean", "interacting", "none")),
        *itertools.product(("llama", "qwen2", "gemma3"), ("fisher", "interacting")),
    ],
)
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


def gradient_on(device, model, tmp_path, **settings):
    """Of one microbatch with a sampler's log-probabilities and a reference model's; `[...]` by name, on the CPU."""
    chosen = {"use_cpu": device == "cpu", "fisher_samples": 10_000, "router_aux_loss_coef": 0.0, **settings}
    trainer = trainer_for(model, tmp_path / device, **chosen)
    trainer.model.to(device)
    _, inputs = batch_on(device)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(inputs["completion_ids"].shape, generator=generator) / 2 - math.log(100)
    inputs["sampling_per_token_logps"] = inputs["ref_per_token_logps"] = noise.to(device)
    trainer.compute_loss(trainer.model, inputs).backward()
    trainer.isopo.end()
    return {name: p.grad.cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}


def check_against_the_cpu(make_model, tmp_path, **settings):
    found, expected = (gradient_on(device, make_model(), tmp_path, **settings) for device in ("cuda", "cpu"))
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, f"{name}: {error}"


def adapted(model, config):
    """With an adapter none of whose parts begins at zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(model, config)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn_like(p))
    return model


def qwen3(lora):
    model = tiny.model("qwen3", tie=True)
    return adapted(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)) if lora else model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
@pytest.mark.parametrize("token_weights", ["sampler", "p3o", "kpo", "terms"])
def test_token_weights_and_terms_on_the_gpu_are_those_on_the_cpu(token_weights, rule, lora, tmp_path):
    chosen = {"token_weights": token_weights}
    if token_weights == "terms":  # for full weights, a reference model would have to be saved
        chosen = {"entropy_coef": 0.2, "beta": 0.3 if lora else 0.0}
    check_against_the_cpu(lambda: qwen3(lora), tmp_path, rule=rule, **chosen)


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.5, "epsilon_high": 0.6},
        {"epsilon": 0.5, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
    ],
    ids=["clipped", "gspo", "cispo", "sapo", "vespo"],
)
def test_losses_of_the_ratio_on_the_gpu_are_those_on_the_cpu(settings, tmp_path):
    check_against_the_cpu(lambda: qwen3(True), tmp_path, rule="fisher", **settings)


ADAPTERS = {
    "dora": lambda: LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"]),
    "embedding": lambda: LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "trainable tokens": lambda: LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 7, 9]),
    "modules to save": lambda: LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_on_the_gpu_are_those_on_the_cpu(kind, rule, tmp_path):
    check_against_the_cpu(
        lambda: adapted(tiny.model("qwen2", tie=False), ADAPTERS[kind]()), tmp_path, rule=rule, top_k=0
    )


@pytest.mark.parametrize("family", ["falcon_h1", "bamba"])
def test_modules_without_a_kind_of_their_own_on_the_gpu_are_those_on_the_cpu(family, tmp_path):
    """Mixers of Mamba and their convolutions."""
    gradients = {}
    for device in ("cuda", "cpu"):
        model = architectures.build(family).float().to(device)
        batch = oracle.random_batch([4, 4], [6, 6], 40)
        ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
        weights = oracle.token_weights(batch).float().to(device)
        isopo = ISOPO(model, "fisher", fisher_samples=10_000)
        assert "any module" in {row["kind"] for row in isopo.coverage()}
        with isopo.microbatch(batch.advantages.float().to(device), attention_mask=mask):
            architectures.loss_of(model, ids, mask, weights).backward()
        gradients[device] = {name: p.grad.cpu() for name, p in model.named_parameters()}
    size = max(gradient.norm() for gradient in gradients["cpu"].values())
    for name, gradient in gradients["cpu"].items():
        error = (gradients["cuda"][name] - gradient).norm() / max(gradient.norm(), 1e-4 * size)
        assert error < 5e-3, f"{name}: {error}"


# Mixtures of experts


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        *(("mixtral", rule) for rule in ("fisher", "fig4", "interacting", "none")),
        ("qwen3_moe", "npg"),
        ("gpt_oss", "fig4"),  # biases
        ("deepseek_v3", "fisher"),
        ("glm4_moe", "euclidean"),
    ],
)
def test_mixtures_on_the_gpu_are_those_on_the_cpu(family, rule, tmp_path):
    check_against_the_cpu(lambda: tiny.model(family), tmp_path, rule=rule)


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_lora_on_experts_on_the_gpu_is_that_on_the_cpu(rule, tmp_path):
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    config = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=targets)
    check_against_the_cpu(lambda: adapted(tiny.model("mixtral"), config), tmp_path, rule=rule)


@pytest.mark.parametrize("lora", [False, True], ids=["float32 weights", "float32 factors on bf16 weights"])
def test_experts_under_autocast_have_finite_gradients(lora, tmp_path):
    """Their accuracy is looked at on the CPU: in bf16, positions may be sent elsewhere."""
    model = tiny.model("mixtral", dtype=torch.bfloat16 if lora else torch.float32)
    if lora:
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = adapted(model, LoraConfig(r=8, target_modules=["o_proj"], target_parameters=targets))
    trainer = trainer_for(model, tmp_path, rule="fisher", bf16=True)
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, batch_on("cuda")[1])
    trainer.accelerator.backward(loss)
    trainer.isopo.end()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.dtype == p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() and p.grad.any(), name


def test_load_balancing_on_the_gpu_is_that_on_the_cpu(tmp_path):
    check_against_the_cpu(lambda: tiny.model("mixtral"), tmp_path, rule="fisher", router_aux_loss_coef=0.5)


def test_a_direct_launch_does_what_tritons_own_does():
    given = batches.batch(3, 7, 5, 33, 8, dtype=torch.float32)
    run = batches.Run.of(given, batches.FISHER)
    run.ledger.table.copy_(torch.randn_like(run.ledger.table))
    x, noted = given.a.contiguous(), []

    def scaled():
        return linear.scaled(x, given.sequences, Entry(run.ledger, 0)).clone()

    linear._scale_plan.cache_clear()
    first, direct = scaled(), scaled()
    plan = linear._scale_plan(3, 7, 33, (33, 33), False, (x.dtype, x.dtype), x.device)
    assert plan.direct is not None and plan.direct.device == x.device.index
    runtime = pytest.importorskip("triton").knobs.runtime
    runtime.launch_enter_hook.add(noted.append)
    try:
        hooked = scaled()
    finally:
        runtime.launch_enter_hook.remove(noted.append)
    assert len(noted) == 1 and torch.equal(first, direct) and torch.equal(first, hooked)
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = scaled()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(first, elsewhere)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_backward_in_the_calling_thread_gives_the_same_gradient(reentrant, tmp_path):
    """Which kinds of checkpointing differ in: one of them starts a backward pass inside another."""
    trainer = trainer_for(tiny.model("qwen3"), tmp_path, rule="fisher", fisher_samples=10_000)
    if reentrant is not None:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trainer.model.enable_input_require_grads()
    inputs, main = batch_on("cuda")[1], threading.get_ident()
    seen = []
    trainer.model.lm_head.weight.register_hook(lambda _: seen.append(threading.get_ident() == main))
    found = []
    for in_calling_thread in (True, False):
        with calling_thread(in_calling_thread):
            found.append(training.gradients(trainer, inputs)[1])
    assert seen == [True, False]
    assert training.distance(*found) < 1e-5


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch runs."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def run_experts(device, rule, dtype=torch.bfloat16, experts=32, k=4, hidden=64, m=4, T=96):
    """
    One stack of experts, of which the last gets no position, from numbers that bf16 can hold: gradients, how often the
    backward waits for the device, and how many operations it runs.
    """
    config = MixtralConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_local_experts=experts)
    config._experts_implementation = "grouped_mm" if dtype == torch.bfloat16 else "eager"
    model = Holder(MixtralExperts(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 8)
    model.bfloat16().to(device, dtype)
    N = m * T
    x, cotangent = (torch.randn(N, hidden, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
    x.requires_grad_()
    choices = torch.rand(N, experts - 1, generator=generator).topk(k).indices.to(device)
    weights = torch.rand(N, k, generator=generator).bfloat16().to(device, dtype)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.7], device=device)
    isopo = ISOPO(model, rule, fisher_samples=50, fisher_scope="microbatch")
    for _ in range(2):  # once to compile
        model.zero_grad()
        with isopo.microbatch(advantages, attention_mask=torch.ones(m, T, device=device)):
            y = model(x, choices, weights)
            with warnings.catch_warnings(record=True) as caught, Operations() as operations:
                warnings.simplefilter("always")
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    y.backward(cotangent)
                finally:
                    if device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
    gradients = {name: p.grad.cpu().double() for name, p in model.named_parameters()}
    waits = sum("synchroniz" in str(warning.message) for warning in caught)
    return gradients, waits, operations.number


@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "interacting", "none"])
def test_experts_in_bf16_are_the_definition_to_its_rounding_and_never_wait(rule):
    """An expert without a position has no gradient."""
    found, waits, _ = run_experts("cuda", rule)
    expected, _, _ = run_experts("cpu", rule, torch.float64)
    assert waits == 0
    for name, gradient in expected.items():
        assert not found[name][-1].any()
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 0.03, f"{name}: {error}"


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_operations_on_experts_do_not_grow_with_their_number(rule):
    counts = {run_experts("cuda", rule, experts=experts)[2] for experts in (8, 32, 128)}
    assert len(counts) == 1


# A quantised base


def quantised(folder, compute):
    path = tiny.save(folder / "model", "llama")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=compute, quantization_config=config, device_map={"": torch.device("cuda", 0)}
    )
    return adapted(base, LoraConfig(r=8, target_modules="all-linear"))


def in_float64(model):
    """The same model with its quantised matrices as plain ones, on the CPU."""
    from bitsandbytes.functional import dequantize_4bit

    plain = adapted(tiny.model("llama"), LoraConfig(r=8, target_modules="all-linear")).double()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in plain.named_parameters():
            given = values[name]
            state = getattr(given, "quant_state", None)
            p.copy_(given if state is None else dequantize_4bit(given.data, state))
    return plain


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("rule", ["none", "fisher", "fig4", "interacting"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_lora_on_a_quantised_base_is_the_definition(compute, rule, tmp_path):
    """
    The definition in float64 on the matrices that quantisation has left. With products in bf16, the gradient that GRPO
    itself has differs from it by some error, and coefficients can add to it no more than the norms they are made of.
    """
    batch, inputs = batch_on("cuda")
    results = {}
    for kind, settings in (("grpo", {}), ("isopo", {"rule": rule, "fisher_samples": 10_000})):
        model = quantised(tmp_path / kind, compute)
        trainer = trainer_for(model, tmp_path / kind, kind=kind, bf16=compute == torch.bfloat16, **settings)
        for p in model.parameters():
            if p.requires_grad:
                assert p.dtype == torch.bfloat16  # TRL's choice for a quantised base
                p.data = p.data.to(compute)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        results[kind] = {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.requires_grad}
    trainer.isopo.end()
    exact = in_float64(model)
    G = oracle.position_gradients(exact, batch, oracle.token_weights(batch), rounding=1e-4)
    errors = {}
    for kind, of_rule in (("grpo", "none"), ("isopo", rule)):
        expected = oracle.expected_gradients(exact, G, batch, None, of_rule)
        whole = torch.cat([expected[p].flatten() for p in exact.parameters() if p.requires_grad])
        found = torch.cat([gradient.flatten() for gradient in results[kind].values()])
        errors[kind] = ((found - whole).norm() / whole.norm()).item()
    print(compute, rule, errors)
    assert errors["isopo"] < (1e-3 if compute == torch.float32 else 4 * errors["grpo"] + 1e-3), errors
    if rule == "none":
        difference = torch.cat([(results["isopo"][n] - x).flatten() for n, x in results["grpo"].items()]).norm()
        size = torch.cat([x.flatten() for x in results["grpo"].values()]).norm()
        assert difference < (1e-5 if compute == torch.float32 else errors["grpo"] + 1e-3) * size


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_gradient_with_ligers_kernels_is_that_without(rule, tmp_path):
    plain = gradient_on("cuda", tiny.model("qwen3"), tmp_path, rule=rule)
    found = gradient_on("cuda", tiny.model("qwen3"), tmp_path, rule=rule, use_liger_kernel=True)
    for name, gradient in plain.items():
        error = (found[name] - gradient).norm() / gradient.norm()
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


@pytest.mark.parametrize(("dtype", "is_masked"), [(torch.bfloat16, False), (torch.float32, True)])
def test_attention_has_no_mask_where_there_is_a_fast_kernel(dtype, is_masked, tmp_path, monkeypatch):
    """In float32 there is none for keys that several queries share."""
    _, inputs = batch_on("cuda")
    masks, own = [], torch.nn.functional.scaled_dot_product_attention

    def noting(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return own(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    model = tiny.model("llama", dtype=dtype)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    trainer = trainer_for(model, tmp_path, rule="interacting")
    _, found = training.gradients(trainer, inputs)
    assert masks and all((mask is not None) == is_masked for mask in masks)
    trainer.isopo.detach()
    monkeypatch.setattr("isopo_trl.integrations.attention.FAMILIES", frozenset())
    _, expected = training.gradients(trainer_for(model, tmp_path, rule="interacting"), inputs)
    assert masks[-1] is not None
    assert training.distance(found, expected) < (0.1 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("size", [1e-5, 1e-7])
def test_a_small_step_from_weights_of_bf16_is_seen_in_float32(size):
    """In TF32 alone it is lost."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(192, 256, device="cuda", generator=generator).bfloat16().float() for _ in range(2))
    weight = weight / 64
    step = size * torch.randn(192, 256, device="cuda", generator=generator)
    moved = weight + step
    expected = x.double() @ (moved - weight).double().T
    # What float32 has of an output of 4
    rounding = 2**-22 * expected.numel() ** 0.5 / expected.norm()

    def error(product):
        return ((product(x, moved) - product(x, weight)).double() - expected).norm() / expected.norm()

    assert precise_forward.is_made_of_halves(x, weight)
    with precise_forward.products(tf32=False):
        assert error(precise_forward.linear) < 0.05 + rounding
    with precise_forward.products(tf32=True):
        assert error(torch.nn.functional.linear) > 0.2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("at_a_time", [2**25, 256 * 256])
def test_products_in_float32_are_close_to_those_in_float64(at_a_time, dtype, bias, monkeypatch):
    """In parts or not: activations are rounded to 11 bits, weights are not."""
    monkeypatch.setattr(precise_forward, "LARGEST", at_a_time)
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, b = (
        torch.randn(shape, device="cuda", generator=generator) for shape in ((2, 77, 256), (700, 256), (700,))
    )
    weight, b = (weight / 16).to(dtype), b if bias else None
    assert len(precise_forward.parts_of(weight)) == (1 if at_a_time == 2**25 else 3)
    with torch.no_grad(), precise_forward.products(tf32=False), precise_forward.Float32():
        found = torch.nn.functional.linear(x, weight, b)
    rounded = (x / precise_forward.FACTOR).half().double() * precise_forward.FACTOR
    expected = torch.nn.functional.linear(rounded, weight.double(), None if b is None else b.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}], ids=["all", "causal", "masked"])
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_attention_in_float32_is_close_to_that_in_float64(size, options):
    """It is in float16: no number is too large for it."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (torch.randn(2, 4, 96, 64, device="cuda", generator=generator) for _ in range(3))
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(2, 1, 96, 96, dtype=torch.bool, device="cuda").tril()}
    attention = torch.nn.functional.scaled_dot_product_attention
    with precise_forward.Float32():
        found = attention(query * size, key * size, value * size, **options)
    assert found.dtype == torch.float32 and found.isfinite().all()
    if size == 1:
        expected = attention(query.double(), key.double(), value.double(), **options)
        error = (found - expected).norm() / expected.norm()
        assert 1e-5 < error < 2e-3
    else:
        assert found.abs().max() <= 1.01 * precise_forward.MOST_ATTENDED


@pytest.mark.parametrize("shape", [(4096, 2048), (2**18 + 1, 127)], ids=str)  # whole blocks, and not
def test_a_large_weight_in_two_parts_has_the_bits_of_plain_pytorch(shape, monkeypatch):
    weight = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert halves.takes_all(weight)
    found = precise_forward.in_halves(weight)
    monkeypatch.setattr(launch, "ENABLED", False)
    assert all(map(torch.equal, found, precise_forward.in_halves(weight)))


@pytest.mark.parametrize("rule", [batches.EUCLIDEAN, batches.INTERACTING], ids=batches.named)
def test_the_largest_gradients_that_are_kept(rule):
    """As many elements as are kept at most: sums over thousands of programs, and places beyond 2^24."""
    m, p = 4, 2**13
    generator = torch.Generator("cuda").manual_seed(0)
    V = torch.randn(m, p, WHOLE_BY_KERNELS // (m * p), generator=generator, device="cuda")
    run = batches.Run.of(batches.batch(m, 1, 1, 1, 1), rule)
    v.v_coefficients(V, run.entry)
    ntk = torch.stack([torch.stack([(V[i].double() * V[j]).sum() for j in range(m)]) for i in range(m)])
    run.check(Statistics(norm=ntk.diagonal(), ntk=ntk), batches.STATISTIC[torch.float32])
    expected = torch.einsum("m,mpd->pd", run.ledger.table[run.index, 0].double(), V[:, -64:].double())
    combined = v.combined(V, run.entry, torch.float32)
    batches.close(combined[-64:], expected, batches.GRADIENT[torch.float32])


# Passes that are replayed


def scores_of(model):
    """A pass of the model alone, for [`Replayed`]."""

    def scores(ids, mask, kept):
        with (
            torch.no_grad(),
            measurement.evaluating(model),
            precise_forward.products(tf32=False),
            precise_forward.Float32(),
        ):
            return model(input_ids=ids, attention_mask=mask, logits_to_keep=kept, use_cache=False).logits

    return scores


def inputs_on_the_gpu(seed, width=64, number=2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, (number, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[:, -5:] = 0
    return ids.cuda(), mask.cuda(), torch.arange(8, 40).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_scores_that_are_replayed_are_those_that_are_not(lora, dtype):
    """Before and after a step, by the same graph."""
    model = tiny.model("llama", dtype=dtype)
    if lora:
        model = adapted(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model = model.cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    passes, scores = cuda_graphs.Replayed(model), scores_of(model)
    assert passes.is_usable
    last = None
    for step in range(4):
        for seed in (0, 1):
            inputs = inputs_on_the_gpu(seed)
            found, expected = passes.own(passes(scores, inputs)), scores(*inputs)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert step == 0 or passes._recorded == 1
        assert last is None or (found - last).abs().max() > 1e-2  # the step is seen
        last = found
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
    assert len(passes._recordings) == 1 and passes.is_usable


def test_graphs_of_many_shapes_share_their_memory():
    model = tiny.model("llama").cuda()
    passes, scores = cuda_graphs.Replayed(model), scores_of(model)
    for _ in range(3):
        for width in range(64, 64 * 11, 64):
            inputs = inputs_on_the_gpu(width, width)
            torch.testing.assert_close(passes(scores, inputs), scores(*inputs), rtol=1e-3, atol=1e-4)
    assert len(passes._recordings) == cuda_graphs.MOST_AT_A_TIME and passes.is_usable
    assert 0 < passes._kept() < cuda_graphs.MOST_KEPT
    passes._drop()
    torch.testing.assert_close(passes(scores, inputs), scores(*inputs), rtol=1e-3, atol=1e-4)


def active_memory():
    return torch.cuda.memory_stats()["active_bytes.all.current"]


class Waits(torch.nn.Module):
    """What cannot be recorded: found by trying, or by the recording itself."""

    def __init__(self, wait):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
        self.wait = wait

    def forward(self, x):
        self.wait(x)
        return x * self.weight


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: torch.cuda.synchronize(), lambda x: x.cpu()],
    ids=["item", "nonzero", "synchronize", "cpu"],
)
def test_a_model_that_waits_for_the_device_is_not_replayed_and_leaves_it_in_order(wait):
    model = Waits(wait).requires_grad_(False)
    passes, stream = cuda_graphs.Replayed(model), torch.cuda.current_stream()
    for value in range(4):
        x = torch.full((3, 4), float(value), device="cuda")
        assert torch.equal(passes(model, (x,)), x)
    assert not passes.is_usable and torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Another model can be recorded after it, and memory that two streams have used comes back
    plain = Waits(lambda x: None).requires_grad_(False)
    others = cuda_graphs.Replayed(plain)
    for value in range(4):
        x = torch.full((3, 4), float(value), device="cuda")
        assert torch.equal(others(plain, (x,)), x)
    assert len(others._recordings) == 1
    assert torch.rand(3, device="cuda").isfinite().all()
    side, taken = torch.cuda.Stream(), active_memory()
    for _ in range(3):
        y = torch.ones(2**20, device="cuda")
        y.record_stream(side)
        del y
    torch.cuda.synchronize()
    torch.ones(1, device="cuda")  # when events are looked at
    assert active_memory() <= taken


def test_models_that_are_not_whole_on_one_gpu_are_not_replayed():
    assert cuda_graphs.is_recordable(tiny.model("llama").cuda())
    model = tiny.model("llama").cuda()
    model.lm_head.cpu()
    assert not cuda_graphs.is_recordable(model)
    model = get_peft_model(tiny.model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).cuda()
    assert not cuda_graphs.is_recordable(model)


class Never(cuda_graphs.Replayed):
    """The same passes, padded alike, but not replayed."""

    def _may_record(self, key):
        return False


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_steps_are_measured_the_same_with_replay_and_without(lora, tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "REPLAYED_WIDTH", 32)
    trainer = trainer_for(qwen3(lora), tmp_path, log_step_kl=True, step_kl_share=1.0, temperature=0.9)
    optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    kl = trainer.step_control.kl
    plain = measurement.StepKL(kl._scoring, kl._precise, trainer.accelerator, share=1.0, seed=trainer.args.seed)
    plain._replayed = Never(trainer.model)
    recorded = early = 0
    for step in range(10):
        lengths = torch.randint(1, 100, (4,), generator=generator).tolist()
        batch = oracle.random_batch([3, 1, 5, 4], lengths, 100, seed=step)
        inputs = {name: value.cuda() for name, value in batch.for_trl().items()}
        inputs["advantages"] = inputs["advantages"].float()
        kl.begin()
        trainer.step_control.see(Batch(inputs), step, 1, fresh=True)
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer.isopo.end()
        plain._batches = kl._batches
        plain.score(step)
        trainer.step_control.score_early(step)
        early += bool(kl._before)
        kl.score(step)
        optimizer.step()
        optimizer.zero_grad()
        expected = plain.measure()
        assert expected.kl > 1e-6
        for _ in range(2):
            found = kl.measure()
            assert found.kl == pytest.approx(expected.kl, rel=1e-4)
            assert found.stderr == pytest.approx(expected.stderr, rel=1e-3)
        recorded = max(recorded, len(kl._replayed._recordings))
        assert kl._replayed.is_usable and not plain._replayed._recordings
        kl.forget()
        plain.forget()
    assert recorded > 1 and early > 1
