"""What is run in float32 for a step to be seen: the same as by a model whose weights are in float32."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isopo_trl.step_size import precise_forward
from isopo_trl.step_size.precise_forward import FACTOR, REST, ROUNDING_AS_TRAINED, Float32, in_halves, linear, rounding
from tests import tiny, training


def ids():
    return torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_narrow_weights_are_run_in_float32(family, dtype):
    """Norms, products of matrices, embeddings that are scaled."""
    model = tiny.model(family).eval().to(dtype)
    if family == "qwen3_moe":  # its default, a grouped matrix product, rounds what the experts see
        model.set_experts_implementation("eager")
    with torch.no_grad():
        with Float32():
            found = model(input_ids=ids(), use_cache=False).logits
        rounded = model(input_ids=ids(), use_cache=False).logits
        expected = model.float()(input_ids=ids(), use_cache=False).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - rounded).abs().max() > 1e-4  # which is more than what is allowed above


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
    "matmul": lambda x, w: torch.matmul(x, w),
    "x.matmul": lambda x, w: x.matmul(w),
    "mm": lambda x, w: torch.mm(x, w),
    "x.mm": lambda x, w: x.mm(w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "x.bmm": lambda x, w: x[None].bmm(w[None]),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "x.addmm": lambda x, w: x.addmm(w, w),
    "baddbmm": lambda x, w: torch.baddbmm(w, x[None], w[None]),
    "x.baddbmm": lambda x, w: x[None].baddbmm(w[None], w[None]),
    "addbmm": lambda x, w: torch.addbmm(w, x[None], w[None]),
    "x.addbmm": lambda x, w: x.addbmm(w[None], w[None]),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_activations_and_narrow_weights_are_in_float32(product):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator).bfloat16()
    with Float32():
        found = product(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, product(x, weight.float()))


def test_adapters_in_float32_on_a_narrow_base():
    torch.manual_seed(0)
    base = tiny.model("qwen3").bfloat16()
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    with torch.no_grad():
        with Float32():
            found = model(input_ids=ids(), use_cache=False).logits
        expected = model.float()(input_ids=ids(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


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
    with torch.no_grad(), precise_forward.in_float32(trainer):
        found = model(input_ids=ids(), use_cache=False).logits
    assert bool(calls) == (case != "one function")
    with torch.no_grad():
        expected = model.float()(input_ids=ids(), use_cache=False).logits
        if case != "disabled":
            with model.disable_adapter():
                assert (model(input_ids=ids(), use_cache=False).logits - expected).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_wider_numbers_stay_as_they_are():
    model = tiny.model("qwen3", dtype=torch.float64).eval()
    with torch.no_grad():
        with Float32():
            found = model(input_ids=ids(), use_cache=False).logits
        assert torch.equal(found, model(input_ids=ids(), use_cache=False).logits)


def in_float16(out, left, right, add=0.0):
    """What a GPU does: products of float16, sums of float32."""
    assert left.dtype == right.dtype == torch.float16 and out.dtype == torch.float32
    product = left.float() @ right.float()
    out.copy_(out + add * product if add else product)


@pytest.fixture
def on_gpu(monkeypatch):
    """Products as GPUs make them, of matrices of any size."""
    monkeypatch.setattr(precise_forward, "FEW", 0)
    monkeypatch.setattr(precise_forward, "multiply", in_float16)
    monkeypatch.setattr(precise_forward, "is_made_of_halves", lambda input, weight: weight.dim() == 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("at_a_time", [1, 8 * 3, 8 * 7, 2**25])
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "float16"])
def test_large_weights_are_multiplied_in_parts(halves, at_a_time, bias, monkeypatch, request):
    if halves:
        request.getfixturevalue("on_gpu")
    monkeypatch.setattr(precise_forward, "LARGEST", at_a_time)  # less than a row, three of seven, all
    monkeypatch.setattr(precise_forward, "ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 5, 8), (7, 8), (7,)))
    assert len(precise_forward.parts_of(weight)) == {1: 7, 24: 3, 56: 1}.get(at_a_time, 1)
    found = linear(x, weight, b if bias else None)
    expected = functional.linear(x.float(), weight.float(), b.float() if bias else None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((4096, 12288), [2048, 2048]),
        ((12288, 4096), [6144, 6144]),
        ((50257, 1024), [25216, 25041]),
        ((9, 2**26), [9]),
        ((0, 8), [0]),
    ],
    ids=str,
)
def test_parts_of_a_weight_are_about_as_large_and_begin_at_multiples_of_128(shape, rows):
    """For a number of rows that is no multiple of 4, cuBLAS has slow kernels only."""
    assert [len(part) for part in precise_forward.parts_of(torch.empty(shape, device="meta"))] == rows


def test_a_weight_in_two_parts_is_the_weight():
    weight = torch.cat([torch.randn(1000) * 10.0**power for power in (-6, -3, 0, 2)])
    high, low = in_halves(weight)
    assert high.dtype == low.dtype == torch.float16
    torch.testing.assert_close(high.float() / FACTOR, weight, rtol=2**-11, atol=2**-29)
    both = high.double() / FACTOR + low.double() / (FACTOR * REST)
    torch.testing.assert_close(both, weight.double(), rtol=2**-22, atol=2**-40)


@pytest.mark.parametrize("direction", [1, -1])
def test_a_step_from_weights_of_bf16_is_what_is_left_of_them(direction):
    """A small one: it is not lost in the first part, nor does it move that by as much as float16 can tell apart."""
    weight = (torch.randn(1000) / 50).bfloat16().float()
    step = direction * 1e-8 * torch.rand(1000)
    moved = weight + step
    high, low = in_halves(moved)
    large = weight.abs() > 1e-3
    assert large.sum() > 900
    assert torch.equal(high[large].float() / FACTOR, weight[large])
    torch.testing.assert_close(low[large].float() / (FACTOR * REST), (moved - weight)[large], rtol=2**-7, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 64), (5, 64), (64,), (0, 64)], ids=str)
@pytest.mark.parametrize("few", [0, 7], ids=["part by part", "both parts at once"])
def test_a_product_of_halves_is_the_product(few, shape, dtype, bias, on_gpu, monkeypatch):
    """As GPUs make it. The weight is seen as it is, activations are rounded."""
    monkeypatch.setattr(precise_forward, "FEW", few)
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(size, generator=generator) for size in (shape, (7, 64), (7,)))
    weight, b = weight.to(dtype), b if bias else None
    found = linear(x, weight, b)
    rounded = (x / FACTOR).half().double() * FACTOR
    expected = functional.linear(rounded, weight.double(), None if b is None else b.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    if dtype == torch.float32 and x.numel():
        coarse = functional.linear(rounded, in_halves(weight)[0].double() / FACTOR, None if b is None else b.double())
        assert (coarse - expected).abs().max() > 1e-4  # the first part alone


def test_activations_are_rounded_once_for_all_layers_that_take_them(monkeypatch, on_gpu):
    rounded = []
    monkeypatch.setattr(
        precise_forward, "halved", lambda values, factor, most: rounded.append(len(values)) or (values * factor).half()
    )
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(5, 64, generator=generator), torch.randn(3, 64, generator=generator)
    weights = [torch.randn(7, 64, generator=generator) for _ in range(3)]
    with torch.no_grad(), Float32():
        found = [functional.linear(x, weight) for weight in weights]
        assert rounded == [5]
        functional.linear(other, weights[0])
        functional.linear(x, weight=weights[0])
        assert rounded == [5, 3, 5]
        x.mul_(2)
        doubled = functional.linear(x, weights[1], bias=None)
        assert rounded == [5, 3, 5, 5]
    torch.testing.assert_close(doubled, 2 * found[1])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("as it is", True),
        ("few rows", True),
        ("few columns", False),
        ("one row", False),
        ("float64", False),
        ("gradient", False),
        ("gradient that nobody asks for", True),
        ("an old PyTorch", False),
        ("a weight of another kind", False),
        ("a CPU", False),
    ],
)
def test_which_products_are_made_of_halves(case, expected, monkeypatch):
    class Other(torch.Tensor):
        pass

    monkeypatch.setattr(precise_forward, "is_on_gpu", lambda x: case != "a CPU")
    monkeypatch.setattr(precise_forward, "multiplies_halves", lambda device: case != "an old PyTorch")
    shape = {"few rows": (128, 200), "few columns": (200, 128), "one row": (200,)}.get(case, (129, 200))
    dtype = torch.float64 if case == "float64" else torch.float32
    x, weight = torch.randn(3, shape[-1], dtype=dtype), torch.randn(shape)
    if case == "a weight of another kind":
        weight = weight.as_subclass(Other)
    weight.requires_grad_(case.startswith("gradient"))
    with torch.set_grad_enabled(case == "gradient"):
        assert precise_forward.is_made_of_halves(x, weight) == expected


@pytest.mark.parametrize("adds", [True, False], ids=["added at once", "added apart"])
def test_products_go_to_pytorch_as_it_takes_them(adds, monkeypatch):
    calls = []

    def mm(left, right, out_dtype, out=None):
        calls.append("mm")
        product = left.float() @ right.float()
        return product if out is None else out.copy_(product)

    def addmm(matrix, left, right, alpha, out_dtype, out):
        assert matrix is out and matrix.dtype == out_dtype == torch.float32
        calls.append("addmm")
        out.add_(left.float() @ right.float(), alpha=alpha)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(precise_forward, "adds_halves", lambda device: adds)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(4, 4, generator=generator).half() for _ in range(2))
    out = torch.full((4, 4), torch.nan)
    precise_forward.multiply(out, left, right)
    precise_forward.multiply(out, left, right, 0.25)
    torch.testing.assert_close(out, 1.25 * (left.float() @ right.float()))
    assert calls == ["mm", "addmm" if adds else "mm"]


def test_a_wrapper_that_is_put_around_products_later_is_seen_through(monkeypatch):
    original = functional.linear
    monkeypatch.setattr(functional, "linear", lambda *args, **kwargs: original(*args, **kwargs))
    x, weight = torch.randn(3, 8), torch.randn(5, 8).bfloat16()
    with Float32():
        found = functional.linear(x, weight)
    torch.testing.assert_close(found, original(x, weight.float()))


def test_this_machine_has_no_such_products():
    """Were there any, tests above would not have to make them."""
    device = torch.device("cpu")
    assert not precise_forward.multiplies_halves(device) and not precise_forward.adds_halves(device)


def attended(x, keys, mask, is_causal, scale):
    """By the definition, in float64."""
    query, key, value = (x.double() for x in (x, *keys))
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else mask
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(
    ("masked", "options"),
    [
        (False, {}),
        (False, {"is_causal": True}),
        (True, {}),
        (True, {"scale": 0.5, "enable_gqa": True}),
    ],
    ids=["all", "causal", "masked", "grouped"],
)
def test_attention_in_float16_is_attention(masked, options):
    generator = torch.Generator().manual_seed(0)
    heads = 2 if options.get("enable_gqa") else 4
    x = torch.randn(2, 4, 9, 16, generator=generator)
    keys = [torch.randn(2, heads, 9, 16, generator=generator) for _ in range(2)]
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    given = [y.clone() for y in (x, *keys)]
    found = precise_forward.attention_in_float16(x, *keys, mask, **options)
    expected = attended(x, keys, mask, options.get("is_causal", False), options.get("scale"))
    assert found.dtype == torch.float32
    assert 1e-6 < (found - expected).norm() / expected.norm() < 1e-3  # in bf16 it is more
    assert all(map(torch.equal, given, (x, *keys)))


@pytest.mark.parametrize("values", [1e6, 65504.0])
def test_attention_between_numbers_that_float16_does_not_hold_is_finite(values):
    """Of queries and keys, see `test_cuda.py`: some kernels for CPUs add up products in float16."""
    x = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(0)).sign()
    found = precise_forward.attention_in_float16(x, x, x * values, is_causal=True)
    assert found.isfinite().all() and found.abs().max() <= 2**15 * 1.001


@pytest.mark.parametrize("name", ["bool", "none", "float", "float64"])
def test_attention_is_in_float16_on_gpus_unless_it_would_lose_what_is_asked_for(name, monkeypatch):
    calls = []
    monkeypatch.setattr(precise_forward, "attention_in_float16", lambda *args, **kwargs: calls.append((args, kwargs)))

    monkeypatch.setattr(precise_forward, "is_on_gpu", lambda x: True)
    dtype = torch.float64 if name == "float64" else torch.float32
    x = torch.randn(1, 2, 3, 4, dtype=dtype)
    mask = {"bool": torch.ones(3, 3, dtype=torch.bool), "float": torch.zeros(3, 3)}.get(name)
    precise_forward._attention(x, x, x, mask, is_causal=False)
    assert bool(calls) == (name in ("bool", "none"))
    if calls:
        assert calls[0][0][3] is mask and calls[0][1] == {"is_causal": False}


def only_narrow(module, query, *args, **kwargs):
    assert query.dtype == torch.bfloat16, "this kernel does not support float32"
    return sdpa_attention_forward(module, query, *args, **kwargs)


def test_tf32_is_off_inside_and_as_it_was_outside(tmp_path):
    def settings():
        matrices, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        if hasattr(cudnn, "conv"):  # from PyTorch 2.9 on
            return matrices.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
        return matrices.allow_tf32, cudnn.allow_tf32

    before = settings()
    trainer = training.build(tmp_path)
    with precise_forward.in_float32(trainer):
        assert settings() == (False, False) and trainer.isopo._current.in_float32
        with precise_forward.products(tf32=True):
            assert settings() == (True, False)
        with pytest.raises(RuntimeError), precise_forward.products(tf32=True):
            raise RuntimeError
        assert settings() == (False, False)
    assert settings() == before and not trainer.isopo._current.in_float32


def test_a_model_that_cannot_be_run_in_float32_is_measured_as_it_is_trained(tmp_path, caplog, monkeypatch):
    AttentionInterface.register("only_narrow", only_narrow)
    monkeypatch.setattr(logging.getLogger("isopo_trl"), "propagate", True)
    config = tiny.model("llama").config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="only_narrow")
    trainer = training.build(tmp_path, model, log_step_kl=True, max_steps=3, learning_rate=1e-2)
    lines = training.train(trainer)
    assert all(line["step/kl"] > 0 for line in lines)
    (warning,) = [record.message for record in caplog.records if "float32" in record.message]
    assert "this kernel does not support float32" in warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_comes_to_is_that_of_the_precision_passes_are_made_in(dtype, tmp_path):
    trainer = training.build(tmp_path, tiny.model("qwen3", dtype=dtype), target_kl=1e-3)
    lost = ROUNDING_AS_TRAINED if dtype == torch.bfloat16 else 0.0
    assert rounding(trainer) == 0  # in float32, on a CPU
    assert rounding(trainer, as_trained=True) == lost
    trainer.accelerator.state._mixed_precision = "bf16"
    assert rounding(trainer) == 0 and rounding(trainer, as_trained=True) == ROUNDING_AS_TRAINED
    trainer.accelerator.state._mixed_precision = "no"
    trainer.model.is_quantized = True
    assert rounding(trainer) == lost
    trainer.model.is_quantized = False
    trainer.model.config._attn_implementation = "flash_attention_2"
    assert rounding(trainer) == lost
