"""
Rotary embeddings: which attention modules are recognised, and what stands in their function's place, and when.

The kernel runs on a GPU or, on a CPU, under Triton's interpreter (see `tests/kernels/test_interpreted.py`).
"""

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from isopo_trl import ISOPO
from isopo_trl.layers import rotary
from isopo_trl.layers.rotary import NAME, RotaryAttention
from tests import tiny
from tests.kernels import batches
from tests.kernels.batches import DEVICE, EXACT
from tests.layers.shortcuts import ADVANTAGES, IDS, MASK, count_calls, gradients, layers_of


def rotary_layers(isopo):
    return layers_of(isopo, RotaryAttention)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the fused function."""
    return count_calls(monkeypatch, rotary._Rotary)


# Which modules are recognised


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_attention_of_a_family_is_recognised_and_given_back(family):
    model = tiny.model(family)
    isopo = ISOPO(model)
    expected = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    assert [layer.module for layer in rotary_layers(isopo)] == expected != []
    isopo.detach()
    assert not any("forward" in module.__dict__ for module in expected)


def test_another_formula_is_not_recognised():
    assert rotary._is_usual(modeling_llama.apply_rotary_pos_emb)
    assert not rotary._is_usual(modeling_cohere.apply_rotary_pos_emb)  # turns neighbours
    assert not rotary._is_usual(lambda q, k, cos, sin: rotary.definition(q, k, cos, -sin))
    assert not rotary._is_usual(lambda q, k: (q, k))


def test_a_model_without_rotary_embeddings_has_none():
    assert rotary_layers(ISOPO(tiny.model("gpt2"))) == []


# With the kernel


@pytest.mark.parametrize("rule", ["none", "fisher"])
@batches.needs_kernels
def test_a_microbatchs_gradients_are_the_same_with_it(calls, rule):
    """With checkpointing, and a term that goes back a second time beside a rule, of which few layers are trained."""
    model = tiny.model("qwen3").to(DEVICE, EXACT)
    for name, p in model.named_parameters():
        p.requires_grad_(rule == "none" or "q_proj" in name or "k_proj" in name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    isopo = ISOPO(model, rule)
    found = gradients(model, isopo, term=True)
    number = len(calls)
    assert number >= len(model.model.layers) * 2
    isopo.detach()
    isopo = ISOPO(model, rule)
    for layer in rotary_layers(isopo):
        layer.detach()
    expected = gradients(model, isopo, term=True)
    assert len(calls) == number
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


@batches.needs_kernels
def test_what_the_kernel_does_not_take_is_left_to_the_model(calls, monkeypatch):
    isopo = ISOPO(tiny.model("qwen3").to(DEVICE))
    (layer, *_) = rotary_layers(isopo)
    q, k = (torch.randn(2, n, 3, 8, device=DEVICE, dtype=EXACT) for n in (2, 1))
    cos, sin = torch.randn(2, 1, 3, 8, device=DEVICE, dtype=EXACT).unbind()
    expected = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(map(torch.equal, layer._rotated(q, k, cos, sin, 1), expected))
    assert all(map(torch.equal, layer._rotated(q.half(), k, cos, sin), layer.own(q.half(), k, cos, sin)))
    assert not calls
    layer._rotated(q, k, cos, sin)
    assert len(calls) == 1
    monkeypatch.setattr(rotary, "is_here", lambda x: False)  # on another device than the current one
    layer._rotated(q, k, cos, sin)
    assert len(calls) == 1


def test_one_tensor_may_be_turned_alone(monkeypatch):
    """As some families' functions allow, whose attention calls them in both ways."""
    (layer, *_) = rotary_layers(ISOPO(tiny.model("qwen3")))
    q, cos, sin = torch.randn(3, 2, 4, 8).unbind()
    monkeypatch.setattr(layer, "own", lambda q, k=None, cos=None, sin=None: q * cos if k is None else (q, k))
    assert torch.equal(layer._rotated(q, cos=cos, sin=sin), q * cos)
    assert torch.equal(layer._rotated(q, None, cos, sin), q * cos)


@batches.needs_kernels
def test_offsets_of_the_kernel_have_32_bits():
    cos = torch.zeros(1, 1, 1, device=DEVICE, dtype=EXACT).expand(1, 2**10, 8)
    k, q = (torch.zeros(1, 1, 1, 1, device=DEVICE, dtype=EXACT).expand(1, n, 2**10, 8) for n in (1, 2**18))
    assert not rotary._kernel_takes(q, k, cos, cos) and not rotary._kernel_takes(k, q, cos, cos)
    assert rotary._kernel_takes(q[:, 1:], k, cos, cos)


# Borrowing the function's name


def test_the_models_function_is_put_back_also_after_an_error():
    own = modeling_qwen3.apply_rotary_pos_emb
    model = tiny.model("qwen3")
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES, attention_mask=MASK)
    model(IDS, attention_mask=MASK)
    assert modeling_qwen3.apply_rotary_pos_emb is own
    with pytest.raises(AttributeError):
        model.model.layers[0].self_attn(torch.ones(2, 4, model.config.hidden_size), (None, None), None)
    assert modeling_qwen3.apply_rotary_pos_emb is own


@pytest.mark.parametrize("when", ["no microbatch", "no gradient"])
def test_elsewhere_the_models_function_is_called(when, monkeypatch):
    model = tiny.model("qwen3")
    isopo = ISOPO(model)
    monkeypatch.setattr(RotaryAttention, "_rotated", None)
    if when == "no gradient":
        isopo.begin(ADVANTAGES, attention_mask=MASK)
    with torch.set_grad_enabled(when != "no gradient"):
        model(IDS, attention_mask=MASK)


def test_what_somebody_else_has_put_there_stays(monkeypatch):
    model = tiny.model("qwen3")
    isopo = ISOPO(model)
    own, seen = getattr(modeling_qwen3, NAME), []

    def others(*args):
        seen.append(getattr(modeling_qwen3, NAME))
        return own(*args)

    monkeypatch.setattr(modeling_qwen3, NAME, others)
    isopo.begin(ADVANTAGES, attention_mask=MASK)
    model(IDS, attention_mask=MASK)
    assert seen == [others] * len(model.model.layers)
