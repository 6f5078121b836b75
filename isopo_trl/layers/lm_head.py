"""
The LM head, which TRL's trainers use in two ways.

Generation, and any loop that asks for logits, calls the module: an ordinary linear layer. TRL's loss never does: it
multiplies by `lm_head.weight` inside [`~trl.kernels.ChunkedLogProbFunction`], tile by tile over the vocabulary, so
that the logits never exist as a whole. The function here returns the same. Its backward goes over the vocabulary
twice: once for the statistics and the gradient of the hidden states, once, when the coefficients are known, for the
gradient of the weight. That is one product more than TRL's backward, and no `[tokens, vocabulary]` tensor. Where the
statistics are products with rows of the step before alone, as for `fisher`, the forward makes both on its way
(`head_gradients`), and the backward goes over the vocabulary once: no product more than TRL.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..geometry.cost import WHOLE_LIMIT, Needs, Strategy, aligned, block_rows, choose_strategy
from ..geometry.sequences import SampleRows, Sequences
from ..geometry.statistics import (
    DenseInputs,
    Direction,
    Statistics,
    VStatistics,
    accumulation_dtype,
    product,
    square_norms,
    with_ones,
)
from ..kernels.coefficients import statistics_are_in_kernels
from ..kernels.v import VBlocks, VSums
from ..microbatch import Microbatch
from ..rules.rule import Rule
from ..trl_seam.head import (
    HEAD_WEIGHT,
    ChunkedLogProbFunction,
    add_head,
    gathered_head,
    remove_head,
)
from .head_gradients import are_exact, forward_with_gradients, logits_gradient
from .layer import Unsupported, full_shape, has_own_forward, layer_backward, take_aside
from .linear import LinearLayer


# Elements of a tile of logits, [tokens, part of the vocabulary], as in TRL
_TILE = 2**27


class LMHeadLayer(LinearLayer):
    """The LM head: called as a module, or through TRL's chunked log-probabilities."""

    kind = "lm head"

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        # TRL gives the instance a forward of its own for `cast_lm_head_to_fp32`; its chunked function does not use it
        if not isinstance(module, nn.Linear) or set(trainable) - {"bias"} != {"weight"}:
            raise Unsupported("only an nn.Linear whose weight is trained is supported as LM head")
        return True

    def attach(self) -> None:
        add_head(self)
        if type(self.module).forward is nn.Linear.forward and not has_own_forward(self.module):
            super().attach()

    def detach(self) -> None:
        remove_head(self)
        if self.module.__dict__.get("_isopo_layer") is self:
            super().detach()

    def strategy(self, sequences: int, length: int, samples: int, rule: Rule) -> str:
        weight = self.module.get_parameter("weight")
        p, d = full_shape(weight)
        d += "bias" in self.parameters
        if not any(rule.needs):
            return "no statistics"
        return head_strategy(sequences, length, p, d, samples, rule.needs, weight.device.type)

    def chunked_logps(self, *args: Any) -> Any:
        """Stand in for `ChunkedLogProbFunction.apply`, same arguments and outputs, in a microbatch."""
        microbatch = self.microbatch
        assert microbatch is not None
        microbatch.in_graph.append(args[HEAD_WEIGHT])
        module: Any = self.module
        microbatch.note_parameters(self.index, module.weight, module.bias)
        return _ChunkedLMHead.apply(*args, self, microbatch)


def head_strategy(m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str = "cpu") -> Strategy:
    """
    As for any linear layer, but overlaps always come from products between rows, and those between all rows, which the
    norm would need, have to be kept from one part of the vocabulary to the next.
    """
    strategy = choose_strategy(m, T, p, d, n, needs._replace(overlap=False, direction=False), device)
    if strategy == "ghost" and (needs.ntk or (needs.norm and m * T * T > WHOLE_LIMIT)):
        return "blocks"
    return strategy


def head_rows(rows: int, microbatch: Microbatch) -> tuple[Sequences, torch.Tensor]:
    """
    Sequences in the rows that TRL's chunked log-probabilities work on, and the row of each of the `B T` positions,
    `-1` where it has none.

    These are the predictions of tokens `1 .. T - 1`, all `B (T - 1)` of them, or (on devices with Triton) only the
    scored ones, in the same order.
    """
    B, T = microbatch.shape
    if microbatch.scored is None or microbatch.sequences.index is not None:
        raise RuntimeError(
            "TRL's chunked log-probabilities were called, but ISOPO was not told which tokens are scored: pass "
            "`attention_mask` and `completion_mask` to `ISOPO.microbatch`."
        )
    scored, C = microbatch.scored.bool(), microbatch.scored.shape[1]
    if microbatch.first_scored is None and rows == B * (T - 1):
        row_of = torch.arange(rows, device=scored.device).view(B, T - 1)
        # The last position predicts nothing
        return Sequences.regular(B, T - 1), torch.nn.functional.pad(row_of, (0, 1), value=-1).reshape(-1)
    row_of = torch.where(scored, scored.view(-1).cumsum(0).view(B, C) - 1, -1)
    places = torch.arange(C, device=scored.device) + (
        T - 1 - C if microbatch.first_scored is None else microbatch.first_scored.unsqueeze(1)
    )
    places = places + T * torch.arange(B, device=scored.device).unsqueeze(1)
    of_positions = row_of.new_full((B * T + 1,), -1)
    # What is not scored may stand nowhere, and writes to the spare last slot
    of_positions[torch.where(scored, places, B * T)] = row_of
    return Sequences.from_index(row_of, rows), of_positions[:-1]


@dataclass
class HeadTerms:
    """
    What the head keeps of terms that carry no advantage. The gradient of the logits is `slope_t e_t` there and in the
    loss, with `e_tv = 1[v = target_t] - p_tv` in both, so that slopes add up, and need no pass over the vocabulary.

    Args:
        slopes (`torch.Tensor`, *optional*): `[N]`, derivatives with respect to the log-probabilities.
        of_entropy (`torch.Tensor`, *optional*): `[N]`, derivatives with respect to the entropies.
    """

    slopes: torch.Tensor | None = None
    of_entropy: torch.Tensor | None = None


def _backward_of_term(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: Any) -> Any:
    hidden, _, _, _, log_z, _ = ctx.saved_tensors
    ctx.microbatch.visit_in_term(ctx.layer.index)
    terms = ctx.aside = take_aside(ctx) or HeadTerms()
    slopes, of_entropy = (None if g is None else g.to(log_z.dtype) for g in (grad_logprobs, grad_entropy))
    terms.slopes, terms.of_entropy = _sum_of(terms.slopes, slopes), _sum_of(terms.of_entropy, of_entropy)
    if not ctx.needs_input_grad[0]:
        return None
    if len(hidden) == 0:
        return torch.zeros_like(hidden)
    if slopes is None or of_entropy is not None:
        return _hidden_gradient(ctx, slopes, of_entropy).to(hidden.dtype)
    if ctx.unit is None:
        ctx.unit = _hidden_gradient(ctx, torch.ones_like(log_z))
    return (ctx.unit * slopes.unsqueeze(1)).to(hidden.dtype)


def _hidden_gradient(ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient of the hidden states `[N, d]`, from those of the log-probabilities and the entropies, `[N]`."""
    hidden, weight, bias, *_ = ctx.saved_tensors
    a = hidden.to(ctx.compute_dtype)
    result = torch.zeros(a.shape, device=a.device, dtype=accumulation_dtype(a.dtype))
    with gathered_head(weight, bias):
        for part, tile in _tiles(ctx, a, grad, grad_entropy):
            result += product(tile, weight[part].to(tile.dtype))
    return result


def _sum_of(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    return y if x is None else x if y is None else x + y


class _ChunkedLMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        *own, ctx.layer, ctx.microbatch = args
        ctx.sequences, ctx.row_of = head_rows(own[0].shape[0], ctx.microbatch)
        ctx.unit = ctx.products = None
        samples = ctx.microbatch.held(ctx.layer.index)
        # What the forward takes along saves a pass where there are no other statistics; the rows that are collected
        # for the next step, as many as samples, then have their logits made once more
        by_samples = samples is not None and ctx.microbatch.needs == Needs(overlap=True)
        # Another model's rows are refused in the backward
        by_samples = by_samples and samples.g.shape[1] == len(own[HEAD_WEIGHT])
        if by_samples and samples.number < len(own[0]) and are_exact(own):
            return forward_with_gradients(ctx, own, samples.g)
        return ChunkedLogProbFunction.forward(ctx, *own)

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, grad_logprobs, grad_entropy, *_):
        if grad_entropy is not None and any(ctx.microbatch.needs):
            raise RuntimeError(
                "A gradient of the entropy reached the LM head in the loss's own pass, where the rule would rescale "
                "it: give the entropy to `ISOPO.unscaled`, or detach it."
            )
        hidden, weight, bias, *_ = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with gathered_head(weight, bias):
            gradients = _head_gradients(ctx, grad_logprobs, grad_entropy, needs_hidden, needs_weight, needs_bias)
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def _head_gradients(ctx, grad_logprobs, grad_entropy, needs_hidden, needs_weight, needs_bias):
    hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
    sequences, microbatch = ctx.sequences, ctx.microbatch
    index, needs = ctx.layer.index, microbatch.needs
    vocab, d = weight.shape
    a = hidden.to(ctx.compute_dtype)
    slots = None
    if microbatch.draw is not None:
        slots = microbatch.draw.in_parts(index, {"g": a.new_empty(0, vocab), "a": a[:0]}, ctx.row_of)
    samples: Any = microbatch.held(index)
    if samples is None and microbatch.samples is not None:
        samples = microbatch.samples.moved(ctx.row_of)
    m, n = sequences.count, 0 if samples is None else samples.number

    if len(a) == 0:  # no token is scored, and TRL still asks for a gradient
        if slots is not None:
            slots.put_nothing()
        none = a.new_zeros
        along = None if microbatch.direction is None else none(m)
        microbatch.coefficients(index, Statistics(none(1, m), none(1), none(m), none(m, m), along))
        parts = ((needs_hidden, hidden), (needs_weight, weight), (needs_bias, bias))
        return tuple(torch.zeros_like(x) if needed else None for needed, x in parts)

    strategy = head_strategy(m, sequences.length, vocab, d + needs_bias, n, needs, a.device.type)
    buffer = _buffer(ctx, a, vocab)
    # Without that of the log-probabilities, there is only the entropy's
    grad: Any
    grad, grad_entropy = (None if g is None else g.to(log_z.dtype) for g in (grad_logprobs, grad_entropy))
    of_terms = take_aside(ctx) or HeadTerms()
    # Gone from the context, since that outlasts the other layers' backwards
    unit, products, ctx.unit, ctx.products = ctx.unit, ctx.products, None, None
    unit = unit if grad is not None and grad_entropy is None else None
    grad_hidden = None
    if needs_hidden and unit is not None:
        grad_hidden = unit.mul_(grad.unsqueeze(1))
    elif needs_hidden:
        grad_hidden = torch.zeros(a.shape, device=a.device, dtype=accumulation_dtype(a.dtype))
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias else None

    def weight_gradients(
        part: slice, tile: torch.Tensor, a: torch.Tensor, c: torch.Tensor | None = None, add: bool = False
    ) -> None:
        if grad_weight is not None:
            total = tile.t() @ a
            grad_weight[part] = grad_weight[part] + total if add else total
        if grad_bias is not None:
            total = tile.sum(0, dtype=accumulation_dtype(tile.dtype)) if c is None else product(tile.t(), c)[:, 0]
            grad_bias[part] = grad_bias[part] + total if add else total

    given = (samples, strategy, vocab, buffer.shape[1])
    sums = _HeadStatistics(a, needs_bias, sequences, index, microbatch, *given)
    if slots is not None:
        slots.put("a", a)
    known = scaled = ones = None
    if not any(needs):  # the coefficients are there: one pass does it all
        # In float32, and rounded once: an advantage in bf16 would be off by up to a part in 500
        dtype = accumulation_dtype(a.dtype)
        known = microbatch.coefficients(index, Statistics()).to(dtype)
        scaled = sequences.scaled(a.to(dtype), known).to(a.dtype)
        ones = sequences.scaled(torch.ones_like(a[:, :1], dtype=dtype), known)
    formed: list[tuple[slice, torch.Tensor]] = []
    tiles = _tiles(ctx, a, grad, grad_entropy, buffer)
    if products is not None:  # the forward has been there
        sums.products, sums.norms = products.t() * grad, square_norms(samples.g)
        _put_rows(ctx, slots, a, grad)
        tiles = iter(())
    for part, tile in tiles:
        if grad_hidden is not None and unit is None:
            grad_hidden += product(tile, weight[part].to(tile.dtype))
        if scaled is not None:
            weight_gradients(part, tile, scaled, ones)
            continue
        if slots is not None:
            slots.put("g", tile, part)
        V = sums.add(tile, part)
        if V is not None:
            formed.append((part, V))
    if known is None:
        c = sums.coefficients()
        for part, V in formed:
            total = torch.einsum("m,mpd->pd", c.to(V.dtype), V)
            if grad_weight is not None:
                grad_weight[part] = total[:, :d].to(weight.dtype)
            if grad_bias is not None:
                grad_bias[part] = total[:, -1].to(bias.dtype)
    slopes = of_terms.slopes
    is_made = known is not None or bool(formed)
    if not is_made:
        slopes = sequences.scaled(grad, c.to(grad.dtype), slopes)
    if slopes is not None or of_terms.of_entropy is not None:
        for part, tile in _tiles(ctx, a, slopes, of_terms.of_entropy, buffer):
            weight_gradients(part, tile, a, add=is_made)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _put_rows(ctx: Any, slots: Any, a: torch.Tensor, grad: torch.Tensor) -> None:
    """Make the gradients of the logits of the rows that take a slot, and of no others, and put them there."""
    _, weight, bias, targets, log_z, _ = ctx.saved_tensors
    rows = slots.source.rows
    of_rows = (None, weight, bias, targets[rows], log_z[rows], None)
    alone = SimpleNamespace(saved_tensors=of_rows, chunk_size=ctx.chunk_size, kernel_args=ctx.kernel_args)
    slots = replace(slots, source=slots.source.in_order)
    for part, tile in _tiles(alone, a[rows], grad[rows], None):
        slots.put("g", tile, part)


class _HeadStatistics:
    """
    The statistics, from tiles of the gradient of the logits.

    Args:
        a (`torch.Tensor`): `[N, d]`, the hidden states.
        bias (`bool`): whether a bias is trained.
        sequences, samples, strategy: as elsewhere.
        index (`int`), microbatch ([`Microbatch`]): the layer, and the rest.
        vocab, width (`int`): of the vocabulary, and of its tiles but for the last.

    Where kernels go from the gradients to the coefficients, they go by the direction, too. Elsewhere a product with
    the tiles takes it in their type, as autocast takes a weight.
    """

    def __init__(
        self,
        a: torch.Tensor,
        bias: bool,
        sequences: Sequences,
        index: int,
        microbatch: Microbatch,
        samples: Any,
        strategy: str,
        vocab: int,
        width: int,
    ):
        rule, self.needs, direction = microbatch.rule, microbatch.needs, microbatch.direction_of(index)
        self.sequences, self.samples, self.direction = sequences, samples, direction
        self.index, self.microbatch = index, microbatch
        self.blocks: VBlocks | None = None
        self.from_before = isinstance(samples, SampleRows)
        self.inputs = DenseInputs(a, bias)
        self.products: Any = 0.0
        self.norms: Any = 0.0
        self.pairs: Any = 0.0
        self.along: Any = 0.0
        self.explicit = strategy != "ghost" and (self.needs.norm or self.needs.ntk)
        # Outputs whose gradients are formed at once, and dropped
        self.at_once = block_rows(sequences.count, a.shape[1] + bias) if strategy == "blocks" else None
        if self.explicit:
            self.a_padded = sequences.padded(with_ones(a, bias))
            without_overlap = self.needs._replace(overlap=False)
            kernels = statistics_are_in_kernels(a, sequences.count, 0, rule.needs)
            self.from_V = VSums(rule) if kernels else VStatistics(without_overlap, None)
            if self.needs._replace(direction=False) == Needs(ntk=True) and microbatch.kernels_take(a):
                tiles = [part.stop - part.start for part in _parts(vocab, width)]
                sizes = [part.stop - part.start for tile in tiles for part in _parts(tile, self.at_once or tile)]
                outputs = self.a_padded.shape[-1]
                self.blocks = VBlocks([size * outputs for size in sizes], microbatch.open_entry(index))

    def add(self, tile: torch.Tensor, part: slice) -> torch.Tensor | None:
        """
        Take in a tile `[N, width]`, that part of the vocabulary; returns the gradients `V` `[m, width, d]` where they
        are kept.
        """
        if self.needs.overlap:
            of_samples = self.samples.g[:, part] if self.from_before else self.samples.of(tile)
            # Samples last: rows of any number of tokens would not begin at multiples of 16 bytes
            self.products = self.products + product(tile, of_samples.t()).t()
            self.norms = self.norms + square_norms(of_samples)
        if self.direction is not None and self.blocks is None:
            # g^T D of each row, to be taken times its input when it is whole
            of_part = _with_bias(self.direction, part).to(tile.dtype)
            self.along = self.along + product(tile, of_part)
        if self.explicit:
            if self.at_once is None:
                V = self._gradients(tile)
                self._add(V, part)
                return V
            for block in _parts(tile.shape[1], self.at_once):
                of_vocabulary = slice(part.start + block.start, part.start + block.stop)
                self._add(self._gradients(tile[:, block]), of_vocabulary)
        elif self.needs.norm:
            padded = self.sequences.padded(tile)
            self.pairs = self.pairs + product(padded, padded.transpose(1, 2))
        return None

    def _gradients(self, tile: torch.Tensor) -> torch.Tensor:
        return product(self.sequences.padded(tile).transpose(1, 2), self.a_padded)

    def _add(self, V: torch.Tensor, part: slice) -> None:
        if self.blocks is None:
            self.from_V.add(V)
        else:
            self.blocks.add(V, None if self.direction is None else tuple(D[part] for D in self.direction))

    def coefficients(self) -> torch.Tensor:
        """The coefficients `[m]`, when all tiles have been taken in."""
        if self.blocks is None:
            return self.microbatch.coefficients(self.index, self.result())
        return self.microbatch.ledger.table[self.index, 0]

    def result(self) -> Statistics:
        statistics = self.from_V.result if self.explicit else Statistics()
        if self.direction is not None:
            rows = with_ones(self.inputs.a, self.inputs.bias)
            statistics.projection = self.sequences.sums((self.along * rows).sum(1))
        if self.needs.overlap and self.from_before:
            of_samples = self.samples.inputs
            statistics.overlap = self.sequences.sums(self.products * self.inputs.with_others(of_samples))
            statistics.sample_norm = self.norms * self.inputs.norms(of_samples)
        elif self.needs.overlap:
            samples, inputs = self.samples, self.inputs
            overlap = self.sequences.sums(self.products * inputs.with_all(samples.rows))
            statistics.overlap = samples.masked(overlap)
            norms = square_norms(with_ones(samples.of(inputs.a), inputs.bias))
            statistics.sample_norm = samples.masked(self.norms * norms)
        if self.needs.norm and not self.explicit:
            statistics.norm = (self.pairs * self.inputs.within(self.sequences, slice(None))).sum((1, 2))
        return statistics


def _parts(length: int, width: int) -> list[slice]:
    """`length` in parts of `width`, but for the last."""
    return [slice(start, min(start + width, length)) for start in range(0, length, width)]


def _with_bias(direction: Direction, part: slice) -> torch.Tensor:
    """That part of a direction's rows, `[width, d]`, with the bias's as one more column, `[width, d + 1]`."""
    weight, *bias = (D[part] for D in direction)
    return torch.cat([weight, bias[0].unsqueeze(1)], 1) if bias else weight


def _buffer(ctx: Any, a: torch.Tensor, width: int) -> torch.Tensor:
    """
    Room for a tile of logits, at most so wide, of rows `a` `[N, d]`. Its rows begin at multiples of 16 bytes, since
    a GPU's products take several times as long otherwise.
    """
    width = min(width, ctx.chunk_size, aligned(max(1, _TILE // len(a))))
    return torch.empty(len(a), width + -width % 8, device=a.device, dtype=a.dtype)[:, :width]


def _tiles(
    ctx: Any,
    a: torch.Tensor,
    grad: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    buffer: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Gradient of the logits `[N, width]`, part by part of the vocabulary, each in the place of the last.

    Args:
        ctx: the context of the function.
        a (`torch.Tensor`): `[N, d]`, the hidden states.
        grad, grad_entropy (`torch.Tensor`, *optional*): `[N]`, gradients of the log-probabilities and the entropies.
        buffer (`torch.Tensor`, *optional*): `[N, width]`, the place.
    """
    _, weight, bias, targets, log_z, entropy = ctx.saved_tensors
    vocab = len(weight)
    if buffer is None:
        buffer = _buffer(ctx, a, vocab)
    width = buffer.shape[1]
    grad = None if grad is None else grad.contiguous()
    of_entropy = None if grad_entropy is None else (entropy, grad_entropy.contiguous())
    for part in _parts(vocab, width):
        tile = torch.mm(a, weight[part].to(a.dtype).t(), out=buffer[:, : part.stop - part.start])
        if bias is not None:
            tile += bias[part].to(a.dtype)
        yield part, logits_gradient(tile, targets, log_z, grad, of_entropy, part.start, ctx.kernel_args)
