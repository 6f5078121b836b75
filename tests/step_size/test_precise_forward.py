"""What is run in float32 for a step to be seen: the same as by a model whose weights are in float32."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isopo_trl.step_size import precise_forward
from isopo_trl.step_size.precise_forward import FACTOR, REST, Float32, PreciseForward, in_halves, linear
from tests import tiny, training


def logits(model):
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Models and functions


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.bfloat16) for family in sorted(tiny.FAMILIES)), ("qwen3", torch.float16)],
    ids=str,
)
def test_narrow_weights_are_run_in_float32(family, dtype):
    """Norms, products of matrices, embeddings that are scaled."""
    model = tiny.model(family).eval().to(dtype)
    if family == "qwen3_moe":  # its default, a grouped matrix product, rounds what the experts see
        model.set_experts_implementation("eager")
    with Float32():
        found = logits(model)
    assert found.dtype == torch.float32
    assert (found - logits(model)).abs().max() > 1e-4  # which is more than what is allowed here
    torch.testing.assert_close(found, logits(model.float()), rtol=1e-4, atol=1e-5)


def test_wider_numbers_stay_as_they_are():
    model = tiny.model("qwen3", dtype=torch.float64).eval()
    with Float32():
        found = logits(model)
    assert torch.equal(found, logits(model))


PRODUCTS = {
    "linear": lambda x, w: functional.linear(x, w),
    "linear, one row": lambda x, w: functional.linear(x, w[0]),
    "bilinear": lambda x, w: functional.bilinear(x, x, w.expand(3, 4, 4)),
    "layer_norm": lambda x, w: functional.layer_norm(x, [4], w[0], w[1]),
    "rms_norm": lambda x, w: functional.rms_norm(x, [4], weight=w[0]),
    "group_norm": lambda x, w: functional.group_norm(x, 2, w[0], bias=w[1]),
    "conv1d": lambda x, w: functional.conv1d(x.view(1, 4, 4), w.view(4, 4, 1)),
    "conv2d": lambda x, w: functional.conv2d(x.view(1, 4, 4, 1), w.view(4, 4, 1, 1)),
    "conv3d": lambda x, w: functional.conv3d(x.view(1, 4, 4, 1, 1), w.view(4, 4, 1, 1, 1)),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], w[None], value=w[None]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "@": lambda x, w: x @ w,
    "reversed @": lambda x, w: w @ x,
}
for owner in (torch, torch.Tensor):
    PRODUCTS |= {
        f"{owner.__name__}.matmul": lambda x, w, owner=owner: owner.matmul(x, w),
        f"{owner.__name__}.mm": lambda x, w, owner=owner: owner.mm(x, w),
        f"{owner.__name__}.bmm": lambda x, w, owner=owner: owner.bmm(x[None], w[None]),
        f"{owner.__name__}.addmm": lambda x, w, owner=owner: owner.addmm(w, x, w),
        f"{owner.__name__}.baddbmm": lambda x, w, owner=owner: owner.baddbmm(w[None], x[None], w[None]),
        f"{owner.__name__}.addbmm": lambda x, w, owner=owner: owner.addbmm(w, x[None], w[None]),
    }


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_activations_and_narrow_weights_are_in_float32(product):
    x, weight = random(4, 4), random(4, 4, dtype=torch.bfloat16, seed=1)
    with Float32():
        found = product(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, product(x, weight.float()))


def test_a_wrapper_that_is_put_around_products_later_is_seen_through(monkeypatch):
    original = functional.linear
    monkeypatch.setattr(functional, "linear", lambda *args, **kwargs: original(*args, **kwargs))
    x, weight = random(3, 8), random(5, 8, dtype=torch.bfloat16)
    with Float32():
        found = functional.linear(x, weight)
    torch.testing.assert_close(found, original(x, weight.float()))


@pytest.mark.parametrize("case", ["one function", "disabled", "a second adapter", "a hook"])
def test_an_adapter_in_a_trainer_is_added_in_one_go(case, tmp_path, monkeypatch):
    """And in PEFT's way where there is more to it."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.model("qwen3").bfloat16(), config)
    trainer = training.build(tmp_path, model)
    model.eval()
    if case == "disabled":
        model.base_model.disable_adapter_layers()
    elif case == "a second adapter":
        model.add_adapter("other", config)
        model.base_model.set_adapter(["default", "other"])
    elif case == "a hook":
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_hook(lambda module, args, output: 2 * output)
    calls, forward = [], PeftLinear.forward
    monkeypatch.setattr(PeftLinear, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    with PreciseForward(trainer.accelerator, trainer.isopo.in_float32).passes(model):
        found = logits(model)
    assert bool(calls) == (case != "one function")
    expected = logits(model.float())
    if case != "disabled":
        with model.disable_adapter():
            assert (logits(model) - expected).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Products of halves, as GPUs make them


@pytest.fixture
def on_gpu(monkeypatch):
    """PyTorch's products of float16, which are added up in float32 on GPUs alone; of matrices of any size."""

    def addmm(matrix, left, right, *, alpha, out_dtype, out):
        assert left.dtype == right.dtype == torch.float16 and matrix is out and out.dtype == out_dtype == torch.float32
        out.add_(left.float() @ right.float(), alpha=alpha)

    def mm(left, right, *, out_dtype, out):
        addmm(out.zero_(), left, right, alpha=1, out_dtype=out_dtype, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(precise_forward, "FEW", 0)
    monkeypatch.setattr(precise_forward, "is_made_of_halves", lambda input, weight: weight.dim() == 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("few", [0, 7], ids=["part by part", "both parts at once"])
def test_a_product_of_halves_is_the_product(few, dtype, bias, on_gpu, monkeypatch):
    """The weight is seen as it is, activations are rounded."""
    monkeypatch.setattr(precise_forward, "FEW", few)
    weight, b = random(7, 64, dtype=dtype), random(7) if bias else None
    for shape in ((2, 5, 64), (64,), (0, 64)):
        x = random(*shape, seed=1)
        found = linear(x, weight, b)
        rounded = (x / FACTOR).half().double() * FACTOR
        expected = functional.linear(rounded, weight.double(), None if b is None else b.double())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("at_a_time", "parts"), [(1, 7), (8 * 3, 3), (8 * 7, 1)])
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "float16"])
def test_large_weights_are_multiplied_in_parts(halves, at_a_time, parts, monkeypatch, request):
    if halves:
        request.getfixturevalue("on_gpu")
    monkeypatch.setattr(precise_forward, "LARGEST", at_a_time)  # less than a row, three of seven, all
    monkeypatch.setattr(precise_forward, "ROWS", 1)
    x, weight, b = (random(*shape, dtype=torch.bfloat16) for shape in ((2, 5, 8), (7, 8), (7,)))
    assert len(precise_forward.parts_of(weight)) == parts
    torch.testing.assert_close(linear(x, weight, b), functional.linear(x.float(), weight.float(), b.float()))


def test_parts_of_a_weight_are_about_as_large_and_begin_at_multiples_of_128():
    """For a number of rows that is no multiple of 4, cuBLAS has slow kernels only."""
    sizes = {(4096, 12288): [2048, 2048], (50257, 1024): [25216, 25041], (9, 2**26): [9], (0, 8): [0]}
    for shape, rows in sizes.items():
        assert [len(part) for part in precise_forward.parts_of(torch.empty(shape, device="meta"))] == rows


@pytest.mark.parametrize("direction", [1, -1])
def test_a_step_from_weights_of_bf16_is_what_is_left_of_them(direction):
    """A small one: it is not lost in the first part, nor does it move that by as much as float16 can tell apart."""
    weight = (random(1000) / 50).bfloat16().float()
    weight = weight[weight.abs() > 1e-3]
    moved = weight + direction * 1e-8 * torch.rand(len(weight))
    high, low = in_halves(moved)
    assert torch.equal(high.float() / FACTOR, weight)
    torch.testing.assert_close(low.float() / (FACTOR * REST), moved - weight, rtol=2**-7, atol=0)


def test_activations_are_rounded_once_for_all_layers_that_take_them_and_anew_when_they_change(monkeypatch, on_gpu):
    rounded, halved = [], precise_forward.halved
    monkeypatch.setattr(precise_forward, "halved", lambda x, *how: rounded.append(len(x)) or halved(x, *how))
    x, other, weights = random(5, 64), random(3, 64), [random(7, 64, seed=seed) for seed in range(2)]
    with torch.no_grad(), Float32():
        found = [functional.linear(x, weight) for weight in weights]
        assert rounded == [5]
        functional.linear(other, weights[0])
        functional.linear(x, weight=weights[0])
        x.mul_(2)
        doubled = functional.linear(x, weights[1], bias=None)
    assert rounded == [5, 3, 5, 5]
    torch.testing.assert_close(doubled, 2 * found[1])


def test_which_products_are_made_of_halves(monkeypatch):
    class Other(torch.Tensor):
        pass

    def made(weight, dtype=torch.float32):
        return precise_forward.is_made_of_halves(random(3, weight.size(-1), dtype=dtype), weight)

    weight = random(129, 200)
    assert not made(weight)  # on a CPU
    monkeypatch.setattr(precise_forward, "is_on_gpu", lambda x: True)
    assert made(weight) and made(random(128, 200)) and made(weight.bfloat16(), torch.bfloat16)
    assert not made(random(200, 128)) and not made(weight[0])  # few columns, or one row
    assert not made(weight, torch.float64) and not made(weight.as_subclass(Other))
    weight.requires_grad_()
    assert not made(weight)
    with torch.no_grad():
        assert made(weight)


# Attention


@pytest.mark.parametrize(
    ("masked", "options"),
    [(False, {}), (False, {"is_causal": True}), (True, {}), (True, {"scale": 0.5, "enable_gqa": True})],
    ids=str,
)
def test_attention_in_float16_is_attention(masked, options):
    x, keys = random(2, 4, 9, 16), [random(2, 2 if "scale" in options else 4, 9, 16, seed=seed) for seed in (1, 2)]
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    given = [y.clone() for y in (x, *keys)]
    found = precise_forward.attention_in_float16(x, *keys, mask, **options)
    wide = [y.double() for y in (x, *keys)]
    expected = functional.scaled_dot_product_attention(*wide, mask, **options)
    assert found.dtype == torch.float32
    assert 1e-6 < (found - expected).norm() / expected.norm() < 1e-3  # in bf16 it is more
    assert all(map(torch.equal, given, (x, *keys)))


def test_attention_between_numbers_that_float16_does_not_hold_is_finite():
    """Of queries and keys, see `test_cuda.py`: some kernels for CPUs add up products in float16."""
    x = random(2, 4, 9, 16).sign()
    for values in (1e6, 65504.0):
        found = precise_forward.attention_in_float16(x, x, x * values, is_causal=True)
        assert found.isfinite().all() and found.abs().max() <= 2**15 * 1.001


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_is_in_float16_on_gpus_unless_it_would_lose_what_is_asked_for(dtype, mask, monkeypatch):
    calls = []
    monkeypatch.setattr(precise_forward, "attention_in_float16", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(precise_forward, "is_on_gpu", lambda x: True)
    x, mask = random(1, 2, 3, 4, dtype=dtype), None if mask is None else torch.ones(3, 3, dtype=mask)
    with Float32():
        functional.scaled_dot_product_attention(x, x, x, mask, is_causal=False)
    assert bool(calls) == (dtype == torch.float32 and (mask is None or mask.dtype == torch.bool))
    assert all(args[3] is mask and kwargs == {"is_causal": False} for args, kwargs in calls)


# The passes


def accelerator(**settings):
    usual = {"native_amp": False, "is_fsdp2": False, "mixed_precision": "no", "device": torch.device("cpu")}
    return SimpleNamespace(**{**usual, **settings})


def test_tf32_is_off_inside_and_as_it_was_outside():
    entered = []

    @contextmanager
    def layers():
        entered.append(True)
        yield
        entered.append(False)

    def settings():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision

    before, model = settings(), SimpleNamespace(config=None)
    with pytest.raises(KeyError), PreciseForward(accelerator(), layers).passes(model):
        assert settings() == ("ieee", "ieee") and entered == [True]
        with pytest.raises(RuntimeError), precise_forward.products(tf32=True):
            assert settings() == ("tf32", "ieee")
            raise RuntimeError
        assert settings() == ("ieee", "ieee")
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_comes_to_is_that_of_the_precision_passes_are_made_in(dtype):
    model = tiny.model("qwen3", dtype=dtype)
    lost = precise_forward.ROUNDING_AS_TRAINED if dtype == torch.bfloat16 else 0.0

    def rounding(*how, **settings):
        return PreciseForward(accelerator(**settings), None).rounding(model, *how)

    assert rounding() == rounding(mixed_precision="bf16") == 0  # in float32, on a CPU
    assert rounding(device=torch.device("cuda")) == precise_forward.ROUNDING_OF_HALVES
    as_trained, quantized = (False, True), (True, False)
    assert rounding(*as_trained) == rounding(*quantized) == rounding(is_fsdp2=True) == lost
    assert rounding(*as_trained, mixed_precision="bf16") == precise_forward.ROUNDING_AS_TRAINED
    model.config._attn_implementation = "flash_attention_2"
    assert rounding() == lost


def only_narrow(module, query, *args, **kwargs):
    assert query.dtype == torch.bfloat16, "this kernel does not support float32"
    return sdpa_attention_forward(module, query, *args, **kwargs)


def test_a_model_that_cannot_be_run_in_float32_is_measured_as_it_is_trained(tmp_path, caplog, monkeypatch):
    AttentionInterface.register("only_narrow", only_narrow)
    monkeypatch.setattr(logging.getLogger("isopo_trl"), "propagate", True)
    config = tiny.model("llama").config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="only_narrow")
    lines = training.train(training.build(tmp_path, model, log_step_kl=True))
    assert all(line["step/kl"] > 0 for line in lines)
    (warning,) = [record.message for record in caplog.records if "cannot be run in float32" in record.message]
    assert "this kernel does not support float32" in warning
