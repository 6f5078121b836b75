"""
The LM head, which TRL's trainers use in two ways.

Generation, and any loop that asks for logits, calls the module: an ordinary linear layer. TRL's loss never does: it
multiplies by `lm_head.weight` inside [`~trl.kernels.ChunkedLogProbFunction`], tile by tile over the vocabulary, so
that the logits never exist as a whole. The function here has the same forward. Its backward goes over the vocabulary
twice: once for the statistics and the gradient of the hidden states, once, when the coefficients are known, for the
gradient of the weight. That is one product more than TRL's backward, and no `[tokens, vocabulary]` tensor.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import maybe_gather_lm_head_ctx

from ..geometry.cost import Needs, Strategy, block_rows, choose_strategy
from ..geometry.sequences import Samples, Sequences
from ..geometry.statistics import (
    DenseInputs,
    Statistics,
    VStatistics,
    accumulation_dtype,
    product,
    square_norms,
    with_ones,
)
from ..microbatch import Microbatch
from .layer import Unsupported, full_shape, has_own_forward
from .linear import LinearLayer


# Elements of a tile of logits, [tokens, part of the vocabulary]
_TILE = 2**25


class LMHeadLayer(LinearLayer):
    """The LM head: called as a module, or through TRL's fused log-probabilities."""

    kind = "lm head"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        # TRL gives the instance a forward of its own for `cast_lm_head_to_fp32`; its fused path does not use it
        if not isinstance(module, nn.Linear) or set(trainable) - {"bias"} != {"weight"}:
            raise Unsupported("only an nn.Linear whose weight is trained is supported as LM head")
        return True

    def attach(self) -> None:
        if type(self.module).forward is nn.Linear.forward and not has_own_forward(self.module):
            super().attach()

    def detach(self) -> None:
        if self.module.__dict__.get("_isopo_layer") is self:
            super().detach()

    def strategy(self, sequences: int, length: int, samples: int, needs: Needs) -> str:
        p, d = full_shape(self.module.get_parameter("weight"))
        return head_strategy(sequences, length, p, d, samples, needs) if any(needs) else "plain"

    def fused(self, *args: Any) -> Any:
        """Stand in for `ChunkedLogProbFunction.apply`, same arguments and outputs."""
        microbatch = self.microbatch
        own = self.module.get_parameter("weight")
        # FSDP2's sharded weight arrives here as a whole; any other weight is another model's
        if microbatch is None or not (args[1] is own or (isinstance(own, DTensor) and args[1].shape == own.shape)):
            return ChunkedLogProbFunction.apply(*args)
        return _FusedLMHead.apply(*args, self, microbatch)


def head_strategy(m: int, T: int, p: int, d: int, n: int, needs: Needs) -> Strategy:
    """As for any linear layer, but norms between rows of logits would need a Gram matrix as large as `[T, T]`."""
    strategy = choose_strategy(m, T, p, d, n, needs)
    return "blocks" if strategy == "ghost" and (needs.norm or needs.ntk) else strategy


def head_rows(rows: int, microbatch: Microbatch) -> tuple[Sequences, Samples | None]:
    """
    Sequences and samples in the rows that TRL's fused head works on.

    These are the predictions of tokens `1 .. T - 1`, all `B (T - 1)` of them, or (on devices with Triton) only the
    scored ones, in the same order.
    """
    B, T = microbatch.shape
    if microbatch.scored is None or microbatch.sequences.index is not None:
        raise RuntimeError(
            "TRL's fused LM head was called, but ISOPO was not told which tokens are scored: pass `attention_mask` "
            "and `completion_mask` to `ISOPO.microbatch`."
        )
    scored = torch.zeros(B, T - 1, dtype=torch.bool, device=microbatch.scored.device)
    scored[:, T - 1 - microbatch.scored.shape[1] :] = microbatch.scored.bool()
    if rows == B * (T - 1):
        sequences = Sequences.regular(B, T - 1)
        row_of = torch.arange(rows, device=scored.device).view(B, T - 1)
    else:
        row_of = torch.where(scored, scored.view(-1).cumsum(0).view(B, T - 1) - 1, -1)
        sequences = Sequences.from_index(row_of[:, T - 1 - microbatch.scored.shape[1] :], rows)
    # The last position predicts nothing
    row_of = torch.nn.functional.pad(row_of, (0, 1), value=-1).reshape(-1)
    samples = None if microbatch.samples is None else microbatch.samples.moved(row_of)
    return sequences, samples


class _FusedLMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        *own, ctx.layer, ctx.microbatch = args
        ctx.sequences, ctx.samples = head_rows(own[0].shape[0], ctx.microbatch)
        return ChunkedLogProbFunction.forward(ctx, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, *_):
        if grad_entropy is not None:
            raise RuntimeError(
                "A gradient of the entropy reached the LM head, but a loss term without an advantage has no place in "
                "ISOPO's single pass: detach the entropy."
            )
        hidden, weight, bias, *_ = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with maybe_gather_lm_head_ctx(weight, bias):
            gradients = _head_gradients(ctx, grad_logprobs, needs_hidden, needs_weight, needs_bias)
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def _head_gradients(ctx, grad_logprobs, needs_hidden, needs_weight, needs_bias):
    hidden, weight, bias, targets, log_z, _ = ctx.saved_tensors
    sequences, samples, microbatch = ctx.sequences, ctx.samples, ctx.microbatch
    needs = microbatch.rule.needs
    vocab, d = weight.shape
    a = hidden.to(ctx.compute_dtype)
    dtype = accumulation_dtype(a.dtype)
    grad = grad_logprobs.to(dtype)

    def tiles(rows: Any, grad: torch.Tensor, width: int) -> Iterator[tuple[slice, Any]]:
        """Gradient of the logits at `rows`, `[rows, width]`, part by part of the vocabulary."""
        for start in range(0, vocab, width):
            part = slice(start, min(start + width, vocab))
            yield part, _logits_gradient(a[rows], weight, bias, targets[rows], log_z[rows], grad, part, ctx)

    if len(a) == 0:  # no token is scored, and TRL still asks for a gradient
        m, none = sequences.count, grad.new_zeros
        microbatch.coefficients(ctx.layer.index, Statistics(none(1, m), none(1), none(m), none(m, m)))
        parts = ((needs_hidden, hidden), (needs_weight, weight), (needs_bias, bias))
        return tuple(torch.zeros_like(x) if needed else None for needed, x in parts)

    n = 0 if samples is None else len(samples.rows)
    strategy = head_strategy(sequences.count, sequences.length, vocab, d, n, needs)
    width = max(1, _TILE // len(a))
    if strategy == "blocks":
        width = min(width, block_rows(sequences.count, d + 1))

    grad_hidden = torch.zeros(a.shape, device=a.device, dtype=dtype) if needs_hidden else None
    gram = from_V = sample_tiles = None
    kept: list[tuple[slice, torch.Tensor]] = []
    norms = torch.zeros((), device=a.device, dtype=dtype)
    if needs.overlap:
        sample_tiles = tiles(samples.rows, grad[samples.rows], width)
        a_samples = with_ones(samples.of(a), needs_bias)
    if strategy == "ghost":
        gram = torch.zeros(n, len(a), device=a.device, dtype=dtype) if needs.overlap else None
    else:
        from_V = VStatistics(needs, a_samples if needs.overlap else None)
        a_padded = sequences.padded(with_ones(a, needs_bias))

    for part, tile in tiles(slice(None), grad, width):
        if grad_hidden is not None:
            grad_hidden += product(tile, weight[part].to(tile.dtype))
        sample_tile: Any = None
        if sample_tiles is not None:
            _, sample_tile = next(sample_tiles)
            norms = norms + square_norms(sample_tile)
        if gram is not None:
            gram += product(sample_tile, tile.t())
        if from_V is not None:
            V = product(sequences.padded(tile).transpose(1, 2), a_padded)
            from_V.add(V, sample_tile)
            if strategy == "kept":
                kept.append((part, V))

    statistics = Statistics() if from_V is None else from_V.result
    if needs.overlap:
        if gram is not None:
            statistics.overlap = sequences.sums(gram * DenseInputs(a, needs_bias).with_all(samples.rows))
        statistics.overlap = samples.masked(statistics.overlap)
        statistics.sample_norm = samples.masked(norms * square_norms(a_samples))
    c = microbatch.coefficients(ctx.layer.index, statistics)

    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias else None
    for part, V in kept:
        total = torch.einsum("m,mpd->pd", c.to(V.dtype), V)
        if grad_weight is not None:
            grad_weight[part] = total[:, :d].to(weight.dtype)
        if grad_bias is not None:
            grad_bias[part] = total[:, -1].to(bias.dtype)
    for part, tile in tiles(slice(None), sequences.scaled(grad, c.to(dtype)), width) if not kept else ():
        if grad_weight is not None:
            grad_weight[part] = product(tile.t(), a).to(weight.dtype)
        if grad_bias is not None:
            grad_bias[part] = tile.sum(0, dtype=dtype).to(bias.dtype)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _logits_gradient(a, weight, bias, targets, log_z, grad, part, ctx):
    """
    Gradient at the output of the projection, `[rows, part]`: `grad_t (1[v = target_t] - p_tv)`, taken back through the
    temperature, the soft cap and the scale of the logits.
    """
    dtype = accumulation_dtype(a.dtype)
    settings = ctx.kernel_args
    logits = a @ weight[part].to(a.dtype).t()
    if bias is not None:
        logits += bias[part].to(a.dtype)
    z = logits.to(dtype) * settings["logit_scale"]
    slope = settings["logit_scale"] * settings["inv_t"]
    if settings["HAS_SOFTCAP"]:
        capped = torch.tanh(z / settings["softcap"])
        slope = slope * (1 - capped.square())
        z = settings["softcap"] * capped
    tile = -torch.exp(z * settings["inv_t"] - log_z.to(dtype).unsqueeze(1))
    place = targets - part.start
    inside = (place >= 0) & (place < part.stop - part.start)
    tile.scatter_add_(1, place.clamp(0, part.stop - part.start - 1).unsqueeze(1), inside.to(dtype).unsqueeze(1))
    return (tile * slope * grad.unsqueeze(1)).to(a.dtype)
