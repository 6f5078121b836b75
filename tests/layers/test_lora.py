"""PEFT's linear layer as one function against PEFT's own forward, and when it leaves the layer to PEFT."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from isopo_trl import ISOPO
from isopo_trl.layers import lora
from isopo_trl.layers.lora import LoRALinear


B, T, D = 3, 4, 5
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
SHAPES = {"B T": (B, T, D), "N": (B * T, D), "1 N": (1, B * T, D)}


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Net(nn.Module):
    """Two linear layers, with a bias and without, which LoRA is put around."""

    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.up = Conv1D(7, D) if kind is Conv1D else kind(D, 7)
        self.down = nn.Linear(7, D, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def fill(model, seed=0):
    """Random parameters; PEFT starts B at zero, where A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def build(dtype=torch.float64, kind=nn.Linear, custom=None, **settings):
    settings = {"r": 2, "lora_alpha": 5, "target_modules": ["up", "down"], **settings}
    config = LoraConfig(**settings)
    if custom is not None:
        config._register_custom_module(custom)
    model = get_peft_model(Net(kind), config, autocast_adapter_dtype=False)
    return fill(model.to(dtype)).train()


def inputs(shape="B T", dtype=torch.float64):
    x = torch.randn(SHAPES[shape], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def run(model, isopo, x, call=None):
    """One microbatch: output, gradients of the input and of the trained parameters, times each layer was reached."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    weight = torch.randn(SHAPES["N"], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = (weight * MASK.reshape(-1, 1)).view(x.shape)
    isopo._draws = 0  # the same samples every time
    isopo.begin(ADVANTAGES[:B], attention_mask=MASK)
    output = (call or model)(x)
    (output.double() * weight).sum().backward()
    reached = isopo.current.visits
    isopo.abort()
    return output.detach(), x.grad, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, reached


def fused_of(isopo):
    return [layer for layer in isopo._shortcuts if isinstance(layer, LoRALinear)]


def unfused(isopo):
    for layer in isopo._shortcuts:
        layer.detach()
    return isopo


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the fused function, by the name of the layer."""
    seen = []
    apply = lora._LoRA.apply

    def counting(*args):
        seen.append(args[6].name)
        return apply(*args)

    monkeypatch.setattr(lora._LoRA, "apply", counting)
    return seen


def both(model, rule="fisher", x=None, call=None, **settings):
    """The fused run and the one with PEFT's own forward, on the same model."""
    x = inputs() if x is None else x
    isopo = ISOPO(model, rule, fisher_samples=7, **settings)
    mine = run(model, isopo, x, call)
    theirs = run(model, unfused(isopo), x, call)
    isopo.detach()
    return mine, theirs


def check(mine, theirs, tolerance=1e-10):
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(mine[0], theirs[0], **close)
    torch.testing.assert_close(mine[1], theirs[1], **close)
    assert mine[2].keys() == theirs[2].keys() and mine[2]
    for name, gradient in mine[2].items():
        assert (gradient is None) == (theirs[2][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, theirs[2][name], **close, msg=lambda m, n=name: f"{n}: {m}")
    assert mine[3] == theirs[3]


# The function


@pytest.mark.parametrize("settings", [{}, {"lora_alpha": 2}, {"use_rslora": True}, {"r": 6}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_output_and_input_gradient_are_pefts(dtype, tolerance, shape, settings, calls):
    model = build(dtype, **settings)
    x = inputs(shape, dtype)
    plain = copy.deepcopy(model)
    expected = plain(other := x.detach().clone().requires_grad_())
    isopo = ISOPO(model, "none")
    mine = run(model, isopo, x)
    assert len(calls) == 2 and mine[0].dtype == dtype and mine[0].shape == expected.shape
    torch.testing.assert_close(mine[0], expected.detach(), rtol=tolerance, atol=tolerance)
    weight = torch.randn(SHAPES["N"], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected.double() * (weight * MASK.reshape(-1, 1)).view(x.shape)).sum().backward()
    torch.testing.assert_close(mine[1], other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
def test_gradients_of_the_factors_are_those_of_two_linear_layers(rule, shape, calls):
    model = build()
    mine, theirs = both(model, rule, inputs(shape))
    assert len(calls) == 2 and all(gradient.any() for gradient in mine[2].values())
    assert mine[3] == [1, 1, 1, 1]
    check(mine, theirs)


def test_an_input_without_gradient_or_turned_around_is_no_different(calls):
    model = build()
    turned = torch.randn(T, B, D, dtype=torch.float64).transpose(0, 1)
    gradients = []
    for fuse in (True, False):
        isopo = ISOPO(model, fisher_samples=7)
        if not fuse:
            unfused(isopo)
        model.zero_grad()
        with isopo.microbatch(ADVANTAGES, attention_mask=MASK):
            model(turned).transpose(0, 1).square().sum().backward()
        isopo.detach()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(calls) == 2
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_under_autocast_types_are_pefts_and_the_factors_gradients_float32(base, calls):
    model = build(torch.float32)
    for module in model.modules():
        if isinstance(module, PeftLinear):
            module.base_layer.to(base)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    mine, theirs = both(model, "none", inputs(dtype=torch.float32), call)
    assert len(calls) == 2
    assert mine[0].dtype == theirs[0].dtype == torch.bfloat16 and mine[1].dtype == torch.float32
    for gradient in mine[2].values():  # not merely cast back to float32
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())
    check(mine, theirs, 5e-2)


def test_rows_that_are_not_those_of_the_microbatch_are_an_error_that_names_the_layer():
    model = build()
    isopo = ISOPO(model)
    with (
        pytest.raises(RuntimeError, match=rf"up.* got positions of shape .* but the microbatch has {B} x {T}"),
        isopo.microbatch(ADVANTAGES, attention_mask=MASK),
    ):
        model(torch.randn(T, B, D, dtype=torch.float64))


def test_a_second_derivative_is_refused_not_wrong():
    model = build()
    with ISOPO(model).microbatch(ADVANTAGES, attention_mask=MASK):
        loss = model(inputs()).pow(3).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
        loss.backward()


# Where it steps aside


def test_a_layer_that_is_no_more_than_a_product_is_fused():
    isopo = ISOPO(build(use_rslora=True))
    assert [layer.name for layer in fused_of(isopo)] == ["base_model.model.up", "base_model.model.down"]
    assert len(isopo.coverage()) == 4  # the factors, each once


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"lora_bias": True}, []),
        ({"kind": OwnLinear}, ["base_model.model.down"]),  # as a quantised base layer has
        ({"kind": Conv1D, "fan_in_fan_out": True}, ["base_model.model.down"]),
        ({"bias": "lora_only"}, ["base_model.model.down"]),  # the bias of the base layer is trained
        ({"bias": "all"}, ["base_model.model.down"]),
        ({"target_modules": ["up"], "modules_to_save": ["down"]}, ["base_model.model.up"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_a_layer_that_is_more_is_left_to_peft(settings, left, rule, calls):
    model = build(**settings)
    isopo = ISOPO(model, rule)
    assert [layer.name for layer in fused_of(isopo)] == left
    isopo.detach()
    mine, theirs = both(model, rule)
    assert calls == left and set(mine[3]) == {1}
    check(mine, theirs)
    if rule == "none":
        plain = copy.deepcopy(model)
        torch.testing.assert_close(mine[0], plain(inputs()).detach())


def test_a_trained_weight_of_the_base_layer_keeps_its_gradient(calls):
    model = build()
    model.base_model.model.up.base_layer.weight.requires_grad_()
    mine, theirs = both(model)
    assert calls == ["base_model.model.down"] and mine[3] == [1] * 5
    assert mine[2]["base_model.model.up.base_layer.weight"].any()
    check(mine, theirs)


def test_a_base_layer_with_a_forward_of_its_own_keeps_it(calls):
    model = build()
    base = model.base_model.model.up.base_layer
    base.forward = lambda x: 3 * nn.Linear.forward(base, x)
    mine, theirs = both(model)
    assert calls == ["base_model.model.down"]
    check(mine, theirs)


class OwnPeftLinear(PeftLinear):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


def test_a_subclass_of_pefts_layer_keeps_its_own_forward():
    mine, theirs = both(build(custom={nn.Linear: OwnPeftLinear}))
    check(mine, theirs)


@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_hooks_on_the_parts_of_the_layer_still_run(part):
    """DeepSpeed ZeRO-3 collects the parameters of a module in a hook before its forward."""
    model = build()
    seen = []
    model.base_model.model.up.get_submodule(part).register_forward_pre_hook(lambda *_: seen.append(part))
    run(model, ISOPO(model), inputs())
    assert seen == [part]


def test_dropout_is_pefts_in_training_and_nothing_in_evaluation(calls):
    model = build(lora_dropout=0.5)

    def seeded(x):
        torch.manual_seed(0)
        return model(x)

    mine, theirs = both(model, call=seeded)
    assert calls == [] and mine[3] == [1] * 4
    check(mine, theirs)
    model.eval()
    check(*both(model))
    assert len(calls) == 2


def test_disabled_adapters_leave_the_base_model(calls):
    model = build()
    isopo = ISOPO(model)
    x = inputs()
    with model.disable_adapter():
        for layer in isopo.layers:  # frozen by PEFT, which is not what is looked at here
            layer.module.requires_grad_()
        expected = copy.deepcopy(model)(x.detach())
        mine = run(model, isopo, x)
    assert calls == [] and mine[3] == [0] * 4
    assert torch.equal(mine[0], expected) and all(gradient is None for gradient in mine[2].values())
    assert run(model, isopo, x)[3] == [1] * 4 and len(calls) == 2  # they are back


def test_merged_adapters_are_not_added_twice(calls):
    model = build()
    isopo = ISOPO(model)
    before = run(model, isopo, inputs())
    calls.clear()
    model.merge_adapter()
    merged = run(model, isopo, inputs())
    assert calls == [] and merged[3] == [0] * 4
    torch.testing.assert_close(merged[0], before[0])
    torch.testing.assert_close(merged[1], before[1])
    model.unmerge_adapter()
    after = run(model, isopo, inputs())
    assert len(calls) == 2
    check(after, before)


@pytest.mark.parametrize("trained", [False, True])
def test_a_second_active_adapter_is_added(trained, calls):
    model = build()
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=2, target_modules=["up", "down"]))
    fill(model.double())
    model.base_model.set_adapter(["default", "other"])
    for name, p in model.named_parameters():
        p.requires_grad_(".default." in name or (trained and ".other." in name))
    mine, theirs = both(model)
    assert calls == [] and mine[3] == [1] * (8 if trained else 4)
    check(mine, theirs)
    torch.testing.assert_close(mine[0], model(inputs()).detach())


def test_an_adapter_that_is_switched_to_later_takes_part(calls):
    model = build()
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=2, target_modules=["up", "down"]))
    fill(model.double())
    isopo = ISOPO(model)
    model.base_model.set_adapter("other", inference_mode=True)
    expected = copy.deepcopy(model)(inputs()).detach()
    mine = run(model, isopo, inputs())
    assert calls == [] and mine[3] == [0] * 4
    assert torch.equal(mine[0], expected)


def test_mixed_types_without_autocast_are_cast_as_peft_casts_them(calls):
    model = build(torch.float32)
    for module in model.modules():
        if isinstance(module, PeftLinear):
            module.base_layer.to(torch.bfloat16)
    mine, theirs = both(model, x=inputs(dtype=torch.bfloat16))
    assert calls == [] and mine[3] == [1] * 4
    assert mine[0].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in mine[2].values())
    check(mine, theirs, 0)


def test_other_arguments_are_passed_on_to_peft(calls):
    model = build()
    up, isopo = model.base_model.model.up, ISOPO(model)
    x = inputs().detach()
    isopo.begin(ADVANTAGES, attention_mask=MASK)
    expected = type(up).forward(copy.deepcopy(up), x, adapter_names=["__base__"] * B)
    model.eval()  # PEFT takes names of adapters only so
    assert torch.equal(up(x, adapter_names=["__base__"] * B), expected)
    assert calls == []
    torch.testing.assert_close(up(x=x), copy.deepcopy(up)(x))
    assert len(calls) == 1  # the input given by name
    isopo.abort()


# Outside of a microbatch, copies, and taking it off


def test_outside_of_a_microbatch_and_without_gradients_the_layer_is_pefts(calls):
    model = build()
    plain = copy.deepcopy(model)
    isopo = ISOPO(model)
    assert torch.equal(model(inputs()), plain(inputs()))
    model(inputs()).square().sum().backward()
    plain(inputs()).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
    microbatch = isopo.begin(ADVANTAGES, attention_mask=MASK)
    with torch.no_grad():
        assert torch.equal(model(inputs()[:1]), plain(inputs()[:1]))  # any shape: nothing is recorded
    isopo.end()
    assert calls == [] and not any(microbatch.visits)


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_frozen_factors_are_left_to_peft(factor, calls):
    model = build()
    isopo = ISOPO(model)
    getattr(model.base_model.model.up, factor)["default"].weight.requires_grad_(False)
    mine = run(model, isopo, inputs())
    assert calls == ["base_model.model.down"] and sorted(mine[3]) == [0, 1, 1, 1]


def test_detach_gives_the_layer_its_own_forward_back(calls):
    model = build()
    layers = [module for module in model.modules() if isinstance(module, PeftLinear)]
    before = [set(layer.__dict__) for layer in layers]
    isopo = ISOPO(model)
    assert all("forward" in layer.__dict__ for layer in layers)
    isopo.begin(ADVANTAGES, attention_mask=MASK)
    isopo.detach()
    assert [set(layer.__dict__) for layer in layers] == before
    model(inputs()).sum().backward()
    assert calls == []
    check(*both(model))  # and another one may take its place


def test_a_deep_copy_is_the_plain_model_and_leaves_the_original_alone(calls):
    model = build()
    plain, isopo = copy.deepcopy(model), ISOPO(model)
    with isopo.microbatch(ADVANTAGES, attention_mask=MASK) as microbatch:
        twin = copy.deepcopy(model)
        assert torch.equal(twin(inputs()), plain(inputs()))
        twin(inputs()).sum().backward()
        assert calls == [] and not any(microbatch.visits) and all(p.grad is None for p in model.parameters())
        model(inputs()).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(inputs()), plain(inputs())) and not twin(inputs()).any()


def test_an_attached_model_can_be_pickled_and_comes_back_plain():
    model = build()
    isopo = ISOPO(model)
    isopo.begin(ADVANTAGES, attention_mask=MASK)
    twin = pickle.loads(pickle.dumps(model))
    isopo.abort()
    assert torch.equal(twin(inputs()), model(inputs()))
    twin(inputs()).sum().backward()
    assert all(p.grad is None for p in model.parameters())
