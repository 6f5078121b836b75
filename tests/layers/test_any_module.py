"""Modules without a kind of their own, against a loop over sequences that are run alone, in float64."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    NemotronHConfig,
)

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.rules import rule_names
from tests import oracle, tiny
from tests.layers.harness import ADVANTAGES, MASK, PACKED, B, D, Holder, T


pytestmark = pytest.mark.usefixtures("float64_throughout")


# Small modules


class Matrix(nn.Module):
    """Uses its own weight as a matrix, with a bias in a container."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(D, D))
        self.shifts = nn.ParameterDict({"used": nn.Parameter(torch.empty(D))})

    def forward(self, x):
        return torch.tanh(x @ self.matrix + self.shifts["used"])


class Recurrent(nn.Module):
    """Positions see those before them; the input comes by name; sizes of parameters differ."""

    def __init__(self):
        super().__init__()
        self.decay, self.gate = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(1))

    def forward(self, *, hidden_states, scale=1.0):
        state, outputs = 0.0, []
        for x in hidden_states.unbind(1):
            state = torch.sigmoid(self.decay) * state + self.gate * x
            outputs.append(state.tanh() * scale)
        return torch.stack(outputs, 1)


class Convolution(nn.Module):
    """Reads the weights of its convolution and does not call it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, groups=D)

    def forward(self, x):
        x = nn.functional.pad(x.transpose(1, 2), (2, 0))
        return nn.functional.conv1d(x, self.conv.weight, self.conv.bias, groups=D).transpose(1, 2)


class Mixer(nn.Module):
    """All of it: a module of this kind inside, a linear layer that is called and one that is read, two outputs."""

    def __init__(self):
        super().__init__()
        self.skip = nn.Parameter(torch.empty(D))
        self.recurrent, self.inner = Recurrent(), nn.Linear(D, D)
        self.read, self.outer = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        h = self.recurrent(hidden_states=self.inner(x))
        h = self.dropout(h) @ self.read.weight.t() + self.skip * x
        return {"output": self.outer(h.tanh()), "states": (h, None)}  # h is used inside, too


class OneOfTwo(nn.Module):
    """Gives the rest of the model one tensor."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x):
        result = self.mixer(x)
        return result["output"] + 2 * result["states"][0]


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = Recurrent()

    def forward(self, x):
        return self.recurrent(hidden_states=x, scale=2.0)


class AroundAConvolution(Convolution):
    """Another module of this kind beside the convolution, with a layer in it that is called, as in Kimi Linear."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        return super().forward(x) * self.gate(x)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(D, D, bias=False), nn.Parameter(torch.empty(D))

    def forward(self, x):
        return (self.linear(x) + self.rate).sigmoid()


SMALL = {"matrix": Matrix, "by name": ByName, "convolution": Convolution, "mixer": lambda: OneOfTwo(Mixer())}
SMALL["around a convolution"] = AroundAConvolution


def build(name):
    layer = SMALL[name]().double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer.eval()


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, cotangent = (torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, cotangent


def sequence_gradients(layer, names, x, cotangent):
    """`V` `[m, parameters]` of the named parameters: each row of the batch alone."""
    own = dict(layer.named_parameters())
    rows = []
    for s in range(len(x)):
        gradients = torch.autograd.grad(layer(x[s : s + 1]), [own[n] for n in names], cotangent[s : s + 1])
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def parameters_by_layer(isopo, prefix="layer."):
    return {
        layer.name: [f"{layer.name}.{name}".removeprefix(prefix) for name in layer.parameters]
        for layer in isopo.layers
        if layer.kind == "any module"
    }


@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("name", SMALL)
def test_gradient_is_the_definition(name, rule):
    layer = build(name)
    plain, model = copy.deepcopy(layer), Holder(layer)
    isopo = ISOPO(model, rule, fisher_samples=3)
    x, cotangent = batch()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with isopo.microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)):
        output = model(mine)
        output.backward(cotangent)
    expected = plain(other)
    expected.backward(cotangent)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
    own = dict(layer.named_parameters())
    by_layer = parameters_by_layer(isopo)
    for names in by_layer.values():
        V = sequence_gradients(plain, names, x, cotangent)
        expected = oracle.coefficients(V, V, ADVANTAGES[:B], rule) @ V
        found = torch.cat([own[n].grad.flatten() for n in names])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if name == "mixer":
        assert set(by_layer) == {"layer.mixer", "layer.mixer.recurrent", "layer.mixer.read"}
        kinds = {row["parameter"]: row["kind"] for row in isopo.coverage()}
        assert kinds["layer.mixer.inner.weight"] == kinds["layer.mixer.outer.weight"] == "linear"


@pytest.mark.parametrize("flat", [False, True], ids=["B T", "N"])
@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
def test_packed_rows_are_told_apart_by_position(rule, flat):
    layer = build("matrix")
    plain, model = copy.deepcopy(layer), Holder(layer)
    x, cotangent = batch()
    shape = (B * T, D) if flat else (B, T, D)
    with ISOPO(model, rule).microbatch(ADVANTAGES, sequence_ids=PACKED):
        model(x.view(shape)).backward(cotangent.view(shape))
    names = [name for name, _ in plain.named_parameters()]
    position = sequence_gradients(plain, names, x.view(B * T, 1, D), cotangent.view(B * T, 1, D))
    V = torch.stack([position[PACKED.flatten() == s].sum(0) for s in range(len(ADVANTAGES))])
    expected = oracle.coefficients(V, V, ADVANTAGES, rule) @ V
    found = torch.cat([p.grad.flatten() for p in layer.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_one_sequence_needs_no_second_run():
    layer = build("by name")
    runs = []
    layer.recurrent.register_forward_hook(lambda *_: runs.append(0))
    model = Holder(layer)
    x, cotangent = batch()
    with ISOPO(model, "fisher").microbatch(ADVANTAGES[1:2], attention_mask=MASK[1:2]):
        model(x[1:2]).backward(cotangent[1:2])
    found = layer.recurrent.decay.grad.clone()
    model.zero_grad()
    layer(x[1:2]).backward(cotangent[1:2])
    assert len(runs) == 2  # the second is this test's own
    torch.testing.assert_close(found, ADVANTAGES[1] * layer.recurrent.decay.grad)


def test_dropout_is_the_same_in_the_second_run_and_draws_nothing_more():
    """With the rule `none` and advantages of one, the gradient is the plain one, for the same random numbers."""
    gradients, streams = [], []
    for attached in (False, True):
        layer = build("mixer").train()
        model = Holder(layer)
        x, cotangent = batch()
        torch.manual_seed(5)
        if attached:
            with ISOPO(model, "none").microbatch(torch.ones(B), attention_mask=torch.ones(B, T)):
                model(x).backward(cotangent)
        else:
            model(x).backward(cotangent)
        gradients.append([p.grad for p in layer.parameters()])
        streams.append(torch.get_rng_state())
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert torch.equal(*streams)


def test_autocast_is_the_same_in_the_second_run():
    gradients = []
    for attached in (False, True):
        layer = build("mixer")
        model = Holder(layer)
        x, cotangent = batch()
        x = x.to(torch.half)
        layer.to(torch.bfloat16)  # without autocast, products of the two types would fail
        isopo = ISOPO(model, "none")
        with isopo.microbatch(torch.ones(B), attention_mask=torch.ones(B, T)) if attached else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
            output.backward(cotangent.to(output.dtype))
        gradients.append([p.grad.double() for p in layer.parameters()])
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.1)


def test_terms_without_an_advantage_are_added_as_they_are():
    layer = build("mixer")
    plain, model = copy.deepcopy(layer), Holder(layer)
    x, cotangent = batch()
    isopo = ISOPO(model, "fisher", fisher_samples=1000)
    gradients = []
    for term in (False, True):
        model.zero_grad()
        with isopo.microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)):
            output = model(x)
            if term:
                isopo.unscaled(output.square().sum())
            output.backward(cotangent)
        gradients.append([p.grad.clone() for p in layer.parameters()])
    plain(x).square().sum().backward()
    expected = [g + p.grad for g, p in zip(gradients[0], plain.parameters(), strict=True)]
    torch.testing.assert_close(gradients[1], expected, rtol=1e-10, atol=1e-12)


def test_a_later_step_goes_by_the_running_means():
    """At a step of twice the gradients, `fisher` without regularisation divides by the norm, and keeps its scale."""
    layer = build("by name")
    plain, model = copy.deepcopy(layer), Holder(layer)
    isopo = ISOPO(model, "fisher", regularization=0.0, fisher_samples=1000)
    names = ["recurrent.decay", "recurrent.gate"]
    x, cotangent = batch()
    V = sequence_gradients(plain, names, x, cotangent)
    F = ((V @ V.T).square().sum(0) / V.square().sum()).sqrt()
    for loss_scale in (1.0, 0.5):
        model.zero_grad()
        with isopo.microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T), loss_scale=loss_scale):
            model(x).backward(loss_scale * cotangent)
        isopo.step()
        expected = (ADVANTAGES[:B] * F.mean() / F) @ V * loss_scale
        found = torch.cat([p.grad.flatten() for p in layer.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# What is refused


class Summed(nn.Module):
    """Its output is no longer laid out by sequence."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return (x * self.scale).cumsum(-2).sum(0)


class Leaking(nn.Module):
    """Hands a tensor to the rest of the model beside its output."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(D, D))

    def forward(self, x):
        self.beside = x @ self.matrix
        return self.beside * 2


def test_an_output_without_sequences_is_an_error_that_names_the_module():
    model = Holder(Summed().double())
    x, _ = batch()
    with (
        pytest.raises(RuntimeError, match=rf"layer has an output of shape \({T}, {D}\).*freeze its parameters"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)),
    ):
        model(x).sum().backward()
    assert isinstance(model.layer.scale, nn.Parameter)


def test_a_gradient_that_does_not_come_through_the_outputs_is_an_error():
    model = Holder(Leaking().double())
    x, _ = batch()
    with (
        pytest.raises(RuntimeError, match="layer has another gradient when it is run again by itself"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)),
    ):
        (model(x).sum() + model.layer.beside.square().sum()).backward()


class Positions(nn.Embedding):
    """Learned positions as BART has them: looked up once for the whole batch, `[1, T, D]` or `[T, D]`."""

    def __init__(self, rows):
        super().__init__(T + 2, D)
        self.rows = rows

    def forward(self, x):
        places = torch.arange(x.shape[1]) + 2  # which some return as well
        return super().forward(places).expand(*[1] * self.rows, -1, -1), places


class Positioned(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.positions = Positions(rows)

    def forward(self, x):
        return torch.tanh(x + self.positions(x)[0])


@pytest.mark.parametrize("rule", ["fisher", "fig4", "none"])
@pytest.mark.parametrize("rows", [1, 0], ids=["1 T", "T"])
def test_positions_that_are_looked_up_once_for_the_batch_are_told_apart(rows, rule):
    model = Holder(Positioned(rows).double())
    plain = copy.deepcopy(model.layer)
    x, cotangent = batch()
    with ISOPO(model, rule).microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)):
        output = model(x)
        output.backward(cotangent)
    torch.testing.assert_close(output, plain(x), rtol=0, atol=0)
    V = sequence_gradients(plain, ["positions.weight"], x, cotangent)
    expected = oracle.coefficients(V, V, ADVANTAGES[:B], rule) @ V
    torch.testing.assert_close(model.layer.positions.weight.grad.flatten(), expected, rtol=1e-9, atol=1e-11)


class TwoNames(nn.Module):
    """A second name for the bias of a layer inside, as BERT's head has it; `used` or not."""

    def __init__(self, used):
        super().__init__()
        self.linear, self.used = nn.Linear(D, D), used
        self.bias = self.linear.bias

    def forward(self, x):
        return self.linear(x) + (self.bias.square() * x if self.used else 0)


@pytest.mark.parametrize("used", [False, True])
def test_a_second_name_of_a_bias_need_not_be_used(used):
    model = Holder(TwoNames(used).double())
    x, cotangent = batch()
    plain = copy.deepcopy(model.layer)
    own = list(plain.parameters())
    V = [torch.autograd.grad(plain(x[[s]]), own, cotangent[[s]]) for s in range(B)]
    with ISOPO(model, "none").microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)):
        model(x).backward(cotangent)
    for p, of_p in zip(model.parameters(), zip(*V, strict=True), strict=True):
        expected = torch.einsum("s,s...->...", ADVANTAGES[:B], torch.stack(of_p))
        torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-11)


class CalledAndRead(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x) * self.scale + x @ self.linear.weight


def test_a_layer_inside_that_is_called_and_read_is_an_error():
    model = Holder(CalledAndRead().double())
    own = model.layer.linear.weight
    x, cotangent = batch()
    with (
        pytest.raises(RuntimeError, match="layer.linear is called, and its weight is read by layer as well"),
        ISOPO(model).microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)),
    ):
        model(x).backward(cotangent)
    assert model.layer.linear.weight is own


def test_a_forward_that_somebody_has_put_in_place_is_used_and_given_back():
    layer = build("matrix")
    layer.forward = lambda x: type(layer).forward(layer, x) * 3
    own = layer.forward
    model = Holder(layer)
    isopo = ISOPO(model, "none")
    x, cotangent = batch()
    with isopo.microbatch(torch.ones(B), attention_mask=torch.ones(B, T)):
        model(x).backward(cotangent)
    found = layer.matrix.grad.clone()
    isopo.detach()
    assert layer.forward is own
    model.zero_grad()
    model(x).backward(cotangent)
    torch.testing.assert_close(found, layer.matrix.grad)


# Whole models


SIZE = {**{k: v for k, v in tiny.SIZE.items() if k != "max_position_embeddings"}, **tiny.IDS}
MAMBA = {"vocab_size": 105, "hidden_size": 16, "num_hidden_layers": 2, **tiny.IDS, "state_size": 4}
FAMILIES = {
    "mamba2": lambda: Mamba2Config(**MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=8),
    # Its `dt_proj` is a linear layer whose weight is read, by newer releases of transformers
    "jamba": lambda: JambaConfig(
        **SIZE, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=8, head_dim=8
    ),
    # One chunk: in transformers 5.13 a sequence with a boundary inside is not what it is alone
    "nemotron_h": lambda: NemotronHConfig(
        **SIZE, layer_types=["linear_attention", "full_attention"], mamba_num_heads=4, mamba_head_dim=8,
        ssm_state_size=4, n_groups=1, chunk_size=16, head_dim=8,
    ),
    # The convolution's module has no parameter of its own
    "lfm2": lambda: Lfm2Config(**SIZE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    # Attention with sinks
    "gpt_oss": lambda: GptOssConfig(**SIZE, num_local_experts=2, num_experts_per_tok=1, head_dim=8),
}  # fmt: skip
WITHOUT_POSITIONS = ("mamba2",)
SEQUENCES = ([3, 1, 4], [5, 6, 1])


def build_model(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family]()).to(torch.float64)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    if family == "gpt_oss":
        model.set_experts_implementation("eager")
        for name, p in model.named_parameters():
            p.requires_grad_("experts" not in name and "router" not in name)  # which have kinds of their own
    return model


def check_model(model, isopo, rule, run, positions=True):
    """`run(batch)` makes the gradients; returns the layers whose gradient was taken per sequence."""
    sequences = oracle.random_batch(*SEQUENCES, 100)
    run(sequences)
    found = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    whole = {
        layer.name: [holder.get_parameter(name) for holder, name in layer.places]
        for layer in isopo.layers
        if layer.kind == "any module"
    }
    isopo.detach()
    model.gradient_checkpointing_disable()
    inputs = None if positions else lambda s, columns: {}
    G = oracle.position_gradients(model, sequences, oracle.token_weights(sequences), whole=whole, inputs=inputs)
    model.zero_grad()
    for p, gradient in found.items():
        p.grad = gradient
    error, name = oracle.worst_error(model, oracle.expected_gradients(model, G, sequences, None, rule, whole=whole))
    assert error < 1e-9, f"{name}: {error}"
    return set(whole)


def in_a_loop(model, isopo):
    def run(batch):
        weights = oracle.token_weights(batch)
        model.train()
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
            (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()

    return run


EXPECTED = {
    "mamba2": {"mixer", "conv1d"},
    "jamba": {"mamba", "conv1d"},
    "falcon_h1": {"mamba", "conv1d"},
    "nemotron_h": {"mixer", "conv1d"},
    "lfm2": {"conv"},
    "gpt_oss": {"self_attn"},
}


@pytest.mark.parametrize("rule", ["fisher", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_model_has_the_gradient_of_the_definition(family, rule):
    model = build_model(family)
    isopo = ISOPO(model, rule, fisher_samples=10_000)
    found = check_model(model, isopo, rule, in_a_loop(model, isopo), family not in WITHOUT_POSITIONS)
    assert {name.split(".")[-1] for name in found} == EXPECTED[family] | linear_layers_not_called(model)


def linear_layers_not_called(model):
    """Last names of the linear layers that a forward pass does not call, the head aside: it reads their weights."""
    linear = {m: name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    called = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in linear]
    model(torch.tensor([[1, 2, 3]]))
    for hook in hooks:
        hook.remove()
    return {name for layer, name in linear.items() if layer not in called}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = build_model(family)
    isopo = ISOPO(model, "fisher", fisher_samples=10_000)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check_model(model, isopo, "fisher", in_a_loop(model, isopo), family not in WITHOUT_POSITIONS)


@pytest.mark.parametrize("rule", ["fig4", "interacting"])
def test_the_trainer_has_the_gradient_of_the_definition(rule, tmp_path):
    model = build_model("mamba2")
    args = ISOPOConfig(
        str(tmp_path), rule=rule, fisher_samples=10_000, use_cpu=True, bf16=False, report_to=[], num_generations=3,
        per_device_train_batch_size=3, max_completion_length=6, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = ISOPOTrainer(model, tiny.reward, args, tiny.prompts(3), processing_class=tiny.tokenizer())
    trainer.current_gradient_accumulation_steps = 1

    def run(batch):
        trainer.model.train()
        trainer.compute_loss(trainer.model, batch.for_trl()).backward()
        trainer.isopo.end()

    check_model(model, trainer.isopo, rule, run, positions=False)
