"""
Parameters that act feature by feature against a loop over their positions in float64.

RMS norms are here for where their positions are, which is found in the same way for all; that their gradient is the
definition is in `test_rms_norm.py`.
"""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isopo_trl import ISOPO
from isopo_trl.rules import rule_names
from tests.layers.harness import ADVANTAGES, ELEMENTWISE, MASK, RMS_NORM, B, Holder, T, build, check, inputs_of


NORMS = [*RMS_NORM, "T5's norm", "scale and shift"]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["N", "1 N"])
@pytest.mark.parametrize("name", ["T5's norm", "scale and shift"])
def test_positions_may_be_flattened(name, at, packed):
    layer = build(name)
    shape = (B * T,) if at == "N" else (1, B * T)
    check(layer, inputs_of(layer, *shape), "fig4", packed, at)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("heads", [1, 2, T])
@pytest.mark.parametrize("at", ["B T", "B H T", "N"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_heads_adds_up_the_heads_of_a_position(name, at, heads, packed):
    layer = build(name)
    x = inputs_of(layer, B, T, heads)
    if at == "B H T":  # turned as attention does it
        x = x.transpose(1, 2)
    if at == "N":
        x = x.flatten(0, 1)
    check(layer, x, "fig4", packed, at)


def test_where_positions_are_is_remembered_for_as_many_heads_as_positions():
    """`[B, H, T, d]`, laid out in memory as it reads: with H = T nothing in the tensor tells the two apart."""
    gradients = []
    for earlier in (False, True):
        model = Holder(LlamaRMSNorm(5)).double()
        isopo = ISOPO(model, "fisher", scale="paper", fisher_samples=10_000)
        for length in (6, 3) if earlier else (3,):
            model.zero_grad()
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, 3, length, 5, generator=generator, dtype=torch.float64)
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x = x if earlier else x.transpose(1, 2).contiguous().transpose(1, 2)  # the stride tells
            with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, length)):
                (model(x) * weight).sum().backward()
        gradients.append(model.layer.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("shape", [(T, B), (B, T + 1), (B * T + 1,), (B, 2, 2), (1, T)])
def test_a_norm_that_cannot_find_its_positions_is_an_error_that_says_so(shape):
    layer = build("llama's norm")
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))
    assert isinstance(layer.weight, nn.Parameter)
