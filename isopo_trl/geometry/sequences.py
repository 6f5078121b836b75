"""Which row belongs to which sequence, and at which rows the Fisher metric is sampled."""

from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Sequences:
    """
    Assignment of `N` rows to `count` sequences.

    Two layouts. *Regular*: row `s * length + t` is position `t` of sequence `s`, the layout of a padded batch
    `[B, T]`; padding rows count as their sequence's (their cotangent is zero). *Indexed*: `index` `[count, length]`
    names the rows of each sequence, `-1` where there is none, the layout of packed sequences.

    Args:
        count (`int`): number of sequences, m.
        length (`int`): largest number of rows of a sequence, T.
        rows (`int`): number of rows, N.
        index (`torch.Tensor`, *optional*): `[m, T]`, `None` for the regular layout.
        ids (`torch.Tensor`, *optional*): `[N]`, the sequence of each row or `-1`; `None` for the regular layout.
    """

    count: int
    length: int
    rows: int
    index: torch.Tensor | None = None
    ids: torch.Tensor | None = None

    @classmethod
    def regular(cls, count: int, length: int) -> "Sequences":
        """Sequences that are the rows of a `[count, length]` batch."""
        return cls(count=count, length=length, rows=count * length)

    @classmethod
    def from_index(cls, index: torch.Tensor, rows: int) -> "Sequences":
        """Sequences whose rows are listed in `index` `[m, T]`, `-1` where a sequence has no more rows."""
        count, length = index.shape
        ids = torch.full((rows + 1,), -1, dtype=torch.long, device=index.device)
        owner = torch.arange(count, device=index.device).unsqueeze(1).expand_as(index)
        # Absent entries all write to the spare last slot
        ids = ids.scatter(0, torch.where(index < 0, rows, index).reshape(-1), owner.reshape(-1))[:rows]
        return cls(count=count, length=length, rows=rows, index=index, ids=ids)

    @classmethod
    def from_ids(cls, ids: torch.Tensor, count: int) -> "Sequences":
        """Sequences given by the sequence number of each row, `ids` `[N]`, `-1` for rows of no sequence."""
        rows = ids.numel()
        ids = ids.reshape(-1).long()
        lengths = torch.bincount(ids.clamp(min=-1) + 1, minlength=count + 1)[1:]
        if len(lengths) > count:
            raise ValueError(
                f"`sequence_ids` names sequence {len(lengths) - 1}, but there are {count} advantages: number the "
                f"sequences 0 to {count - 1}."
            )
        length = max(int(lengths.max()), 1)
        order = torch.argsort(ids, stable=True)
        order = order[rows - int(lengths.sum()) :]  # rows of no sequence sort first
        owner = ids[order]
        starts = lengths.cumsum(0) - lengths
        place = torch.arange(order.numel(), device=ids.device) - starts[owner]
        index = torch.full((count, length), -1, dtype=torch.long, device=ids.device)
        index[owner, place] = order
        return cls(count=count, length=length, rows=rows, index=index, ids=ids)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Rows by sequence, `[N, ...]` -> `[m, T, ...]`, zero where a sequence has no row."""
        if self.index is None:
            return x.reshape(self.count, self.length, *x.shape[1:])
        places, present = self._places
        # Not a product: row 0 stands in for an absent one, and zero times it is not zero where it is not finite
        return torch.where(present.view(*present.shape, *[1] * (x.dim() - 1)), x[places], 0)

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`index`, with 0 where there is none, and where there is one."""
        assert self.index is not None
        return self.index.clamp(min=0), self.index >= 0

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each sequence along the last dimension, `[..., N]` -> `[..., m]`."""
        if self.index is None:
            return x.reshape(*x.shape[:-1], self.count, self.length).sum(-1)
        places, present = self._places
        return torch.where(present, x[..., places], 0).sum(-1)

    def scaled(self, x: torch.Tensor, c: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """
        Each row multiplied by its sequence's value, `x` `[N, ...]`, `c` `[m]`; zero for rows of no sequence. `plus`,
        of the shape of `x`, is added.
        """
        if self.ids is None:
            c = c.view(-1, *[1] * x.dim())
            if plus is not None:
                return torch.addcmul(self.padded(plus), self.padded(x), c).view(x.shape)
            return (self.padded(x) * c).view(x.shape)
        c = torch.where(self.ids < 0, 0, c[self.ids.clamp(min=0)]).view(-1, *[1] * (x.dim() - 1))
        return x * c if plus is None else torch.addcmul(plus, x, c)


@dataclass(frozen=True)
class Samples:
    """
    The positions `j` at which the Fisher metric is taken.

    Args:
        rows (`torch.Tensor`): `[n]`, row numbers.
        absent (`torch.Tensor`): `[n]`, whether the entry is no position at all, since a batch may have fewer real
            positions than samples were asked for; its row is some padding.
    """

    rows: torch.Tensor
    absent: torch.Tensor
    _slots: torch.Tensor | None = field(init=False, default=None, compare=False)

    @property
    def number(self) -> int:
        """How many there are, absent ones included."""
        return self.rows.shape[0]

    @cached_property
    def present(self) -> torch.Tensor:
        """`rows`, with `-1` for absent ones."""
        return torch.where(self.absent, -1, self.rows)

    @cached_property
    def order(self) -> torch.Tensor:
        """`0 .. n - 1`, with `-1` for absent ones."""
        return torch.where(self.absent, -1, torch.arange(self.rows.shape[0], device=self.rows.device))

    def slots(self, rows: int) -> torch.Tensor:
        """Which sample each of so many rows is, `[N]`, or `-1`."""
        if self._slots is None:
            slots = torch.full((rows + 1,), -1, dtype=torch.int32, device=self.rows.device)
            places = torch.where(self.absent, rows, self.rows)  # absent ones all write to the spare last slot
            object.__setattr__(self, "_slots", slots.scatter(0, places, self.order.to(torch.int32))[:rows])
        assert self._slots is not None
        return self._slots

    def are_of(self, dtype: torch.dtype) -> bool:
        """Whether their rows are of this type if the batch's are."""
        return True

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The sampled rows of `x`, `[N, ...]` -> `[n, ...]`; what is made of them goes through `masked`."""
        return x.index_select(0, self.rows)

    def split(self, size: int) -> "list[Samples]":
        """The samples in groups of at most `size`."""
        pairs = zip(self.rows.split(size), self.absent.split(size), strict=True)
        return [Samples(*pair) for pair in pairs]

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        """Zero where the sample is absent, `[n, ...]`."""
        return x.masked_fill(self.absent.view(-1, *[1] * (x.dim() - 1)), 0)

    def moved(self, row_of: torch.Tensor) -> "Samples":
        """The same positions where rows are numbered differently: `row_of` `[N]` is the new number, or `-1`."""
        rows = row_of[self.rows]
        return Samples(rows=rows.clamp(min=0), absent=self.absent | (rows < 0))


@dataclass(frozen=True)
class SampleRows:
    """
    Samples that are not positions of the batch: a layer's rows from before, zero where there is none.

    Args:
        g (`torch.Tensor`): `[n, p]`, their cotangents; of an elementwise parameter its gradients, and where samples
            are whole sequences theirs; of experts `[n, k, p]`, at each expert that a position was sent to.
        a (`torch.Tensor`, *optional*): `[n, d]`, their inputs; of an embedding `[n]`, of experts `[n, k, d]`.
        choices (`torch.Tensor`, *optional*): `[n, k]`, the experts that they were sent to.
    """

    g: torch.Tensor
    a: torch.Tensor | None = None
    choices: torch.Tensor | None = None

    @property
    def number(self) -> int:
        """How many there are, absent ones included."""
        return self.g.shape[0]

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """The rows that there are, by name."""
        named = {"g": self.g, "a": self.a, "choices": self.choices}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def inputs(self) -> torch.Tensor:
        """`a`, of a layer that has inputs."""
        assert self.a is not None
        return self.a

    def are_of(self, dtype: torch.dtype) -> bool:
        """Whether inputs and cotangents are of this type."""
        return self.g.dtype is self.inputs.dtype is dtype

    @cached_property
    def by_expert(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All `choices` in ascending order, `[n k]`, and where each of them is among the flattened ones."""
        assert self.choices is not None
        return torch.sort(self.choices.reshape(-1))


def draw_samples(real: torch.Tensor, number: int, seed: int) -> Samples:
    """
    Draw `number` of the real positions without replacement (all of them if there are fewer).

    Draws from a generator of its own, so that the global random stream is untouched, and never looks at the mask on
    the host.

    Args:
        real (`torch.Tensor`): `[N]`, true at positions that are not padding.
        number (`int`): how many to draw, n.
        seed (`int`): seed of this draw.
    """
    real = real.reshape(-1).bool()
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(real.numel(), generator=generator, dtype=torch.float64).to(torch.float32).to(real.device)
    keys = keys.masked_fill(~real, -1.0)
    values, rows = keys.topk(min(number, real.numel()))
    return Samples(rows=rows, absent=values < 0)
