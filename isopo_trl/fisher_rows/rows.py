"""
The rows at which the Fisher metric is sampled, kept from one optimizer step to the next (`fisher_scope="step"`).

A layer's rows are its inputs `a_j` and cotangents `g_j` at sampled positions. There are two sets of them: those of the
last step, which every microbatch of this step is measured with, and those that this step collects for the next. Which
positions these are is decided by priorities ([`~geometry.reservoir`]), once per microbatch; the backward of each layer
then copies its rows. When the step is closed, ranks agree on the best of all of them and exchange their rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..geometry import reservoir
from ..geometry.sequences import SampleRows, Samples, Sequences
from ..geometry.statistics import accumulation_dtype
from ..kernels import fisher_rows as kernels


# Elements of all layers' gradients of whole sequences, where these are the samples: 1 GiB in float32
MOST_ELEMENTS = 2**28
# Fewer sequences than that are not worth keeping: the metric would be that of one or two of them
FEWEST_SEQUENCES = 8

# In elements: kernels want rows that begin at a multiple of 16 bytes
_ALIGNMENT = 16

_Rows = dict[str, torch.Tensor]
# Slots of cotangents and of inputs, `[n, ...]`, and the row that each of them gets, `[n]`
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


@dataclass
class _Alike:
    """
    Memory of rows of one shape, of all layers that have such: so that what is done to rows is done to many layers at
    once.

    Args:
        layers (`list[tuple[int, str]]`): layers, and what their rows are called.
        size (`int`): which set they belong to.
        held, collected (`torch.Tensor`): `[layers, slots, ...]`.
    """

    layers: list[tuple[int, str]]
    size: int
    held: torch.Tensor
    collected: torch.Tensor


@dataclass
class Place:
    """
    Where a layer's rows are.

    Args:
        held ([`SampleRows`], *optional*): those from before this step, which may be in the host's memory.
        slots (`dict[str, torch.Tensor]`): `[n, ...]`, where this step's are collected.
        dtype (`torch.dtype`, *optional*): of all of them, inputs and cotangents; `None` where there is none for both.
    """

    held: SampleRows | None
    slots: _Rows
    dtype: torch.dtype | None

    def fetched(self) -> SampleRows | None:
        """The rows from before this step, on the device of the layer."""
        device = next(iter(self.slots.values())).device
        if self.held is None or self.held.g.device == device:
            return self.held
        rows = {"g": self.held.g, "a": self.held.a, "choices": self.held.choices}
        return SampleRows(**{name: x.to(device, non_blocking=True) for name, x in rows.items() if x is not None})


class KeptRows:
    """
    Args:
        samples (`int`): number of rows per layer, n.
        steps (`int`): number of steps whose rows are held at a time; each step replaces its part.
        seed (`int`): of the draws.
        layers (`int`): number of layers, which have equal shares of the memory for gradients of whole sequences.
        offload (`bool`): whether the rows from before are held in the host's memory.

    Attributes:
        places (`dict[int, Place]`): of the layers that have been asked for, where their rows are.
    """

    def __init__(self, samples: int, steps: int = 1, seed: int = 0, layers: int = 1, offload: bool = False):
        self.samples, self.steps, self.seed, self.layers, self.offload = samples, steps, seed, layers, offload
        self.closed_steps = 0
        self._loss_scale: float | None = None  # that all rows carry: the first microbatch's
        self._held: dict[int, _Rows] = {}  # by layer, [n, ...]
        self._collected: dict[int, _Rows] = {}
        self._set_of: dict[int, int] = {}  # which set a layer's rows belong to: its size, 0 for positions
        self._sets: dict[int, _Set] = {}
        # Asked for by every layer in every microbatch, and so not made each time, nor when memory changes places
        self.places: dict[int, Place] = {}
        self._places_before: dict[int, Place] = {}
        # Once the layers are known: memory of all of them, and what it is cut from, one tensor per type
        self._alike: list[_Alike] = []
        self._flat: list[torch.Tensor] = []
        self._flat_collected: list[torch.Tensor] = []
        self._exchange: list[Any] = []  # under way
        self._loaded: dict[str, Any] | None = None

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
        return Draw(
            self,
            priorities,
            rows,
            lambda: reservoir.sequence_priorities(there, keys, salt),
            self._loss_scale / loss_scale,
        )

    def holds(self, layer: int) -> bool:
        """Whether there are rows of the layer from before this step."""
        return layer in (self._held if self._loaded is None else self._loaded["rows"])

    def sequences_of(self, elements: int) -> int:
        """How many sequences' gradients of so many elements are kept of a layer; 0 where it would be too few."""
        number = min(self.samples, MOST_ELEMENTS // self.layers // max(elements, 1))
        return number if number >= min(self.samples, FEWEST_SEQUENCES) else 0

    def set_for(self, size: int) -> _Set:
        """The set of `size` whole sequences, or of positions for 0."""
        found = self._sets.get(size)
        if found is None:
            found = self._sets[size] = _Set(size or self.samples, slice(0, 0))
            found.slots = self._slots(found.size)
        return found

    def place_of(self, layer: int, size: int, rows: _Rows) -> Place:
        """Where the layer's rows are, which are like `rows` `[N, ...]`."""
        found = self.places.get(layer)
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
        slots = {name: buffer[:number] for name, buffer in collected.items()}
        used = {slots[name].dtype for name in ("g", "a") if name in slots}
        held = SampleRows(**self._held[layer]) if layer in self._held else None
        place = Place(held, slots, used.pop() if len(used) == 1 else None)
        self.places[layer] = place
        return place

    def _room(self, size: int) -> int:
        """How many rows a step collects at most."""
        return -(-size // self.steps) if self._held else size

    def rows_of(self, layer: int) -> SampleRows | None:
        """The rows from before this step, if there are any, of a layer whose place has been asked for."""
        return self.places[layer].fetched()

    def unreached(self, draw: "Draw", layers: Sequence[int]) -> None:
        """A microbatch's backward did not come to these layers: its positions have no gradient there."""
        for layer in layers:
            if layer in self._collected:
                size = self._set_of[layer]
                Slots(self.place_of(layer, size, {}).slots, draw.source(size), draw.factor).put_nothing()

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
        if self.steps > 1:
            self.places = {}  # other slots
        for layer, place in self.places.items():
            if place.held is not None and place.held.choices is not None:
                place.held = SampleRows(**self._held[layer])  # forgets the order of the experts

    def restart(self) -> None:
        """Forget what this step has collected: a microbatch was broken off, or its numbers are not finite."""
        self._begin_step()
        for rows in self._collected.values():
            for buffer in rows.values():
                buffer.zero_()

    def close(self, keep: bool = True) -> None:
        """
        Close an optimizer step, on every rank: the best rows of all ranks are those that the next step goes by; or, if
        not `keep`, those of the last step stay, and the step is not counted: not every way of training makes it.
        """
        if not keep or not self._collected:
            self.restart()
            return
        world, rank = (dist.get_world_size(), dist.get_rank()) if _is_distributed() else (1, 0)
        in_place = self._held.keys() == self._collected.keys()
        if world == 1 and self.steps == 1 and in_place and not self.offload:
            self._change_places()
            return
        orders: dict[int, tuple[torch.Tensor, torch.Tensor, slice]] = {}
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
            orders[size] = places % found.number, ~mine, found.slots
        rows = self._collected
        if not in_place:
            self._allocate()
        if world > 1 and rank > 0 and self.steps > 1 and not self.offload:
            for flat in self._flat:
                flat.zero_()  # what stays is on the first rank too, and added to nothing
        summed = world > 1 and self.offload  # now, since the sum is made on the device
        if in_place:
            for alike in self._alike:
                _choose(alike.collected, alike.held, *orders[alike.size], summed)
        else:
            for layer, held in self._held.items():
                for name, buffer in held.items():
                    own = rows[layer][name].unsqueeze(0)
                    _choose(own, buffer.unsqueeze(0), *orders[self._set_of[layer]], summed)
        if world > 1 and not summed:
            # Awaited when the next microbatch begins; meanwhile the optimizer steps
            self._exchange = [dist.all_reduce(flat, async_op=True) for flat in self._flat]
        self.closed_steps += 1
        self._begin_step()

    def _change_places(self) -> None:
        """Close a step of one rank that replaces all rows: nobody has better ones, and nothing is copied."""
        self._held, self._collected = self._collected, self._held
        self._flat, self._flat_collected = self._flat_collected, self._flat
        self.places, self._places_before = self._places_before, self.places
        for alike in self._alike:
            alike.held, alike.collected = alike.collected, alike.held
        for flat in self._flat_collected:
            flat.zero_()  # where a step fills no slot
        self.closed_steps += 1
        self._begin_step()

    def _allocate(self) -> None:
        """
        Give the rows of all layers that collect any a place in memory: a few tensors, however many layers there are.
        What is held is taken along, what was collected is not.
        """
        before, collected = self._held, self._collected
        self._held, self._collected, self._alike, self._flat, self._flat_collected = {}, {}, [], [], []
        self.places, self._places_before = {}, {}
        by_type: dict[torch.dtype, dict[tuple, list[tuple[int, str]]]] = {}
        for layer, rows in sorted(collected.items()):
            for name, buffer in rows.items():
                shape = (self._set_of[layer], *buffer.shape[1:])
                by_type.setdefault(buffer.dtype, {}).setdefault(shape, []).append((layer, name))
        device = next(iter(next(iter(collected.values())).values())).device
        for dtype, by_shape in by_type.items():
            sizes = [self.set_for(shape[0]).size for shape in by_shape]
            rooms = [-(-size // self.steps) for size in sizes]
            kinds = [(len(layers), shape[1:]) for shape, layers in by_shape.items()]
            where = torch.device("cpu") if self.offload else device
            flat, held = _cut(kinds, sizes, dtype, where, pinned=self.offload and device.type == "cuda")
            flat_collected, free = _cut(kinds, rooms, dtype, device)
            self._flat.append(flat)
            self._flat_collected.append(flat_collected)
            for (shape, layers), x, y in zip(by_shape.items(), held, free, strict=True):
                self._alike.append(_Alike(layers, shape[0], x, y))
                for (layer, name), own, other in zip(layers, x, y, strict=True):
                    self._held.setdefault(layer, {})[name] = own
                    self._collected.setdefault(layer, {})[name] = other
                    if layer in before:
                        own.copy_(before[layer][name])

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
            layer: {name: x.to("cpu", copy=True) for name, x in held.items()}
            for layer, held in sorted(self._held.items())
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
        self._held, self._collected, self._sets, self._set_of = {}, {}, {}, {}
        self.places, self._places_before = {}, {}
        self._alike, self._flat, self._flat_collected = [], [], []
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
            layer: {name: x[:0].to(device) for name, x in rows.items()} for layer, rows in state["rows"].items()
        }
        self._allocate()
        for layer, rows in state["rows"].items():
            for name, x in rows.items():
                self._held[layer][name].copy_(x)
        self._begin_step()


def _cut(
    kinds: list[tuple[int, tuple[int, ...]]],
    slots: list[int],
    dtype: torch.dtype,
    device: torch.device,
    pinned: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """
    Zeros in one piece, and parts of it, `[layers, slots, ...]` each, in which every layer's rows are aligned.

    Args:
        kinds (`list`): of each part the number of layers and the shape of a row.
        slots (`list[int]`): of each part the number of slots.
        pinned (`bool`): whether another device is to fetch them at any time.
    """
    shapes = [(number, *row) for (_, row), number in zip(kinds, slots, strict=True)]
    sizes = [-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    lengths = [layers * size for (layers, _), size in zip(kinds, sizes, strict=True)]
    flat = torch.zeros(sum(lengths), dtype=dtype, device=device, pin_memory=pinned)
    parts = [
        piece.view(-1, size)[:, : math.prod(shape)].unflatten(1, shape)
        for piece, size, shape in zip(flat.split(lengths), sizes, shapes, strict=True)
    ]
    return flat, parts


def _choose(
    collected: torch.Tensor, held: torch.Tensor, order: torch.Tensor, others: torch.Tensor, slots: slice, summed: bool
) -> None:
    """
    Move rows of this rank to where they are held, those of all ranks if they are `summed`.

    Args:
        collected (`torch.Tensor`): `[layers, n, ...]`, the rows.
        held (`torch.Tensor`): `[layers, slots, ...]`, where they go.
        order (`torch.Tensor`): which row each slot gets.
        others (`torch.Tensor`): which slots are another rank's to fill, or nobody's.
        slots (`slice`): the slots.
    """
    chosen = collected.index_select(1, order)
    chosen.masked_fill_(others.view(1, -1, *[1] * (held.dim() - 2)), 0)
    if summed:
        dist.all_reduce(chosen)
    held[:, slots] = chosen


@dataclass
class Draw:
    """
    What is kept of one microbatch.

    Args:
        kept ([`KeptRows`]): where it goes.
        priorities, rows (`torch.Tensor`): `[m, T]`, of its positions.
        of_sequences (`Callable`): returns priorities `[m]` of whole sequences, which few models need.
        factor (`float`): that makes its rows comparable with the others'.

    Attributes:
        samples ([`Samples`]): the best positions of this microbatch alone, for layers that have no rows from before.
        outcomes (`dict`): of each set, the priorities of its slots, and what each gets.
    """

    kept: KeptRows
    priorities: torch.Tensor
    rows: torch.Tensor
    of_sequences: Callable[[], torch.Tensor]
    factor: float
    samples: Samples = field(init=False)
    outcomes: dict[int, tuple[torch.Tensor, reservoir.Source]] = field(init=False, default_factory=dict)
    _slots: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self):
        self.offered, self.samples = reservoir.best(self.priorities, self.rows, self.kept.samples)
        self.source()

    def source(self, size: int = 0) -> reservoir.Source:
        """What each slot gets: of positions, or of a set of `size` whole sequences."""
        if size not in self.outcomes:
            found = self.kept.set_for(size)
            offered, samples = self.offered, self.samples
            if size:
                of_sequences = self.of_sequences()
                numbers = torch.arange(len(of_sequences), device=of_sequences.device)
                offered, samples = reservoir.best(of_sequences, numbers, found.number)
            if found.priorities is None:
                priorities, numbers = reservoir.placed(offered, samples, found.number)
            else:
                priorities, numbers = reservoir.replaced(found.priorities, offered, samples.rows)
            self.outcomes[size] = priorities, reservoir.Source(numbers, fills=True)
        return self.outcomes[size][1]

    def exchange(self, layer: int, rows: _Rows, sequences: int = 0) -> SampleRows | None:
        """
        Keep what the next step needs of a layer's `rows` `[N, ...]`, and return what the last one has kept.

        Args:
            layer (`int`): the layer.
            rows (`dict[str, torch.Tensor]`): by the names of the fields of [`SampleRows`].
            sequences (`int`): if not 0, rows are those of whole sequences, of which so many are kept.
        """
        place, source = self.kept.place_of(layer, sequences, rows), self.source(sequences)
        Slots(place.slots, source, self.factor).put_all(rows)
        return place.fetched()

    def exchange_in_kernel(self, layer: int, g: torch.Tensor, a: torch.Tensor) -> tuple[SampleRows, Into] | None:
        """
        The same for a linear layer whose kernel keeps its rows along with measuring: what the last step has kept, and
        where to put what the next one needs; `None` where there is nothing to measure with, or rows are not copied as
        they are.
        """
        place = self.kept.places.get(layer) or self.kept.place_of(layer, 0, {"g": g, "a": a})
        if place.held is None or place.dtype is not g.dtype or self.factor != 1:
            return None
        held: Any = place.fetched()
        return held, (place.slots["g"], place.slots["a"], self.source().numbers)

    def is_plain(self, layer: int) -> bool:
        """Whether the layer is measured with rows from before, and its own are kept as they are."""
        return self.factor == 1 and self.kept.holds(layer)

    def vectors(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """Where the rows of an elementwise parameter are collected, `[n, d]`, for one like `[..., d]`."""
        place = self.kept.places.get(layer)
        if place is None:
            place = self.kept.place_of(layer, 0, {"g": like.new_empty(0, like.shape[-1])})
        return place.slots["g"]

    def put_samples(self, layer: int, v: torch.Tensor, rows: int) -> None:
        """Keep rows of an elementwise parameter, given at this microbatch's `samples`, `[n, d]`, of so many rows."""
        self.source().moved(self.samples.slots(rows).long()).put(self.vectors(layer, v), v, self.factor)

    def slots(self, rows: int) -> torch.Tensor:
        """Which slot each of so many rows gets, `[N]`, or `-1`."""
        if self._slots is None:
            source = self.source().numbers
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
        place = self.kept.place_of(layer, 0, like)
        return Slots(place.slots, self.source().moved(row_of), self.factor, place.fetched())

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
        place, source = self.kept.places.get(layer), self.source()
        k = choices.shape[1]
        if place is None:
            like = {"g": g.new_empty(0, k, g.shape[1]), "a": a.new_empty(0, k, a.shape[1]), "choices": choices[:0]}
            place = self.kept.place_of(layer, 0, like)
        if self.factor == 1 and kernels.take_routed(g, a, place.slots):
            kernels.put_routed(place.slots, g, a, choices, places, source.numbers)
            return place.fetched()
        source.put(place.slots["choices"], choices)
        by_choice = source.numbers.unsqueeze(1)
        rows = torch.where(by_choice < 0, by_choice, places.view(-1, k)[source.rows])
        by_row = {name: place.slots[name].flatten(0, 1) for name in ("g", "a")}
        Slots(by_row, reservoir.Source(rows.reshape(-1), fills=True), self.factor).put_all({"g": g, "a": a})
        return place.fetched()


@dataclass
class Slots:
    """
    Where one layer's rows of a microbatch go.

    Args:
        buffers (`dict[str, torch.Tensor]`): `[n, ...]`, by the names of the fields of [`SampleRows`].
        source ([`~geometry.reservoir.Source`]): what each slot gets.
        factor (`float`): what cotangents are multiplied by.
        held ([`SampleRows`], *optional*): the layer's rows from before this step.
    """

    buffers: _Rows
    source: reservoir.Source
    factor: float
    held: SampleRows | None = None

    def put_all(self, rows: _Rows) -> None:
        """Copy rows out of `rows` `[N, ...]`."""
        if self.factor == 1 and kernels.take(rows, self.buffers):
            kernels.put(self.buffers, rows, self.source.numbers)
            return
        for name, x in rows.items():
            self.source.put(self.buffers[name], x, self.factor if name == "g" else 1.0)

    def put(self, name: str, x: torch.Tensor, part: slice = slice(None)) -> None:
        """Copy rows out of `x` `[N, ...]`, the `part` of the features."""
        buffer = self.buffers[name]
        buffers = {name: buffer if part == slice(None) else buffer[:, part]}
        Slots(buffers, self.source, self.factor).put_all({name: x})

    def put_nothing(self) -> None:
        """There are no rows: positions that take a slot have no gradient at this layer."""
        source = self.source.nothing()
        for buffer in self.buffers.values():
            source.put(buffer, buffer)


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
