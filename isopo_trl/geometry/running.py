"""Running means of the statistics, per layer, and the figures that are reported of a step."""

from typing import Any

import torch
import torch.distributed as dist

from .cost import Needs


# What a rule may refer to, in the order in which it is stored; x is F, or N for a rule without F
EXPECTATIONS = ("fisher^2", "norm^2", "relative^2", "fx", "x")
# What a microbatch records of each layer and sequence
RECORDED = ("c", "fisher", "norm", "raw", "multiplier", "alive", "broken")


class RunningStatistics:
    """
    Exponential means, over optimizer steps, of a step's mean over its sequences; one row a layer.

    A step's mean is over the sequences, of all microbatches and ranks, that have a gradient at the layer; a layer
    where none has (LoRA's A while B is zero) keeps its history. Everything stays on the device: `step` talks to the
    other ranks, `metrics` to the host.

    Args:
        layers (`int`): number of layers, L.
        decay (`float`): weight of the past, 0.9 in the paper.
        needs ([`Needs`]): the statistics that the rule computes; its `x` is the Fisher norm, if that is among them.
        device (`torch.device`): where the statistics live.
        dtype (`torch.dtype`): their precision.
    """

    # Behind the sums of EXPECTATIONS: the number of sequences and the sums that are only reported
    _COUNT = len(EXPECTATIONS)
    _REPORTED = ("fisher", "norm", "relative", "|c|", "c^2", "multiplier", "has multiplier")

    def __init__(self, layers: int, decay: float, needs: Needs, device: torch.device, dtype: torch.dtype):
        self.decay = decay
        self.needs = needs
        self.mean = torch.zeros(layers, len(EXPECTATIONS), device=device, dtype=dtype)
        self.known = torch.zeros(layers, device=device, dtype=torch.bool)
        self._start_step()
        self._finished = (self._sums, self._extremes, self._broken)

    def _start_step(self) -> None:
        self._sums = self.mean.new_zeros(len(self.mean), self._COUNT + 1 + len(self._REPORTED))
        self._extremes = self.mean.new_full((2,), -torch.inf)  # of -f and f
        self._broken = self.mean.new_zeros(1)

    def add(self, record: torch.Tensor) -> None:
        """Take in one microbatch: `record` `[L, 7, m]`, rows `RECORDED`."""
        c, fisher, norm, raw, multiplier, alive, broken = record.unbind(1)
        alive = alive.bool()
        relative = torch.where(norm > 0, fisher / torch.where(norm > 0, norm, 1), 0)
        x = fisher if self.needs.overlap else norm
        expectations = (fisher.square(), norm.square(), relative.square(), raw * x, x)
        defined = alive & ~torch.isnan(multiplier)
        reported = (fisher, norm, relative, c.abs(), c.square(), torch.where(defined, multiplier, 0), defined)
        terms = torch.stack([*expectations, torch.ones_like(x), *reported], dim=1)
        # Sequences without a gradient, and broken ones, are left out: nothing non-finite gets in
        self._sums = self._sums + torch.where(alive.unsqueeze(1), terms, 0).sum(-1)
        extremes = torch.where(defined, torch.stack([-multiplier, multiplier]), -torch.inf)
        self._extremes = torch.maximum(self._extremes, extremes.amax((1, 2)))
        self._broken = self._broken + broken.bool().any(0).sum()

    def step(self) -> None:
        """Close an optimizer step: sum over ranks, update the running means, start the next step."""
        totals = torch.cat([self._sums.flatten(), self._broken])
        extremes = self._extremes
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(totals)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        sums = totals[:-1].view_as(self._sums)
        count = sums[:, self._COUNT : self._COUNT + 1]
        seen = count > 0
        step_mean = sums[:, : self._COUNT] / count.clamp(min=1)
        first = seen & ~self.known.unsqueeze(1)
        later = torch.where(seen, self.decay * self.mean + (1 - self.decay) * step_mean, self.mean)
        self.mean = torch.where(first, step_mean, later)
        self.known = self.known | seen.squeeze(1)
        self._finished = (sums, extremes, totals[-1:])
        self._start_step()

    def metrics(self) -> dict[str, float]:
        """
        Figures of the last closed step over its layers and sequences; one transfer to the host.

        `multiplier_mean`, `_min`, `_max`: of `f`; `effective_sequences`: participation ratio `(sum |c|)^2 / sum c^2`,
        mean over layers; `fisher_norm`, `euclidean_norm`, `relative_norm`: mean `F`, `N`, `F / N`, those that the rule
        computes; `broken_sequences`: number of sequences with a non-finite statistic somewhere.
        """
        sums, extremes, broken = self._finished
        count = sums[:, self._COUNT].sum().clamp(min=1)
        fisher, norm, relative, absolute, square, multiplier, defined = sums[:, self._COUNT + 1 :].unbind(1)
        participating = square > 0
        participation = torch.where(participating, absolute.square() / torch.where(participating, square, 1), 0)
        values = {
            "multiplier_mean": multiplier.sum() / defined.sum().clamp(min=1),
            "multiplier_min": torch.where(defined.sum() > 0, -extremes[0], 0),
            "multiplier_max": torch.where(defined.sum() > 0, extremes[1], 0),
            "effective_sequences": participation.sum() / participating.sum().clamp(min=1),
            "broken_sequences": broken[0],
        }
        if self.needs.overlap:
            values["fisher_norm"] = fisher.sum() / count
        if self.needs.norm or self.needs.ntk:
            values["euclidean_norm"] = norm.sum() / count
        if self.needs.overlap and self.needs.norm:
            values["relative_norm"] = relative.sum() / count
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.cpu(), "known": self.known.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"].to(self.mean)
        self.known = state["known"].to(self.known)
