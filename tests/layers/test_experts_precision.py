"""Experts whose matrices, adapters and inputs are not of one type, beside what PEFT and transformers make of it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from isopo_trl import ISOPO
from tests.gradients import mixtures
from tests.layers.harness import Holder


B, T, E, D = 3, 5, 4, 16
BATCH = SimpleNamespace(advantages=torch.tensor([1.0, -0.5, 2.0]).double(), attention_mask=torch.ones(B, T))
# On a CPU, which products autocast takes
AUTOCAST = {"": contextlib.nullcontext, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}


def numbers(*shape, seed):
    """Random numbers that bf16 can hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def experts(implementation, dtype, lora=False, adapters=None):
    """A stack of experts, with adapters of the type `adapters`, PEFT's choice if it is not given."""
    config = MixtralConfig(hidden_size=D, intermediate_size=24, num_local_experts=E)
    config._experts_implementation = implementation
    model = Holder(MixtralExperts(config).to(dtype))
    if lora:
        targets = ["layer.gate_up_proj", "layer.down_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=[], target_parameters=targets))
    with torch.no_grad():
        for seed, (name, p) in enumerate(model.named_parameters()):
            p.copy_(numbers(*p.shape, seed=seed) / 4)
            if adapters is not None and "lora_" in name:
                p.data = p.data.to(adapters)
    return model


def inputs(dtype):
    """Positions, the experts chosen for them, the weights of these, and a cotangent."""
    choices = torch.rand(B * T, E, generator=torch.Generator().manual_seed(20)).topk(2).indices
    weights = torch.full((B * T, 2), 0.5, dtype=dtype)
    return numbers(B * T, D, seed=21).to(dtype), choices, weights, numbers(B * T, D, seed=22).to(dtype)


def gradients(model, dtype, rule=None, advantages=BATCH.advantages, autocast=""):
    """Of the adapters, or of all; by autograd of the plain model where no rule is given."""
    x, choices, weights, cotangent = inputs(dtype)
    x.requires_grad_()
    settings = {"fisher_samples": 1000, "regularization": 0.1} if rule == "fisher" else {}
    microbatch = contextlib.nullcontext()
    if rule is not None:
        microbatch = ISOPO(model, rule, **settings).microbatch(advantages, attention_mask=BATCH.attention_mask)
    with microbatch:
        with AUTOCAST[autocast]():
            y = model(x, choices, weights)
        y.backward(cotangent.to(y.dtype))
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(found[name].dtype == p.dtype for name, p in model.named_parameters() if p.requires_grad)
    return {**found, "x": x.grad}


def check(found, expected, accuracy):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert error < accuracy, f"{name}: {error}"


@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_float32_adapters_of_experts_in_bf16_have_the_gradient_that_peft_gives_them(implementation, autocast):
    plain, ours = (experts(implementation, torch.bfloat16, lora=True) for _ in range(2))
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}  # PEFT's choice
    expected = gradients(plain, torch.bfloat16, autocast=autocast)
    check(gradients(ours, torch.bfloat16, "none", torch.ones(B), autocast), expected, 0.03)


@pytest.mark.parametrize("autocast", AUTOCAST)
def test_float32_adapters_of_experts_in_bf16_have_the_gradient_of_the_definition(autocast):
    exact = experts("eager", torch.float64, lora=True, adapters=torch.float64)
    ((name, unit),) = mixtures.units(exact).items()
    trained = list(unit.parameters.values())
    x, choices, weights, cotangent = inputs(torch.float64)
    rows = []
    for t in range(B * T):
        y = exact(*(values[t : t + 1] for values in (x, choices, weights)))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(y, trained, cotangent[t : t + 1])]))
    G = {name: torch.stack(rows).view(B, T, -1)}
    expected = mixtures.expected_gradients(exact, G, BATCH, None, "fisher", regularization=0.1)
    found = gradients(experts("grouped_mm", torch.bfloat16, lora=True), torch.bfloat16, "fisher", autocast=autocast)
    del found["x"]
    check(found, expected, 0.03)


def test_adapters_enter_in_the_type_of_the_matrices():
    """As in PEFT; from numbers that this type can hold, the same then comes out for either type of adapters."""
    kinds = (torch.float32, torch.bfloat16)
    models = [experts("grouped_mm", torch.bfloat16, lora=True, adapters=dtype) for dtype in kinds]
    wide, narrow = (gradients(model, torch.bfloat16, "fisher") for model in models)
    assert all(torch.equal(wide[name], gradient.to(wide[name].dtype)) for name, gradient in narrow.items())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_autocast_leaves_grouped_products_of_float32_as_they_are(lora):
    plain, ours = (experts("grouped_mm", torch.float32, lora) for _ in range(2))
    # PEFT's own product of the two factors is rounded by autocast before 0.21
    expected = gradients(plain, torch.float32, autocast="" if lora else "autocast")
    check(gradients(ours, torch.float32, "none", torch.ones(B), "autocast"), expected, 1e-4)
