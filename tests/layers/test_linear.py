"""Linear layers and Conv1D against a loop over their positions in float64."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
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
@pytest.mark.parametrize("strategy", ["ghost", "kept", "blocks"])
def test_a_linear_layer_has_the_same_gradient_by_every_strategy(name, strategy, rule, packed, monkeypatch):
    monkeypatch.setattr("isopo_trl.layers.linear.choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "KEPT_LIMIT", 40)  # blocks of one row
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
