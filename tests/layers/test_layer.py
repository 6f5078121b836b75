"""What layers of all kinds share: when they are themselves, copies, taking them off, types, and running means."""

import copy
import itertools
import pickle

import pytest
import torch

from isopo_trl import ISOPO
from tests.layers.harness import (
    ADVANTAGES,
    LAYERS,
    MASK,
    B,
    D,
    Holder,
    T,
    build,
    check,
    expected_gradients,
    inputs_of,
    position_gradients,
)


# Gradients


def test_an_input_that_is_not_contiguous_is_no_different():
    for name in ("linear", "LayerNorm"):
        layer = build(name)
        check(layer, inputs_of(layer, T, B).transpose(0, 1), "fisher")


def test_later_steps_refer_to_the_running_means_of_earlier_ones():
    layer = build("linear")
    plain, model = copy.deepcopy(layer), Holder(layer)
    settings = {"regularization": 0.5, "regularization_decay": 0.8, "fisher_samples": 7}
    isopo = ISOPO(model, "fisher", fisher_scope="microbatch", **settings)
    sequence = torch.arange(B).unsqueeze(1).expand(B, T)
    history = None
    for step in range(3):
        own = []
        for part in range(2):  # microbatches of a step
            x = inputs_of(layer, B, T, seed=10 * step + part) * (1 + step)
            cotangent = torch.randn(B, T, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            layer.zero_grad()
            with isopo.microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)) as microbatch:
                model(x).backward(cotangent)
            rows = microbatch.samples.rows
            expected = expected_gradients(
                plain, x, cotangent, sequence, ADVANTAGES[:B], rows, "fisher", regularization=0.5, history=history
            )
            torch.testing.assert_close(layer.weight.grad, expected[0])
            torch.testing.assert_close(layer.bias.grad, expected[1])
            G = position_gradients(plain, x, cotangent)
            V = G.view(B, T, -1).sum(1)
            F = [((G[rows] @ v).square().sum() / G[rows].square().sum()).sqrt().item() for v in V]
            level = 0.5 * (sum(f * f for f in F) / B if history is None else history["fisher^2"])
            own += [(f * f, f / (f * f + level) ** 0.5, f) for f in F]
        isopo.step()
        means = [sum(column) / len(own) for column in zip(*own, strict=True)]
        means = dict(zip(("fisher^2", "fx", "x"), means, strict=True))
        history = means if history is None else {k: 0.8 * history[k] + 0.2 * means[k] for k in means}


def test_an_advantage_may_be_given_in_any_floating_type():
    x = torch.randn(B, T, D, dtype=torch.float64)
    gradients = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer = build("linear")
        model = Holder(layer)
        with ISOPO(model).microbatch(ADVANTAGES[:B].to(dtype), attention_mask=MASK):
            model(x).sum().backward()
        gradients.append(layer.weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("name", ["linear", "LayerNorm", "llama's norm", "scale and shift", "Conv1D"])
def test_under_autocast_rule_none_gives_the_layers_own_gradient(name):
    layer = build(name).float()
    plain, model = copy.deepcopy(layer), Holder(layer)
    x = inputs_of(layer, B, T).float()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        with ISOPO(model, "none").microbatch(torch.ones(B), attention_mask=MASK):
            output = model(mine)
            output.float().square().sum().backward()
        expected = plain(other)
        expected.float().square().sum().backward()
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=1e-2)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["linear", "LayerNorm", "llama's norm", "embedding"])
def test_a_second_derivative_is_refused_not_wrong(name):
    layer = build(name)
    model = Holder(layer)
    with ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK):
        loss = model(inputs_of(layer, B, T)).pow(3).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
        loss.backward()


@pytest.mark.parametrize("name", ["linear", "llama's norm"])
def test_transforms_of_torch_func_are_refused_not_wrong(name):
    layer = build(name)
    model = Holder(layer)
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: model(x).sum())(inputs_of(layer, B, T))
    isopo.abort()


# Outside of a microbatch, copies, and taking it off


@pytest.mark.parametrize("name", ["linear", "Conv1D", "LayerNorm", "llama's norm", "embedding"])
def test_outside_of_a_microbatch_the_layer_is_its_own(name):
    layer = build(name)
    plain, model = copy.deepcopy(layer), Holder(layer)
    x = inputs_of(layer, B, T)
    isopo = ISOPO(model)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    microbatch = isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    with torch.no_grad():
        assert torch.equal(model(x[:1]), plain(x[:1]))  # any shape: nothing is recorded
    isopo.end()
    assert microbatch.visits == [0]


@pytest.mark.parametrize("name", ["linear", "Conv1D", "LayerNorm", "llama's norm", "embedding"])
def test_a_deep_copy_is_the_plain_model_and_leaves_the_original_alone(name):
    layer = build(name)
    plain, model = copy.deepcopy(layer), Holder(layer)
    x = inputs_of(layer, B, T)
    isopo = ISOPO(model)
    with isopo.microbatch(ADVANTAGES[:B], attention_mask=MASK) as microbatch:
        twin = copy.deepcopy(model)
        twin(x).square().sum().backward()
        plain(x).square().sum().backward()
        assert microbatch.visits == [0] and not microbatch.ledger.table.any()
        assert all(p.grad is None for p in layer.parameters())
        model(x).square().sum().backward()
        assert microbatch.visits == [1]
    for p, q in zip(twin.layer.parameters(), plain.parameters(), strict=True):
        assert p is not q and torch.equal(p.grad, q.grad)
    # The copy computes with its own parameters
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(x), plain(x)) and not torch.equal(twin(x), plain(x))


def test_an_attached_model_can_be_pickled_and_comes_back_plain():
    layer = build("linear")
    model = Holder(layer)
    ISOPO(model)
    x = torch.randn(2, D, dtype=torch.float64)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("name", LAYERS)
def test_detach_gives_the_model_its_own_layers_back(name):
    layer = build(name)
    before = set(layer.__dict__)
    model = Holder(layer)
    isopo = ISOPO(model)
    assert "forward" in layer.__dict__
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    isopo.detach()
    assert set(layer.__dict__) == before
    x = inputs_of(layer, B, T)
    model(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)
    isopo.detach()  # a second time does nothing
    ISOPO(model)  # and another one may take its place


def test_state_dict_and_parameters_are_those_of_the_plain_model():
    model = Holder(build("linear"))
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    ISOPO(model)
    assert [name for name, _ in model.named_modules()] == names and list(model.state_dict()) == keys


@pytest.mark.parametrize(("name", "keyword"), [("linear", "input"), ("llama's norm", "hidden_states")])
def test_the_input_may_be_given_by_name(name, keyword):
    layer = build(name)
    model = Holder(layer)
    x = inputs_of(layer, B, T)
    gradients = []
    for call in (lambda: model(x), lambda: model(**{keyword: x})):
        model.zero_grad()
        isopo = ISOPO(model)
        with isopo.microbatch(ADVANTAGES[:B], attention_mask=MASK):
            call().square().sum().backward()
        isopo.detach()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


# Inputs that do not fit the microbatch


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product(["linear", "LayerNorm"], [(T, B), (B, T + 1), (B * T + 1,), (1, T)]),
        ("linear", (B, T, 2)),  # heads, over which norms alone are taken
        ("LayerNorm", (B, T + 1, 2)),
    ],
)
def test_rows_that_are_not_those_of_the_microbatch_are_an_error_that_says_so(name, shape):
    layer = build(name)
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))
