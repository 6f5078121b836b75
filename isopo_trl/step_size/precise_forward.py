"""
Forward passes in float32, whatever the model is trained in: so that a step of the optimizer is seen.

The weights of most models come from a file in bf16, and in float32 they begin as such numbers. A step moves them by a
small part of what lies between two of these, and of what TF32 can tell apart. Rounded to either, most of them are
where they were, and the step seems to have hardly happened; where products cut bits off instead, it seems a hundred
times as long. That goes on until steps have spread the weights. Rounded activations do less harm: they add noise,
which looks like a step of 1e-6 nats per token in TF32, but of 1e-4 to 1e-3 in bf16
(`benchmarks/questions/step_precision.py`).

So in passes of [`PreciseForward`] activations are in float32, and narrower weights are widened where they are used. On
GPUs, where float32 is slow, layers multiply in float16, which has as many bits as TF32, 11, and so the same noise
(bf16 has 8), and sums are in float32. Of a weight in float32 there are two products: with its first 11 bits, and with
the rest. PyTorch's fused attention, which has no weights, is in float16 as well. Numbers that are too large for it are
cut to the largest that is taken, before the step as after it. All other products are in float32 proper.

This file is long because no library multiplies weights of float32 in float16 without losing what a step has changed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..kernels import halves
from ..trl_seam.loans import borrowed


# Elements of a weight that are widened, or taken apart, at a time, in a multiple of so many rows
LARGEST = 2**25
ROWS = 128
# Products over as few columns are in float32, which takes no longer; of as few rows both parts are multiplied at once
FEW = 128
_NARROW = (torch.bfloat16, torch.float16)
# Weights are multiplied by this in float16, and activations divided: up to 4,094 and a million, and with all bits from
# 2^-18 and 2^-10 on; what is smaller is rounded to multiples of 2^-28 and 2^-20
FACTOR = 2.0**4
# The largest number of float16
MOST = 65504.0
# What of a weight float16 leaves out is multiplied by this, so that it is nearly as large as the weight
REST = 2.0**11
# The largest number in attention: half of what float16 holds, so that it holds a mean of them, too, however rounded
MOST_ATTENDED = 2.0**15
# KL divergences that rounding makes, in nats per token: of products in float16, and of a model in bf16
ROUNDING_OF_HALVES = 4e-6
ROUNDING_AS_TRAINED = 1e-3
# As it is now: who puts a wrapper around it later calls this one in the end
_LINEAR = functional.linear


_CONVOLUTIONS: Any = getattr(torch.backends.cudnn, "conv")  # noqa: B009  # which type checkers do not know


class PreciseForward:
    """
    The passes of a model in float32.

    Args:
        accelerator (`Accelerator`): who prepared the model.
        layers (`Callable`): returns a context in which ISOPO's layers know of it.
    """

    def __init__(self, accelerator: Any, layers: Callable[[], AbstractContextManager[None]]):
        self._accelerator, self._layers = accelerator, layers

    @contextmanager
    def passes(self, model: Any) -> Iterator[None]:
        """Context in which the model is run in float32, unless it cannot be."""
        with ExitStack() as loans:
            if not self._is_run_as_trained(model):
                if self._accelerator.native_amp:
                    loans.enter_context(borrowed(self._accelerator, native_amp=False))
                    loans.enter_context(borrowed(model, forward=model._original_forward))
                loans.enter_context(self._layers())
                loans.enter_context(products(tf32=False))
                loans.enter_context(Precision(_CONVOLUTIONS, tf32=False))
                loans.enter_context(Float32())
            yield

    def _is_run_as_trained(self, model: Any) -> bool:
        """Whether its attention, or FSDP2, which casts the weights that it gathers, runs the model in what it has."""
        fused = "flash" in str(getattr(model.config, "_attn_implementation", None))
        return fused or self._accelerator.is_fsdp2

    def rounding(self, model: Any, is_quantized: bool = False, as_trained: bool = False) -> float:
        """
        KL divergence, in nats per token, that rounding alone makes of two passes between which weights have moved by
        next to nothing: less than that says nothing about a step. `as_trained`: passes are made as the model is
        trained.
        """
        as_trained |= self._is_run_as_trained(model)
        narrow = any(p.dtype in _NARROW for p in model.parameters())
        narrow = narrow or self._accelerator.mixed_precision in ("bf16", "fp16")
        if narrow and (as_trained or is_quantized):
            return ROUNDING_AS_TRAINED
        on_gpu = self._accelerator.device.type == "cuda" and not as_trained
        return ROUNDING_OF_HALVES if on_gpu and torch.version.hip is None else 0.0


class Float32(TorchFunctionMode):
    """Context in which what is narrower than float32 is widened: embeddings, and what weights are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self._last = Last()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _LINEAR:
            return linear(*args, **{"last": self._last, **(kwargs or {})})
        return _INSTEAD.get(function, function)(*args, **(kwargs or {}))


class Last:
    """The activations that were used last, in float16: several layers often take the same."""

    def __init__(self) -> None:
        self._given: tuple[torch.Tensor, int] | None = None
        self._half = torch.empty(0)

    def half(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, columns]`"""
        if self._given is None or self._given[0] is not input or self._given[1] != input._version:
            self._half = halved(input.reshape(-1, input.size(-1)), 1 / FACTOR, MOST)
            self._given = (input, input._version)
        return self._half


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, last: Last | None = None
) -> torch.Tensor:
    """PyTorch's product, in float32 where the arguments are not wider."""
    if is_made_of_halves(input, weight):
        return product_of_halves(input, weight, bias, last or Last())
    input, bias = _wide(input), _wide(bias)
    parts = parts_of(weight)
    if len(parts) == 1:
        return functional.linear(input, _wide(weight), bias)
    output = input.new_empty(*input.shape[:-1], len(weight))
    for out, part in zip(output.split(len(parts[0]), dim=-1), parts, strict=True):
        out.copy_(functional.linear(input, _wide(part)))
    return output if bias is None else output.add_(bias)


def parts_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix's rows, as many at a time as are widened at once: about as many in each part, so that none is slow."""
    number = max(1, -(-weight.numel() // LARGEST))
    rows = -(-len(weight) // number) if weight.dim() == 2 else 0
    return weight.split(-(-rows // ROWS) * ROWS) if 0 < rows < len(weight) else (weight,)


def is_made_of_halves(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is made in float16: on GPUs, of what float32 could hold, and without gradient."""
    if not is_on_gpu(input) or not is_ordinary(weight) or weight.dim() != 2 or weight.size(1) <= FEW:
        return False
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
        return False
    known = (torch.float32, *_NARROW)
    return input.dtype in known and weight.dtype in known


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether PyTorch makes products of float16 in float32 there: on NVIDIA's GPUs."""
    return x.device.type == "cuda" and torch.version.hip is None


def is_ordinary(weight: torch.Tensor) -> bool:
    """Whether a weight is what it seems to be: not sharded, nor stored in another type."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter)


def product_of_halves(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, last: Last
) -> torch.Tensor:
    """The product with a weight of float32, or of less, by products of float16 that are added up in float32."""
    x, wide = last.half(input), weight.dtype == torch.float32
    if wide and len(weight) <= FEW:
        both = x.new_empty(len(x), 2 * len(weight), dtype=torch.float32)
        multiply(both, x, in_halves(weight).flatten(0, 1).t())
        high, low = both.chunk(2, dim=1)
        output = torch.add(high, low, alpha=1 / REST)
    else:
        output = x.new_empty(len(x), len(weight), dtype=torch.float32)
        parts = parts_of(weight)
        for out, part in zip(output.split(len(parts[0]), dim=1), parts, strict=True):
            if wide:
                high, low = in_halves(part)
                multiply(out, x, high.t())
                multiply(out, x, low.t(), 1 / REST)
            else:  # float16 has all of it
                multiply(out, x, halved(part, FACTOR, MOST).t())
    if bias is not None:
        output += bias
    return output.view(*input.shape[:-1], len(weight))


def multiply(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, add: float = 0.0) -> None:
    """`out`, in float32, becomes the product of matrices of float16, or has so many times that product added to it."""
    if add == 0:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, left, right, alpha=add, out_dtype=torch.float32, out=out)


def halved(values: torch.Tensor, factor: float, most: float) -> torch.Tensor:
    """`factor * values` in float16; what is larger than `most` is cut to it, and what is not finite stays as it is."""
    if halves.takes_all(values):
        return halves.halved(values, factor, most)
    return _cut(values.float() * factor, most).half()


def _cut(values: torch.Tensor, most: float) -> torch.Tensor:
    return values.where(values.isinf(), values.clamp(-most, most))


def in_halves(weight: torch.Tensor) -> torch.Tensor:
    """
    `[2, rows, columns]`: what float16 has of a weight in float32 that is multiplied by `FACTOR`, and `REST` times what
    is left of it.
    """
    if halves.takes_all(weight):
        return halves.in_halves(weight, FACTOR, MOST, REST)
    both = torch.empty(2, *weight.shape, dtype=torch.float16, device=weight.device)
    weight = _cut(weight * FACTOR, MOST)
    both[0] = weight
    both[1] = weight.sub_(both[0]).mul_(REST)
    return both


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    query, key, value = given = [_wide(query), _wide(key), _wide(value)]
    no_numbers = attn_mask is None or attn_mask.dtype == torch.bool
    if no_numbers and all(is_on_gpu(x) and x.dtype == torch.float32 for x in given):
        return attention_in_float16(query, key, value, attn_mask, *args, **kwargs)
    return functional.scaled_dot_product_attention(query, key, value, _wide(attn_mask), *args, **kwargs)


def attention_in_float16(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """PyTorch's attention, of tensors in float32, and so is the result."""
    query, key, value = (_attended(x) for x in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs).float()


def _attended(x: torch.Tensor) -> torch.Tensor:
    """In float16; heads often lie behind positions."""
    turned = x.dim() == 4 and not x.is_contiguous()
    return halved(x.transpose(1, 2), 1.0, MOST_ATTENDED).transpose(1, 2) if turned else halved(x, 1.0, MOST_ATTENDED)


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
    functional.scaled_dot_product_attention: _attention,
}


def products(tf32: bool) -> "Precision":
    """Context in which GPUs multiply matrices of float32 in TF32, or do not."""
    return Precision(torch.backends.cuda.matmul, tf32)


class Precision:
    """Context for some of PyTorch's settings of precision; entered for every layer, so without a generator."""

    def __init__(self, settings: Any, tf32: bool):
        self.settings, self.value = settings, "tf32" if tf32 else "ieee"

    def __enter__(self) -> None:
        self.own, self.settings.fp32_precision = self.settings.fp32_precision, self.value

    def __exit__(self, *error: object) -> None:
        self.settings.fp32_precision = self.own
