"""
Forward passes in float32, whatever the model is trained in: so that a step of the optimizer is seen.

The weights of most models come from a file in bf16, and in float32 they begin as such numbers. A step moves them by a
small part of what lies between two of these, and of what TF32 can tell apart. Rounded to either, most of them are
where they were, and the step seems to have hardly happened; where products cut bits off instead, it seems a hundred
times as long. That goes on until steps have spread the weights. Rounded activations do less harm: they add noise,
which looks like a step of 1e-6 nats per token in TF32, but of 1e-4 to 1e-3 in bf16 (`benchmarks/step_precision.py`).

So under [`in_float32`] activations are in float32, and narrower weights are widened where they are used. On GPUs,
where float32 is slow, a product with a weight is made in two parts: with the weight as TF32 has it, in TF32, and with
what is left of it, in bf16. PyTorch's fused attention, which has no weights, is in float16 there: it has as many bits
as TF32, 11, and so the same noise; bf16 has 8. Numbers that are too large for it are cut to the largest that is taken,
before the step as after it. All other products are in float32 proper.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import trl_seam
from .kernels import two_parts


# Elements of a weight that are widened, or taken apart, at a time
LARGEST = 2**25
_NARROW = (torch.bfloat16, torch.float16)
_BITS_LEFT_OUT = 13  # of float32's fraction, by TF32
# The largest number in attention: half of what float16 holds, so that it holds a mean of them, too, however rounded
MOST_ATTENDED = 2.0**15
# What PyTorch calls the precision of products, and its values without TF32 and with it; another name before 2.9
_SETTING, _VALUES = (
    ("fp32_precision", ("ieee", "tf32"))
    if hasattr(torch.backends.cuda.matmul, "fp32_precision")
    else ("allow_tf32", (False, True))
)


@contextmanager
def in_float32(trainer: Any) -> Iterator[None]:
    """Context in which the trainer's model is run in float32, unless its attention, or FSDP2, runs it in bf16."""
    model, accelerator = trainer.model, trainer.accelerator
    fused = "flash" in str(getattr(model.config, "_attn_implementation", None))
    with ExitStack() as loans:
        if not fused and not accelerator.is_fsdp2:  # which casts the weights it gathers by itself
            if accelerator.native_amp:
                loans.enter_context(trl_seam.borrowed(accelerator, native_amp=False))
                loans.enter_context(trl_seam.borrowed(model, forward=model._original_forward))
            loans.enter_context(trl_seam.borrowed(trainer.isopo._current, in_float32=True))
            loans.enter_context(products(tf32=False))
            loans.enter_context(Precision(getattr(torch.backends.cudnn, "conv", torch.backends.cudnn), tf32=False))
            loans.enter_context(Float32())
        yield


class Float32(TorchFunctionMode):
    """Context in which what is narrower than float32 is widened: embeddings, and what weights are multiplied with."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(function, function)(*args, **(kwargs or {}))


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As PyTorch's, in float32 where the arguments are not wider."""
    input, bias = _wide(input), _wide(bias)
    rows = max(1, LARGEST // weight.size(-1))
    if weight.dim() != 2 or len(weight) <= rows:
        return _product(input, weight, bias)
    output = input.new_empty(*input.shape[:-1], len(weight))
    biases = [None] * -(-len(weight) // rows) if bias is None else bias.split(rows)
    for out, part, own in zip(output.split(rows, dim=-1), weight.split(rows), biases, strict=True):
        out.copy_(_product(input, part, own))
    return output


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if input.device.type == "cuda" and input.dtype == torch.float32 and weight.dtype in (torch.float32, *_NARROW):
        return product_in_parts(input, weight, bias)
    return functional.linear(input, _wide(weight), bias)


def product_in_parts(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product with a weight of float32, or of less, in TF32 and bf16."""
    if weight.dtype == torch.float32:
        coarse, rest = in_two_parts(weight)
    else:
        coarse, rest = weight.float(), None  # TF32 has all of it
    with products(tf32=True):
        output = functional.linear(input, coarse, bias)
    return output if rest is None else _plus_product(output, input.bfloat16(), rest)


def _plus_product(output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`output`, to which the product of narrower numbers is added, if possible while that is made."""
    apart = weight.dim() != 2 or output.requires_grad or not output.is_contiguous()
    if apart or not adds_to_float32(output.device):
        return output.add_(functional.linear(input, weight))
    rows = output.view(-1, output.size(-1))
    torch.addmm(rows, input.reshape(-1, input.size(-1)), weight.t(), out_dtype=torch.float32, out=rows)
    return output


@lru_cache
def adds_to_float32(device: torch.device) -> bool:
    """Whether PyTorch adds a product of bf16 to a matrix of float32 there: on GPUs from 2.10 on, found by trying."""
    one = torch.ones(16, 16, device=device)
    small = 2**-7 * one.bfloat16()
    try:
        torch.addmm(one, small, small, out_dtype=torch.float32, out=one)
    except (RuntimeError, TypeError):
        return False
    return bool((one == 1 + 2**-10).all())


def in_two_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in float32, rounded to what TF32 has numbers for, and what is left of it, in bf16."""
    if two_parts.usable(weight):
        return two_parts.in_two_parts(weight, _BITS_LEFT_OUT)
    half = 1 << (_BITS_LEFT_OUT - 1)
    coarse = (weight.view(torch.int32) + half).bitwise_and_(-(1 << _BITS_LEFT_OUT)).view(torch.float32)
    return coarse, (weight - coarse).bfloat16()


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    query, key, value = given = [_wide(query), _wide(key), _wide(value)]
    no_numbers = attn_mask is None or attn_mask.dtype == torch.bool
    if no_numbers and all(x.is_cuda and x.dtype == torch.float32 for x in given):
        return attention_in_float16(query, key, value, attn_mask, *args, **kwargs)
    return functional.scaled_dot_product_attention(query, key, value, _wide(attn_mask), *args, **kwargs)


def attention_in_float16(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """As PyTorch's, of tensors in float32, and so is the result."""
    # Infinite where it is too large, and finite again
    query, key, value = (x.half().clamp_(-MOST_ATTENDED, MOST_ATTENDED) for x in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs).float()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value


def _embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _wide(functional.embedding(*args, **kwargs))


def _widened(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})


# What does not widen its arguments by itself
_PRODUCTS = [
    functional.bilinear,
    functional.layer_norm,
    functional.rms_norm,
    functional.group_norm,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    torch.einsum,
    *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm")),
    *(getattr(torch.Tensor, name) for name in ("matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm")),
]
# Most calls under [`Float32`] are of none of these, and cost one look
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: partial(_widened, function) for function in _PRODUCTS},
    functional.embedding: _embedding,
    functional.linear: linear,
    functional.scaled_dot_product_attention: _attention,
}


def products(tf32: bool) -> "Precision":
    """Context in which GPUs multiply matrices of float32 in TF32, or do not."""
    return Precision(torch.backends.cuda.matmul, tf32)


class Precision:
    """Context for some of PyTorch's settings of precision; entered for every layer, so without a generator."""

    def __init__(self, settings: Any, tf32: bool):
        self.settings, self.value = settings, _VALUES[tf32]

    def __enter__(self) -> None:
        self.own = getattr(self.settings, _SETTING)
        setattr(self.settings, _SETTING, self.value)

    def __exit__(self, *error: object) -> None:
        setattr(self.settings, _SETTING, self.own)
