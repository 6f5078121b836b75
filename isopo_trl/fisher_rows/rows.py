"""
The rows at which the Fisher metric is sampled, kept from one optimizer step to the next (`fisher_scope="step"`).

A layer's rows are its inputs `a_j` and cotangents `g_j` at sampled positions. There are two sets of them: those of the
last step, which every microbatch of this step is measured with, and the rows that this step collects for the next.
Which positions are sampled is decided by priorities ([`~geometry.reservoir`]), once per microbatch; the backward of
each layer then copies its rows. When the step is closed, ranks agree on the best of all of them and exchange their
rows.

This file is long because rows come in five ways: at once, inside a kernel that measures, part by part from the LM
head, by experts, and as gradients of whole sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..geometry import reservoir
from ..geometry.sequences import SampleRows, Samples, Sequences
from ..geometry.statistics import accumulation_dtype
from ..kernels import fisher_rows as kernels
from ..kernels.fisher_rows import Into


# Elements of all layers' gradients of whole sequences, where these are the samples: 1 GiB in float32
MOST_ELEMENTS = 2**28
# Names of sequences whose tokens are not known, now and in the step before: the two are different
UNNAMED, UNNAMED_BEFORE = -1, -2
# Fewer sequences than that are not worth collecting: the metric would be that of one or two of them
FEWEST_SEQUENCES = 8

Buffers = dict[str, torch.Tensor]  # by the names of the fields of `SampleRows`


class LayerRows:
    """
    The rows of one layer.

    Args:
        collected (`dict[str, torch.Tensor]`): `[n, ...]`, the slots that this step fills.
        sequences (`int`): number of slots where samples are whole sequences, 0 where they are positions.

    Attributes:
        held ([`SampleRows`], *optional*): the rows of the step before.
    """

    def __init__(self, collected: Buffers, sequences: int = 0):
        self.held: SampleRows | None = None
        self.collected, self.sequences = collected, sequences
        self.is_verified = False  # that rows have the shapes of the slots

    def exchange(self) -> None:
        """The rows of this step become those of the step before, whose memory is filled next."""
        before = self.held
        self.held = SampleRows(**self.collected)
        if before is None:
            self.collected = {name: torch.empty_like(x) for name, x in self.collected.items()}
        else:
            self.collected = before.fields


class FisherRows:
    """
    The rows of all layers.

    Args:
        samples (`int`): number of rows per layer, n.
        seed (`int`): of the draws.
        layers (`int`): number of layers, which have equal shares of the memory for gradients of whole sequences.

    Attributes:
        layers (`dict[int, LayerRows]`): what each layer has, by its number.
        priorities, held_names (`dict[int, torch.Tensor]`): by the number of sequences of [`LayerRows`], `[n]`:
            priorities of what this step has collected, and names of the sequences that rows from the step before are
            of ([`Draw.name`]).
    """

    def __init__(self, samples: int, seed: int = 0, layers: int = 1):
        self.samples, self.seed, self._share = samples, seed, MOST_ELEMENTS // layers
        self._begin()

    def _begin(self) -> None:
        self.closed_steps = 0
        self._loss_scale: float | None = None  # that all rows carry: the first microbatch's
        self.layers: dict[int, LayerRows] = {}
        self.priorities: dict[int, torch.Tensor] = {}
        self.held_names: dict[int, torch.Tensor] = {}
        self._names: dict[int, torch.Tensor] = {}  # of the sequences of what has been collected, likewise
        self._exchange: list[Any] = []  # between ranks, under way
        self._loaded: dict[str, Any] | None = None

    # One microbatch

    def draw(
        self,
        real: torch.Tensor,
        sequences: Sequences,
        keys: torch.Tensor,
        loss_scale: float,
        names: torch.Tensor | None = None,
    ) -> "Draw":
        """
        Decide which rows of a microbatch are collected.

        Args:
            real (`torch.Tensor`): `[B, T]`, which positions are not padding.
            sequences ([`Sequences`]): the sequences.
            keys (`torch.Tensor`): `[m]`, by which a sequence is known within the step, however that is cut.
            loss_scale (`float`): constant that the loss carries.
            names (`torch.Tensor`, *optional*): `[m]`, by which a sequence is known in the next step, too.
        """
        self._wait()
        self._place_loaded(real.device)
        if self._loss_scale is None:
            self._loss_scale = loss_scale
        salt = reservoir.salt(self.seed, self.closed_steps)
        there, rows = reservoir.grid(real, sequences)
        return Draw(
            self,
            reservoir.position_priorities(there, keys, salt),
            rows,
            lambda: reservoir.sequence_priorities(there, keys, salt),
            self._loss_scale / loss_scale,
            sequences,
            names,
        )

    def is_held(self, layer: int) -> bool:
        """Whether there are rows of the layer from the step before."""
        if self._loaded is not None:
            return layer in self._loaded["rows"]
        return layer in self.layers and self.layers[layer].held is not None

    def held(self, layer: int) -> SampleRows | None:
        """The rows of the layer from the step before, if there are any."""
        found = self.layers.get(layer)
        return None if found is None else found.held

    def sequences_of(self, elements: int) -> int:
        """How many sequences' gradients of so many elements are collected of a layer; 0 where that is too few."""
        number = min(self.samples, self._share // max(elements, 1))
        return number if number >= min(self.samples, FEWEST_SEQUENCES) else 0

    def layer(self, index: int, rows: Callable[[], Buffers], sequences: int = 0) -> LayerRows:
        """The rows of a layer, made when first asked for, of the shapes and types of its `rows()` `[N, ...]`."""
        found = self.layers.get(index)
        if found is not None and found.is_verified:  # every layer asks in every microbatch
            return found
        like = rows()
        if found is None:
            # Vectors are small: they are collected as they were summed
            types = {name: x.dtype if "a" in like else accumulation_dtype(x.dtype) for name, x in like.items()}
            slots = sequences or self.samples
            shapes = {name: (slots, *x.shape[1:]) for name, x in like.items()}
            buffers = {name: x.new_zeros(shapes[name], dtype=types[name]) for name, x in like.items()}
            found = self.layers[index] = LayerRows(buffers, sequences)
        for name, x in like.items():
            if name not in found.collected or found.collected[name].shape[1:] != x.shape[1:]:
                before = {name: list(x.shape[1:]) for name, x in found.collected.items()}
                raise RuntimeError(
                    f"Layer {index} has rows of shape {list(x.shape[1:])}, but before it had {before}: if the "
                    "run was resumed, the checkpoint is of another model; else set fisher_scope='microbatch'."
                )
        found.is_verified = True
        return found

    def commit(self, draw: "Draw", unreached: Sequence[int]) -> None:
        """
        The microbatch has been all through the layers, and its rows are in their slots. At `unreached` layers, to
        which its backward did not come, its positions have no gradient.
        """
        for index in unreached:
            if index in self.layers:
                layer = self.layers[index]
                Slots(layer.collected, draw.source(layer.sequences)).put_nothing()
        for sequences, (priorities, source) in draw.outcomes.items():
            self.priorities[sequences] = priorities
            names, before = draw.names_of(source, sequences), self._names.get(sequences)
            self._names[sequences] = names if before is None else torch.where(source.keeps, before, names)

    # One step

    def restart(self) -> None:
        """Forget what this step has collected: a microbatch was broken off, or its numbers are not finite."""
        self.priorities, self._names = {}, {}
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}  # of one type, many are filled by few launches
        for layer in self.layers.values():
            for x in layer.collected.values():
                by_type.setdefault(x.dtype, []).append(x)
        for buffers in by_type.values():
            torch._foreach_zero_(buffers)

    def close(self, keep: bool = True) -> None:
        """
        Close an optimizer step, on every rank: the next step goes by the best rows of all ranks; or, if
        not `keep`, those of the last step stay, and the step is not counted: not every way of training makes it.
        """
        if keep and self.layers:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._exchange_between_ranks()
            else:
                for layer in self.layers.values():
                    layer.exchange()
                self.held_names = self._names
            self.closed_steps += 1
        self.restart()

    def _exchange_between_ranks(self) -> None:
        """Give all ranks the same rows: those of the best priorities, each of which one rank has."""
        device = next(iter(next(iter(self.layers.values())).collected.values())).device
        orders = {
            sequences: self._order(sequences, device)
            for sequences in sorted({layer.sequences for layer in self.layers.values()})
        }
        alike: dict[tuple, list[tuple[int, str]]] = {}  # of one shape, so that few launches serve many layers
        for index, layer in sorted(self.layers.items()):
            for name, x in layer.collected.items():
                alike.setdefault((layer.sequences, x.dtype, x.shape), []).append((index, name))
        found: dict[int, Buffers] = {index: {} for index in self.layers}
        for (sequences, _, shape), members in alike.items():
            rows, others = orders[sequences]
            chosen = torch.stack([self.layers[index].collected[name] for index, name in members])
            chosen = chosen.index_select(1, rows)
            chosen.masked_fill_(others.view(1, -1, *[1] * (len(shape) - 1)), 0)
            # Awaited when the next microbatch begins; meanwhile the optimizer steps
            self._exchange.append(dist.all_reduce(chosen, async_op=True))
            for (index, name), x in zip(members, chosen, strict=True):
                found[index][name] = x
        for index, layer in self.layers.items():
            layer.held = SampleRows(**found[index])

    def _order(self, sequences: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of this rank's rows goes to each slot, `[n]`, and which slots are not this rank's to fill."""
        slots, nobody = sequences or self.samples, (reservoir.ABSENT, UNNAMED_BEFORE)
        if sequences in self.priorities:
            own = torch.stack([self.priorities[sequences], self._names[sequences]])
        else:  # no layer of this set was reached here
            own = torch.tensor(nobody, device=device).unsqueeze(1).repeat(1, slots)
        everyone = own.new_empty(dist.get_world_size() * 2, slots)
        dist.all_gather_into_tensor(everyone, own)
        priorities, names = everyone[0::2].flatten(), everyone[1::2].flatten()
        # In the order of priority, so that slots are the same however the step was cut
        values, places = priorities.topk(slots, largest=False)
        self.held_names[sequences] = names[places]
        mine = (places // slots == dist.get_rank()) & (values != reservoir.ABSENT)
        return places % slots, ~mine

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
        rows = {index: layer.held.fields for index, layer in sorted(self.layers.items()) if layer.held is not None}
        return {
            "closed_steps": self.closed_steps,
            "samples": self.samples,
            "loss_scale": self._loss_scale,
            "sequences": {index: self.layers[index].sequences for index in rows},
            "names": {sequences: x.cpu() for sequences, x in self.held_names.items()},
            # Copies, since what is held is written over
            "rows": {index: {name: x.to("cpu", copy=True) for name, x in of.items()} for index, of in rows.items()},
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Go on from what was saved; returns whether its rows can be used, which takes the same number of them."""
        self._wait()
        self._begin()
        if state is None:
            return False
        self.closed_steps = state["closed_steps"]
        if not state["rows"] or state["samples"] != self.samples:
            return not state["rows"]  # saved before there were any: as it would have gone on
        self._loss_scale, self._loaded = state["loss_scale"], state
        return True

    def _place_loaded(self, device: torch.device) -> None:
        state, self._loaded = self._loaded, None
        if state is not None:
            for index, rows in state["rows"].items():
                layer = LayerRows(
                    {name: x.to(device, copy=True) for name, x in rows.items()}, state["sequences"][index]
                )
                layer.exchange()
                self.layers[index] = layer
            self.held_names = {sequences: x.to(device) for sequences, x in state["names"].items()}
            self.restart()


@dataclass
class Draw:
    """
    What is collected of one microbatch.

    Args:
        rows_of_layers ([`FisherRows`]): where it goes.
        priorities, rows (`torch.Tensor`): `[m, T]`, of its positions.
        of_sequences (`Callable`): returns priorities `[m]` of whole sequences, which few models need.
        factor (`float`): that makes its rows comparable with the others'.
        sequences ([`Sequences`]): its sequences.
        names (`torch.Tensor`, *optional*): `[m]`, by which a sequence is known in other steps; see [`name`].

    Attributes:
        samples ([`Samples`]): the best positions of this microbatch alone, for layers that have no rows from before.
        outcomes (`dict`): of positions (0), and of numbers of whole sequences, the priorities of the slots, and what
            each of them gets.
    """

    rows_of_layers: FisherRows
    priorities: torch.Tensor
    rows: torch.Tensor
    of_sequences: Callable[[], torch.Tensor]
    factor: float
    sequences: Sequences
    names: torch.Tensor | None = None
    samples: Samples = field(init=False)
    outcomes: dict[int, tuple[torch.Tensor, reservoir.Source]] = field(init=False, default_factory=dict)
    _slots: torch.Tensor | None = field(init=False, default=None)
    _own: dict[int, torch.Tensor | None] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.offered, self.samples = reservoir.best(self.priorities, self.rows, self.rows_of_layers.samples)
        self.source()

    def name(self, ids: torch.Tensor) -> None:
        """Name the sequences by their tokens, `ids` `[B, T]`, unless they have names, or these are other positions."""
        if self.names is None and ids.numel() == self.sequences.rows:
            tokens = ids.reshape(-1)[self.rows.clamp(min=0)]
            self.names = reservoir.content_keys(tokens, self.priorities != reservoir.ABSENT)

    def names_of(self, source: reservoir.Source, sequences: int = 0) -> torch.Tensor:
        """Names `[n]` of the sequences that slots get rows of, whatever it is where they get none."""
        if self.names is None:
            return torch.full_like(source.numbers, UNNAMED_BEFORE)
        numbers = source.rows
        if not sequences:
            ids = self.sequences.ids
            numbers = numbers // self.sequences.length if ids is None else ids[numbers]
        return self.names[numbers]

    @cached_property
    def names_of_rows_and_sequences(self) -> torch.Tensor | None:
        """`[n + m]`, the names of the sequences of rows from before, and of this microbatch's; `None` without rows."""
        before = self.rows_of_layers.held_names.get(0)
        return None if before is None else torch.cat([before, self._named()])

    def own(self, index: int) -> torch.Tensor | None:
        """`[n, m]`, which rows from before of layer `index` are a sequence's own; `None` without rows from before."""
        found = self.rows_of_layers.layers.get(index)
        if found is None or found.held is None:
            return None
        if found.sequences not in self._own:
            before = self.rows_of_layers.held_names.get(found.sequences)
            own = None if before is None else before.unsqueeze(1) == self._named()
            self._own[found.sequences] = own
        return self._own[found.sequences]

    def _named(self) -> torch.Tensor:
        return self.rows.new_full((len(self.rows),), UNNAMED) if self.names is None else self.names

    def source(self, sequences: int = 0) -> reservoir.Source:
        """What each slot gets: of positions, or of so many whole sequences."""
        if sequences not in self.outcomes:
            slots = sequences or self.rows_of_layers.samples
            offered, samples = self.offered, self.samples
            if sequences:
                of_sequences = self.of_sequences()
                numbers = torch.arange(len(of_sequences), device=of_sequences.device)
                offered, samples = reservoir.best(of_sequences, numbers, slots)
            before = self.rows_of_layers.priorities.get(sequences)
            if before is None:
                priorities, numbers = reservoir.placed(offered, samples, slots)
            else:
                priorities, numbers = reservoir.replaced(before, offered, samples.rows)
            self.outcomes[sequences] = priorities, reservoir.Source(numbers, fills=True)
        return self.outcomes[sequences][1]

    def collect(self, index: int, rows: Buffers, sequences: int = 0) -> None:
        """
        Copy what the next step needs of a layer's `rows` `[N, ...]`.

        Args:
            index (`int`): the layer.
            rows (`dict[str, torch.Tensor]`): by the names of the fields of [`SampleRows`].
            sequences (`int`): if not 0, rows are those of whole sequences, of which so many are collected.
        """
        layer = self.rows_of_layers.layer(index, lambda: rows, sequences)
        Slots(layer.collected, self.source(sequences), self.factor).put_all(rows)

    def into(self, index: int, g: torch.Tensor, a: torch.Tensor) -> Into | None:
        """
        Where a kernel puts a linear layer's rows while it measures them; `None` where there are no rows from before to
        measure with, or rows are not copied as they are.
        """
        layer = self.rows_of_layers.layer(index, lambda: {"g": g, "a": a})
        if self.factor != 1 or layer.held is None or not layer.held.are_of(g.dtype):
            return None
        return layer.collected["g"], layer.collected["a"], self.source().numbers

    def into_vectors(self, index: int, like: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where a kernel puts the rows of an elementwise parameter like `[..., d]`: slots, and the one of each row."""
        if self.factor != 1 or self.rows_of_layers.held(index) is None:
            return None
        if self._slots is None:
            source = self.source().numbers
            numbers = torch.arange(len(source), dtype=torch.int32, device=source.device)
            slots = torch.full((rows + 1,), -1, dtype=torch.int32, device=source.device)
            # Slots that get none all write to the spare last row
            self._slots = slots.scatter(0, torch.where(source < 0, rows, source), numbers)[:rows]
        return self._vectors(index, like), self._slots

    def collect_samples(self, index: int, v: torch.Tensor, rows: int) -> None:
        """Collect rows of an elementwise parameter, given at the microbatch's `samples`, `[n, d]`, of so many rows."""
        self.source().moved(self.samples.slots(rows).long()).put(self._vectors(index, v), v, self.factor)

    def _vectors(self, index: int, like: torch.Tensor) -> torch.Tensor:
        return self.rows_of_layers.layer(index, lambda: {"g": like.new_empty(0, like.shape[-1])}).collected["g"]

    def in_parts(self, index: int, like: Buffers, row_of: torch.Tensor) -> "Slots":
        """
        Where the rows of a layer go that come part by part.

        Args:
            index (`int`): the layer.
            like (`dict[str, torch.Tensor]`): `[0, ...]`, what its rows look like.
            row_of (`torch.Tensor`): `[N]`, the row of each position at this layer; `-1` where it has none.
        """
        buffers = self.rows_of_layers.layer(index, lambda: like).collected
        return Slots(buffers, self.source().moved(row_of), self.factor)

    def collect_routed(
        self, index: int, g: torch.Tensor, a: torch.Tensor, choices: torch.Tensor, places: torch.Tensor
    ) -> None:
        """
        Collect the rows of a stack of experts.

        Args:
            index (`int`): the stack.
            g, a (`torch.Tensor`): `[S, ...]`, its rows, one for each position and expert that it was sent to.
            choices (`torch.Tensor`): `[N, k]`, the experts of each position.
            places (`torch.Tensor`): `[N k]`, the row of each of these.
        """
        k, source = choices.shape[1], self.source()

        def like() -> Buffers:
            by_choice = {name: x.new_empty(0, k, x.shape[1]) for name, x in (("g", g), ("a", a))}
            return {**by_choice, "choices": choices[:0]}

        buffers = self.rows_of_layers.layer(index, like).collected
        if self.factor == 1 and kernels.take_routed(g, a, buffers):
            kernels.put_routed(buffers, g, a, choices, places, source.numbers)
            return
        source.put(buffers["choices"], choices)
        by_choice = source.numbers.unsqueeze(1)
        rows = torch.where(by_choice < 0, by_choice, places.view(-1, k)[source.rows])
        by_row = {name: buffers[name].flatten(0, 1) for name in ("g", "a")}
        Slots(by_row, reservoir.Source(rows.reshape(-1), fills=True), self.factor).put_all({"g": g, "a": a})


@dataclass
class Slots:
    """
    Where one layer's rows of a microbatch go.

    Args:
        buffers (`dict[str, torch.Tensor]`): `[n, ...]`, by the names of the fields of [`SampleRows`].
        source ([`~geometry.reservoir.Source`]): what each slot gets.
        factor (`float`): what cotangents are multiplied by.
    """

    buffers: Buffers
    source: reservoir.Source
    factor: float = 1.0

    def put_all(self, rows: Buffers) -> None:
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
