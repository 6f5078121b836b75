"""`nn.Linear`, LoRA's two factors (which are `nn.Linear`), and GPT-2's `Conv1D`, whose weight is transposed."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..geometry.cost import Needs, choose_strategy
from ..geometry.statistics import elementwise_statistics, linear_statistics
from ..microbatch import Microbatch
from .layer import Layer, Unsupported, autocast, full_shape, has_own_forward


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

    def forward(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        assert self.microbatch is not None
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        x, weight, bias = autocast(x, weight, module.bias)
        return _Linear.apply(x, weight, bias, self, self.microbatch)

    def strategy(self, sequences: int, length: int, samples: int, needs: Needs) -> str:
        if not any(needs):
            return "plain"
        if "weight" not in self.parameters:
            return "kept"
        p, d = full_shape(self.module.get_parameter("weight"))
        return choose_strategy(sequences, length, p, d, samples, needs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer, microbatch):
        microbatch.rows(layer.name, x)
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.microbatch = layer, microbatch
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        layer, microbatch = ctx.layer, ctx.microbatch
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = microbatch.rows(layer.name, grad)
        a = microbatch.rows(layer.name, x)
        grad_x = (g @ weight).view_as(x) if needs_x else None
        grad_weight, grad_bias = linear_gradient(g, a, needs_weight, needs_bias, layer.index, microbatch)
        return (
            grad_x,
            grad_weight if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def linear_gradient(
    g: torch.Tensor, a: torch.Tensor, weight: bool, bias: bool, index: int, microbatch: Microbatch
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    `sum_s c_s V_s` of a linear layer: the gradients of its weight `[p, d]` and bias `[p]`.

    Args:
        g (`torch.Tensor`): `[N, p]` cotangents.
        a (`torch.Tensor`): `[N, d]` inputs.
        weight, bias (`bool`): which of the two is trained.
        index (`int`): the layer's place in the running statistics.
        microbatch ([`Microbatch`]): the rest.
    """
    sequences, samples, needs = microbatch.sequences, microbatch.samples, microbatch.rule.needs
    if not weight:  # only the bias is trained: its gradient at a position is g_t
        statistics, V = elementwise_statistics(g, sequences, samples, needs)
        return None, microbatch.coefficients(index, statistics).to(V.dtype) @ V

    n = 0 if samples is None else len(samples.rows)
    strategy = choose_strategy(sequences.count, sequences.length, g.shape[1], a.shape[1], n, needs)
    statistics, kept = linear_statistics(g, a, bias, sequences, samples, needs, strategy)
    c = microbatch.coefficients(index, statistics)
    if kept is not None:
        total = torch.einsum("m,mpd->pd", c.to(kept.dtype), kept)
        return (total[:, :-1], total[:, -1]) if bias else (total, None)
    c = c.to(g.dtype)
    if bias or g.shape[1] <= a.shape[1]:
        g = sequences.scaled(g, c)
    else:  # the same product, with fewer elements to scale
        a = sequences.scaled(a, c)
    return g.t() @ a, g.sum(0) if bias else None
