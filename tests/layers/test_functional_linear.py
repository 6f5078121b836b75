"""Modules that call `torch.nn.functional.linear` with a weight of their own; routers are in `test_experts.py`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isopo_trl import ISOPO
from isopo_trl.layers.functional_linear import calls_linear_once
from tests.layers import harness
from tests.layers.harness import B, D, T


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, D)), nn.Parameter(torch.empty(3))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).sigmoid()


class Cast(Plain):
    """Multiplies in another type, as routers do, by keyword."""

    def forward(self, x):
        return F.linear(input=x.to(torch.float64), weight=self.weight.to(torch.float32).double(), bias=None) + 0


class Corrected(Plain):
    """Told what to add when it chooses, and with a child that is not trained, as some routers are."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x, correction):
        logits = F.linear(x, self.weight, self.bias)
        return logits, (logits + correction).topk(2).indices


class OfLinear(nn.Linear):
    """A linear layer that goes on from its product, and draws random numbers, as the router of Phi-MoE."""

    def __init__(self):
        super().__init__(D, 3)

    def forward(self, x):
        return super().forward(x).sigmoid() + 0 * torch.rand(1)


class WithoutBias(Plain):
    def forward(self, x):
        return F.linear(x, self.weight) + self.bias


class Indexed(Plain):
    """With a parameter that can have no gradient."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)[..., self.order]


class Twice(Plain):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(x.square(), self.weight)


class Normalised(Plain):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight), self.bias)


class Penalised(Plain):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * self.weight.norm()


def example(kind):
    module = kind()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module.double()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
@pytest.mark.parametrize("kind", [Plain, OfLinear])
def test_gradient_is_that_of_a_loop_over_positions(kind, rule, packed):
    module = example(kind)
    harness.check(module, harness.inputs_of(module, B, T), rule, packed)


def test_a_weight_that_is_cast_before_the_product_is_known_again():
    module = example(Cast)
    module.bias.requires_grad_(False)
    model, x = harness.Holder(module), harness.inputs_of(module, B, T)
    expected = sum(
        A * torch.autograd.grad(module(x[b]).square().sum(), module.weight)[0] for b, A in enumerate([1, -2, 3])
    )
    with ISOPO(model, "none").microbatch(torch.tensor([1.0, -2.0, 3.0]), attention_mask=torch.ones(B, T)):
        model(x).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_product_is_known_where_deepspeed_has_put_its_own_function(monkeypatch):
    def another(x, weight, bias=None):
        return x @ weight.T + (0 if bias is None else bias)

    module = example(Plain)
    monkeypatch.setattr(F, "linear", another)
    assert calls_linear_once(module)
    harness.check(module, harness.inputs_of(module, B, T), "fisher", packed=False)
    assert F.linear is another


def test_a_router_that_is_told_more_than_the_hidden_states_is_known():
    assert calls_linear_once(example(Corrected))


def test_trying_a_router_draws_nothing_from_the_global_stream():
    model = harness.Holder(example(OfLinear))
    before = torch.get_rng_state()
    (layer,) = ISOPO(model).layers
    assert layer.kind == "linear" and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [WithoutBias, Twice, Normalised, Penalised, Indexed])
def test_other_uses_of_the_weight_are_left_to_gradients_per_sequence(kind):
    module = example(kind)
    weight, trained = module.weight, [p.requires_grad for p in module.parameters()]
    assert not calls_linear_once(module)
    assert module.weight is weight and [p.requires_grad for p in module.parameters()] == trained
    (layer,) = ISOPO(harness.Holder(module)).layers
    assert layer.kind == "any module"


def test_a_second_product_that_shows_only_in_training_is_an_error():
    class Sometimes(Plain):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias) if x.dim() == 2 else Twice.forward(self, x)

    model = harness.Holder(example(Sometimes))
    isopo = ISOPO(model, "none")
    with (
        pytest.raises(RuntimeError, match="layer multiplied by its weight 2 times"),
        isopo.microbatch(torch.ones(B), attention_mask=torch.ones(B, T)),
    ):
        model(torch.ones(B, T, D, dtype=torch.float64))
