"""
Gated activations: which modules are recognised, when the fused function runs, and what it keeps.

The kernel runs on a GPU or, on a CPU, under Triton's interpreter (see `tests/kernels/test_interpreted.py`).
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.layers import gated
from isopo_trl.layers.gated import GatedMLP
from tests import tiny
from tests.kernels import batches
from tests.kernels.batches import DEVICE, EXACT
from tests.layers.shortcuts import ADVANTAGES, IDS, MASK, count_calls, gradients, layers_of


def gated_layers(isopo):
    return layers_of(isopo, GatedMLP)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the fused function."""
    return count_calls(monkeypatch, gated._Gated)


def mlp(forward=None, activation=None):
    """A module of three products and an activation, with a forward of its own if given."""

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = activation or nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    if forward is not None:
        MLP.forward = forward
    return MLP()


# Which modules are recognised


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_mlp_of_a_family_is_recognised_and_given_back(family):
    model = tiny.model(family)
    isopo = ISOPO(model)
    expected = [module for name, module in model.named_modules() if name.endswith("mlp")]
    assert [layer.module for layer in gated_layers(isopo)] == expected != []
    isopo.detach()
    assert not any("forward" in module.__dict__ for module in expected)


def test_another_formula_is_not_recognised():
    assert gated._is_usual(mlp())
    assert not gated._is_usual(mlp(activation=nn.GELU()))
    assert not gated._is_usual(mlp(lambda self, x: self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))))
    assert not gated._is_usual(mlp(lambda self, x: self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
    assert not gated._is_usual(mlp(lambda self, x: gated.definition(self, x) * self.scale))
    assert not gated._is_usual(mlp(lambda self, x: (gated.definition(self, x), None)))
    in_float32 = lambda self, x: self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype))  # noqa: E731
    assert not gated._is_usual(mlp(in_float32))
    assert not gated._is_usual(nn.Linear(4, 4))


def test_a_module_whose_forward_somebody_has_replaced_keeps_it():
    model = tiny.model("qwen3")
    replaced = model.model.layers[0].mlp
    replaced.forward = lambda x: x
    assert [layer.module for layer in gated_layers(ISOPO(model))] == [model.model.layers[1].mlp]


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral"])
def test_models_with_other_mlps_have_none(family):
    assert gated_layers(ISOPO(tiny.model(family))) == []


# With the kernel


@pytest.mark.parametrize(  # without a rule, no kernel but this one and the norms' has anything to do
    ("checkpointing", "trained", "rule"),
    [(None, "all", "none"), ("reentrant", "lora", "none"), ("non-reentrant", "lora", "fisher")],
)
@batches.needs_kernels
def test_a_microbatchs_gradients_are_the_same_with_it(calls, checkpointing, trained, rule):
    model = tiny.model("qwen3")
    if trained == "lora":
        config = LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    model.to(DEVICE, EXACT)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    term = checkpointing != "reentrant"  # which leaves no graph for one
    isopo = ISOPO(model, rule)
    found = gradients(model, isopo, term)
    number = len(calls)
    assert number
    isopo.detach()
    isopo = ISOPO(model, rule)
    for layer in gated_layers(isopo):
        layer.detach()
    expected = gradients(model, isopo, term)
    assert len(calls) == number
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


@batches.needs_kernels
def test_it_keeps_what_it_was_given_and_nothing_else():
    gate, up = (torch.randn(2, 3, 8, device=DEVICE, dtype=EXACT, requires_grad=True) for _ in range(2))
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated._Gated.apply(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]


@batches.needs_kernels
def test_what_the_kernel_does_not_take_is_left_to_pytorch(calls, monkeypatch):
    model = tiny.model("qwen3").to(DEVICE, EXACT)
    isopo = ISOPO(model)
    module = model.model.layers[0].mlp
    x = torch.randn(2, 4, model.config.hidden_size, device=DEVICE, dtype=EXACT)
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    fused = module(x)
    assert len(calls) == 1
    monkeypatch.setattr(gated, "is_here", lambda x: False)  # on another device than the current one
    torch.testing.assert_close(module(x), fused)
    assert len(calls) == 1


@batches.needs_kernels
def test_a_hook_of_the_activation_is_called(calls):
    model = tiny.model("qwen3").to(DEVICE, EXACT)
    isopo = ISOPO(model)
    module = model.model.layers[0].mlp
    handle = module.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    x = torch.randn(2, 4, model.config.hidden_size, device=DEVICE, dtype=EXACT)
    assert not module(x).any() and not calls
    handle.remove()
    assert module(x=x).any() and len(calls) == 1


@pytest.mark.parametrize("when", ["no microbatch", "no gradient"])
def test_elsewhere_the_modules_own_forward_runs(when, monkeypatch):
    model = tiny.model("qwen3")
    isopo = ISOPO(model)
    monkeypatch.setattr(GatedMLP, "forward", None)
    if when == "no gradient":
        isopo.begin(ADVANTAGES, attention_mask=MASK)
    with torch.set_grad_enabled(when != "no gradient"):
        model(IDS, attention_mask=MASK)
