r"""
The statistics of each sequence's gradient at one layer: overlaps with sampled positions, Euclidean norm, NTK, and the
projection on a direction `D` of the weight's shape that is held from before.

Rows, sequences and samples are as the package's opening page defines them. A position's gradient is the outer product
`g_t phi(a_t)^T` with `phi(a) = a` for a linear layer, `(a, 1)` with a bias, and a one-hot vector for an embedding; so
every statistic is a sum over pairs of positions of `(g_i . g_j) k(a_i, a_j)` with the kernel `k(a, b) = phi(a) .
phi(b)`:

    overlap_js = <g_j phi(a_j)^T, V_s> = sum_{t in s} (g_j . g_t) k(a_j, a_t)
    norm_s^2   = |V_s|^2               = sum_{t, t' in s} (g_t . g_t') k(a_t, a_t')
    ntk_ij     = <V_i, V_j>

and the projection is a sum over positions:

    projection_s = <V_s, D> = sum_{t in s} g_t . D phi(a_t)

`ghost_statistics` evaluates these sums; `VStatistics` takes them from explicit `V_s`, whole or in blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from .cost import WHOLE_LIMIT, Needs, Strategy, aligned, block_rows
from .sequences import SampleRows, Samples, Sequences


_HALF = (torch.bfloat16, torch.float16)
# Sampled positions handled at once
_ROWS_AT_ONCE = 256


@dataclass
class Statistics:
    """
    Args:
        overlap (`torch.Tensor`, *optional*): `[n, m]`, `<gradient of position j, V_s>`.
        sample_norm (`torch.Tensor`, *optional*): `[n]`, squared norm of position j's gradient, `|g_j|^2 k(a_j, a_j)`.
        norm (`torch.Tensor`, *optional*): `[m]`, `|V_s|^2`.
        ntk (`torch.Tensor`, *optional*): `[m, m]`, `<V_i, V_j>`.
        projection (`torch.Tensor`, *optional*): `[m]`, `<V_s, D>`.
        own (`torch.Tensor`, *optional*): `[n, m]`, whether sample j is of sequence s itself, from an earlier step.
    """

    overlap: torch.Tensor | None = None
    sample_norm: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    ntk: torch.Tensor | None = None
    projection: torch.Tensor | None = None
    own: torch.Tensor | None = None


# The parts of a direction `D`, of the shapes of a layer's trained parameters and in their order
Direction = tuple[torch.Tensor, ...]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the operands are float64 already."""
    return torch.promote_types(dtype, torch.float32)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x @ y` (matrices or batches of them), accumulated and returned in float32 or better."""
    if x.dtype == y.dtype and x.is_cuda and x.dtype in _HALF:
        multiply = torch.mm if x.dim() == 2 else torch.bmm
        return multiply(x, y, out_dtype=torch.float32)
    dtype = torch.promote_types(x.dtype, y.dtype)
    if dtype in _HALF and x.is_cuda:
        return product(x.to(dtype), y.to(dtype))
    dtype = accumulation_dtype(dtype)
    return x.to(dtype) @ y.to(dtype)


class Inputs(Protocol):
    """The `a` side of a layer: its kernel `k` between rows."""

    def with_all(self, rows: torch.Tensor) -> torch.Tensor:
        """`k` between `rows` `[n]` and every row, `[n, N]`."""
        ...

    def with_others(self, inputs: torch.Tensor) -> torch.Tensor:
        """`k` between inputs from elsewhere, `[n, ...]`, and every row, `[n, N]`."""
        ...

    def norms(self, inputs: torch.Tensor) -> torch.Tensor:
        """`k` of inputs from elsewhere with themselves, `[n]`."""
        ...

    def within(self, sequences: Sequences, rows: slice) -> torch.Tensor:
        """`k` between positions `rows` of each sequence and all positions of it, `[m, r, T]`."""
        ...

    def along(self, g: torch.Tensor, direction: Direction) -> torch.Tensor:
        """
        `g_t . D phi(a_t)` of every row, `[N]`, for cotangents `g` `[N, p]`.

        A product takes D in the type of its rows, as autocast takes a weight: where D is in float32 and rows are in
        bf16, D is rounded to these. Sums are in float32 or better.
        """
        ...


@dataclass
class DenseInputs:
    """Inputs of a linear layer, `a` `[N, d]`; `bias` adds the input that is always 1."""

    a: torch.Tensor
    bias: bool = False

    def with_all(self, rows: torch.Tensor) -> torch.Tensor:
        return self.with_others(self.a.index_select(0, rows))

    def with_others(self, inputs: torch.Tensor) -> torch.Tensor:
        gram = product(inputs, self.a.t())
        return gram + 1 if self.bias else gram

    def norms(self, inputs: torch.Tensor) -> torch.Tensor:
        return square_norms(inputs) + float(self.bias)

    def within(self, sequences: Sequences, rows: slice) -> torch.Tensor:
        a = sequences.padded(self.a)
        return product(a[:, rows], a.transpose(1, 2)) + float(self.bias)

    def along(self, g: torch.Tensor, direction: Direction) -> torch.Tensor:
        weight = direction[0].to(self.a.dtype)
        at_once = max(1, WHOLE_LIMIT // min(weight.shape))
        parts = [_along(*rows, weight) for rows in zip(g.split(at_once), self.a.split(at_once), strict=True)]
        result = torch.cat(parts)
        return result + product(g, direction[1].to(g.dtype).unsqueeze(1)).squeeze(1) if self.bias else result


def _along(g: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`g_t . D a_t` of each row, with the smaller of the two products between."""
    if g.shape[1] <= a.shape[1]:
        return (product(a, weight.t()) * g).sum(1)
    return (product(g, weight) * a).sum(1)


@dataclass
class OneHotInputs:
    """Inputs of an embedding, `ids` `[N]`."""

    ids: torch.Tensor

    def with_all(self, rows: torch.Tensor) -> torch.Tensor:
        return self.with_others(self.ids[rows])

    def with_others(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.unsqueeze(1) == self.ids.unsqueeze(0)

    def norms(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(inputs)

    def within(self, sequences: Sequences, rows: slice) -> torch.Tensor:
        ids = sequences.padded(self.ids)
        return ids[:, rows].unsqueeze(2) == ids.unsqueeze(1)

    def along(self, g: torch.Tensor, direction: Direction) -> torch.Tensor:
        rows = direction[0].index_select(0, self.ids)
        return (rows * g).sum(1, dtype=accumulation_dtype(g.dtype))


def with_ones(x: torch.Tensor, bias: bool) -> torch.Tensor:
    """`(x, 1)` along the last dimension, for a layer with a bias."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1) if bias else x


def square_norms(x: torch.Tensor) -> torch.Tensor:
    """`|x_i|^2` of each row."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulation_dtype(x.dtype)).square()


def overlap_of_products(
    products: torch.Tensor, sequences: Sequences, samples: Samples
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Overlap `[n, m]` and sample norms `[n]` from `(g_j . g_t) k(a_j, a_t)` between samples and all rows, `[n, N]`.
    """
    sample_norm = products.gather(1, samples.rows.unsqueeze(1)).squeeze(1)
    return samples.masked(sequences.sums(products)), samples.masked(sample_norm)


def overlap_with_rows(
    g: torch.Tensor, inputs: Inputs, sequences: Sequences, samples: SampleRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlap `[n, m]` and sample norms `[n]` with samples that are not among the rows."""
    pairs = zip(samples.g.split(_ROWS_AT_ONCE), samples.inputs.split(_ROWS_AT_ONCE), strict=True)
    parts = [sequences.sums(product(g_j, g.t()) * inputs.with_others(a_j)) for g_j, a_j in pairs]
    overlap = parts[0] if len(parts) == 1 else torch.cat(parts)
    return overlap, square_norms(samples.g) * inputs.norms(samples.inputs)


def ghost_statistics(
    g: torch.Tensor,
    inputs: Inputs,
    sequences: Sequences,
    samples: Samples | SampleRows | None,
    needs: Needs,
    direction: Direction | None = None,
) -> Statistics:
    """
    Statistics from products between rows; no per-sequence gradient is formed.

    Args:
        g (`torch.Tensor`): `[N, p]` cotangents.
        inputs ([`DenseInputs`] or [`OneHotInputs`]): the other side.
        sequences ([`Sequences`]): m sequences over the N rows.
        samples ([`Samples`] or [`SampleRows`], *optional*): needed for the overlap.
        needs ([`Needs`]): what to compute.
        direction (`tuple`, *optional*): D, where there is one; else there is no projection.
    """
    result = Statistics()
    if direction is not None:
        result.projection = sequences.sums(inputs.along(g, direction))
    if needs.overlap and isinstance(samples, SampleRows):
        result.overlap, result.sample_norm = overlap_with_rows(g, inputs, sequences, samples)
    elif needs.overlap:
        assert isinstance(samples, Samples)
        parts = [
            overlap_of_products(product(part.of(g), g.t()) * inputs.with_all(part.rows), sequences, part)
            for part in samples.split(_ROWS_AT_ONCE)
        ]
        overlap, sample_norm = zip(*parts, strict=True)
        result.overlap = overlap[0] if len(parts) == 1 else torch.cat(overlap)
        result.sample_norm = sample_norm[0] if len(parts) == 1 else torch.cat(sample_norm)
    if needs.ntk:
        result.ntk = _ghost_ntk(g, inputs, sequences)
        if needs.norm:
            result.norm = result.ntk.diagonal()
    elif needs.norm:
        result.norm = _ghost_norm(g, inputs, sequences)
    return result


def _ghost_norm(g: torch.Tensor, inputs: Inputs, sequences: Sequences) -> torch.Tensor:
    m, T = sequences.count, sequences.length
    g = sequences.padded(g)
    step = max(1, WHOLE_LIMIT // (m * T))
    norm = torch.zeros(m, device=g.device, dtype=accumulation_dtype(g.dtype))
    for start in range(0, T, step):
        rows = slice(start, start + step)
        norm += (product(g[:, rows], g.transpose(1, 2)) * inputs.within(sequences, rows)).sum((1, 2))
    return norm


def _ghost_ntk(g: torch.Tensor, inputs: Inputs, sequences: Sequences) -> torch.Tensor:
    # Row by row: [rows, N] products, summed over the columns of each sequence, then over the rows of each
    at_once = aligned(max(1, WHOLE_LIMIT // sequences.rows))
    parts = [
        sequences.sums(product(g[rows], g.t()) * inputs.with_all(rows))
        for rows in torch.arange(sequences.rows, device=g.device).split(at_once)
    ]
    return sequences.sums(torch.cat(parts).t())


class VStatistics:
    """
    Statistics from explicit per-sequence gradients, given whole or in blocks of output rows.

    Call `add(V, g_samples, D)` once a block, with `V` `[m, b, d]` the rows `b` of every `V_s`, `g_samples` `[n, b]`
    the same outputs of the sampled cotangents, and `D` `[b, d]` those of the direction.

    Args:
        needs ([`Needs`]): what to compute.
        a_samples (`torch.Tensor`, *optional*): `[n, d]`, `phi(a_j)`; needed for the overlap.
    """

    def __init__(self, needs: Needs, a_samples: torch.Tensor | None):
        self.needs = needs
        self.a_samples = a_samples
        self.result = Statistics()

    def add(self, V: torch.Tensor, g_samples: torch.Tensor | None = None, D: torch.Tensor | None = None) -> None:
        m, b, d = V.shape
        if D is not None:
            self._accumulate("projection", V.reshape(m, b * d) @ D.reshape(-1).to(V.dtype))
        if self.needs.overlap:
            assert self.a_samples is not None and g_samples is not None
            # g_j . (V_s phi(a_j)): [m * b, d] @ [d, n]
            Va = product(V.reshape(m * b, d), self.a_samples.to(V.dtype).t()).view(m, b, -1)
            self._accumulate("overlap", (Va * g_samples.to(V.dtype).t()).sum(1).t())
        if self.needs.ntk:
            flat = V.reshape(m, b * d)
            self._accumulate("ntk", flat @ flat.t())
        if self.needs.norm:
            self._accumulate("norm", V.square().sum((1, 2)))

    def _accumulate(self, name: str, value: torch.Tensor) -> None:
        total = getattr(self.result, name)
        setattr(self.result, name, value if total is None else total + value)


def sequence_gradients(
    g: torch.Tensor, a: torch.Tensor, bias: bool, sequences: Sequences, rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    `V_s` of every sequence, in blocks of `rows` outputs: yields the block and `V` `[m, rows, d]` (`d + 1` with a bias,
    whose gradient is the last column).
    """
    g_padded = sequences.padded(g).transpose(1, 2)
    a_padded = with_ones(sequences.padded(a), bias)
    for start in range(0, g.shape[1], rows):
        block = slice(start, start + rows)
        yield block, product(g_padded[:, block], a_padded)


def linear_statistics(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    sequences: Sequences,
    samples: Samples | SampleRows | None,
    needs: Needs,
    strategy: Strategy,
    direction: Direction | None = None,
) -> tuple[Statistics, torch.Tensor | None]:
    """
    Statistics of a linear layer by the chosen strategy, and `V` `[m, p, d (+1)]` where the strategy keeps it.

    Args:
        g (`torch.Tensor`): `[N, p]` cotangents.
        a (`torch.Tensor`): `[N, d]` inputs.
        bias (`bool`): whether a trainable bias takes part.
        sequences, samples, needs: as for [`ghost_statistics`].
        strategy (`str`): `"ghost"`, `"whole"` or `"blocks"`, see [`~geometry.cost.choose_strategy`].
        direction (`tuple`, *optional*): D of the weight `[p, d]`, and of the bias `[p]` where that takes part.
    """
    if strategy == "ghost":
        return ghost_statistics(g, DenseInputs(a, bias), sequences, samples, needs, direction), None
    g_samples = a_samples = D = None
    if direction is not None:
        D = torch.cat([direction[0], direction[1].unsqueeze(1)], 1) if bias else direction[0]
    if needs.overlap:
        assert samples is not None
        rows = samples if isinstance(samples, SampleRows) else SampleRows(samples.of(g), samples.of(a))
        g_samples, a_samples = rows.g, with_ones(rows.inputs, bias)
    statistics = VStatistics(needs, a_samples)
    outputs = g.shape[1] if strategy == "whole" else block_rows(sequences.count, a.shape[1] + bias)
    V = None
    for block, V in sequence_gradients(g, a, bias, sequences, outputs):
        statistics.add(V, None if g_samples is None else g_samples[:, block], None if D is None else D[block])
    result = statistics.result
    if samples is not None and g_samples is not None and a_samples is not None and result.overlap is not None:
        result.sample_norm = square_norms(g_samples) * square_norms(a_samples)
        if isinstance(samples, Samples):  # else what is absent is zero
            result.overlap, result.sample_norm = samples.masked(result.overlap), samples.masked(result.sample_norm)
    return result, V if strategy == "whole" else None


def elementwise_statistics(
    v: torch.Tensor,
    sequences: Sequences,
    samples: Samples | SampleRows | None,
    needs: Needs,
    direction: Direction | None = None,
) -> tuple[Statistics, torch.Tensor]:
    """
    Statistics of an elementwise parameter (the scale or shift of a norm) and its `V` `[m, d]`.

    Args:
        v (`torch.Tensor`): `[N, d]`, the parameter's gradient at each position.
        sequences, samples, needs, direction: as for [`ghost_statistics`].
    """
    V = sequences.padded(v).sum(1, dtype=accumulation_dtype(v.dtype))
    result = Statistics(projection=projected(V, direction))
    if needs.overlap:
        assert samples is not None
        v_samples = (samples.g if isinstance(samples, SampleRows) else samples.of(v)).to(V.dtype)
        result.overlap, result.sample_norm = v_samples @ V.t(), square_norms(v_samples)
        if isinstance(samples, Samples):  # else what is absent is zero
            result.overlap, result.sample_norm = samples.masked(result.overlap), samples.masked(result.sample_norm)
    if needs.ntk:
        result.ntk = V @ V.t()
    if needs.norm:
        result.norm = square_norms(V)
    return result, V


def projected(V: torch.Tensor, direction: Direction | None) -> torch.Tensor | None:
    """`<V_s, D>` `[m]` from flat gradients `V` `[m, d]`, where there is a direction."""
    return None if direction is None else V @ torch.cat([D.reshape(-1).to(V.dtype) for D in direction])


def sequence_sample_statistics(
    V: torch.Tensor, needs: Needs, samples: SampleRows | None = None, direction: Direction | None = None
) -> Statistics:
    """
    Statistics from explicit per-sequence gradients `V` `[m, d]` where there are none per position: the samples of the
    Fisher metric are gradients of sequences, `samples` from before, or those of the sequences themselves, all of them:

        F_s^2 = sum_s' <V_s', V_s>^2 / sum_s' |V_s'|^2
    """
    products = V @ V.t() if (needs.overlap and samples is None) or needs.ntk else None
    norm = square_norms(V)
    overlap, sample_norm = products, norm
    if samples is not None:
        overlap, sample_norm = samples.g @ V.t(), square_norms(samples.g)
    return Statistics(
        overlap=overlap if needs.overlap else None,
        sample_norm=sample_norm if needs.overlap else None,
        norm=norm if needs.norm else None,
        ntk=products if needs.ntk else None,
        projection=projected(V, direction),
    )


def fisher_norm(
    overlap: torch.Tensor, sample_norm: torch.Tensor, own: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `F_s = sqrt(sum_j overlap_js^2 / sum_j |gradient_j|^2)`, `[m]`, over the samples that are not the sequence's `own`
    (see [`Statistics`]), and whether any of them has a gradient: if none has, `F` is zero but not known to be.
    """
    dtype = scalar_dtype(overlap.device)
    if own is None:
        weight = sample_norm.sum(dtype=dtype)
    else:
        overlap = overlap.masked_fill(own, 0)
        weight = sample_norm.unsqueeze(1).masked_fill(own, 0).sum(0, dtype=dtype)
    F = torch.linalg.vector_norm(overlap, dim=0, dtype=dtype) * weight.clamp(min=torch.finfo(dtype).tiny).rsqrt()
    return F, weight != 0


def scalar_dtype(device: torch.device) -> torch.dtype:
    """What the few numbers per sequence and layer are kept in: squares of squares of small gradients underflow."""
    return torch.float32 if device.type == "mps" else torch.float64
