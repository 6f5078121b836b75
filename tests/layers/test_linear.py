"""Linear layers and Conv1D against a loop over their positions in float64."""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.layers import linear
from isopo_trl.rules import rule_names
from tests.layers.harness import ADVANTAGES, LINEAR, MASK, B, Holder, T, build, check, inputs_of


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", LINEAR)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["N", "1 N"])
@pytest.mark.parametrize("name", ["linear", "Conv1D"])
def test_positions_may_be_flattened(name, at, packed):
    layer = build(name)
    shape = (B * T,) if at == "N" else (1, B * T)
    check(layer, inputs_of(layer, *shape), "fig4", packed, at)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
@pytest.mark.parametrize("name", ["linear", "wide linear without bias", "linear, only its weight", "Conv1D"])
@pytest.mark.parametrize("strategy", ["ghost", "whole", "blocks"])
def test_a_linear_layer_has_the_same_gradient_by_every_strategy(name, strategy, rule, packed, monkeypatch):
    monkeypatch.setattr("isopo_trl.layers.linear.choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 40)  # blocks of one row
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["linear", "linear without bias"])
def test_a_model_may_go_on_in_place_with_the_output(name, lora):
    """As Llama 4 does with its shared expert's, and RoCBert with that of its embeddings."""
    model = Holder(build(name))
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)).double()
    x = inputs_of(build(name), B, T)

    def gradients(in_place):
        other = copy.deepcopy(model)
        with ISOPO(other, fisher_samples=7).microbatch(ADVANTAGES[:B], attention_mask=MASK):
            y = other(x)
            y = y.add_(x[..., :1]) if in_place else y + x[..., :1]
            y.square().sum().backward()
        return [p.grad for p in other.parameters() if p.requires_grad]

    torch.testing.assert_close(gradients(in_place=True), gradients(in_place=False), rtol=0, atol=0)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.number += operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("activation", [nn.Identity(), nn.Tanh()], ids=["at the end", "before another"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_recomputation_makes_no_more_products_than_that_of_the_plain_model(bias, activation, reentrant):
    """It ends before the last one, unless somebody behind it needs what comes out."""
    model = nn.Sequential(nn.Linear(5, 6, bias), nn.Tanh(), nn.Linear(6, 5, bias), activation).double()
    x = torch.randn(B, T, 5, dtype=torch.float64, requires_grad=True)

    def run(scale):
        other = copy.deepcopy(model)
        isopo = ISOPO(other, rule="none") if scale else None
        mask = torch.ones(B, T)
        around = isopo.microbatch(torch.ones(B), attention_mask=mask) if isopo else contextlib.nullcontext()
        with around, Products() as products:
            y = checkpoint(other, x, use_reentrant=reentrant)
            y.backward(torch.ones_like(y))
        return products.number, [p.grad for p in other.parameters()]

    number, plain = run(False)
    own_number, own = run(True)
    assert own_number == number
    for one, other in zip(own, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_product_that_is_made_later_is_the_same(bias, strided):
    layer = nn.Linear(40, 33, bias)
    x = torch.randn(3, 40, 7).transpose(1, 2) if strided else torch.randn(3, 7, 40)
    later = torch.empty(3, 7, 33)
    linear._multiply(x, layer.weight, layer.bias, later)
    torch.testing.assert_close(later, layer(x).detach())
