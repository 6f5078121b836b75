"""Running means of the statistics, per layer, and the figures that are reported of a step."""

import math
from typing import Any

import torch
import torch.distributed as dist

from ..geometry.guarded import ratio
from ..geometry.statistics import Statistics, scalar_dtype
from .diagnostics import Diagnostics
from .ledger import HISTORY, Ledger, expectations_of
from .rule import Expectations, Rule
from .stacked import stacked_coefficients


# What a rule may refer to, in the order in which it is stored; x is F, or N for a rule without F
EXPECTATIONS = ("fisher^2", "norm^2", "relative^2", "fx", "x")
# Sums over sequences that are only reported
_REPORTED = ("fisher", "norm", "relative", "|c|", "c^2", "multiplier", "has multiplier")
_COUNT = len(EXPECTATIONS)
_KNOWN = HISTORY.index("known")


class RunningStatistics:
    """
    Exponential means, over optimizer steps, of a step's mean over its sequences; one row per layer.

    A step's mean is over the sequences, of all microbatches and ranks, that have a gradient at the layer; a layer
    where none has (LoRA's A while B is zero) keeps its history. A layer where every gradient of a step is noise beside
    its history loses it: after an outlier the history, and not the gradients, is what is wrong, and would never change
    again. Everything stays on the device until `step`, which talks to the other ranks and, once, to the host.

    Args:
        layers (`int`): number of layers, L.
        decay (`float`): weight of the past, 0.9 in the paper.
        rule ([`Rule`]): the rule.
        device (`torch.device`): where the statistics live.
        parts (`list[str]`, *optional*): what part of the model each layer is, for [`Diagnostics`].

    Attributes:
        by_rows (`list[bool]`): which layers' Fisher norms are, in this step, measured with rows of the step before.
            Where the history of a layer is of norms that were measured otherwise, the two do not compare: then the
            layer has no history for this step, whose means take its place.
        proportions (`list[float]`): of the step that was closed last, each layer's largest multiplier in units of the
            layer's mean one; 0 for a rule in which sequences look at each other.
        sequences (`float`): of the step that was closed last, how many sequences counted, on all ranks.
    """

    def __init__(self, layers: int, decay: float, rule: Rule, device: torch.device, parts: list[str] | None = None):
        self.decay = decay
        self.rule = rule
        self.mean = torch.zeros(layers, len(EXPECTATIONS), device=device, dtype=scalar_dtype(device))
        self.known = [False] * layers
        self._on_device: tuple[list[bool], torch.Tensor] | None = None  # what was known, and the same as numbers
        self.proportions = [0.0] * layers
        self.sequences = 0.0
        self._diagnostics = Diagnostics(rule, decay, parts or [], self.mean)
        self._is_own = not type(rule).__module__.startswith(f"{__package__}.")  # the user's
        self.by_rows = [False] * layers
        self._of_rows = [False] * layers  # what the history is of
        self._refresh()
        self._start_step()

    def _start_step(self) -> None:
        self._sums = self.mean.new_zeros(len(self.mean), _COUNT + 1 + len(_REPORTED))
        self._extremes = self.mean.new_full((2, len(self.mean)), -torch.inf)  # of -f and f
        self._factor = 1.0  # that multipliers carry for the loss's constant
        self._noise = self.mean.new_zeros(len(self.mean))  # gradients that are there but do not count
        self._broken = self.mean.new_zeros(1)
        self._blamed = self.mean.new_zeros(1)  # layers whose coefficients are broken by a rule of one's own
        self._diagnostics.start_step()
        self._first: list[tuple[torch.Tensor, ...]] = []  # F, N and who counts, of layers that change their metric

    def forget_step(self) -> None:
        """Leave out the microbatches since the last step."""
        self._start_step()

    def open(self, advantages: torch.Tensor, loss_scale: float = 1.0) -> Ledger:
        """A ledger for a microbatch with `advantages` `[m]`, whose loss carries the constant `loss_scale`."""
        self._factor = loss_scale**self.rule.degree
        advantages = advantages.to(self.mean.dtype, copy=True).contiguous()
        return Ledger(self.rule, advantages, self.history, loss_scale)

    def measure_by_rows(self, by_rows: list[bool]) -> None:
        """Set which layers are measured with rows of the step before from here on."""
        if by_rows != self.by_rows:
            self.by_rows = by_rows
            self._refresh()

    @property
    def serves(self) -> list[bool]:
        """Which layers have a history of the norms that they are measured with now."""
        if self.by_rows == self._of_rows:
            return self.known
        each = zip(self.known, self.by_rows, self._of_rows, strict=True)
        return [known and now == before for known, now, before in each]

    def expectations(self, layer: int) -> Expectations | None:
        """The running means that `layer`'s rule refers to; `None` if it has no history that serves."""
        serves = self.known[layer] and self.by_rows[layer] == self._of_rows[layer]
        return expectations_of(self.history[layer]) if serves else None

    def add(self, ledger: Ledger, reached: list[bool]) -> None:
        """Take in one microbatch: the coefficients of the layers that were `reached`."""
        needs, advantages = self.rule.needs, ledger.advantages
        c, fisher, norm, raw, noise = ledger.table.unbind(1)
        has_norms = needs.norm or needs.ntk
        alive = finite = torch.isfinite(c + fisher + norm)
        if needs.overlap:
            alive = alive & (fisher > 0)
        if has_norms:
            alive = alive & (norm > 0)
        if not all(reached):
            alive = alive & torch.tensor(reached, device=c.device).unsqueeze(1)
        noise = alive & (noise != 0)
        alive = alive & ~noise
        defined = alive & (advantages != 0)
        multiplier = torch.where(defined, c / advantages, 0)
        x = fisher if needs.overlap else norm
        # The table has zeros for what the rule does not compute
        relative = ratio(fisher, norm) if needs.overlap and has_norms else torch.zeros_like(c)
        expectations = (fisher.square(), norm.square(), relative.square(), raw * x, x)
        reported = (fisher, norm, relative, c.abs(), c.square(), multiplier, defined)
        terms = torch.stack([*expectations, torch.ones_like(c), *reported], dim=1)
        # Sequences without a gradient, noise and broken ones are left out: nothing non-finite gets in
        self._sums = self._sums + torch.where(alive.unsqueeze(1), terms, 0).sum(-1)
        if self._changing():
            self._first.append((fisher, norm, alive))
        extremes = torch.where(defined, torch.stack([-multiplier, multiplier]), -torch.inf)
        self._extremes = torch.maximum(self._extremes, extremes.amax(2))
        self._noise = self._noise + noise.sum(-1)
        self._broken = self._broken + (~finite).any(0).sum()
        if self._is_own:
            given = torch.isfinite(fisher + norm).all(1) & torch.isfinite(advantages).all()
            if ledger.ntk is not None:
                given = given & torch.isfinite(ledger.ntk).flatten(1).all(1)
            # A rule may keep its norms to itself
            told = (fisher > 0).any(1) if needs.overlap else (norm > 0).any(1)
            self._blamed = self._blamed + (given & told & (~torch.isfinite(c)).any(1)).sum()
        self._diagnostics.add(ledger, alive)

    def step(self, grad_norm: torch.Tensor | None = None) -> dict[str, float]:
        """
        Close an optimizer step: sum over ranks, update the running means, start the next step.

        Args:
            grad_norm (`torch.Tensor`, *optional*): scalar, norm of the step's gradient, to be read along.

        Returns the step's figures over its layers and sequences: `multiplier_mean`, `_min`, `_max`: of `f`, under
        `scale="paper"` in units of the layer's mean multiplier (of `1 / c0` for `interacting`);
        `effective_sequences`: participation ratio `(sum |c|)^2 / sum c^2`, mean over layers; `fisher_norm`,
        `euclidean_norm`, `relative_norm`: mean `F`, `N`, `F / N`, those that the rule computes; `broken_sequences`:
        number of sequences with a non-finite statistic or coefficient somewhere; `broken_by_rule`, for a rule that is
        not the package's: number of layers, over microbatches, at which it made coefficients that are not finite of
        statistics that are; `grad_norm`, if it was given; and those of [`Diagnostics`] that are defined.
        """
        diagnostics, ranks = self._diagnostics, 1
        totals = torch.cat([self._sums.flatten(), self._noise, self._broken, self._blamed, diagnostics.sums])
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
            dist.all_reduce(totals)
            dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX)
        sizes = [self._sums.numel(), len(self._noise), 1, 1, len(diagnostics.sums)]
        sums, noise, broken, blamed, others = totals.split(sizes)
        sums = sums.view_as(self._sums)
        count = sums[:, _COUNT]
        step_mean = sums[:, :_COUNT] / count.clamp(min=1).unsqueeze(1)
        decay = self.decay * self.history[:, _KNOWN:]  # a first mean has no past
        if self._changing():
            step_mean = self._of_one_step(step_mean, count)
        updated = decay * self.mean + (1 - decay) * step_mean
        lost = (count == 0) & (noise > 0)
        self.mean = torch.where((count > 0).unsqueeze(1), updated, self.mean.masked_fill(lost.unsqueeze(1), 0))
        figures = self._figures(sums, broken[0])
        if self._is_own:
            figures["broken_by_rule"] = blamed[0]
        if grad_norm is not None:
            figures["grad_norm"] = grad_norm.detach().to(self.mean)
        optional = diagnostics.figures(others, grad_norm, ranks)
        figures |= optional
        # The one transfer to the host
        scalars = torch.stack([*figures.values(), diagnostics.sequences_of(others)])
        values = torch.cat([scalars, count, lost, self._proportions()]).tolist()
        rows, self.sequences = len(count), values[len(figures)]
        seen, forget, self.proportions = (values[len(values) - k * rows :][:rows] for k in (3, 2, 1))
        self.known = [number > 0 or (k and not f) for k, number, f in zip(self.known, seen, forget, strict=True)]
        counted = zip(self._of_rows, self.by_rows, seen, strict=True)
        self._of_rows = [now if number > 0 else before for before, now, number in counted]
        self._refresh()
        self._start_step()
        named = dict(zip(figures, values, strict=False))
        return {name: x for name, x in named.items() if name not in optional or not math.isnan(x)}

    def _changing(self) -> list[bool]:
        """Which layers have a history of norms that were measured otherwise; none of them for an empty list."""
        if self.by_rows == self._of_rows:
            return []
        return [now != before for now, before in zip(self.by_rows, self._of_rows, strict=True)]

    def _of_one_step(self, step_mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """
        A step's means, where those of layers that change their metric refer to the step: `f` in `E[f x]` is
        regularised by its mean squares, not by those of each microbatch. A rule of one's own that looks across
        sequences has no such `f`, and keeps its means.
        """
        if self.rule.needs.ntk or self.rule.needs.direction:
            return step_mean
        history = torch.cat([step_mean[:, :3], torch.ones_like(step_mean[:, :3])], dim=1)
        fx = torch.zeros_like(count)
        for fisher, norm, alive in self._first:
            one = torch.ones_like(fisher[0])
            given = Statistics(overlap=fisher.unsqueeze(1), sample_norm=torch.ones_like(fisher[:, :1]))
            if self.rule.needs.norm:
                given.norm = norm.square()
            raw = stacked_coefficients(self.rule, given, one, history, [True] * len(fisher)).raw
            if raw is not None:
                fx = fx + torch.where(alive, raw * fisher, 0).sum(1)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(fx)
        column = EXPECTATIONS.index("fx")
        changing = self.mean.new_tensor(self._changing()).bool()
        result = step_mean.clone()
        result[:, column] = torch.where(changing, fx / count.clamp(min=1), step_mean[:, column])
        return result

    def _figures(self, sums: torch.Tensor, broken: torch.Tensor) -> dict[str, torch.Tensor]:
        fisher, norm, relative, absolute, square, multiplier, defined = sums[:, _COUNT + 1 :].unbind(1)
        count = sums[:, _COUNT].sum().clamp(min=1)
        extremes = self._extremes
        if self.rule.scale == "paper":
            units = self._units()
            multiplier = ratio(multiplier, units)
            extremes = torch.where(extremes.isinf(), extremes, ratio(extremes, units))
        lowest, largest = extremes.amax(1)
        needs, multipliers = self.rule.needs, defined.sum()
        figures = {
            "multiplier_mean": multiplier.sum() / multipliers.clamp(min=1),
            "multiplier_min": torch.where(multipliers > 0, -lowest, 0),
            "multiplier_max": torch.where(multipliers > 0, largest, 0),
            "effective_sequences": ratio(absolute.square(), square).sum() / (square > 0).sum().clamp(min=1),
            "broken_sequences": broken,
        }
        if needs.overlap:
            figures["fisher_norm"] = fisher.sum() / count
        if needs.norm or needs.ntk:
            figures["euclidean_norm"] = norm.sum() / count
        if needs.overlap and needs.norm:
            figures["relative_norm"] = relative.sum() / count
        return figures

    def _proportions(self) -> torch.Tensor:
        """`[L]`, each layer's largest multiplier of the step, in units of its mean one."""
        largest = self._extremes.amax(0)
        if self.rule.needs.ntk:
            # c_s / A_s is large wherever A_s is small beside its neighbours', and means nothing
            return torch.zeros_like(largest)
        return largest if self.rule.scale == "relative" else ratio(largest, self._units())

    def _units(self) -> torch.Tensor:
        """`[L]`, of the step's multipliers under `scale="paper"`: in these they are what they are in the other."""
        square, fx, x = (self.mean[:, EXPECTATIONS.index(name)] for name in ("norm^2", "fx", "x"))
        if self.rule.needs.ntk:
            # c0 to the right power: c tends to A / c0 as lambda grows
            return self._factor * (getattr(self.rule, "regularization", 1.0) * square) ** (self.rule.degree / 2)
        return self._factor * ratio(fx, x)  # the layer's mean multiplier

    def _refresh(self) -> None:
        x, fx = self.mean[:, EXPECTATIONS.index("x")], self.mean[:, EXPECTATIONS.index("fx")]
        serves = self.serves
        if self._on_device is None or self._on_device[0] != serves:  # the device has nothing to do meanwhile
            self._on_device = (list(serves), self.mean.new_tensor(serves))
        scales = torch.stack([ratio(x, fx), ratio(fx, x), self._on_device[1]], dim=1)
        self.history = torch.cat([self.mean[:, :3], scales], dim=1)  # as HISTORY says

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": self.mean.cpu(),
            "known": self.known,
            "of_rows": self._of_rows,
            "moments": self._diagnostics.moments.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"].to(self.mean)
        self.known = list(state["known"])
        self._diagnostics.moments = state["moments"].to(self.mean)
        self._of_rows = list(state["of_rows"])
        self._refresh()
