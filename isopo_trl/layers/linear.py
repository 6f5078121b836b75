"""`nn.Linear`, LoRA's two factors (which are `nn.Linear`), and GPT-2's `Conv1D`, whose weight is transposed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..geometry.cost import Needs, Strategy, block_rows, choose_strategy
from ..geometry.sequences import Sequences
from ..geometry.statistics import Statistics, linear_statistics, product, sequence_gradients, with_ones
from ..kernels import linear as row_kernels
from ..kernels import v as v_kernels
from ..kernels.coefficients import Entry, statistics_are_in_kernels
from ..kernels.fisher_rows import Into
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
        return rescaled_linear(x, weight, parameter_of(module, "bias"), self, microbatch)

    def strategy(self, sequences: int, length: int, samples: int, rule: Rule) -> str:
        if not any(rule.needs):
            return "no statistics"
        if "weight" not in self.parameters:  # a bias alone is a vector
            return "whole"
        weight = self.module.get_parameter("weight")
        p, d = full_shape(weight)
        if isinstance(self.module, Conv1D):
            p, d = d, p
        d += "bias" in self.parameters
        kernels = statistics_are_in_kernels(weight, sequences, samples, rule.needs)
        return linear_strategy(sequences, length, p, d, samples, rule.needs, weight.device.type, kernels)


def rescaled_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Layer, microbatch: Microbatch
) -> torch.Tensor:
    """
    What `torch.nn.functional.linear(x, weight, bias)` returns, with the gradients that the rule makes of a layer's.

    Args:
        x (`torch.Tensor`): `[B, T, d]`, or in another layout that [`Microbatch.verify_positions`] knows.
        weight, bias (`torch.Tensor`): `[p, d]` and `[p]`, the layer's parameters, or views of them.
        layer ([`Layer`]): the layer.
        microbatch ([`Microbatch`]): the one under way.
    """
    microbatch.note_parameters(layer.index, weight, bias)
    x, weight, bias = autocast(x, weight, bias)
    if not is_recomputing():
        return _Linear.apply(x, weight, bias, layer, microbatch)
    y = _Linear.apply(x, weight, bias, layer, microbatch, False)
    _multiply(x, weight, bias, y)
    return y


def linear_strategy(m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str, kernels: bool) -> Strategy:
    """
    How a linear layer gets its statistics; arguments as in [`~geometry.cost.relative_costs`], and whether its kernels
    are used: these take overlaps from products between rows in any case, which costs them one launch.
    """
    if kernels and not (needs.norm or needs.ntk):
        return "ghost"
    return choose_strategy(m, T, p, d, n, needs, device, kernels)


class LinearRows(NamedTuple):
    """
    The rows of a linear layer in a backward pass, and what is to be made of them.

    Args:
        g (`torch.Tensor`): `[N, p]`, cotangents.
        a (`torch.Tensor`): `[N, d]`, inputs.
        dtype (`torch.dtype`): of the gradients.
        weight, bias (`bool`): which of the two is trained.
    """

    g: torch.Tensor
    a: torch.Tensor
    dtype: torch.dtype
    weight: bool = True
    bias: bool = False


@dataclass
class LinearTerms:
    """
    What a linear layer keeps aside of terms that carry no advantage.

    Args:
        rows (`torch.Tensor`, *optional*): `[N, p]`, cotangents: the loss's own, rescaled, are added to them, and one
            product makes the gradient of both.
        weight, bias (`torch.Tensor`, *optional*): `[p, d]` and `[p]`, gradients, where these are kept instead.
    """

    rows: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def add(self, rows: LinearRows, microbatch: Microbatch) -> None:
        """Take in the rows of a term."""
        g, a, dtype, weight, bias = rows
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
        return g.t().mm(a) if plus is None else plus.addmm_(g.t(), a)
    result = product(g.t(), a).to(dtype)
    return result if plus is None else plus.add_(result)


def _sum(g: torch.Tensor, dtype: torch.dtype, plus: torch.Tensor | None = None) -> torch.Tensor:
    total = g.sum(0).to(dtype)
    return total if plus is None else plus.add_(total)


def _backward_of_term(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    x, weight = ctx.saved_tensors
    rows = _rows(ctx, x, weight, grad)
    ctx.microbatch.visit_in_term(ctx.layer.index)
    ctx.aside = take_aside(ctx) or LinearTerms()
    ctx.aside.add(rows, ctx.microbatch)
    return rows.g.mm(weight).view_as(x) if ctx.needs_input_grad[0] else None


def _rows(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> LinearRows:
    """The rows of the backward; the forward has verified positions. Checkpointing unpacks saved tensors but once."""
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    return LinearRows(grad.flatten(0, -2), x.flatten(0, -2), weight.dtype, needs_weight, needs_bias)


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
    def forward(ctx, x, weight, bias, layer, microbatch, multiplies=True):
        microbatch.verify_positions(layer.name, x)
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.microbatch = layer, microbatch
        if not multiplies:
            # Checkpointing ends a recomputation when the last tensor is saved, which an autograd function does behind
            # its forward: the product of a block's last layer, which nobody asks for, is left to be made after that
            return x.new_empty(*x.shape[:-1], len(weight))
        return apart(torch.nn.functional.linear(x, weight, bias))

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = _rows(ctx, x, weight, grad)
        gradients = linear_gradient(rows, ctx.layer.index, ctx.microbatch, take_aside(ctx))
        # Behind the other, which may need much memory for a moment
        grad_x = rows.g.mm(weight).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, *gradients, None, None, None


_NOTHING = LinearTerms()
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


def linear_gradient(
    rows: LinearRows, index: int, microbatch: Microbatch, terms: LinearTerms | None = None
) -> _Gradients:
    """
    `sum_s c_s V_s` of a linear layer: the gradients of its weight `[p, d]` and bias `[p]`.

    Args:
        rows ([`LinearRows`]): its rows.
        index (`int`): the layer's entry in the running statistics.
        microbatch ([`Microbatch`]): the rest.
        terms ([`LinearTerms`], *optional*): what is added.
    """
    g, a, dtype, weight, bias = rows
    terms = terms or _NOTHING
    if not weight:  # only the bias is trained: its gradient at a position is g_t
        alone = elementwise_gradient(g, index, microbatch, dtype)
        return None, alone if terms.bias is None else terms.bias.add_(alone)
    sequences, needs, draw = microbatch.sequences, microbatch.needs, microbatch.draw
    samples = microbatch.samples_of(index)
    kernels = g.dtype == a.dtype and microbatch.kernels_measure(g) and (samples is None or samples.are_of(g.dtype))
    explicit = needs.norm or needs.ntk  # gradients V_s may be needed
    strategy: Strategy = "ghost"
    if not kernels or explicit:
        n = 0 if samples is None else samples.number
        size = (sequences.count, sequences.length, g.shape[1], a.shape[1] + bias)
        strategy = linear_strategy(*size, n, needs, g.device.type, kernels)
    kernels = kernels and not (explicit and strategy == "ghost")
    into = draw.into(index, g, a) if kernels and draw is not None else None
    if into is None:
        microbatch.collect(index, g, a=a)
    c: torch.Tensor | Entry
    if kernels and microbatch.rule_is_in_kernels:
        c, V = _coefficients_by_kernels(rows, index, microbatch, samples, into, strategy)
    elif kernels:
        statistics, V = _statistics_by_kernels(rows, index, microbatch, samples, into, strategy)
        microbatch.coefficients(index, statistics)
        c = microbatch.entry(index)
    else:
        direction = microbatch.direction_of(index)
        statistics, V = linear_statistics(g, a, bias, sequences, samples, needs, strategy, direction)
        c = microbatch.coefficients(index, statistics)
    if V is not None:
        return _with_terms(_combined(V, c, dtype), rows, terms)
    if bias or terms.rows is not None or g.shape[1] <= a.shape[1]:
        g = _scaled(g, c, sequences, terms.rows)
    else:
        a = _scaled(a, c, sequences)  # the same product, with fewer elements to scale
    return _product(g, a, dtype, terms.weight), _sum(g, dtype, terms.bias) if bias else None


def _coefficients_by_kernels(
    rows: LinearRows, index: int, microbatch: Microbatch, samples: Any, into: Into | None, strategy: Strategy
) -> tuple[Entry, torch.Tensor | None]:
    """The coefficients, by Triton's kernels, and `V` `[m, p, d (+1)]` where the strategy forms it whole."""
    g, a, _, _, bias = rows
    sequences, needs, direction = microbatch.sequences, microbatch.needs, microbatch.direction_of(index)
    entry = microbatch.open_entry(index)
    given = (g, a, bias, sequences, samples, entry, into)
    if not (needs.norm or needs.ntk):
        if not needs.overlap:  # the coefficients are there already
            return entry, None
        row_kernels.overlaps(*given, finish=True)
        return entry, None
    overlaps = row_kernels.overlaps(*given) if needs.overlap else None
    if strategy == "whole":
        V = _gradients_of(rows, sequences)
        return v_kernels.v_coefficients(V, entry, overlaps, direction), V
    p, d = g.shape[1], a.shape[1] + bias
    at_once = block_rows(sequences.count, d)
    blocks = v_kernels.VBlocks([min(at_once, p - start) * d for start in range(0, p, at_once)], entry, overlaps)
    for block, V in sequence_gradients(g, a, bias, sequences, at_once):
        blocks.add(V, None if direction is None else tuple(D[block] for D in direction))
    return entry, None


def _statistics_by_kernels(
    rows: LinearRows, index: int, microbatch: Microbatch, samples: Any, into: Into | None, strategy: Strategy
) -> tuple[Statistics, torch.Tensor | None]:
    """The statistics, for a rule that the kernels do not know, and `V` where the strategy forms it whole."""
    sequences, needs = microbatch.sequences, microbatch.rule.needs
    sums, V = v_kernels.VSums(microbatch.rule), None
    if needs.norm or needs.ntk:
        if strategy == "whole":
            V = _gradients_of(rows, sequences)
            sums.add(V)
        else:
            at_once = block_rows(sequences.count, rows.a.shape[1] + rows.bias)
            for _, block in sequence_gradients(rows.g, rows.a, rows.bias, sequences, at_once):
                sums.add(block)
    result = sums.result
    if needs.overlap:
        given = (rows.g, rows.a, rows.bias, sequences, samples, microbatch.entry(index), into)
        overlaps = row_kernels.overlaps(*given)
        result.overlap, result.sample_norm = overlaps.statistics(sequences.count)
    return result, V


def _gradients_of(rows: LinearRows, sequences: Sequences) -> torch.Tensor:
    """`V` `[m, p, d (+1)]`, of sequences that lie one behind the other."""
    m, T = sequences.count, sequences.length
    return product(rows.g.view(m, T, -1).transpose(1, 2), with_ones(rows.a.view(m, T, -1), rows.bias))


def _scaled(
    x: torch.Tensor, c: "torch.Tensor | Entry", sequences: Sequences, plus: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row of `x` `[N, d]` times its sequence's coefficient, and `plus` `[N, d]`."""
    if isinstance(c, Entry):
        return row_kernels.scaled(x, sequences, c, plus)
    return sequences.scaled(x, c.to(x.dtype), plus)


def _combined(V: torch.Tensor, c: "torch.Tensor | Entry", dtype: torch.dtype) -> torch.Tensor:
    """`sum_s c_s V_s` `[p, d]`."""
    if isinstance(c, Entry):
        return v_kernels.combined(V, c, dtype)
    return torch.einsum("m,mpd->pd", c.to(V.dtype), V).to(dtype)


def _with_terms(total: torch.Tensor, rows: LinearRows, terms: LinearTerms) -> _Gradients:
    """The gradients of weight and bias out of `total` `[p, d (+1)]`, with what was kept of terms."""
    weight, bias = (total[:, :-1], total[:, -1]) if rows.bias else (total, None)
    if terms.rows is not None:
        _product(terms.rows, rows.a, rows.dtype, weight)
        if bias is not None:
            _sum(terms.rows, rows.dtype, bias)
    if terms.weight is not None:
        weight += terms.weight
    if bias is not None and terms.bias is not None:
        bias += terms.bias
    return weight, bias
