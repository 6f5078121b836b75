"""
RMSNorm: which modules are recognised, and the fused layers, trained and frozen, against the modules themselves.

The kernels run on a GPU or, on a CPU, under Triton's interpreter (see `tests/kernels/test_interpreted.py`).
"""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from isopo_trl import ISOPO
from isopo_trl.kernels import launch
from isopo_trl.kernels.rms_norm import Flavour
from isopo_trl.layers import rms_norm
from isopo_trl.layers.rms_norm import FrozenRMSNorm, RMSNormLayer, flavour_of
from isopo_trl.rules import rule_names
from tests.kernels import batches
from tests.kernels.batches import DEVICE, EXACT
from tests.layers import harness
from tests.layers.harness import RMS_NORM, Holder


B, T, H, D = 3, 4, 2, 5
EPS = 1e-3
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
EARLY, LATE, OFFSET = Flavour(EPS, 0.0, True), Flavour(EPS, 0.0, False), Flavour(EPS, 1.0, False)
FAMILIES = {
    LlamaRMSNorm: EARLY,
    Qwen2RMSNorm: EARLY,
    Qwen3RMSNorm: EARLY,
    MistralRMSNorm: EARLY,
    GemmaRMSNorm: OFFSET,
    Gemma2RMSNorm: OFFSET,
    Gemma3RMSNorm: OFFSET,
    Olmo2RMSNorm: LATE,
}
CLOSE = {"rtol": 1e-10, "atol": 1e-10} if EXACT == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def float64_if_interpreted(monkeypatch):
    """Norms go to float32 inside, whatever they are given; here they cannot."""
    if EXACT == torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):  # both names are in use
            monkeypatch.setattr(torch, name, torch.float64)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the two fused functions, by their name."""
    seen = []
    for function in (rms_norm._RMSNorm, rms_norm._FrozenRMSNorm):

        def counting(*args, function=function, apply=function.apply):
            seen.append(function.__name__)
            return apply(*args)

        monkeypatch.setattr(function, "apply", counting)
    return seen


# Which modules are recognised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_the_norm_of_a_family_is_recognised(kind, dtype):
    assert flavour_of(kind(D, EPS).to(dtype)) == FAMILIES[kind]


class L1Norm(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * (x.float() / (x.float().abs().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class OffsetTwo(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (self.weight + 2) / self.weight


class InFloat32(LlamaRMSNorm):
    """The same formula, but the output keeps another type."""

    def forward(self, x):
        return super().forward(x).float()


class Raises(LlamaRMSNorm):
    error = RuntimeError

    def forward(self, x):
        raise self.error("no")


class WithoutEpsilon(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize(
    "kind", [L1Norm, OffsetTwo, InFloat32, WithoutEpsilon, Raises, nn.LayerNorm], ids=lambda kind: kind.__name__
)
def test_another_formula_is_not_taken_for_an_rms_norm(kind):
    assert flavour_of(kind(D, EPS)) is None


def test_pytorchs_own_norm_is_recognised_only_if_it_gives_the_same():
    assert flavour_of(nn.RMSNorm(D)) is None  # its epsilon depends on the type
    norm = nn.RMSNorm(D, eps=EPS)
    flavour = flavour_of(norm)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(B, T, D).to(dtype)
        if flavour is not None:
            assert torch.equal(norm.to(dtype)(x), flavour(x, norm.weight))


def test_a_module_without_memory_is_not_tried():
    with torch.device("meta"):
        assert flavour_of(LlamaRMSNorm(D)) is None


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_a_weight_that_lies_elsewhere_does_not_change_the_flavour(kind):
    """DeepSpeed ZeRO-3 leaves an empty tensor behind, with its true shape in `ds_shape`."""
    norm = kind(D, EPS)
    norm.weight = nn.Parameter(torch.empty(0))
    norm.weight.ds_shape = torch.Size([D])
    assert flavour_of(norm) == FAMILIES[kind]


@pytest.mark.parametrize("error", [None, RuntimeError, TypeError, KeyboardInterrupt])
def test_trying_a_module_leaves_its_weight_where_it_was(error):
    norm = LlamaRMSNorm(D) if error is None else Raises(D)
    norm.error = error
    own, value = norm.weight, norm.weight.detach().clone()
    if error is KeyboardInterrupt:  # not one of a forward that does not fit
        with pytest.raises(KeyboardInterrupt):
            flavour_of(norm)
    else:
        assert (flavour_of(norm) is None) == (error is not None)
    assert norm.weight is own and dict(norm.named_parameters()) == {"weight": own}
    assert torch.equal(own, value) and own.requires_grad and own.grad is None


def test_a_frozen_norm_is_not_among_the_trained_parameters():
    model = nn.Sequential(LlamaRMSNorm(D), nn.Linear(D, D), Gemma3RMSNorm(D), nn.LayerNorm(D), L1Norm(D))
    for k in (0, 3, 4):
        model[k].requires_grad_(False)
    isopo = ISOPO(model)
    frozen = [layer.module for layer in isopo._shortcuts if isinstance(layer, FrozenRMSNorm)]
    assert frozen == [model[0]]
    assert [row["parameter"] for row in isopo.coverage()] == ["1.weight", "1.bias", "2.weight"]
    assert [type(layer) for layer in isopo.layers if layer.name == "2"] == [RMSNormLayer]
    isopo.detach()
    assert not any("forward" in module.__dict__ for module in model)


# With the kernels: trained norms. Without them, they are among the layers of `test_layer.py`


@batches.needs_kernels
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", RMS_NORM)
def test_gradient_is_the_definition(name, rule, packed):
    layer = harness.build(name)
    harness.check(layer, harness.inputs_of(layer, B, T), rule, packed)


def build(kind, dtype=EXACT, trained=True):
    norm = kind(D, EPS).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * torch.randn(D, generator=torch.Generator().manual_seed(0)))
    return Holder(norm.requires_grad_(trained))


def inputs(*shape, dtype=EXACT, seed=1):
    x = torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype)


def real(x, axes=(0, 1)):
    """Which elements of `x` are at real positions, where `axes` count sequences and positions."""
    shape = [1] * x.dim()
    shape[axes[0]], shape[axes[1]] = B, T
    return MASK.view(shape).to(x.device)


def run(model, x, use, axes=(0, 1), rule="fisher"):
    """Output, gradient of the input, gradient of the weight; `use` goes from the output to a tensor like the input."""
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    isopo = ISOPO(model, rule, fisher_samples=7)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.device, x.dtype)
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    output = model(x)
    (use(output) * use(cotangent * real(x, axes))).sum().backward()
    reached = isopo.current.visits
    isopo.detach()
    assert reached == [1]
    return output.detach(), x.grad, model.layer.weight.grad.clone()


def both(model, x, monkeypatch, **settings):
    """With the kernels and without."""
    use = settings.pop("use", lambda y: y)
    mine = run(model, x, use, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "ENABLED", False)
        theirs = run(model, x, use, **settings)
    return mine, theirs


LAYOUTS = {
    "as it is": lambda y: y,
    "positions first": lambda y: y.transpose(0, 1).contiguous(),
    "heads first": lambda y: y.transpose(1, 2).contiguous(),
    "features first": lambda y: y.transpose(1, -1).contiguous(),
}


@batches.needs_kernels
@pytest.mark.usefixtures("float64_if_interpreted")
@pytest.mark.parametrize(
    ("kind", "shape", "layout"),
    batches.thinned(
        3,
        [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm],
        [(B, T), (1, B * T), (B, T, H)],
        LAYOUTS,
        names=lambda x: getattr(x, "__name__", str(x)),
    ),
)
def test_the_fused_norm_gives_what_the_module_gives(kind, shape, layout, calls, monkeypatch):
    model = build(kind)
    x = inputs(B, T, *shape[2:])
    if shape[0] == 1:
        model.forward = lambda x: model.layer(x.flatten(0, 1).unsqueeze(0)).view(x.shape)
    mine, theirs = both(model, x, monkeypatch, use=LAYOUTS[layout])
    assert calls == ["_RMSNorm"]
    expected = copy.deepcopy(model.layer)(x).detach()
    torch.testing.assert_close(mine[0], expected, **CLOSE)
    for ours, plain in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)


@batches.needs_kernels
@pytest.mark.usefixtures("float64_if_interpreted")
@pytest.mark.parametrize("heads", [H, T])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm], ids=lambda kind: kind.__name__)
def test_heads_before_positions_take_the_general_way(kind, heads, calls, monkeypatch):
    model = build(kind)
    x = inputs(B, T, heads)
    mine, theirs = both(model, x.transpose(1, 2), monkeypatch, axes=(0, 2))
    assert calls == []
    for ours, plain in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)
    # The same numbers, positions first: with the same cotangent, turned, the same gradient
    turned = Holder(model.layer)
    turned.forward = lambda x: model.layer(x.transpose(1, 2)).transpose(1, 2)
    again = run(turned, x.transpose(1, 2), lambda y: y, axes=(0, 2))
    assert calls == ["_RMSNorm"]
    for ours, other in zip(mine, again, strict=True):
        torch.testing.assert_close(ours, other, **CLOSE)


@batches.needs_kernels
@pytest.mark.usefixtures("float64_if_interpreted")
def test_positions_in_one_row_before_heads_are_right(monkeypatch):
    """`[B T, H, d]`."""
    model = build(LlamaRMSNorm)
    model.forward = lambda x: model.layer(x.flatten(0, 1)).view(x.shape)
    mine, theirs = both(model, inputs(B, T, H), monkeypatch)
    for ours, plain in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)


@batches.needs_kernels
@pytest.mark.usefixtures("float64_if_interpreted")
def test_where_positions_are_is_remembered_for_as_many_heads_as_positions(monkeypatch):
    """`[B, H, T, d]`, laid out in memory as it reads: with H = T nothing in the tensor tells the two apart."""
    gradients = []
    for enabled in (True, False):
        monkeypatch.setattr(launch, "ENABLED", enabled)
        model = build(LlamaRMSNorm)
        isopo = ISOPO(model, "fisher", scale="paper", fisher_samples=1000)
        for length in (6, 3):
            model.zero_grad()
            x = inputs(2, 3, length)
            weight = inputs(2, 3, length, seed=length)
            with isopo.microbatch(torch.ones(2, device=DEVICE), attention_mask=torch.ones(2, length, device=DEVICE)):
                (model(x) * weight).sum().backward()
        gradients.append(model.layer.weight.grad)
    torch.testing.assert_close(*gradients, **CLOSE)


# With the kernels: frozen norms


class Model(nn.Module):
    """A frozen norm between two layers that are trained."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), norm, nn.Linear(D, D)

    def forward(self, x, turn=lambda x: x):
        return self.last(turn(self.norm(turn(self.first(x)))))


def with_frozen(kind, dtype=EXACT):
    torch.manual_seed(0)
    model = Model(build(kind, trained=False).layer)
    return model.to(DEVICE, dtype)


def train(model, isopo, x, **settings):
    model.zero_grad()
    isopo._draws = 0
    x = x.detach().clone().requires_grad_()
    with isopo.microbatch(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE)):
        output = model(x, **settings)
        (output.square() * real(x)).sum().backward()
    return output.detach(), x.grad, *[p.grad.clone() for p in model.parameters() if p.requires_grad]


def positions_first(x):
    """`[B, T, d]`, as it is."""
    return x


def heads_first(x):
    """`[B, T, d]` as `[B, 1, T, d]`, and back."""
    return x.unsqueeze(1) if x.dim() == 3 else x.squeeze(1)


@batches.needs_kernels
@pytest.mark.usefixtures("float64_if_interpreted")
@pytest.mark.parametrize(
    ("kind", "turn"),
    batches.thinned(
        2,
        [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm],  # one of each flavour
        [positions_first, heads_first],
        names=lambda x: x.__name__,
    ),
)
def test_a_frozen_norm_gives_what_the_module_gives(kind, turn, calls):
    model = with_frozen(kind)
    isopo = ISOPO(model, "fisher", fisher_samples=7, fisher_scope="microbatch")
    mine = train(model, isopo, inputs(B, T), turn=turn)
    assert calls == ["_FrozenRMSNorm"]
    for layer in isopo._shortcuts:
        layer.detach()
    theirs = train(model, isopo, inputs(B, T), turn=turn)
    assert calls == ["_FrozenRMSNorm"] and model.norm.weight.grad is None
    for ours, plain in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)


@batches.needs_kernels
@pytest.mark.parametrize("kind", [*FAMILIES, T5LayerNorm], ids=lambda kind: kind.__name__)
def test_a_frozen_norm_of_another_type_gives_the_modules_type(kind, calls):
    norm = build(kind, trained=False).layer.half()
    isopo = ISOPO(model := nn.Sequential(norm, nn.Linear(D, D, device=DEVICE)))
    x = inputs(B, T, dtype=torch.float32)
    plain = copy.deepcopy(norm)
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    output = model[0](mine := x.clone().requires_grad_())
    isopo.abort()
    assert calls == ["_FrozenRMSNorm"] or kind not in FAMILIES
    expected = plain(other := x.clone().requires_grad_())
    assert output.dtype == expected.dtype
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(mine.grad, other.grad, rtol=2e-3, atol=2e-3)


@batches.needs_kernels
def test_a_frozen_norm_is_the_module_wherever_nothing_is_to_be_gained(calls):
    model = with_frozen(LlamaRMSNorm)
    norm, plain = model.norm, copy.deepcopy(model.norm)
    isopo = ISOPO(model)
    x = inputs(B, T).requires_grad_()

    def is_plain(x):
        return torch.equal(norm(x), plain(x)) and calls == []

    assert is_plain(x)  # outside of a microbatch
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    with torch.no_grad():
        assert is_plain(x)
    assert is_plain(x.detach())
    assert is_plain(x[0, 0]) and is_plain(x[:0])  # too few dimensions, and no element
    twin = copy.deepcopy(model)
    assert torch.equal(twin.norm(x), plain(x)) and calls == []
    norm(x)
    assert calls.pop() == "_FrozenRMSNorm"
    norm.weight.requires_grad_()
    plain.weight.requires_grad_()
    assert is_plain(x)
    norm(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.equal(norm.weight.grad, plain.weight.grad)
    isopo.abort()
    isopo.detach()
    assert "forward" not in norm.__dict__
    norm.weight.requires_grad_(False)
    assert is_plain(x)


@batches.needs_kernels
def test_a_frozen_norm_refuses_a_second_derivative():
    model = with_frozen(LlamaRMSNorm)
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES.to(DEVICE), attention_mask=MASK.to(DEVICE))
    x = inputs(B, T).requires_grad_()
    loss = model.norm(x).pow(3).sum()
    isopo.abort()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, x, create_graph=True)


# With the kernels: passes in float32 without gradients


@pytest.fixture
def launches(monkeypatch):
    """Counts what the kernel does."""
    seen = []
    forward = rms_norm.rms_norm.forward
    monkeypatch.setattr(rms_norm.rms_norm, "forward", lambda *args: seen.append(args) or forward(*args))
    return seen


@batches.needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_in_a_pass_in_float32_the_kernel_gives_what_the_module_gives(kind, trained, dtype, launches):
    norm = build(kind, dtype, trained).layer
    plain = copy.deepcopy(norm)
    isopo = ISOPO(nn.Sequential(norm, nn.Linear(D, D, device=DEVICE)))
    isopo._current.in_float32 = True
    x = inputs(B, H, T, dtype=torch.float32).transpose(1, 2)
    with torch.no_grad():
        found, expected = norm(x), plain(x)
        assert len(launches) == 1 and found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert norm(x[0, 0, 0]).shape == (D,) and len(launches) == 2


@batches.needs_kernels
def test_other_passes_without_gradients_are_the_modules(launches):
    model = nn.Sequential(build(LlamaRMSNorm, torch.float32).layer)
    norm, plain = model[0], copy.deepcopy(model[0])
    isopo = ISOPO(model)
    x = inputs(B, T, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(norm(x), plain(x))
        isopo._current.in_float32 = True
        assert torch.equal(norm(x.half()), plain(x.half())) and torch.equal(norm(x[:0]), plain(x[:0]))
        assert torch.equal(norm(hidden_states=x), plain(x))
        assert torch.equal(copy.deepcopy(norm)(x), plain(x))
    assert torch.equal(norm(x), plain(x)) and not launches
