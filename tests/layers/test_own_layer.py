"""The kind of layer that `docs/inside.md` registers from outside the package, against a loop over sequences."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.layers import Layer, register_layer, registry
from tests import oracle


PAGE = Path(__file__).parents[2] / "docs" / "inside.md"
B, T = 3, 4
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """What the page's block defines; it is not registered any longer after the test."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    block = re.search(r"^```python\n(.*?register_layer.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {"__name__": "users_module"}
    exec(compile(block[1], PAGE.name, "exec"), names)
    return names


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
def test_its_gradient_is_the_definition(names, rule):
    generator = torch.Generator().manual_seed(0)
    layer = names["Projection"](5, 3).double()
    model = nn.Sequential(layer)
    x, g = (torch.randn(B, T, width, generator=generator, dtype=torch.float64) for width in (5, 3))
    isopo = ISOPO(model, rule, fisher_samples=B * T, fisher_scope="microbatch" if rule in ("fisher", "fig4") else None)
    with isopo.microbatch(ADVANTAGES, attention_mask=torch.ones(B, T)):
        model(x).backward(g)
    assert [row["kind"] for row in isopo.coverage()] == ["projection"]
    G = torch.einsum("btd,btp->btdp", x, g).flatten(2)  # of each position
    V = G.sum(1)
    c = oracle.coefficients(V, G.flatten(0, 1), ADVANTAGES, rule)
    torch.testing.assert_close(layer.kernel.grad.flatten(), c @ V, rtol=1e-9, atol=1e-11)


def test_it_is_asked_before_the_package_and_may_leave_a_module_to_it():
    class Mine(Layer):
        kind = "mine"

        @classmethod
        def accepts(cls, module, trainable):
            return isinstance(module, nn.Linear) and module.out_features == 2

    register_layer(Mine)
    isopo = ISOPO(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))
    assert [row["kind"] for row in isopo.coverage()] == ["mine", "mine", "linear", "linear"]


def test_a_class_that_is_defined_again_takes_the_place_of_the_first(names):
    before = len(registry.registered_kinds())
    register_layer(type("ProjectionLayer", (names["ProjectionLayer"],), {"__module__": "users_module"}))
    assert len(registry.registered_kinds()) == before


@pytest.mark.parametrize("given", [nn.Linear, "projection", type("Nameless", (Layer,), {})])
def test_what_is_no_kind_of_layer_is_refused(given):
    with pytest.raises(TypeError, match="subclass of `isopo_trl.layers.Layer` with a `kind`"):
        register_layer(given)
