r"""
A mixture of experts: every position is sent to `k` of `E` experts, and each expert's matrix is a layer of its own.

The rows of all experts stand in one list of `S = N k` rows, sorted by expert and within an expert by sequence, one row
for each (position, chosen expert). So the rows of expert `e`, and those of sequence `s` at expert `e`, are contiguous:

    V_es = sum_{t in s, sent to e} g_te a_te^T

with `g_te` and `a_te` the cotangent and the input of position `t` at expert `e`. The Fisher metric of expert `e` is
sampled at those of the sampled positions that were sent to it, which may be none. Statistics are those of
[`~geometry.statistics`], with one more dimension in front, the experts; none of the functions here has a loop over
experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from .cost import WHOLE_LIMIT, Needs
from .sequences import SampleRows, Samples, Sequences
from .statistics import Direction, Statistics, accumulation_dtype, product, square_norms


# What PyTorch's grouped product asks of row lengths, in elements of bfloat16
_ALIGNMENT = 8


@dataclass(frozen=True)
class Routing:
    """
    Which row belongs to which expert and sequence.

    Args:
        choices (`torch.Tensor`): `[N, k]`, the experts of each position, all different.
        experts (`int`): number of experts, E.
        sequences (`int`): number of sequences, m.
        keys (`torch.Tensor`): `[S]`, ascending, `e (m + 1) + s` of each row; `s = m` where it is of no sequence.
        order (`torch.Tensor`): `[S]`, place of each row in the flattened `choices`.
    """

    choices: torch.Tensor
    experts: int
    sequences: int
    keys: torch.Tensor
    order: torch.Tensor
    _sample_rows: tuple[torch.Tensor, torch.Tensor] | None = field(init=False, default=None, compare=False)

    @classmethod
    def of(cls, choices: torch.Tensor, experts: int, sequences: Sequences) -> "Routing":
        """The routing of `N` positions, those of `sequences`, to `choices` `[N, k]`."""
        m = sequences.count
        if sequences.ids is None:
            owner = torch.arange(sequences.rows, device=choices.device) // sequences.length
        else:
            owner = torch.where(sequences.ids < 0, m, sequences.ids)
        keys = (choices * (m + 1) + owner.unsqueeze(1)).reshape(-1)
        keys, order = torch.sort(keys, stable=True)
        return cls(choices, experts, m, keys, order)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of each row, `[S]`."""
        return self.order // self.choices.shape[1]

    @cached_property
    def places(self) -> torch.Tensor:
        """The row of each entry of the flattened `choices`, `[S]`: the inverse of `order`."""
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(len(self.order), device=self.order.device)
        )

    @cached_property
    def row_experts(self) -> torch.Tensor:
        """The expert of each row, `[S]`."""
        return self.keys // (self.sequences + 1)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """`[E (m + 1) + 1]`, where the rows of each (expert, sequence) begin; the last entry is `S`."""
        every = torch.arange(self.experts * (self.sequences + 1) + 1, device=self.keys.device)
        return torch.searchsorted(self.keys, every)

    @cached_property
    def expert_bounds(self) -> torch.Tensor:
        """`[E + 1]`, where the rows of each expert begin."""
        return self.bounds[:: self.sequences + 1].contiguous()

    @cached_property
    def _ends(self) -> torch.Tensor:
        return self.expert_bounds[1:].to(torch.int32)

    @cached_property
    def longest_group(self) -> int:
        """The largest number of rows of a sequence at an expert."""
        return longest(self.bounds)

    @cached_property
    def longest_expert(self) -> int:
        """The largest number of rows of an expert."""
        return longest(self.expert_bounds)

    @cached_property
    def _padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        return padding(self.expert_bounds, self.longest_expert)

    def of_positions(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to positions, for each row: `[N, d]` -> `[S, d]`."""
        return x.index_select(0, self.positions)

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the rows of each position, `[S, d]` -> `[N, d]`."""
        return y.index_select(0, self.places).view(*self.choices.shape, -1).sum(1)

    # Products, each expert's rows with its own matrix

    def product(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """`x_i @ M_e` for each row, `x` `[S, d]`, `matrices` `[E, d, p]` -> `[S, p]`."""
        if takes_grouped(x, matrices.shape[2]):
            return torch.nn.functional.grouped_mm(x.contiguous(), _aligned(matrices), offs=self._ends)
        rows, present = self._padding
        result = padded(x, rows, present) @ matrices
        return result.flatten(0, 1).index_select(0, self._places_in_padding)

    @cached_property
    def _places_in_padding(self) -> torch.Tensor:
        rows, _ = self._padding
        within = torch.arange(len(self.keys), device=self.keys.device) - self.expert_bounds[self.row_experts]
        return self.row_experts * rows.shape[1] + within

    def outer(self, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """`sum_i g_i a_i^T` over the rows of each expert, `g` `[S, p]`, `a` `[S, d]` -> `[E, p, d]`."""
        if takes_grouped(g, a.shape[1]):
            return torch.nn.functional.grouped_mm(g.contiguous().t(), a.contiguous(), offs=self._ends)
        rows, present = self._padding
        return padded(g, rows, present).transpose(1, 2) @ padded(a, rows, present)

    # Sums and multiples

    def expert_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each expert, `[S, ...]` -> `[E, ...]`, in float32 or better."""
        return _segment_sums(x, self.expert_bounds)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each (expert, sequence), `[S, n]` -> `[E, m, n]`, in float32 or better."""
        return _segment_sums(x, self.bounds).view(self.experts, self.sequences + 1, -1)[:, :-1]

    def scaled(self, x: torch.Tensor, c: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """
        Each row multiplied by `c` `[E, m]` of its expert and sequence; zero for rows of no sequence. `plus`, of the
        shape of `x`, is added.
        """
        c = torch.nn.functional.pad(c, (0, 1)).reshape(-1)[self.keys].unsqueeze(1)
        return x * c if plus is None else torch.addcmul(plus, x, c)

    def sample_rows(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The rows of sampled positions, `[n k]`, ascending, so that those of an expert follow one another, and where
        each expert's begin, `[E + 1]`. Absent samples are behind the last one.
        """
        if self._sample_rows is None:
            rows = self.places.view(-1, self.choices.shape[1]).index_select(0, samples.rows)
            rows = rows.masked_fill(samples.absent.unsqueeze(1), len(self.keys)).reshape(-1).sort().values
            # For all layers of the module: its samples are the microbatch's
            object.__setattr__(self, "_sample_rows", (rows, torch.searchsorted(rows, self.expert_bounds)))
        assert self._sample_rows is not None
        return self._sample_rows

    def rows_from_before(self, samples: SampleRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Each expert's rows from before: their numbers among the `samples`' own, `[n k]`, and where they begin."""
        experts, rows = samples.by_expert
        return rows, torch.searchsorted(experts, self._numbers)

    @cached_property
    def _numbers(self) -> torch.Tensor:
        return torch.arange(self.experts + 1, device=self.keys.device)

    def sampled(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor, int]:
        """
        Where the rows of sampled positions go in a stack `[E, n, ...]` of the samples by expert.

        Returns their rows `[n k]`, their places `[n k]` in the first two dimensions of the stack (`E n` for samples
        that are absent), and `n`, the number of samples rounded up to what products like.
        """
        n = _aligned_number(samples.rows.shape[0])
        k = self.choices.shape[1]
        rows = self.places.view(-1, k)[samples.rows]
        number = torch.arange(len(samples.rows), device=rows.device)
        place = self.choices[samples.rows] * n + number.unsqueeze(1)
        place = torch.where(samples.absent.unsqueeze(1), self.experts * n, place)
        return rows.reshape(-1), place.reshape(-1), n


def _aligned_number(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def takes_grouped(x: torch.Tensor, columns: int) -> bool:
    """Whether PyTorch's grouped product does without a loop over experts; else they are padded to one length."""
    if x.dtype is not torch.bfloat16 or x.shape[1] % _ALIGNMENT or columns % _ALIGNMENT:
        return False
    return not x.is_cuda or _is_new_enough(x.device)


@lru_cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _aligned(matrices: torch.Tensor) -> torch.Tensor:
    """`[E, d, p]` with rows or columns in one piece, as the grouped product wants them."""
    _, row, column = matrices.stride()
    in_place = (row == 1 and column % _ALIGNMENT == 0) or (column == 1 and row % _ALIGNMENT == 0)
    return matrices if in_place else matrices.contiguous()


def longest(bounds: torch.Tensor) -> int:
    """The largest number of rows between two bounds, at least 1; the host waits for it."""
    return max(int(bounds.diff().max()), 1)


def padding(bounds: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows between neighbours of `bounds` `[G + 1]`, in one length: their numbers, and which exist, `[G, L]`."""
    steps = torch.arange(length, device=bounds.device)
    rows = bounds[:-1].unsqueeze(1) + steps
    present = rows < bounds[1:].unsqueeze(1)
    return torch.where(present, rows, 0), present


def padded(x: torch.Tensor, rows: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """`[S, d]` -> `[G, L, d]`, zero where there is no row."""
    return torch.where(present.unsqueeze(2), x[rows], 0)


def _segment_sums(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    x = x.to(accumulation_dtype(x.dtype))
    return torch.segment_reduce(x, "sum", offsets=bounds, axis=0, unsafe=True)


def routed_statistics(
    g: torch.Tensor,
    a: torch.Tensor,
    bias: bool,
    routing: Routing,
    samples: Samples | SampleRows | None,
    needs: Needs,
    direction: Direction | None = None,
) -> Statistics:
    """
    Statistics of every expert from products between rows: `overlap` `[E, n, m]`, `sample_norm` `[E, n]`, `norm`
    `[E, m]`, `ntk` `[E, m, m]`, `projection` `[E, m]`.

    Args:
        g (`torch.Tensor`): `[S, p]` cotangents.
        a (`torch.Tensor`): `[S, d]` inputs.
        bias (`bool`): whether a trained bias takes part, one more input that is always 1.
        routing ([`Routing`]): whose the rows are.
        samples ([`Samples`] or [`SampleRows`], *optional*): sampled positions; needed for the overlap.
        needs ([`Needs`]): what to compute.
        direction (`tuple`, *optional*): D of the matrices `[E, p, d]`, and of the biases `[E, p]` where these are
            trained; of the biases alone where only these are.
    """
    result = Statistics()
    if direction is not None:
        result.projection = routed_projection(g, a, bias, routing, direction)
    if needs.overlap:
        assert samples is not None
        if isinstance(samples, SampleRows):
            assert samples.choices is not None
            n = _aligned_number(samples.number)
            number = torch.arange(samples.number, device=g.device)
            place = (samples.choices * n + number.unsqueeze(1)).reshape(-1)
            g_rows, a_rows = samples.g.flatten(0, 1), samples.inputs.flatten(0, 1)
        else:
            rows, place, n = routing.sampled(samples)
            g_rows, a_rows = g[rows], a[rows]

        def stacked(x: torch.Tensor) -> torch.Tensor:
            stack = x.new_zeros(routing.experts * n + 1, x.shape[1])
            stack[place] = x
            return stack[:-1].view(routing.experts, n, -1)

        g_samples, a_samples = stacked(g_rows), stacked(a_rows)
        # A sample that was not sent to an expert has g_j = 0 there
        gram = routing.product(a, a_samples.transpose(1, 2)).to(accumulation_dtype(a.dtype))
        products = routing.product(g, g_samples.transpose(1, 2)) * (gram + float(bias))
        result.overlap = routing.sums(products).transpose(1, 2)
        result.sample_norm = square_norms(g_samples) * (square_norms(a_samples) + float(bias))
    if needs.ntk:
        result.ntk = _ntk(g, a, bias, routing)
        if needs.norm:
            result.norm = result.ntk.diagonal(dim1=1, dim2=2)
    elif needs.norm:
        result.norm = _norms(g, a, bias, routing)
    return result


def routed_projection(
    g: torch.Tensor, a: torch.Tensor, bias: bool, routing: Routing, direction: Direction
) -> torch.Tensor:
    """The `projection` `[E, m]` of [`routed_statistics`]."""
    return routing.sums(_along(g, a, bias, routing, direction).unsqueeze(1)).squeeze(2)


def _along(g: torch.Tensor, a: torch.Tensor, bias: bool, routing: Routing, direction: Direction) -> torch.Tensor:
    """`g_i . D_e phi(a_i)` of every row, `[S]`."""
    dtype = accumulation_dtype(g.dtype)
    result = torch.zeros(len(g), device=g.device, dtype=dtype)
    if direction[0].dim() == 3:
        D = direction[0].to(a.dtype)
        if g.shape[1] <= a.shape[1]:
            result += (routing.product(a, D.transpose(1, 2)).to(dtype) * g).sum(1)
        else:
            result += (routing.product(g, D).to(dtype) * a).sum(1)
    if bias:
        result += (direction[-1].to(dtype).index_select(0, routing.row_experts) * g).sum(1)
    return result


def _norms(g: torch.Tensor, a: torch.Tensor, bias: bool, routing: Routing) -> torch.Tensor:
    """`|V_es|^2` `[E, m]`."""
    parts = [
        (product(gp, gp.transpose(1, 2)) * (product(ap, ap.transpose(1, 2)) + float(bias))).sum((1, 2))
        for gp, ap, _ in _in_parts(g, a, routing.bounds, routing.longest_group)
    ]
    return torch.cat(parts).view(routing.experts, routing.sequences + 1)[:, :-1]


def _ntk(g: torch.Tensor, a: torch.Tensor, bias: bool, routing: Routing) -> torch.Tensor:
    """`<V_ei, V_ej>` `[E, m, m]`."""
    owner = routing.keys % (routing.sequences + 1)
    parts = []
    for gp, ap, (rows, present) in _in_parts(g, a, routing.expert_bounds, routing.longest_expert):
        belongs = torch.nn.functional.one_hot(torch.where(present, owner[rows], routing.sequences))
        belongs = torch.nn.functional.pad(belongs, (0, routing.sequences + 1 - belongs.shape[2]))[..., :-1]
        products = product(gp, gp.transpose(1, 2)) * (product(ap, ap.transpose(1, 2)) + float(bias))
        belongs = belongs.to(products.dtype)
        parts.append(belongs.transpose(1, 2) @ (products @ belongs))
    return torch.cat(parts)


_Part = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def _in_parts(g: torch.Tensor, a: torch.Tensor, bounds: torch.Tensor, length: int) -> Iterator[_Part]:
    """Groups of rows in one length, as many of them at once as memory allows: `g`, `a` `[G, L, ...]`, `padding`."""
    groups = len(bounds) - 1
    step = max(1, WHOLE_LIMIT // (length * (2 * length + g.shape[1] + a.shape[1])))
    for start in range(0, groups, step):
        rows, present = padding(bounds[start : start + step + 1], length)
        yield padded(g, rows, present), padded(a, rows, present), (rows, present)
