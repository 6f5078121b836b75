"""`nn.LayerNorm`: scale and shift."""

from typing import Any

import torch
from torch import nn

from ..microbatch import Microbatch
from .elementwise import VectorLayer, elementwise_gradient
from .layer import Unsupported, has_own_forward, layer_backward, put_aside, with_aside


class LayerNormLayer(VectorLayer):
    """`y = w * x_hat + b`: a position's gradient is `(g_t * x_hat_t, g_t)`, scale and shift together."""

    kind = "layer norm"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        if not isinstance(module, nn.LayerNorm):
            return False
        if type(module).forward is not nn.LayerNorm.forward or has_own_forward(module):
            raise Unsupported(f"{type(module).__name__} does not compute its output as nn.LayerNorm does")
        if len(module.normalized_shape) != 1 or not set(trainable) <= {"weight", "bias"}:
            raise Unsupported("a layer norm over more than the last dimension is not supported")
        return True

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        microbatch.note_parameters(self.index, weight, bias)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # As autocast does for layer norms
            x, weight, bias = x.float(), *(p if p is None else p.float() for p in (weight, bias))
        # With heads, [B, T, H, d] or [B, H, T, d]: a position's gradient is the sum over them
        axes = self.axes(x, microbatch) if x.dim() > 3 else None
        return _LayerNorm.apply(x, weight, bias, module.eps, axes, self, microbatch)


def _own_backward(saved: Any, grad: torch.Tensor, needed: list[bool]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of input, scale and shift that are `needed`, as PyTorch has them, from what the forward saved."""
    x, weight, bias, mean, rstd = saved
    return torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x, x.shape[-1:], mean, rstd, weight, bias, needed
    )


def _backward_of_term(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    needed = list(ctx.needs_input_grad[:3])
    grad_x, *gradients = _own_backward(ctx.saved_tensors, grad, needed)
    if any(needed[1:]):
        ctx.microbatch.visit_in_term(ctx.layer.index)
        put_aside(ctx, *(g if needs else None for g, needs in zip(gradients, needed[1:], strict=True)))
    return grad_x if needed[0] else None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, axes, layer, microbatch):
        if axes is None:
            microbatch.verify_positions(layer.name, x)
        output, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.axes, ctx.layer, ctx.microbatch = axes, layer, microbatch
        return output

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad):
        x, weight, bias, mean, rstd = saved = ctx.saved_tensors
        layer, microbatch = ctx.layer, ctx.microbatch
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = _own_backward(saved, grad, [True, False, False])[0] if needs_x else None
        parts = []
        if needs_weight:
            parts.append(grad * ((x - mean) * rstd))
        if needs_bias:
            parts.append(grad)
        gradients = [None, None]
        if parts:
            v = torch.cat(parts, dim=-1)
            if ctx.axes is not None:
                v = v.movedim(ctx.axes, tuple(range(len(ctx.axes)))).flatten(len(ctx.axes), -2).sum(-2)
            v = microbatch.rows(layer.name, v)
            dtype = (weight if needs_weight else bias).dtype
            flat = elementwise_gradient(v, layer.index, microbatch, dtype).split(x.shape[-1])
            gradients = [flat[0] if needs_weight else None, flat[-1].to(bias.dtype) if needs_bias else None]
        return grad_x, *with_aside(ctx, *gradients), None, None, None, None
