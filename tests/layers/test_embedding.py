"""Embeddings against a loop over their positions in float64."""

import copy

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.rules import rule_names
from tests.layers.harness import (
    ADVANTAGES,
    EMBEDDING,
    MASK,
    B,
    Holder,
    T,
    build,
    check,
    expected_gradients,
    inputs_of,
)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", EMBEDDING)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["N", "1 N"])
@pytest.mark.parametrize("name", ["embedding"])
def test_positions_may_be_flattened(name, at, packed):
    layer = build(name)
    shape = (B * T,) if at == "N" else (1, B * T)
    check(layer, inputs_of(layer, *shape), "fig4", packed, at)


def test_one_row_of_position_ids_counts_for_every_sequence():
    """As in GPT-2: positions `[1, T]`, added to tokens `[B, T]`."""
    layer = build("embedding")
    plain = copy.deepcopy(layer)
    model, ids = Holder(layer), torch.arange(T).unsqueeze(0)
    isopo = ISOPO(model, fisher_samples=7)
    cotangent = torch.randn(B, T, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with isopo.microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)) as microbatch:
        (torch.zeros(B, T, 3, dtype=torch.float64) + model(ids)).backward(cotangent)
    sequence = torch.arange(B).unsqueeze(1).expand(B, T)
    rows = microbatch.samples.rows
    (expected,) = expected_gradients(plain, ids.expand(B, T), cotangent, sequence, ADVANTAGES[:B], rows, "fisher")
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("shape", [(T, B), (B, T + 1), (2, T)])
def test_token_ids_that_are_not_those_of_the_microbatch_are_an_error_that_says_so(shape):
    layer = build("embedding")
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))
