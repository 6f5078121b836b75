"""Every kind of layer, alone on a small module, against a loop over its positions in float64."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.rules import rule_names
from tests import oracle


B, T = 3, 4
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0], dtype=torch.float64)
# One sequence a row, with padding; or several a row, one of them in two rows and one without any position
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
PACKED = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 1, 1, 3]])


@pytest.fixture
def float64_throughout(monkeypatch):
    """Norms go to float32 inside, whatever they are given; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


class Holder(nn.Module):
    """The least that ISOPO can be attached to."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class ScaleAndShift(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return torch.tanh(x) * self.scale + self.shift


class LayerScale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.gamma


class ScaledEmbedding(nn.Embedding):
    """The scale is a plain number here, a buffer in gemma."""

    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


D = 5
LAYERS = {
    "linear": lambda: nn.Linear(D, 3),
    "wide linear": lambda: nn.Linear(D, 9),
    "linear without bias": lambda: nn.Linear(D, 3, bias=False),
    "wide linear without bias": lambda: nn.Linear(D, 9, bias=False),
    "linear, only its weight": lambda: trained(nn.Linear(D, 3), "weight"),
    "linear, only its bias": lambda: trained(nn.Linear(D, 3), "bias"),
    "Conv1D": lambda: Conv1D(3, D),
    "Conv1D, only its weight": lambda: trained(Conv1D(3, D), "weight"),
    "Conv1D, only its bias": lambda: trained(Conv1D(3, D), "bias"),
    "LayerNorm": lambda: nn.LayerNorm(D),
    "LayerNorm without bias": lambda: nn.LayerNorm(D, bias=False),
    "LayerNorm, only its weight": lambda: trained(nn.LayerNorm(D), "weight"),
    "LayerNorm, only its bias": lambda: trained(nn.LayerNorm(D), "bias"),
    "llama's norm": lambda: LlamaRMSNorm(D),
    "gemma's norm": lambda: Gemma3RMSNorm(D),
    "T5's norm": lambda: T5LayerNorm(D),
    "scale and shift": lambda: ScaleAndShift(D),
    "scale and shift, only the shift": lambda: trained(ScaleAndShift(D), "shift"),
    "layer scale": lambda: LayerScale(D),
    "embedding": lambda: nn.Embedding(6, 3),
    "embedding with padding_idx": lambda: nn.Embedding(6, 3, padding_idx=2),
    "scaled embedding": lambda: ScaledEmbedding(6, 3),
    "gemma's embedding": lambda: Gemma3TextScaledWordEmbedding(6, 3, padding_idx=0, embed_scale=7.5),
}
NORMS = ["llama's norm", "gemma's norm", "T5's norm", "scale and shift"]


def trained(layer, *names):
    """The layer with only the named parameters trained."""
    for name, p in layer.named_parameters():
        p.requires_grad_(name in names)
    return layer


def build(name, seed=0):
    """The layer in float64 with random parameters, near one where they are a vector."""
    layer = LAYERS[name]().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_((p.dim() == 1) + 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def inputs_of(layer, *shape, seed=1):
    """Random token ids or activations whose dimensions before the features are `shape`."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, shape, generator=generator)
    return torch.randn(*shape, D, generator=generator, dtype=torch.float64)


# Where the position (b, t) is found in a layer's input
POSITION = {
    "B T": lambda b, t: (slice(b, b + 1), slice(t, t + 1)),
    "B H T": lambda b, t: (slice(b, b + 1), slice(None), slice(t, t + 1)),
    "N": lambda b, t: (slice(b * T + t, b * T + t + 1),),
    "1 N": lambda b, t: (slice(None), slice(b * T + t, b * T + t + 1)),
}


def position_gradients(layer, x, cotangent, at="B T"):
    """The gradient of all trained parameters at each position, `[N, parameters]`: the layer run on it alone."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    rows = []
    for b, t in itertools.product(range(B), range(T)):
        index = POSITION[at](b, t)
        gradients = torch.autograd.grad(layer(x[index].detach()), parameters, cotangent[index])
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def expected_gradients(layer, x, cotangent, ids, advantages, rows, rule, at="B T", **settings):
    """`sum_s c_s V_s` by the definition, and the `V` it is made of."""
    G = position_gradients(layer, x, cotangent, at)
    V = torch.stack([G[ids.flatten() == s].sum(0) for s in range(len(advantages))])
    c = oracle.coefficients(V, G[rows], advantages, rule, **settings)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    flat = (c @ V).split([p.numel() for p in parameters])
    return [g.view_as(p) for g, p in zip(flat, parameters, strict=True)]


def check(layer, x, rule, packed=False, at="B T", samples=7):
    """Output, gradient of the input and gradients of the parameters of an attached layer."""
    plain, m = copy.deepcopy(layer), 5 if packed else B
    advantages = ADVANTAGES[:m]
    ids = PACKED if packed else torch.arange(B).unsqueeze(1).expand(B, T)
    where = {"sequence_ids": PACKED} if packed else {"attention_mask": MASK}
    model = Holder(layer)
    isopo = ISOPO(model, rule, fisher_samples=samples)
    mine, other = x.detach().clone(memory_format=torch.preserve_format), x.detach().clone()
    if x.is_floating_point():
        mine.requires_grad_(), other.requires_grad_()
    expected_output = plain(other)
    cotangent = torch.randn(expected_output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if not packed:  # the loss does not look at padding
        for b, t in (MASK == 0).nonzero().tolist():
            cotangent[POSITION[at](b, t)] = 0

    with isopo.microbatch(advantages, **where) as microbatch:
        output = model(mine)
        output.backward(cotangent)
    torch.testing.assert_close(output, expected_output, rtol=1e-12, atol=1e-12)
    if x.is_floating_point():
        expected_output.backward(cotangent)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
    rows = torch.tensor([], dtype=torch.long)
    if microbatch.samples is not None:
        rows = microbatch.samples.rows[~microbatch.samples.absent]
        assert len(rows) == samples
    expected = expected_gradients(plain, x, cotangent, ids, advantages, rows, rule, at)
    for (name, p), gradient in zip(
        [(name, p) for name, p in layer.named_parameters() if p.requires_grad], expected, strict=True
    ):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in layer.parameters() if not p.requires_grad)


# Gradients


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_the_definition(name, rule, packed):
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("at", ["N", "1 N"])
@pytest.mark.parametrize("name", ["linear", "Conv1D", "LayerNorm", "embedding", *NORMS])
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


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
@pytest.mark.parametrize("name", ["linear", "wide linear without bias", "linear, only its weight", "Conv1D"])
@pytest.mark.parametrize("strategy", ["ghost", "kept", "blocks"])
def test_a_linear_layer_has_the_same_gradient_by_every_strategy(name, strategy, rule, packed, monkeypatch):
    monkeypatch.setattr("isopo_trl.layers.linear.choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "KEPT_LIMIT", 40)  # blocks of one row
    layer = build(name)
    check(layer, inputs_of(layer, B, T), rule, packed)


def test_an_input_that_is_not_contiguous_is_no_different():
    for name in ("linear", "LayerNorm"):
        layer = build(name)
        check(layer, inputs_of(layer, T, B).transpose(0, 1), "fisher")


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


def test_later_steps_refer_to_the_running_means_of_earlier_ones():
    layer = build("linear")
    plain, model = copy.deepcopy(layer), Holder(layer)
    isopo = ISOPO(model, "fisher", regularization=0.5, regularization_decay=0.8, fisher_samples=7)
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


# What is refused


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.once, self.unused = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x):
        return self.once(self.shared(self.shared(x)))


def test_a_layer_that_is_used_twice_or_not_at_all_is_reported_by_name():
    model = Twice()
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError) as error, isopo.microbatch(torch.ones(B), attention_mask=MASK):
        model(torch.randn(B, T, D)).sum().backward()
    message = str(error.value)
    assert "shared.weight, shared.bias: 2 times" in message
    assert "unused.weight, unused.bias: 0 times" in message
    assert "once" not in message.split("exactly once")[1]
    assert isopo.current is None


def test_layers_are_counted_only_once_a_backward_has_run():
    model = Twice()
    isopo = ISOPO(model)
    isopo.begin(torch.ones(B), attention_mask=MASK)
    model(torch.randn(B, T, D))
    isopo.end()
    with pytest.raises(RuntimeError, match="shared.weight"), isopo.microbatch(torch.ones(B), attention_mask=MASK):
        model(torch.randn(B, T, D)).sum().backward()


class Matrix(nn.Module):
    """Uses its own weight as a matrix."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return x @ self.matrix


class Cumulative(nn.Module):
    """Elementwise, but positions see one another."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return (x * self.scale).cumsum(-2)


class MeanOfScale(Cumulative):
    """A vector parameter that is reduced before it meets the positions."""

    def forward(self, x):
        return x * self.scale.mean()


class OtherArguments(Cumulative):
    """A vector parameter of a module that is not called with a tensor."""

    def forward(self, output):
        return output.hidden_states * self.scale


class TwoSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale * self.gate


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 2


class ShiftedEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def with_forward_of_its_own(layer):
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: nn.Conv1d(D, D, 3), ["weight", "bias"]),
        (lambda: nn.RMSNorm(D), ["weight"]),  # its forward insists on a vector
        (lambda: nn.BatchNorm1d(D), ["weight", "bias"]),
        (Matrix, ["matrix"]),
        (Cumulative, ["scale"]),
        (MeanOfScale, ["scale"]),
        (OtherArguments, ["scale"]),
        (TwoSizes, ["scale", "gate"]),
        (lambda: nn.ParameterList([torch.ones(3), torch.ones(3)]), ["0", "1"]),
        (lambda: nn.Embedding(6, 3, max_norm=1.0), ["weight"]),
        (lambda: nn.Embedding(6, 3, sparse=True), ["weight"]),
        (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True), ["weight"]),
        (lambda: ShiftedEmbedding(6, 3), ["weight"]),
        (lambda: OPTLearnedPositionalEmbedding(6, 3), ["weight"]),
        (lambda: OwnLinear(D, D), ["weight", "bias"]),
        (lambda: OwnNorm(D), ["weight", "bias"]),
        (lambda: nn.LayerNorm([T, D]), ["weight", "bias"]),
        (lambda: with_forward_of_its_own(nn.Linear(D, D)), ["weight", "bias"]),
        (lambda: with_forward_of_its_own(nn.LayerNorm(D)), ["weight", "bias"]),
        (lambda: with_forward_of_its_own(nn.Embedding(6, 3)), ["weight"]),
        (lambda: with_forward_of_its_own(LlamaRMSNorm(D)), ["weight"]),
    ],
)
def test_a_layer_that_cannot_be_honoured_is_refused_by_name(make, parameters):
    model = nn.Sequential(nn.Linear(D, D), make())
    values = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="freeze them") as error:
        ISOPO(model)
    for name in parameters:
        assert f"1.{name} (" in str(error.value)
    assert "0.weight" not in str(error.value)
    # The attempt leaves no trace, and the same layer is welcome when it is frozen
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert "forward" not in model[0].__dict__
    model[1].requires_grad_(False)
    assert [row["parameter"] for row in ISOPO(model).coverage()] == ["0.weight", "0.bias"]


def test_trying_a_layer_out_leaves_its_parameters_where_they_were():
    for name in [*NORMS, "layer scale", "scaled embedding"]:
        layer = build(name)
        own = dict(layer.named_parameters())
        values = {key: p.clone() for key, p in own.items()}
        ISOPO(Holder(layer))
        for key, p in layer.named_parameters():
            assert p is own[key] and torch.equal(p, values[key])


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        ISOPO(Holder(trained(nn.Linear(D, D))))


@pytest.mark.parametrize("shape", [(T, B), (B, T + 1), (B * T + 1,), (B, T, 2), (1, T)])
@pytest.mark.parametrize("name", ["linear", "LayerNorm"])
def test_rows_that_are_not_those_of_the_microbatch_are_an_error_that_says_so(name, shape):
    layer = build(name)
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))


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


@pytest.mark.parametrize("shape", [(T, B), (B, T + 1), (2, T)])
def test_token_ids_that_are_not_those_of_the_microbatch_are_an_error_that_says_so(shape):
    layer = build("embedding")
    model = Holder(layer)
    with (
        pytest.raises(RuntimeError, match=rf"layer got positions of shape .* but the microbatch has {B} x {T}"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK),
    ):
        model(inputs_of(layer, *shape))


def test_a_sequence_number_without_an_advantage_is_an_error_that_says_so():
    isopo = ISOPO(Holder(build("linear")))
    with pytest.raises(ValueError, match="sequence_ids"):
        isopo.begin(ADVANTAGES[:3], sequence_ids=PACKED)  # holds sequences 0 .. 3


@pytest.mark.parametrize("name", ["linear", "LayerNorm", "llama's norm", "embedding"])
def test_a_second_derivative_is_refused_not_wrong(name):
    layer = build(name)
    model = Holder(layer)
    with ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=MASK):
        loss = model(inputs_of(layer, B, T)).pow(3).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
        loss.backward()


def test_where_positions_are_is_remembered_for_as_many_heads_as_positions():
    """`[B, H, T, d]`, laid out in memory as it reads: with H = T nothing in the tensor tells the two apart."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = LlamaRMSNorm(5)

        def forward(self, x):
            return self.norm(x)

    gradients = []
    for earlier in (False, True):
        model = Model().double()
        isopo = ISOPO(model, "fisher", scale="paper", fisher_samples=10_000)
        for T in (6, 3) if earlier else (3,):
            model.zero_grad()
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, 3, T, 5, generator=generator, dtype=torch.float64)
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x = x if earlier else x.transpose(1, 2).contiguous().transpose(1, 2)  # the stride tells
            with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, T)):
                (model(x) * weight).sum().backward()
        gradients.append(model.norm.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
