"""`nn.Linear`, LoRA's two factors (which are `nn.Linear`), and GPT-2's `Conv1D`, whose weight is transposed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..geometry.cost import Needs, Strategy, block_rows, choose_strategy
from ..geometry.sequences import SampleRows, Samples
from ..geometry.statistics import linear_statistics, product, sequence_gradients, with_ones
from ..kernels import fisher_rows as kept_kernels
from ..kernels import linear as row_kernels
from ..kernels import v as v_kernels
from ..kernels.coefficients import usable
from ..microbatch import Microbatch
from ..rules.rule import Rule
from .elementwise import elementwise_gradient
from .layer import (
    Layer,
    LayerFunction,
    Unsupported,
    apart,
    autocast,
    full_shape,
    has_own_forward,
    is_recomputing,
    layer_backward,
    parameter_of,
    take_aside,
)


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
        weight = parameter_of(module, "weight")
        if isinstance(module, Conv1D):
            weight = weight.t()
        x, weight, bias = autocast(x, weight, parameter_of(module, "bias"))
        if not is_recomputing():
            return _Linear.apply(x, weight, bias, self, microbatch)
        y = _Linear.apply(x, weight, bias, self, microbatch, False)
        _multiply(x, weight, bias, y)
        return y

    def strategy(self, sequences: int, length: int, samples: int, rule: Rule) -> str:
        if not any(rule.needs):
            return "no statistics"
        if "weight" not in self.parameters:  # a bias alone is a vector
            return "kept"
        weight = self.module.get_parameter("weight")
        p, d = full_shape(weight)
        if isinstance(self.module, Conv1D):
            p, d = d, p
        d += "bias" in self.parameters
        kernels = usable(weight, sequences, samples, rule)
        return linear_strategy(sequences, length, p, d, samples, rule.needs, weight.device.type, kernels)


def linear_strategy(m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str, kernels: bool) -> Strategy:
    """
    How a linear layer gets its statistics; arguments as in [`~geometry.cost.relative_costs`], and whether its kernels
    are used: these take overlaps from products between rows in any case, which costs them one launch.
    """
    if kernels and not (needs.norm or needs.ntk):
        return "ghost"
    return choose_strategy(m, T, p, d, n, needs, device, kernels)


@dataclass
class OfTerm:
    """
    What a linear layer keeps of terms that carry no advantage.

    Args:
        rows (`torch.Tensor`, *optional*): `[N, p]`, cotangents: the loss's own, rescaled, are added to them, and one
            product makes the gradient of both.
        weight, bias (`torch.Tensor`, *optional*): `[p, d]` and `[p]`, gradients, where these are kept instead.
    """

    rows: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def add(
        self, g: torch.Tensor, a: torch.Tensor, weight: bool, bias: bool, microbatch: Microbatch, dtype: torch.dtype
    ) -> None:
        """Take in the cotangents of a term; arguments as in [`linear_gradient`]."""
        if weight and (self.rows is not None or microbatch.keeps_rows(g, a)):
            self.rows = g if self.rows is None else self.rows + g
            return
        if weight:
            self.weight = _product(g, a, dtype, self.weight)
        if bias:
            self.bias = _sum(g, dtype, self.bias)


def _product(g: torch.Tensor, a: torch.Tensor, dtype: torch.dtype, plus: torch.Tensor | None = None) -> torch.Tensor:
    """`g^T a` `[p, d]`; to `plus` it is added in place."""
    if g.dtype == dtype:
        return g.t() @ a if plus is None else plus.addmm_(g.t(), a)
    result = product(g.t(), a).to(dtype)
    return result if plus is None else plus.add_(result)


def _sum(g: torch.Tensor, dtype: torch.dtype, plus: torch.Tensor | None = None) -> torch.Tensor:
    total = g.sum(0).to(dtype)
    return total if plus is None else plus.add_(total)


def _of_term(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    x, weight = ctx.saved_tensors
    microbatch = ctx.microbatch
    N = microbatch.sequences.rows
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    g = grad.reshape(N, -1)
    microbatch.visit_in_term(ctx.layer.index)
    ctx.aside = take_aside(ctx) or OfTerm()
    ctx.aside.add(g, x.reshape(N, -1), needs_weight, needs_bias, microbatch, weight.dtype)
    return (g @ weight).view_as(x) if needs_x else None


@torch.no_grad()
def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """What `torch.nn.functional.linear` returns, by the same operations, into `y` `[..., p]`."""
    rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


class _Linear(LayerFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, layer, microbatch, complete=True):
        microbatch.check(layer.name, x)
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.microbatch = layer, microbatch
        if not complete:
            # Checkpointing ends a recomputation when the last tensor is saved, which an autograd function does behind
            # its forward: the product of a block's last layer, which nobody asks for, is left to be made after that
            return x.new_empty(*x.shape[:-1], len(weight))
        return apart(torch.nn.functional.linear(x, weight, bias))

    @staticmethod
    @layer_backward(_of_term)
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        layer, microbatch = ctx.layer, ctx.microbatch
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Positions were checked in the forward
        g, a = grad.flatten(0, -2), x.flatten(0, -2)
        of_term = take_aside(ctx)
        gradients = linear_gradient(g, a, needs_weight, needs_bias, layer.index, microbatch, weight.dtype, of_term)
        # Behind the other, which may need much memory for a moment
        grad_x = g.mm(weight).view_as(x) if needs_x else None
        return grad_x, *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def linear_gradient(
    g: torch.Tensor,
    a: torch.Tensor,
    weight: bool,
    bias: bool,
    index: int,
    microbatch: Microbatch,
    dtype: torch.dtype,
    of_term: OfTerm | None = None,
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
        of_term ([`OfTerm`], *optional*): what is added to it.
    """
    of_term = of_term or OfTerm()
    if not weight:  # only the bias is trained: its gradient at a position is g_t
        alone = elementwise_gradient(g, index, microbatch, dtype)
        return None, alone if of_term.bias is None else of_term.bias.add_(alone)
    sequences, needs = microbatch.sequences, microbatch.rule.needs
    kernels = g.dtype == a.dtype and microbatch.kernels_take(g)
    samples: Any = microbatch.samples
    into = None
    if microbatch.draw is not None:
        exchanged = microbatch.draw.exchange_in_kernel(index, g, a) if kernels else None
        if exchanged is not None:
            samples, into = exchanged
        else:
            samples = microbatch.sampled(index, g, a=a)
            if isinstance(samples, SampleRows):
                kernels = kernels and samples.g.dtype == samples.inputs.dtype == g.dtype
    strategy: Strategy = "ghost"
    if not kernels or needs.norm or needs.ntk:
        n = 0 if samples is None else samples.number
        size = (sequences.count, sequences.length, g.shape[1], a.shape[1] + bias)
        strategy = linear_strategy(*size, n, needs, g.device.type, kernels)
    if kernels and (strategy != "ghost" or not (needs.norm or needs.ntk)):
        total, g, a = _by_kernels(g, a, bias, index, microbatch, samples, into, dtype, strategy, of_term.rows)
    else:
        if into is not None:
            microbatch.sampled(index, g, a=a)
        total, g, a = _by_torch(g, a, bias, index, microbatch, samples, dtype, strategy, of_term.rows)
    if total is None:
        return _product(g, a, dtype, of_term.weight), _sum(g, dtype, of_term.bias) if bias else None
    of_weight, of_bias = (total[:, :-1], total[:, -1]) if bias else (total, None)
    if of_term.rows is not None:
        _product(of_term.rows, a, dtype, of_weight)
        if of_bias is not None:
            _sum(of_term.rows, dtype, of_bias)
    if of_term.weight is not None:
        of_weight += of_term.weight
    if of_bias is not None and of_term.bias is not None:
        of_bias += of_term.bias
    return of_weight, of_bias


_Total = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


def _by_torch(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    index: int,
    microbatch: Microbatch,
    samples: Samples | SampleRows | None,
    dtype: torch.dtype,
    strategy: Strategy,
    plus: torch.Tensor | None,
) -> _Total:
    """
    The gradient, or `None` and the rows, one side of them scaled, whose product it is; only in these is `plus`
    `[N, p]`, which is added to cotangents.
    """
    sequences = microbatch.sequences
    statistics, V = linear_statistics(g, a, bias, sequences, samples, microbatch.rule.needs, strategy)
    c = microbatch.coefficients(index, statistics)
    if V is not None:
        return torch.einsum("m,mpd->pd", c.to(V.dtype), V).to(dtype), g, a
    c = c.to(g.dtype)
    if bias or plus is not None or g.shape[1] <= a.shape[1]:
        return None, sequences.scaled(g, c, plus), a
    return None, g, sequences.scaled(a, c)  # the same product, with fewer elements to scale


def _by_kernels(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    index: int,
    microbatch: Microbatch,
    samples: Any,
    into: Any,
    dtype: torch.dtype,
    strategy: Strategy,
    plus: torch.Tensor | None,
) -> _Total:
    """The same with Triton's kernels."""
    sequences, needs = microbatch.sequences, microbatch.rule.needs
    ledger = microbatch.kernel_ledger(index)
    overlap: Any = None
    if needs.overlap:
        finish = not (needs.norm or needs.ntk)
        given = (g, a, bias, sequences, samples, ledger, index, finish)
        if isinstance(samples, SampleRows):
            overlap = kept_kernels.overlap_coefficients(*given, into)
        else:
            overlap = row_kernels.overlap_coefficients(*given)
    n = 0 if overlap is None else samples.number
    if strategy == "kept":
        m, T = sequences.count, sequences.length  # the layout is regular
        V = product(g.view(m, T, -1).transpose(1, 2), with_ones(a.view(m, T, -1), bias))
        v_kernels.v_coefficients(V, ledger, index, overlap, n)
        return v_kernels.combined(V, ledger, index, dtype), g, a
    if strategy == "blocks":
        p, d = g.shape[1], a.shape[1] + bias
        rows = block_rows(sequences.count, d)
        sizes = [min(rows, p - start) * d for start in range(0, p, rows)]
        blocks = v_kernels.VBlocks(sizes, ledger, index, overlap, n)
        for _, V in sequence_gradients(g, a, bias, sequences, rows):
            blocks.add(V)
    if bias or plus is not None or g.shape[1] <= a.shape[1]:
        return None, row_kernels.scaled(g, sequences, ledger, index, plus), a
    return None, g, row_kernels.scaled(a, sequences, ledger, index)
