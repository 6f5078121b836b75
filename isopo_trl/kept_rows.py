"""
The rows at which the Fisher metric is sampled, kept from one optimizer step to the next (`fisher_scope="step"`).

A layer's rows are its inputs `a_j` and cotangents `g_j` at sampled positions. There are two sets of them: those of the
last step, which every microbatch of this step is measured with, and those that this step collects for the next. Which
positions these are is decided by priorities ([`~geometry.reservoir`]), once per microbatch; the backward of each layer
then copies its rows. When the step is closed, ranks agree on the best of all of them and exchange their rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .geometry import reservoir
from .geometry.sequences import SampleRows, Samples, Sequences
from .geometry.statistics import accumulation_dtype
from .kernels import kept_rows as kernels


# Elements of one layer's gradients of whole sequences, where these are the samples: 32 MiB in float32
MOST_ELEMENTS = 2**23

# In elements: kernels want rows that begin at a multiple of 16 bytes
_ALIGNMENT = 16

_Rows = dict[str, torch.Tensor]


@dataclass
class _Set:
    """
    What a step collects at slots of one numbering: positions, or a number of whole sequences.

    Args:
        size (`int`): number of slots of all steps' rows together.
        slots (`slice`): those of them that the step under way replaces.
        priorities (`torch.Tensor`, *optional*): `[slots]`, of what has been collected.
    """

    size: int
    slots: slice
    priorities: torch.Tensor | None = None

    @property
    def number(self) -> int:
        return self.slots.stop - self.slots.start


class KeptRows:
    """
    Args:
        samples (`int`): number of rows per layer, n.
        steps (`int`): number of steps whose rows are held at a time; each step replaces its part.
        seed (`int`): of the draws.
    """

    def __init__(self, samples: int, steps: int = 1, seed: int = 0):
        self.samples, self.steps, self.seed = samples, steps, seed
        self.closed_steps = 0
        self._loss_scale: float | None = None  # that all rows carry: the first microbatch's
        self._held: dict[int, _Rows] = {}  # by layer, [n, ...]
        self._collected: dict[int, _Rows] = {}
        self._set_of: dict[int, int] = {}  # which set a layer's rows belong to: its size, 0 for positions
        self._sets: dict[int, _Set] = {}
        # Asked for by every layer in every microbatch, and so not made each time
        self._slots_of: dict[int, _Rows] = {}
        self._rows_of: dict[int, SampleRows] = {}
        self._flat: list[torch.Tensor] = []  # memory of what is held, one tensor per type
        self._exchange: list[Any] = []  # under way
        self._loaded: dict[str, Any] | None = None
        self._begin_step()

    # One microbatch

    def draw(self, real: torch.Tensor, sequences: Sequences, keys: torch.Tensor, loss_scale: float) -> "Draw":
        """
        Decide which rows of a microbatch are kept.

        Args:
            real (`torch.Tensor`): `[B, T]`, which positions are not padding.
            sequences ([`Sequences`]): the sequences.
            keys (`torch.Tensor`): `[m]`, by which a sequence is known, however the step is cut.
            loss_scale (`float`): constant that the loss carries.
        """
        self._wait()
        self._place_loaded(real.device)
        if self._loss_scale is None:
            self._loss_scale = loss_scale
        salt = reservoir.salt(self.seed, self.closed_steps)
        there, rows = reservoir.grid(real, sequences)
        priorities = reservoir.position_priorities(there, keys, salt)
        of_sequences = reservoir.sequence_priorities(there, keys, salt)
        return Draw(self, priorities, rows, of_sequences, self._loss_scale / loss_scale)

    def holds(self, layer: int) -> bool:
        """Whether there are rows of the layer from before this step."""
        return layer in (self._held if self._loaded is None else self._loaded["rows"])

    def sequences_of(self, elements: int) -> int:
        """How many sequences' gradients of so many elements are kept."""
        return max(1, min(self.samples, MOST_ELEMENTS // max(elements, 1)))

    def set_for(self, size: int) -> _Set:
        """The set of `size` whole sequences, or of positions for 0."""
        found = self._sets.get(size)
        if found is None:
            found = self._sets[size] = _Set(size or self.samples, slice(0, 0))
            found.slots = self._slots(found.size)
        return found

    def slots_of(self, layer: int, size: int, rows: _Rows) -> _Rows:
        """Where the layer's rows are collected, like `rows` `[N, ...]`."""
        found = self._slots_of.get(layer)
        if found is not None:
            return found
        collected = self._collected.get(layer)
        if collected is None:
            number = self._room(self.set_for(size).size)
            # Vectors are small: they are kept as they were summed
            types = {name: x.dtype if "a" in rows else accumulation_dtype(x.dtype) for name, x in rows.items()}
            collected = {name: x.new_zeros(number, *x.shape[1:], dtype=types[name]) for name, x in rows.items()}
            self._collected[layer], self._set_of[layer] = collected, size
        for name, x in rows.items():
            if name not in collected or collected[name].shape[1:] != x.shape[1:]:
                before = {name: list(x.shape[1:]) for name, x in collected.items()}
                raise RuntimeError(
                    f"Layer {layer} has rows of shape {list(x.shape[1:])}, but those kept of it have {before}: if the "
                    "run was resumed, the checkpoint is of another model; else set fisher_scope='microbatch'."
                )
        number = self.set_for(size).number
        self._slots_of[layer] = {name: buffer[:number] for name, buffer in collected.items()}
        return self._slots_of[layer]

    def _room(self, size: int) -> int:
        """How many rows a step collects at most."""
        return -(-size // self.steps) if self._held else size

    def rows_of(self, layer: int) -> SampleRows | None:
        """The rows from before this step, if there are any."""
        return self._rows_of.get(layer)

    def unreached(self, draw: "Draw", layers: Sequence[int]) -> None:
        """A microbatch's backward did not come to these layers: its positions have no gradient there."""
        for layer in layers:
            if layer in self._collected:
                size = self._set_of[layer]
                Slots(self.slots_of(layer, size, {}), draw.source(size), draw.factor).put_nothing()

    def commit(self, draw: "Draw") -> None:
        """The microbatch has been all through the layers: its rows are in their slots."""
        for size, (priorities, _) in draw.outcomes.items():
            self._sets[size].priorities = priorities

    # One step

    def _slots(self, size: int) -> slice:
        """The slots that the step under way replaces: a part of them in turn, and all of them in the first step."""
        if not self._held:
            return slice(0, size)
        turn = self.closed_steps % self.steps
        return slice(size * turn // self.steps, size * (turn + 1) // self.steps)

    def _begin_step(self) -> None:
        for found in self._sets.values():
            found.slots, found.priorities = self._slots(found.size), None
        self._slots_of = {}
        self._rows_of = {layer: SampleRows(**held) for layer, held in self._held.items()}

    def restart(self) -> None:
        """Forget what this step has collected: a microbatch was broken off, or its numbers are not finite."""
        self._begin_step()
        for rows in self._collected.values():
            for buffer in rows.values():
                buffer.zero_()

    def close(self, keep: bool = True) -> None:
        """
        Close an optimizer step, on every rank: the best rows of all ranks are those that the next step goes by; or, if
        not `keep`, those of the last step stay.
        """
        if not keep or not self._collected:
            self.closed_steps += 1
            self.restart()
            return
        world, rank = (dist.get_world_size(), dist.get_rank()) if _is_distributed() else (1, 0)
        if world == 1 and self.steps == 1:
            self._change_places()
            return
        first = not self._held
        self._allocate()
        orders: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for size, found in sorted(self._sets.items()):
            priorities = found.priorities
            if priorities is None:  # no layer of this set was reached here
                device = next(iter(next(iter(self._collected.values())).values())).device
                priorities = torch.full((found.number,), reservoir.ABSENT, device=device)
            everyone = priorities
            if world > 1:
                everyone = priorities.new_empty(world * len(priorities))
                dist.all_gather_into_tensor(everyone, priorities)
            # In the order of priority, so that slots are the same however the step was cut
            values, places = everyone.topk(found.number, largest=False)
            mine = (places // found.number == rank) & (values != reservoir.ABSENT)
            orders[size] = places % found.number, ~mine
        for layer, rows in self._collected.items():
            found = self._sets[self._set_of[layer]]
            order, others = orders[self._set_of[layer]]
            for name, buffer in rows.items():
                held = self._held[layer][name]
                chosen = buffer[: found.number].index_select(0, order)
                chosen = chosen.masked_fill(others.view(-1, *[1] * (buffer.dim() - 1)), 0)
                if world > 1 and rank > 0 and self.steps > 1:
                    held.zero_()  # what stays is on the first rank too, and added to nothing
                held[found.slots] = chosen
        if world > 1:
            # Awaited when the next microbatch begins; meanwhile the optimizer steps
            self._exchange = [dist.all_reduce(flat, async_op=True) for flat in self._flat]
        self.closed_steps += 1
        if first and self.steps > 1:  # from now on a part of the rows at a time
            for rows in self._collected.values():
                for name, buffer in rows.items():
                    rows[name] = buffer.new_zeros(self._room(len(buffer)), *buffer.shape[1:])
        self._begin_step()

    def _change_places(self) -> None:
        """Close a step of one rank that replaces all rows: nobody has better ones, and nothing is copied."""
        free = {
            layer: self._held.get(layer) or {name: torch.zeros_like(x) for name, x in rows.items()}
            for layer, rows in self._collected.items()
        }
        self._held, self._collected = self._collected, free
        torch._foreach_zero_([x for rows in free.values() for x in rows.values()])  # where a step fills no slot
        self.closed_steps += 1
        self._begin_step()

    def _allocate(self) -> None:
        """Give layers that hold no rows yet a place in memory; all layers of one type share it, for the exchange."""
        if self._held.keys() == self._collected.keys():
            return
        before, self._held, self._flat = self._held, {}, []
        by_type: dict[torch.dtype, list[tuple[int, str, torch.Tensor]]] = {}
        for layer, rows in sorted(self._collected.items()):
            for name, buffer in rows.items():
                by_type.setdefault(buffer.dtype, []).append((layer, name, buffer))
        for entries in by_type.values():
            shapes = [(self.set_for(self._set_of[layer]).size, *buffer.shape[1:]) for layer, _, buffer in entries]
            sizes = [-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
            flat = entries[0][2].new_zeros(sum(sizes))
            self._flat.append(flat)
            for (layer, name, _), shape, view in zip(entries, shapes, flat.split(sizes), strict=True):
                self._held.setdefault(layer, {})[name] = view[: math.prod(shape)].view(shape)
                if layer in before:
                    self._held[layer][name].copy_(before[layer][name])

    def _wait(self) -> None:
        for work in self._exchange:
            work.wait()
        self._exchange = []

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is held between two steps; the same on every rank."""
        if self._loaded is not None:
            return self._loaded
        self._wait()
        # Copies, since what is held is written over
        rows = {
            layer: {name: x.to("cpu", copy=True) for name, x in held.items()} for layer, held in self._held.items()
        }
        return {
            "closed_steps": self.closed_steps,
            "samples": self.samples,
            "steps": self.steps,
            "loss_scale": self._loss_scale,
            "sets": {layer: self._set_of[layer] for layer in rows},
            "rows": rows,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Go on from what was saved; returns whether its rows can be used, which takes the same numbers of them."""
        self._wait()
        self._held, self._collected, self._flat, self._sets, self._set_of = {}, {}, [], {}, {}
        self._begin_step()
        self._loss_scale = self._loaded = None
        if state is None:
            return False
        self.closed_steps = state["closed_steps"]
        if not state["rows"] or (state["samples"], state["steps"]) != (self.samples, self.steps):
            return not state["rows"]  # saved before there were any: as it would have gone on
        self._loss_scale, self._loaded = state["loss_scale"], state
        return True

    def _place_loaded(self, device: torch.device) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._set_of = dict(state["sets"])
        self._collected = {
            layer: {name: torch.zeros_like(x[: -(-len(x) // self.steps)], device=device) for name, x in rows.items()}
            for layer, rows in state["rows"].items()
        }
        self._allocate()
        for layer, rows in state["rows"].items():
            for name, x in rows.items():
                self._held[layer][name].copy_(x)
        self._begin_step()


@dataclass
class Draw:
    """
    What is kept of one microbatch.

    Args:
        kept ([`KeptRows`]): where it goes.
        priorities, rows (`torch.Tensor`): `[m, T]`, of its positions.
        of_sequences (`torch.Tensor`): `[m]`, priorities of whole sequences.
        factor (`float`): that makes its rows comparable with the others'.

    Attributes:
        samples ([`Samples`]): the best positions of this microbatch alone, for layers that have no rows from before.
        outcomes (`dict`): of each set, the priorities of its slots, and the row that each gets.
    """

    kept: KeptRows
    priorities: torch.Tensor
    rows: torch.Tensor
    of_sequences: torch.Tensor
    factor: float
    samples: Samples = field(init=False)
    outcomes: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=dict)
    _slots: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self):
        self.offered, self.samples = reservoir.best(self.priorities, self.rows, self.kept.samples)
        self.source()

    def source(self, size: int = 0) -> torch.Tensor:
        """The row that each slot gets, or `KEEP`: of positions, or of a set of `size` whole sequences."""
        if size not in self.outcomes:
            found = self.kept.set_for(size)
            offered, rows = self.offered, self.samples.rows
            if size:
                offered, samples = reservoir.best(
                    self.of_sequences, torch.arange(len(self.of_sequences), device=rows.device), found.number
                )
                rows = samples.rows
            held = found.priorities
            if held is None:
                held = offered.new_full((found.number,), reservoir.ABSENT)
            self.outcomes[size] = reservoir.replaced(held, offered, rows)
        return self.outcomes[size][1]

    def exchange(self, layer: int, rows: _Rows, sequences: int = 0) -> SampleRows | None:
        """
        Keep what the next step needs of a layer's `rows` `[N, ...]`, and return what the last one has kept.

        Args:
            layer (`int`): the layer.
            rows (`dict[str, torch.Tensor]`): by the names of the fields of [`SampleRows`].
            sequences (`int`): if not 0, rows are those of whole sequences, of which so many are kept.
        """
        buffers, source = self.kept.slots_of(layer, sequences, rows), self.source(sequences)
        if self.factor == 1 and kernels.take(rows, buffers):
            kernels.put(buffers, rows, source)
        else:
            slots = Slots(buffers, source, self.factor)
            for name, x in rows.items():
                slots.put(name, x)
        return self.kept.rows_of(layer)

    def is_plain(self, layer: int) -> bool:
        """Whether the layer is measured with rows from before, and its own are kept as they are."""
        return self.factor == 1 and self.kept.holds(layer)

    def vectors(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """Where the rows of an elementwise parameter are collected, `[n, d]`, for one like `[..., d]`."""
        return self.kept.slots_of(layer, 0, {"g": like.new_empty(0, like.shape[-1])})["g"]

    def put_samples(self, layer: int, v: torch.Tensor, rows: int) -> None:
        """Keep rows of an elementwise parameter, given at this microbatch's `samples`, `[n, d]`, of so many rows."""
        source = reservoir.moved(self.source(), self.samples.slots(rows).long())
        reservoir.put(self.vectors(layer, v), v, source, self.factor)

    def slots(self, rows: int) -> torch.Tensor:
        """Which slot each of so many rows gets, `[N]`, or `-1`."""
        if self._slots is None:
            source = self.source()
            numbers = torch.arange(len(source), dtype=torch.int32, device=source.device)
            slots = torch.full((rows + 1,), -1, dtype=torch.int32, device=source.device)
            # Slots that get none all write to the spare last row
            self._slots = slots.scatter(0, torch.where(source < 0, rows, source), numbers)[:rows]
        return self._slots

    def in_parts(self, layer: int, like: _Rows, row_of: torch.Tensor) -> "Slots":
        """
        The same for a layer whose rows come part by part.

        Args:
            layer (`int`): the layer.
            like (`dict[str, torch.Tensor]`): `[0, ...]`, what its rows look like.
            row_of (`torch.Tensor`): `[N]`, the row of each position at this layer; `-1` where it has none.
        """
        source = reservoir.moved(self.source(), row_of)
        return Slots(self.kept.slots_of(layer, 0, like), source, self.factor, self.kept.rows_of(layer))

    def exchange_routed(
        self, layer: int, g: torch.Tensor, a: torch.Tensor, choices: torch.Tensor, places: torch.Tensor
    ) -> SampleRows | None:
        """
        The same for a stack of experts.

        Args:
            layer (`int`): the stack.
            g, a (`torch.Tensor`): `[S, ...]`, its rows, one for each position and expert that it was sent to.
            choices (`torch.Tensor`): `[N, k]`, the experts of each position.
            places (`torch.Tensor`): `[N k]`, the row of each of these.
        """
        k, source = choices.shape[1], self.source().unsqueeze(1)
        like = {"g": g.new_empty(0, k, g.shape[1]), "a": a.new_empty(0, k, a.shape[1]), "choices": choices[:0]}
        buffers = self.kept.slots_of(layer, 0, like)
        Slots(buffers, self.source(), self.factor).put("choices", choices)
        rows = torch.where(source < 0, source, places.view(-1, k)[source.squeeze(1).clamp(min=0)])
        by_row = {name: buffers[name].flatten(0, 1) for name in ("g", "a")}
        slots = Slots(by_row, rows.reshape(-1), self.factor)
        slots.put("g", g)
        slots.put("a", a)
        return self.kept.rows_of(layer)


@dataclass
class Slots:
    """
    Where one layer's rows of a microbatch go.

    Args:
        buffers (`dict[str, torch.Tensor]`): `[n, ...]`, by the names of the fields of [`SampleRows`].
        source (`torch.Tensor`): `[n]`, the row that each slot gets, `KEEP` or `NOTHING`.
        factor (`float`): what cotangents are multiplied by.
        held ([`SampleRows`], *optional*): the layer's rows from before this step.
    """

    buffers: _Rows
    source: torch.Tensor
    factor: float
    held: SampleRows | None = None

    def put(self, name: str, x: torch.Tensor, part: slice = slice(None)) -> None:
        """Copy rows out of `x` `[N, ...]`, the `part` of the features."""
        buffer = self.buffers[name]
        buffer = buffer if part == slice(None) else buffer[:, part]
        reservoir.put(buffer, x, self.source, self.factor if name == "g" else 1.0)

    def put_nothing(self) -> None:
        """There are no rows: positions that take a slot have no gradient at this layer."""
        source = torch.where(self.source < 0, self.source, reservoir.NOTHING)
        for buffer in self.buffers.values():
            reservoir.put(buffer, buffer, source)


def is_state(state: Any) -> bool:
    """Whether this looks like what [`KeptRows.state_dict`] returns."""
    kinds = {"closed_steps": int, "samples": int, "steps": int, "sets": dict, "rows": dict}
    if not isinstance(state, dict) or "loss_scale" not in state:
        return False
    if not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        return False
    rows = [x for of_layer in state["rows"].values() for x in dict(of_layer).values()]
    return state["sets"].keys() == state["rows"].keys() and all(isinstance(x, torch.Tensor) for x in rows)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
