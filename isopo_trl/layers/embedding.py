"""`nn.Embedding` (tokens or positions), also where the model multiplies the looked-up row by a constant."""

from typing import Any

import torch
from torch import nn

from ..geometry.statistics import OneHotInputs, ghost_statistics
from ..microbatch import Microbatch
from ..trl_seam.loans import borrowed
from .layer import (
    PROBE_ERRORS,
    Inseparable,
    Layer,
    Unsupported,
    exchanged,
    has_own_forward,
    layer_backward,
    put_aside,
    take_aside,
)


class EmbeddingLayer(Layer):
    """A linear layer whose input is one-hot: `a_i . a_j = [id_i = id_j]`."""

    kind = "embedding"
    way = "ghost"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        if not isinstance(module, nn.Embedding):
            return False
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise Inseparable("an embedding with max_norm, sparse or scale_grad_by_freq changes its own gradient")
        if set(trainable) != {"weight"} or has_own_forward(module) or not _looks_up_and_scales(module):
            raise Unsupported(f"{type(module).__name__} does more than look up a row and multiply it by a constant")
        return True

    def forward(self, module: Any, microbatch: Microbatch, ids: torch.Tensor) -> torch.Tensor:
        B, T = microbatch.shape
        if ids.shape == (1, T) and B > 1:
            # One row of positions for the whole batch: with one row a sequence their gradients stay apart
            ids = ids.expand(B, T)
        microbatch.note_parameters(self.index, module.weight)
        output = _Embedding.apply(ids, module.weight, module.padding_idx, self, microbatch)
        scale = getattr(module, "embed_scale", None)
        return output if scale is None else output * _as(scale, output)


def _as(scale: Any, output: torch.Tensor) -> Any:
    return scale.to(output.dtype) if isinstance(scale, torch.Tensor) else scale


def _looks_up_and_scales(module: nn.Embedding) -> bool:
    if type(module).forward is nn.Embedding.forward:
        return True
    # A subclass: try it on a small table instead of trusting its name
    device = getattr(module, "embed_scale", module.weight)
    device = device.device if isinstance(device, torch.Tensor) else module.weight.device
    if device.type == "meta":
        return False
    table = torch.linspace(-1, 1, 12, device=device, dtype=module.weight.dtype).view(4, 3)
    ids = torch.tensor([[3, 1, 2]], device=device)
    try:
        with torch.no_grad(), exchanged([(module, "weight")], [table]), borrowed(module, padding_idx=None):
            output = type(module).forward(module, ids)
    except PROBE_ERRORS:
        return False  # not called with token ids, or not with them alone
    return torch.equal(output, table[ids] * _as(getattr(module, "embed_scale", 1.0), table))


def _backward_of_term(ctx: Any, grad: torch.Tensor) -> None:
    """Keep the cotangents of a term `[N, d]`, or where the table is smaller than these, its gradient."""
    ids, g = _rows(ctx, grad)
    ctx.microbatch.visit_in_term(ctx.layer.index)
    if len(g) > ctx.rows:
        g = torch.ops.aten.embedding_dense_backward(g, ids, ctx.rows, -1, False)
    put_aside(ctx, g)


def _rows(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[N]` and cotangents `[N, d]`."""
    (ids,) = ctx.saved_tensors
    ids = ctx.microbatch.rows(ctx.layer.name, ids, features=0)
    g = ctx.microbatch.rows(ctx.layer.name, grad)
    if ctx.padding_idx is not None:
        g = g.masked_fill((ids == ctx.padding_idx).unsqueeze(1), 0)
    return ids, g


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx, layer, microbatch):
        microbatch.verify_positions(layer.name, ids, features=0)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.padding_idx = weight.shape[0], weight.dtype, padding_idx
        ctx.layer, ctx.microbatch = layer, microbatch
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad):
        layer, microbatch = ctx.layer, ctx.microbatch
        ids, g = _rows(ctx, grad)
        needs = microbatch.needs
        microbatch.collect(layer.index, g, a=ids)
        samples = microbatch.samples_of(layer.index)
        direction = microbatch.direction_of(layer.index)
        statistics = ghost_statistics(g, OneHotInputs(ids), microbatch.sequences, samples, needs, direction)
        c = microbatch.coefficients(layer.index, statistics).to(g.dtype)
        (aside,) = take_aside(ctx) or (None,)
        rows_aside = aside if len(g) <= ctx.rows else None
        g = microbatch.sequences.scaled(g, c, rows_aside)
        gradient = torch.ops.aten.embedding_dense_backward(g, ids, ctx.rows, -1, False)
        if aside is not None and rows_aside is None:
            gradient += aside
        return None, gradient.to(ctx.dtype), None, None, None
