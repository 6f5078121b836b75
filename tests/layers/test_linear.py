"""Linear layers and Conv1D against a loop over their positions in float64."""

import pytest

from isopo_trl.geometry import cost
from isopo_trl.rules import rule_names
from tests.layers.harness import LINEAR, B, T, build, check, inputs_of


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
