"""Linear layers: every strategy, outputs that a model changes in place, recomputation. See also `test_layer.py`."""

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
from tests.layers.harness import ADVANTAGES, MASK, B, Holder, T, build, check, inputs_of


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
@pytest.mark.parametrize(
    ("name", "packed"),
    [("linear", False), ("wide linear without bias", True), ("linear, only its weight", False), ("Conv1D", True)],
)
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
def test_recomputation_gives_the_same_and_makes_no_more_products_than_that_of_the_plain_model(
    bias, activation, reentrant
):
    """It ends before the last one, unless somebody behind it needs what comes out."""
    model = nn.Sequential(nn.Linear(5, 6, bias), nn.Tanh(), nn.Linear(6, 5, bias), activation).double()
    x = torch.randn(B, 5, T, dtype=torch.float64).transpose(1, 2).requires_grad_()

    def run(scale):
        other = copy.deepcopy(model)
        around = contextlib.nullcontext()
        if scale:
            around = ISOPO(other, rule="none").microbatch(torch.ones(B), attention_mask=torch.ones(B, T))
        with around, Products() as products:
            y = checkpoint(other, x, use_reentrant=reentrant)
            y.backward(torch.ones_like(y))
        return products.number, [p.grad for p in other.parameters()]

    (number, plain), (own_number, own) = run(False), run(True)
    assert own_number == number
    torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
