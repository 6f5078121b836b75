r"""
A sample of a whole optimizer step that does not depend on how the step is cut into microbatches or spread over ranks.

Every position has a priority, a hash of the seed, the step's number, the key of its sequence and its place in the
sequence, counted from the first real token; the `n` positions with the smallest priorities are the sample. As the
priorities look random, it is a draw without replacement; as they are no more than a function of the position, it is
the same draw in whichever order and company positions come along. While the step is under way, a reservoir holds the
best so far: each microbatch offers its own `n` best, which take the places of those that they beat.

Everything has a fixed shape, and nothing looks at values on the host.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from .sequences import Samples, Sequences


# The priority of no position at all
ABSENT = 2**63 - 1
# In a `source`: the slot keeps what it has; it gets a row of zeros
KEEP, NOTHING = -1, -2

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed number
_FACTORS = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64: a one-to-one function of 64 bits, each bit of which depends on all of them."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # without the copies of the sign


def salt(seed: int, step: int) -> int:
    """What a step's hashes begin with, from the seed and the number of the step."""
    hashed = _mixed_number(_mixed_number(seed) + step * _GOLDEN)
    return hashed - 2**64 if hashed >= 2**63 else hashed


def _mixed_number(x: int) -> int:
    """[`mixed`] of one number, on the host."""
    x %= 2**64
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x ^ (x >> 31)


def content_keys(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    A key for each sequence, `[B]`, from its tokens alone, wherever padding stands.

    Args:
        ids (`torch.Tensor`): `[B, T]`, tokens.
        mask (`torch.Tensor`): `[B, T]`, nonzero at real positions.
    """
    real = mask != 0
    hashes = mixed(mixed(ids.long() + 1) + real.cumsum(1) * _GOLDEN)
    return mixed(torch.where(real, hashes, 0).sum(1))


def position_priorities(real: torch.Tensor, keys: torch.Tensor, salt: int) -> torch.Tensor:
    """
    Priorities `[m, T]`, `ABSENT` where there is no position.

    Args:
        real (`torch.Tensor`): `[m, T]`, which positions of each sequence there are.
        keys (`torch.Tensor`): `[m]`, the sequences' keys.
        salt (`int`): see [`salt`].
    """
    hashes = mixed(mixed(keys ^ salt).unsqueeze(1) + real.cumsum(1) * _GOLDEN) & ABSENT
    return torch.where(real, hashes, ABSENT)


def sequence_priorities(real: torch.Tensor, keys: torch.Tensor, salt: int) -> torch.Tensor:
    """Priorities `[m]` of whole sequences, as for positions; `ABSENT` for a sequence without any."""
    return torch.where(real.any(1), mixed(mixed(keys ^ salt)) & ABSENT, ABSENT)


def grid(real: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions each sequence has, and their rows, `[m, T]` both; `real` `[B, T]` says which are not padding."""
    if sequences.index is not None:
        return sequences.index >= 0, sequences.index
    rows = torch.arange(sequences.rows, device=real.device).view(sequences.count, sequences.length)
    return real, rows


def best(priorities: torch.Tensor, rows: torch.Tensor, number: int) -> tuple[torch.Tensor, Samples]:
    """
    The `number` smallest priorities (all if there are fewer) and their rows.

    Args:
        priorities, rows (`torch.Tensor`): of any one shape.
        number (`int`): how many.
    """
    values, places = priorities.reshape(-1).topk(min(number, priorities.numel()), largest=False)
    absent = values == ABSENT
    return values, Samples(rows=rows.reshape(-1)[places].clamp(min=0), absent=absent)


def placed(offered: torch.Tensor, samples: Samples, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What [`replaced`] returns for a reservoir of so many `slots` that holds nothing yet.

    Args:
        offered (`torch.Tensor`): `[k]`, priorities of the `samples`, smallest first.
        samples ([`Samples`]): the rows on offer.
        slots (`int`): number of slots, n.
    """
    priorities, source = offered[:slots], samples.present[:slots]  # absent ones are `KEEP`
    if len(offered) < slots:
        missing = (slots - len(offered),)
        priorities = torch.cat([priorities, priorities.new_full(missing, ABSENT)])
        source = torch.cat([source, source.new_full(missing, KEEP)])
    return priorities, source


def replaced(held: torch.Tensor, offered: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Let the offered rows take the places of the rows that they beat.

    Args:
        held (`torch.Tensor`): `[n]`, priorities in the reservoir's slots.
        offered, rows (`torch.Tensor`): `[k]`, priorities and numbers of the rows on offer.

    Returns the new priorities `[n]`, and for each slot the row that it gets, `[n]`, or `KEEP`.
    """
    n, k = len(held), len(offered)
    together = torch.cat([held, offered])
    # Stable: among equals what is held stays, so that rows that are absent never get in
    places = torch.argsort(together, stable=True)
    rank = torch.empty_like(places).scatter_(0, places, torch.arange(n + k, device=held.device))
    wins, freed = rank[n:] < n, rank[:n] >= n
    # As many win as slots are freed: the i-th winner takes the i-th free slot
    order = torch.where(wins, wins.cumsum(0) - 1, k)
    winners = rows.new_zeros(k + 1).scatter_(0, order, rows)
    their_priorities = offered.new_zeros(k + 1).scatter_(0, order, offered)
    number = (freed.cumsum(0) - 1).clamp(min=0)
    return (
        torch.where(freed, their_priorities[number], held),
        torch.where(freed, winners[number], KEEP),
    )


@dataclass(frozen=True)
class Source:
    """
    What the slots of a reservoir get of a microbatch.

    Args:
        numbers (`torch.Tensor`): `[n]`, the row that each slot gets, `KEEP` or `NOTHING`.
        fills (`bool`): whether `NOTHING` is not among them.
    """

    numbers: torch.Tensor
    fills: bool = False

    # Every layer asks for these

    @cached_property
    def rows(self) -> torch.Tensor:
        """A row for each slot, `[n]`, also where a slot gets none."""
        return self.numbers.clamp(min=0)

    @cached_property
    def keeps(self) -> torch.Tensor:
        """`[n]`, which slots keep what they have."""
        return self.numbers == KEEP

    @cached_property
    def empties(self) -> torch.Tensor:
        """`[n]`, which slots get zeros."""
        return self.numbers == NOTHING

    def moved(self, row_of: torch.Tensor) -> "Source":
        """The source where rows are numbered differently: `row_of` `[N]` is the new number, or `-1` for zeros."""
        there = row_of[self.rows]
        return Source(torch.where(self.numbers < 0, self.numbers, torch.where(there < 0, NOTHING, there)))

    @property
    def in_order(self) -> "Source":
        """The same where row i is what slot i gets."""
        places = torch.arange(len(self.numbers), device=self.numbers.device)
        return Source(torch.where(self.numbers < 0, self.numbers, places))

    def nothing(self) -> "Source":
        """The source where there are no rows: slots that would get one get zeros."""
        return Source(torch.where(self.numbers < 0, self.numbers, NOTHING))

    def put(self, buffer: torch.Tensor, x: torch.Tensor, factor: float = 1.0) -> None:
        """Write rows of `x` `[N, ...]` to their slots of `buffer` `[n, ...]`, times `factor`."""
        shape = (-1, *[1] * (x.dim() - 1))
        rows = x.index_select(0, self.rows)
        rows = (rows if factor == 1 else rows * factor).to(buffer.dtype)
        if not self.fills:
            rows = rows.masked_fill(self.empties.view(shape), 0)
        torch.where(self.keeps.view(shape), buffer, rows, out=buffer)
