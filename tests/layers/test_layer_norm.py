"""LayerNorm against a loop over its positions in float64."""

import pytest

from isopo_trl.rules import rule_names
from tests.layers.harness import LAYER_NORM, B, T, build, check, inputs_of


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", LAYER_NORM)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["N", "1 N"])
@pytest.mark.parametrize("name", ["LayerNorm"])
def test_positions_may_be_flattened(name, at, packed):
    layer = build(name)
    shape = (B * T,) if at == "N" else (1, B * T)
    check(layer, inputs_of(layer, *shape), "fig4", packed, at)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["B T", "B H T"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm, only its bias"])
def test_a_norm_over_heads_adds_up_the_heads_of_a_position(name, heads, at, packed):
    layer = build(name)
    x = inputs_of(layer, B, T, heads)
    check(layer, x.transpose(1, 2) if at == "B H T" else x, "fig4", packed, at)
