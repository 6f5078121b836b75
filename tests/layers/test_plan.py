"""Who takes which trained parameter, what is refused by name, the coverage table."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from isopo_trl import ISOPO
from isopo_trl.layers.plan import parameter_names, plan, shortcuts, trained_parameters
from isopo_trl.microbatch import CurrentMicrobatch
from tests import tiny
from tests.layers.harness import ELEMENTWISE, EMBEDDING, LAYER_NORM, LINEAR, RMS_NORM, D, Holder, T, build, trained


def linear():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


# Who takes what


KINDS = {
    **dict.fromkeys(LINEAR, "linear"),
    **dict.fromkeys(LAYER_NORM, "layer norm"),
    **dict.fromkeys(RMS_NORM, "rms norm"),
    **dict.fromkeys(ELEMENTWISE, "elementwise"),
    **dict.fromkeys(EMBEDDING, "embedding"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_taken_by_its_own_kind(name):
    (layer,) = plan(CurrentMicrobatch(), Holder(build(name)))
    assert (layer.kind, layer.name, layer.index) == (KINDS[name], "layer", 0)
    assert layer.parameters == [n for n, p in layer.module.named_parameters() if p.requires_grad]


def test_layers_are_numbered_in_the_order_of_the_modules():
    model = tiny.model("qwen3")
    model.model.layers[0].requires_grad_(False)
    layers = plan(CurrentMicrobatch(), model)
    assert [layer.index for layer in layers] == list(range(len(layers)))
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = [name for layer in layers for name in parameter_names(layer)]
    assert set(names) == trained and len(names) == len(trained)
    modules = [name for name, _ in model.named_modules()]
    assert [modules.index(layer.name) for layer in layers] == sorted(modules.index(layer.name) for layer in layers)


def test_the_output_embeddings_are_taken_as_the_head_even_where_peft_has_a_copy_of_them():
    for modules_to_save in (None, ["lm_head"]):
        model = tiny.model("llama", tie=False)
        if modules_to_save:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=modules_to_save))
        heads = [layer for layer in plan(CurrentMicrobatch(), model) if layer.kind == "lm head"]
        assert [parameter_names(layer)[0].split(".")[-1] for layer in heads] == ["weight"]
        assert heads[0].module.weight.requires_grad and heads[0].module.out_features == model.config.vocab_size


def test_trained_parameters_are_those_that_require_a_gradient_now():
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.LayerNorm(D), nn.Identity()))
    everything = {(model[0], "weight"), (model[0], "bias"), (model[1][0], "weight"), (model[1][0], "bias")}
    assert trained_parameters(model) == everything
    model[0].weight.requires_grad_(False)
    model[1][0].bias = None
    assert trained_parameters(model) == {(model[0], "bias"), (model[1][0], "weight")}
    planned = {(model[0], "weight"), (model[0], "bias")}
    assert trained_parameters(model, planned) == {(model[1][0], "weight")}


def test_a_parameter_that_two_modules_share_is_two_of_them():
    model = tiny.model("llama", tie=True)
    shared = [name for module, name in trained_parameters(model) if module._parameters[name] is model.lm_head.weight]
    assert shared == ["weight", "weight"]


def test_shortcuts_are_for_whole_lora_layers_and_frozen_norms_and_train_nothing_themselves():
    model = get_peft_model(tiny.model("qwen3"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    current = CurrentMicrobatch()
    layers = plan(current, model)
    found = shortcuts(current, model, layers)
    kinds = ("LoRALinear", "FrozenRMSNorm", "RotaryAttention", "GatedMLP")
    by_kind = {kind: {s.module for s in found if type(s).__name__ == kind} for kind in kinds}
    modules = dict(model.named_modules())
    assert by_kind["LoRALinear"] == {m for n, m in modules.items() if n.endswith(("q_proj", "up_proj"))}
    assert by_kind["FrozenRMSNorm"] == {m for n, m in modules.items() if n.endswith("norm")}
    assert by_kind["RotaryAttention"] == {m for n, m in modules.items() if n.endswith("self_attn")}
    assert by_kind["GatedMLP"] == {m for n, m in modules.items() if n.endswith("mlp")}
    assert len(found) == sum(map(len, by_kind.values()))
    # The trained parameters stay with their own layers
    assert {layer.module for layer in layers}.isdisjoint(s.module for s in found)


def test_a_trained_norm_has_no_shortcut():
    model = tiny.model("qwen3")
    current = CurrentMicrobatch()
    found = shortcuts(current, model, plan(current, model))
    assert {type(shortcut).__name__ for shortcut in found} == {"RotaryAttention", "GatedMLP"}


# What is refused


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
    """Multiplies in its own way, as Falcon's."""

    def forward(self, x):
        return x @ self.weight.t() + self.bias


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 2


class ShiftedEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def with_forward_of_its_own(layer):
    layer.forward = lambda x: x
    return layer


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.ones(4, D, 2 * D))

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: nn.Conv1d(D, D, 3), ["weight", "bias"]),
        (lambda: nn.RMSNorm(D), ["weight"]),  # its forward insists on a vector
        (Matrix, ["matrix"]),
        (Cumulative, ["scale"]),
        (MeanOfScale, ["scale"]),
        (OtherArguments, ["scale"]),
        (TwoSizes, ["scale", "gate"]),
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
def test_a_layer_without_a_kind_of_its_own_is_taken_per_sequence(make, parameters):
    model = nn.Sequential(nn.Linear(D, D), make())
    values = [p.clone() for p in model.parameters()]
    isopo = ISOPO(model)
    rows = [(row["parameter"], row["kind"], row["strategy"]) for row in isopo.coverage()]
    assert rows[2:] == [(f"1.{name}", "any module", "per sequence") for name in parameters]
    assert [row[1] for row in rows[:2]] == ["linear", "linear"]
    # Trying it out leaves no trace
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    isopo.detach()
    assert {row["strategy"] for row in ISOPO(model, "none").coverage()} == {"no statistics"}


def test_parameters_in_a_container_belong_to_the_module_whose_forward_finds_them():
    model = Holder(nn.Linear(D, D))
    model.scales = nn.ParameterDict({"a": torch.ones(D), "b": nn.ParameterList([torch.ones(2)])})
    rows = {row["parameter"]: row["kind"] for row in ISOPO(model).coverage()}
    kinds = {"scales.a": "any module", "scales.b.0": "any module", "layer.weight": "linear", "layer.bias": "linear"}
    assert rows == kinds


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: nn.BatchNorm1d(D), ["weight", "bias"]),
        (lambda: nn.Embedding(6, 3, max_norm=1.0), ["weight"]),
        (lambda: nn.Embedding(6, 3, sparse=True), ["weight"]),
        (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True), ["weight"]),
        (lambda: Experts(), ["gate_up_proj"]),
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
    for name in [*RMS_NORM, "T5's norm", "scale and shift", "scaled embedding"]:
        layer = build(name)
        own = dict(layer.named_parameters())
        values = {key: p.clone() for key, p in own.items()}
        ISOPO(Holder(layer))
        for key, p in layer.named_parameters():
            assert p is own[key] and torch.equal(p, values[key])


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        ISOPO(Holder(trained(nn.Linear(D, D))))


def test_trained_parameters_on_several_devices_are_refused():
    model = linear()
    model[1].to("meta")
    with pytest.raises(ValueError, match="split over cpu, meta"):
        ISOPO(model)


def test_a_model_without_a_trained_parameter_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        ISOPO(linear().requires_grad_(False))


def test_a_second_isopo_on_the_same_model_is_refused():
    model = linear()
    first = ISOPO(model)
    with pytest.raises(ValueError, match=r"attached to this model already.*trainer\.isopo\.detach\(\)"):
        ISOPO(model)
    first.detach()
    ISOPO(model)


def test_a_linear_layer_with_another_parameter_is_taken_per_sequence():
    model = linear()
    model[1].register_parameter("gain", nn.Parameter(torch.ones(2)))
    kinds = {row["parameter"]: row["kind"] for row in ISOPO(model).coverage()}
    assert kinds["1.gain"] == kinds["1.weight"] == "any module" and kinds["0.weight"] == "linear"


def test_an_lm_head_that_is_no_linear_layer_is_refused():
    model = tiny.model("llama")
    model.lm_head = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, model.config.vocab_size))
    model.get_output_embeddings = lambda: model.lm_head[1]
    ISOPO(model).detach()
    model.lm_head[1].weight.requires_grad_(False)
    model.lm_head[1].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="lm_head.1.bias .*whose weight is trained"):
        ISOPO(model)


@pytest.mark.parametrize("how", ["wrapped", "in place", "a layer in place"])
def test_a_compiled_model_is_refused(how):
    model = linear()
    if how == "wrapped":
        model = torch.compile(model)
    else:
        (model if how == "in place" else model[1]).compile()
    with pytest.raises(ValueError, match="compiled.*uncompiled"):
        ISOPO(model)


# Coverage


def test_parameters_of_the_model_itself_have_their_plain_names():
    isopo = ISOPO(nn.Linear(3, 2))
    assert [row["parameter"] for row in isopo.coverage()] == ["weight", "bias"]


def test_a_bias_trained_alone_is_kept_whatever_the_size_of_the_weight():
    model = nn.Linear(4096, 4096, device="meta")
    model.weight.requires_grad_(False)
    (row,) = ISOPO(model).coverage()
    assert (row["parameter"], row["strategy"]) == ("bias", "whole")


def test_the_coverage_tells_the_whole_shape_of_a_partitioned_parameter():
    """As DeepSpeed ZeRO-3 leaves it: an empty tensor that remembers its shape."""
    model = nn.Linear(8, 4, bias=False)
    isopo = ISOPO(model)
    model.weight.data = torch.empty(0)
    model.weight.ds_shape = torch.Size([4, 8])
    assert isopo.coverage()[0]["shape"] == (4, 8)


def test_the_coverage_names_every_trained_parameter_once_with_its_kind_and_strategy(capsys):
    model = tiny.model("qwen3", tie=False)
    model.model.layers[0].mlp.requires_grad_(False)
    isopo = ISOPO(model, "fisher")
    rows = isopo.coverage(sequences=8, length=1024)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {row["parameter"]: row["shape"] for row in rows} == {name: tuple(p.shape) for name, p in trained.items()}
    kinds = {row["parameter"].split(".")[-2]: row["kind"] for row in rows}
    assert kinds["embed_tokens"] == "embedding" and kinds["lm_head"] == "lm head"
    assert kinds["q_proj"] == "linear" and kinds["q_norm"] == "rms norm"
    isopo.print_coverage(sequences=8, length=1024)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["parameter", "shape", "kind", "strategy"] and len(lines) == 1 + len(rows)
    for line, row in zip(lines[1:], rows, strict=True):
        assert line.startswith(row["parameter"]) and line.endswith(row["strategy"])
