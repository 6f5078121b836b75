"""What the backward of every layer needs to know about the microbatch it is part of."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .fisher_rows.rows import Draw
from .geometry.cost import Needs
from .geometry.sequences import SampleRows, Samples, Sequences
from .geometry.statistics import Direction, Statistics
from .kernels.coefficients import Entry, KernelLedger, statistics_are_in_kernels
from .kernels.launch import is_here
from .kernels.rms_norm import Factors
from .rules.direction import GivenDirection
from .rules.ledger import Ledger
from .rules.rule import Rule
from .rules.running import RunningStatistics
from .rules.stacked import stacked_coefficients


_NOT_PROJECTED = (
    "Gradients are to be projected on a direction, but a kind of layer of one's own does not do so: its forward has "
    "to call `microbatch.note_parameters`, and its backward to hand `microbatch.direction_of` to what makes its "
    "statistics (`rescaled_linear` does both). Or take a rule that asks for no direction."
)


@dataclass
class Microbatch:
    """
    One microbatch: its sequences, samples and advantages, and what its backward pass recorded.

    Layers hold on to it through their autograd context, so a backward that runs on another thread, or after the next
    forward has begun, still finds its own.

    Args:
        shape (`tuple[int, int]`): `(B, T)`, the shape of the token positions that the model sees.
        sequences ([`Sequences`]): which of the `B T` rows belong to which sequence.
        samples ([`Samples`], *optional*): sampled positions, where the rule needs them.
        advantages (`torch.Tensor`): `[m]`, the part of the advantages that is not in the loss.
        rule ([`Rule`]): the rule.
        running ([`RunningStatistics`]): the running means as they were when the microbatch began.
        loss_scale (`float`): constant that the loss carries.
        scored (`torch.Tensor`, *optional*): `[B, C]`, which of the last `C` predictions (positions `T - 1 - C` to `T -
            2`) are scored by TRL's chunked log-probabilities.
        first_scored (`torch.Tensor`, *optional*): `[B]`, the position of the first of them, where it is another one.
        prompts, signs (`torch.Tensor`, *optional*): `[m]`, for figures, see [`Ledger`].
        draw ([`Draw`], *optional*): which of its rows are collected for the next step, under `fisher_scope="step"`.
        direction ([`GivenDirection`], *optional*): on which gradients are projected, where anybody asks for that.

    Attributes:
        needs ([`Needs`]): the statistics to compute.
        ledger ([`Ledger`]): the coefficients so far.
        visits (`list[int]`): how often the backward pass came to each layer.
        closed (`bool`): whether the microbatch is over.
        lends (`bool`): whether views of parameters may stand in their place (`layers.any_module`).
        entered (`list[int]`): layers whose forward has run since, in that order.
        in_graph (`list[torch.Tensor]`): a trained parameter of each layer in the graph.
        in_term (`bool`): whether the backward under way is that of a term that carries no advantage.
        visits_of_terms (`list[int]`): how often the backward of such a term came to each layer; empty where there was
            none.
        recomputes (`bool`): whether, in the backward of such a term, a layer's forward has run again: then what the
            graph needs is not in memory, but made once more (gradient checkpointing).
        rule_is_in_kernels (`bool`): whether Triton's kernels know the rule's formula, or its statistics alone.
        factors ([`Factors`]): memory for what norms keep for their backward.
    """

    shape: tuple[int, int]
    sequences: Sequences
    samples: Samples | None
    advantages: torch.Tensor
    rule: Rule
    running: RunningStatistics
    loss_scale: float = 1.0
    scored: torch.Tensor | None = None
    first_scored: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    draw: Draw | None = None
    direction: GivenDirection | None = None
    needs: Needs = field(init=False)
    ledger: Ledger = field(init=False)
    visits: list[int] = field(init=False)
    closed: bool = field(init=False, default=False)
    lends: bool = field(init=False, default=False)
    entered: list[int] = field(init=False, default_factory=list)
    in_graph: list[torch.Tensor] = field(init=False, default_factory=list)
    in_term: bool = field(init=False, default=False)
    visits_of_terms: list[int] = field(init=False, default_factory=list)
    recomputes: bool = field(init=False, default=False)
    rule_is_in_kernels: bool = field(init=False)
    factors: Factors = field(init=False, default_factory=Factors)
    _kernel_ledger: KernelLedger | None = field(init=False, default=None)
    _kernels_measure: dict[torch.dtype, bool] = field(init=False, default_factory=dict)
    _parameters: dict[int, tuple[torch.Tensor, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.needs = self.rule.needs if self.direction is None else self.rule.needs._replace(direction=True)
        self.visits = [0] * len(self.running.mean)
        self.rule_is_in_kernels = self.rule.kernel_form is not None
        self.ledger = self.running.open(self.advantages, self.loss_scale)
        self.ledger.prompts, self.ledger.signs = self.prompts, self.signs

    # Inside a layer's forward

    def add_to_graph(self, module: nn.Module) -> None:
        """Note a trained parameter of a layer in the graph, through which the layer's backward can be asked for."""
        self.recomputes = self.recomputes or self.in_term
        # As the module has it now: FSDP exchanges parameters between forward and backward
        for p in module._parameters.values():
            if p is not None and p.requires_grad:
                self.in_graph.append(p)
                return

    def note_parameters(self, index: int, *parameters: Any) -> None:
        """
        Note the trained parameters of layer `index`, or the views of them that it works with, in the order of its
        gradients: [`direction_of`] is that of these. `None` and what is not trained is left out.
        """
        if self.direction is not None:
            self._parameters[index] = tuple(p for p in parameters if p is not None and p.requires_grad)

    # Inside a layer's backward

    def direction_of(self, index: int) -> Direction | None:
        """The direction of layer `index`, a tensor for each of its trained parameters, where there is one."""
        if self.direction is None:
            return None
        if index not in self._parameters:
            raise RuntimeError(_NOT_PROJECTED)
        if not self.direction.is_there:
            return None
        parameters = self._parameters[index]
        found = [self.direction.seen_as(p) for p in parameters]
        if all(D is None for D in found):
            return None
        return tuple(torch.zeros_like(p) if D is None else D for p, D in zip(parameters, found, strict=True))

    def kernels_take(self, x: torch.Tensor) -> bool:
        """Whether Triton's kernels can take a layer's rows `x` `[N, features]`, and make the rule's coefficients."""
        return self.rule_is_in_kernels and self.kernels_measure(x)

    def kernels_measure(self, x: torch.Tensor) -> bool:
        """Whether they can take its statistics, whatever the rule makes of them."""
        known = self._kernels_measure.get(x.dtype)
        if known is None:
            m, n = self.sequences.count, 0 if self.samples is None else self.samples.number
            if self.draw is not None:
                n = self.draw.rows_of_layers.samples
            # Kernels are given addresses, and would not notice what is elsewhere
            data = [self.advantages] if self.samples is None else [self.advantages, self.samples.rows]
            here = is_here(x) and all(tensor.device == x.device for tensor in data)
            projects = self.rule.needs.direction and self.rule_is_in_kernels  # of others, PyTorch does
            known = here and self.sequences.index is None and (projects or not self.needs.direction)
            known = known and statistics_are_in_kernels(x, m, n, self.rule.needs)
            self._kernels_measure[x.dtype] = known
        return known

    def collect(self, index: int, g: torch.Tensor, **rows: torch.Tensor) -> None:
        """
        Copy what the next step is measured with of layer `index`, whose rows in this microbatch are `g` and `rows`, by
        the names of the fields of [`SampleRows`]. Without `fisher_scope="step"`, nothing is.
        """
        if self.draw is not None:
            self.draw.collect(index, {"g": g, **rows})

    def collect_sequences(self, index: int, V: torch.Tensor) -> None:
        """Copy what the next step is measured with, where samples are gradients of whole sequences, `V` `[m, d]`."""
        if self.draw is not None:
            number = self.draw.rows_of_layers.sequences_of(V.shape[1])
            if number:
                self.draw.collect(index, {"g": V}, number)

    def held(self, index: int) -> SampleRows | None:
        """The rows of the last step that layer `index` is measured with, if there are any."""
        return None if self.draw is None else self.draw.rows_of_layers.held(index)

    def samples_of(self, index: int) -> Samples | SampleRows | None:
        """What layer `index` is measured with: rows of the last step, or else positions of this microbatch."""
        return self.samples if self.draw is None else self.draw.rows_of_layers.held(index) or self.samples

    def open_entry(self, index: int, count: int = 1) -> Entry:
        """
        Note that the backward has come to layer `index`, or to a stack of so many from there on, and say where a
        kernel enters their coefficients.
        """
        self._visit(index, count)
        return self.entry(index)

    def entry(self, index: int) -> Entry:
        """Where kernels find the coefficients of layer `index`, once they are entered."""
        if self._kernel_ledger is None:
            names = None if self.draw is None else self.draw.names_of_rows_and_sequences
            unit = 1.0 if self.direction is None else self.direction.unit
            self._kernel_ledger = KernelLedger(self.ledger, names, unit)
        return Entry(self._kernel_ledger, index)

    def coefficients(self, index: int, statistics: Statistics) -> torch.Tensor:
        """Coefficients `[m]` of layer `index`, to which the backward has come; entered for means and log."""
        self._visit(index)
        history = self.running.expectations(index)
        statistics = self._along(index, self._with_own(index, statistics), self.ledger.advantages)
        result = self.rule.coefficients(statistics, self.ledger.advantages, history, self.loss_scale)
        self.ledger.record(index, result, statistics.ntk, statistics.projection)
        return result.c

    def stack_coefficients(self, indices: range, statistics: Statistics) -> torch.Tensor:
        """Coefficients `[E, m]` of the layers of a stack; `statistics` have a first dimension `E`."""
        self._visit(indices.start, len(indices))
        entries = slice(indices.start, indices.stop)
        history, known = self.running.history[entries], self.running.serves[entries]
        along = self.ledger.advantages.expand(len(indices), -1)
        statistics = self._along(indices.start, self._with_own(indices.start, statistics), along)
        result = stacked_coefficients(self.rule, statistics, self.ledger.advantages, history, known, self.loss_scale)
        self.ledger.record(entries, result, statistics.ntk, statistics.projection)
        return result.c

    def _with_own(self, index: int, statistics: Statistics) -> Statistics:
        """The statistics of layer `index`, with what is said about samples from before."""
        own = None if self.draw is None or statistics.overlap is None else self.draw.own(index)
        if own is None:
            return statistics
        assert statistics.overlap is not None
        added = statistics.overlap.shape[-2] - len(own)  # samples that only fill up
        return replace(statistics, own=functional.pad(own, (0, 0, 0, added)) if added else own)

    def _along(self, index: int, statistics: Statistics, like: torch.Tensor) -> Statistics:
        """The statistics of layer `index`, with the projections in their unit; zero where there is no direction."""
        if self.direction is None:
            return statistics
        projection = statistics.projection
        if projection is None and self.direction_of(index) is not None:
            raise RuntimeError(_NOT_PROJECTED)
        if projection is None:
            return replace(statistics, projection=torch.zeros_like(like))
        return replace(statistics, projection=projection * self.direction.unit)

    def _visit(self, index: int, count: int = 1) -> None:
        if self.closed:
            raise RuntimeError(
                "A backward pass ran after its microbatch had ended: call `backward` before `end`, or inside the "
                "`microbatch` context."
            )
        visits = self.visits
        visits[index] += 1
        if count > 1:
            for other in range(index + 1, index + count):
                visits[other] += 1

    # Terms without an advantage

    def visit_in_term(self, *indices: int) -> None:
        """Note that the backward of a term has come to these layers."""
        visits = self.visits_of_terms
        for index in indices:
            visits[index] += 1

    def backward_of_term(self, term: torch.Tensor) -> None:
        """
        Run the backward of a loss `term` (a scalar) that carries no advantage, and keep what the parameters get of it
        until the loss's own.
        """
        self.visits_of_terms = self.visits_of_terms or [0] * len(self.visits)
        self.in_term = self.ledger.beside_terms = True
        try:
            # Asked for as the gradient of parameters, so that it is returned (as None) instead of accumulated
            torch.autograd.grad(term, self.in_graph, retain_graph=True, allow_unused=True)
        finally:
            self.in_term = False

    def keeps_rows(self, g: torch.Tensor, a: torch.Tensor, experts: int = 1) -> bool:
        """
        Whether a layer that the backward of a term has come to keeps its cotangents `g` `[N, p]`, instead of the
        gradients that they make with its inputs `a` `[N, d]`, `experts` times `[p, d]`: that product need not be made
        then. It does where they are no larger than the gradients, or than the inputs, which are in memory unless they
        are recomputed.
        """
        d = a.shape[1]
        return len(g) <= experts * d or (g.shape[1] <= d and not self.recomputes)

    # The layout of positions

    def rows(self, name: str, x: torch.Tensor, features: int = 1) -> torch.Tensor:
        """View a layer's tensor, positions first, as rows `[N, ...]`; `features` counts the dimensions behind them."""
        self.verify_positions(name, x, features)
        return x.reshape(self.sequences.rows, *x.shape[x.dim() - features :])

    def verify_positions(self, name: str, x: torch.Tensor, features: int = 1) -> None:
        """Raise if the positions of `x` are not the microbatch's: then rows cannot be told apart by sequence."""
        positions = x.shape[: x.dim() - features]
        if positions == self.shape:
            return
        B, T = self.shape
        # [B, 1, T] is how DeepSeek's attention has them
        if positions not in ((B * T,), (1, B * T), (B, 1, T)):
            raise RuntimeError(
                f"{name} got positions of shape {tuple(positions)}, but the microbatch has {B} x {T}: check that "
                "`attention_mask` has the shape of `input_ids`; if it has, ISOPO cannot tell which sequence this "
                "layer's rows belong to, so freeze its parameters, or leave it out of the LoRA targets."
            )


@dataclass
class CurrentMicrobatch:
    """The place where layers find the microbatch under way, if there is one, and whether they are run in float32."""

    microbatch: Microbatch | None = None
    in_float32: bool = False
