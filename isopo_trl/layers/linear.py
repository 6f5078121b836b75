"""`nn.Linear`, LoRA's two factors (which are `nn.Linear`), and GPT-2's `Conv1D`, whose weight is transposed."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..geometry import kernels
from ..geometry.cost import Needs, Strategy, block_rows, choose_strategy
from ..geometry.statistics import linear_statistics, product, sequence_gradients, with_ones
from ..microbatch import Microbatch
from .elementwise import elementwise_gradient
from .layer import Layer, Unsupported, autocast, full_shape, has_own_forward, layer_backward


class LinearLayer(Layer):
    """`y = W a + b`: `V_s = sum_t g_t (a_t, 1)^T` over weight and bias together."""

    kind = "linear"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        if not isinstance(module, (nn.Linear, Conv1D)):
            return False
        if type(module).forward not in (nn.Linear.forward, Conv1D.forward) or has_own_forward(module):
            raise Unsupported(f"{type(module).__name__} does not compute its output as nn.Linear does")
        if not set(trainable) <= {"weight", "bias"}:
            raise Unsupported(f"{type(module).__name__} has parameters beside weight and bias")
        return True

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor) -> torch.Tensor:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        x, weight, bias = autocast(x, weight, module.bias)
        return _Linear.apply(x, weight, bias, self, microbatch)

    def strategy(self, sequences: int, length: int, samples: int, needs: Needs) -> str:
        if not any(needs):
            return "plain"
        if "weight" not in self.parameters:
            return "kept"
        weight = self.module.get_parameter("weight")
        p, d = full_shape(weight)
        fused = weight.is_cuda and kernels.ENABLED
        if fused and not (needs.norm or needs.ntk):
            return "ghost"
        d += "bias" in self.parameters
        return choose_strategy(sequences, length, p, d, samples, needs, weight.device.type)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer, microbatch):
        microbatch.check(layer.name, x)
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.microbatch = layer, microbatch
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @layer_backward
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        layer, microbatch = ctx.layer, ctx.microbatch
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = microbatch.rows(layer.name, grad)
        a = microbatch.rows(layer.name, x)
        grad_x = (g @ weight).view_as(x) if needs_x else None
        gradients = linear_gradient(g, a, needs_weight, needs_bias, layer.index, microbatch, weight.dtype)
        return grad_x, *gradients, None, None


def linear_gradient(
    g: torch.Tensor, a: torch.Tensor, weight: bool, bias: bool, index: int, microbatch: Microbatch, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    `sum_s c_s V_s` of a linear layer: the gradients of its weight `[p, d]` and bias `[p]`.

    Args:
        g (`torch.Tensor`): `[N, p]` cotangents.
        a (`torch.Tensor`): `[N, d]` inputs.
        weight, bias (`bool`): which of the two is trained.
        index (`int`): the layer's place in the running statistics.
        microbatch ([`Microbatch`]): the rest.
        dtype (`torch.dtype`): of the result.
    """
    if not weight:  # only the bias is trained: its gradient at a position is g_t
        return None, elementwise_gradient(g, index, microbatch, dtype)
    compute = _fused if g.dtype == a.dtype and microbatch.fused(g) else _plain
    total, g, a = compute(g, a, bias, index, microbatch, dtype)
    if total is None:
        total = g.t() @ a if g.dtype == dtype else product(g.t(), a).to(dtype)
        return total, g.sum(0).to(dtype) if bias else None
    return (total[:, :-1], total[:, -1]) if bias else (total, None)


def _strategy(g: torch.Tensor, a: torch.Tensor, bias: bool, microbatch: Microbatch) -> Strategy:
    sequences, samples = microbatch.sequences, microbatch.samples
    n = 0 if samples is None else len(samples.rows)
    shape = (sequences.count, sequences.length, g.shape[1], a.shape[1] + bias)
    return choose_strategy(*shape, n, microbatch.rule.needs, g.device.type)


_Total = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


def _plain(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    index: int,
    microbatch: Microbatch,
    dtype: torch.dtype,
) -> _Total:
    """The gradient, or `None` and the rows, one side of them scaled, whose product it is."""
    sequences, samples = microbatch.sequences, microbatch.samples
    strategy = _strategy(g, a, bias, microbatch)
    statistics, kept = linear_statistics(g, a, bias, sequences, samples, microbatch.rule.needs, strategy)
    c = microbatch.coefficients(index, statistics)
    if kept is not None:
        return torch.einsum("m,mpd->pd", c.to(kept.dtype), kept).to(dtype), g, a
    c = c.to(g.dtype)
    if bias or g.shape[1] <= a.shape[1]:
        return None, sequences.scaled(g, c), a
    return None, g, sequences.scaled(a, c)  # the same product, with fewer elements to scale


def _fused(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    index: int,
    microbatch: Microbatch,
    dtype: torch.dtype,
) -> _Total:
    """The same with Triton's kernels. Overlaps always come from products between rows, which cost one launch."""
    sequences, needs = microbatch.sequences, microbatch.rule.needs
    samples: Any = microbatch.samples
    explicit = needs.norm or needs.ntk
    strategy: Strategy = _strategy(g, a, bias, microbatch) if explicit else "ghost"
    if explicit and strategy == "ghost":
        return _plain(g, a, bias, index, microbatch, dtype)
    ledger = microbatch.reach(index)
    overlap: Any = None
    if needs.overlap:
        overlap = kernels.overlap_coefficients(g, a, bias, sequences, samples, ledger, index, finish=not explicit)
    n = 0 if overlap is None else len(samples.rows)
    if strategy == "kept":
        V = product(sequences.padded(g).transpose(1, 2), with_ones(sequences.padded(a), bias))
        kernels.v_coefficients(V, ledger, index, overlap, n)
        return kernels.combined(V, ledger, index, dtype), g, a
    if strategy == "blocks":
        p, d = g.shape[1], a.shape[1] + bias
        rows = block_rows(sequences.count, d)
        sizes = [min(rows, p - start) * d for start in range(0, p, rows)]
        blocks = kernels.VBlocks(sizes, ledger, index, overlap, n)
        for _, V in sequence_gradients(g, a, bias, sequences, rows):
            blocks.add(V)
    if bias or g.shape[1] <= a.shape[1]:
        return None, kernels.scaled(g, sequences, ledger, index), a
    return None, g, kernels.scaled(a, sequences, ledger, index)
