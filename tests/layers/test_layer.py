"""
Layers of every kind against a loop over their positions in float64, and what all share: when they are themselves,
copies, taking them off, types.
"""

import copy
import pickle

import pytest
import torch

from isopo_trl import ISOPO
from tests.layers.harness import ADVANTAGES, LAYERS, MASK, B, D, Holder, T, build, check, inputs_of


ONE_OF_EACH = ["linear", "Conv1D", "LayerNorm", "llama's norm", "scale and shift", "embedding"]
each_kind = pytest.mark.parametrize("name", ONE_OF_EACH)
both_layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


# Gradients


@pytest.mark.usefixtures("float64_throughout")
@both_layouts
@pytest.mark.parametrize("rule", ["fisher", "fig4", "euclidean", "interacting", "none"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@both_layouts
@pytest.mark.parametrize("at", ["N", "1 N"])
@each_kind
def test_positions_may_be_flattened(name, at, packed):
    layer = build(name)
    shape = (B * T,) if at == "N" else (1, B * T)
    check(layer, inputs_of(layer, *shape), "fig4", packed, at)


@pytest.mark.usefixtures("float64_throughout")
@both_layouts
@pytest.mark.parametrize("heads", [2, T])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *((name, at) for name in ("llama's norm", "scale and shift") for at in ("B T", "B H T", "N")),
        *((name, at) for name in ("LayerNorm", "LayerNorm, only its bias") for at in ("B T", "B H T")),
    ],
)
def test_a_norm_over_heads_adds_up_the_heads_of_a_position(name, at, heads, packed):
    layer = build(name)
    x = inputs_of(layer, B, T, heads)
    # Turned as attention does it, or all positions in one row
    x = x.transpose(1, 2) if at == "B H T" else x.flatten(0, 1) if at == "N" else x
    check(layer, x, "fig4", packed, at)


@pytest.mark.parametrize("name", ["linear", "LayerNorm"])
def test_an_input_that_is_not_contiguous_is_no_different(name):
    layer = build(name)
    check(layer, inputs_of(layer, T, B).transpose(0, 1), "fisher")


def test_an_advantage_may_be_given_in_any_floating_type():
    x = torch.randn(B, T, D, dtype=torch.float64)
    gradients = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = Holder(build("linear"))
        with ISOPO(model).microbatch(ADVANTAGES[:B].to(dtype), attention_mask=MASK):
            model(x).sum().backward()
        gradients.append(model.layer.weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("name", ONE_OF_EACH[:-1])
def test_under_autocast_rule_none_gives_the_layers_own_gradient(name):
    layer = build(name).float()
    plain, model = copy.deepcopy(layer), Holder(layer)
    mine, other = (inputs_of(layer, B, T).float().requires_grad_() for _ in range(2))
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


@each_kind
def test_a_second_derivative_is_refused_not_wrong(name):
    layer = build(name)
    model = Holder(layer)
    with ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK):
        loss = model(inputs_of(layer, B, T)).pow(3).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
        loss.backward()


def test_transforms_of_torch_func_are_refused_not_wrong():
    model = Holder(build("linear"))
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: model(x).sum())(inputs_of(model.layer, B, T))
    isopo.abort()


# Outside of a microbatch, copies, and taking it off


@each_kind
def test_outside_of_a_microbatch_and_in_a_deep_copy_the_layer_is_its_own(name):
    layer = build(name)
    plain, model = copy.deepcopy(layer), Holder(layer)
    x = inputs_of(layer, B, T)
    isopo = ISOPO(model)
    plain(x).square().sum().backward()

    def is_plain(other):
        other.zero_grad()
        other(x).square().sum().backward()
        pairs = zip(other.parameters(), plain.parameters(), strict=True)
        return all(p is not q and torch.equal(p.grad, q.grad) for p, q in pairs)

    assert is_plain(model)
    model.zero_grad()
    with isopo.microbatch(ADVANTAGES[:B], attention_mask=MASK) as microbatch:
        twin = copy.deepcopy(model)
        assert is_plain(twin) and all(p.grad is None for p in layer.parameters())
        with torch.no_grad():
            assert torch.equal(model(x[:1]), plain(x[:1]))  # any shape: nothing is recorded
        assert microbatch.visits == [0] and not microbatch.ledger.table.any()
        model(x).square().sum().backward()
        assert microbatch.visits == [1]
    # The copy computes with its own parameters
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(x), plain(x)) and not torch.equal(twin(x), plain(x))


@each_kind
def test_detach_gives_the_model_its_own_layers_back(name):
    layer = build(name)
    before = set(layer.__dict__)
    model = Holder(layer)
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    isopo = ISOPO(model)
    assert [name for name, _ in model.named_modules()] == names and list(model.state_dict()) == keys
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    isopo.detach()
    assert set(layer.__dict__) == before
    model(inputs_of(layer, B, T)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    isopo.detach()  # a second time does nothing
    ISOPO(model)  # and another one may take its place


def test_an_attached_model_can_be_pickled_and_comes_back_plain():
    model = Holder(build("linear"))
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    twin = pickle.loads(pickle.dumps(model))
    isopo.abort()
    x = torch.randn(2, D, dtype=torch.float64)
    assert torch.equal(twin(x), model(x))
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, shape) for name in ONE_OF_EACH for shape in [(T, B), (B, T + 1), (2, T)]),
        ("linear", (B, T, 2)),  # heads, over which norms alone are taken
        ("llama's norm", (B, 2, 2)),
        ("LayerNorm", (B, T + 1, 2)),
        ("LayerNorm", (B * T + 1,)),
    ],
)
def test_rows_that_are_not_those_of_the_microbatch_are_an_error_that_says_so(name, shape):
    layer = build(name)
    own = dict(layer.named_parameters())
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))
    assert dict(layer.named_parameters()) == own
