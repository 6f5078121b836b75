r"""
Rules in which sequences do not look at each other: `c_s = A_s f_s`.

With `scale="relative"`, `f` is divided by `E[f x] / E[x]`, where `x` is `F`, or `N` for a rule without `F`:
coefficients become dimensionless and of order one, and the step keeps its total Fisher length. `scale="paper"` is the
formula to the letter.

Where no sampled position has a gradient at a layer (a few long prompts before short completions, and the last layers,
which only completions reach; or all samples are the sequence's own), a Fisher norm is not known, and the sequence gets
the layer's mean multiplier: `f = 1` in the relative scale; in the paper's, 0 before there is any history.

A norm that cannot be told from rounding counts as 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..geometry.guarded import alive_sequences, below_noise, mean_over, ratio
from ..geometry.statistics import Statistics, fisher_norm
from .rule import Coefficients, Expectations, Rule


class Norms(NamedTuple):
    """
    The norms of each sequence's gradient that the rule needs, `[m]` each: `F_s`, `N_s`, and `F_s / N_s`, 0 where `N_s`
    is.
    """

    fisher: torch.Tensor | None
    norm: torch.Tensor | None
    relative: torch.Tensor | None


class MeanSquares:
    """
    `E[x^2]` of each of the [`Norms`], a scalar each, by its name (`mean_squares["fisher"]`): the running mean, or the
    microbatch's own before there is any.
    """

    def __init__(self, norms: Norms, history: Expectations | None):
        self._norms, self._history = norms, history
        self._alive = alive_sequences(norms.fisher, norms.norm) if history is None else None

    def __getitem__(self, name: str) -> torch.Tensor:
        place = Norms._fields.index(name)
        if self._history is not None:
            return self._history.mean_square[place]
        x = self._norms[place]
        assert x is not None
        return mean_over(x.square(), self._alive)

    def scale(self, raw: torch.Tensor) -> torch.Tensor:
        """`E[x] / E[f x]` for `f` = `raw`."""
        if self._history is not None:
            return self._history.scale
        x = self._norms.fisher if self._norms.fisher is not None else self._norms.norm
        assert x is not None
        return ratio(mean_over(x, self._alive), mean_over(raw * x, self._alive))


@dataclass(frozen=True, kw_only=True)
class NonInteracting(Rule):
    """
    A rule `c_s = A_s f_s`. A subclass says what it `needs` (`overlap` for `F`, `norm` for `N`, both for `F / N`), its
    `degree`, and `f`.
    """

    @abstractmethod
    def multiplier(self, norms: Norms, mean_squares: MeanSquares) -> torch.Tensor:
        """
        `f_s` `[m]` by the formula to the letter, and 0 for a sequence without a gradient.

        Args:
            norms ([`Norms`]): of each sequence.
            mean_squares ([`MeanSquares`]): of each norm; computed when asked for.
        """

    def coefficients(
        self,
        statistics: Statistics,
        advantages: torch.Tensor,
        history: Expectations | None,
        loss_scale: float = 1.0,
    ) -> Coefficients:
        if not any(self.needs):
            return Coefficients(c=advantages)
        fisher = norm = relative = informed = noise = None
        F = N = None  # without noise
        if self.needs.overlap:
            assert statistics.overlap is not None and statistics.sample_norm is not None
            fisher, informed = fisher_norm(statistics.overlap, statistics.sample_norm, statistics.own)
            fisher = fisher if loss_scale == 1 else fisher / loss_scale
            past = None if history is None else history.mean_square[0]
            noise = below_noise(fisher, past, statistics.overlap.dtype)
            F = fisher.masked_fill(noise, 0)
        if self.needs.norm:
            assert statistics.norm is not None
            norm = statistics.norm.to(advantages.dtype).clamp(min=0).sqrt()
            norm = norm if loss_scale == 1 else norm / loss_scale
            past = None if history is None else history.mean_square[1]
            below = below_noise(norm, past, statistics.norm.dtype)
            N = norm.masked_fill(below, 0)
            noise = below if noise is None else noise | below
        if F is not None and N is not None:
            relative = ratio(F, N)
        norms = Norms(F, N, relative)
        mean_squares = MeanSquares(norms, history)
        raw = self.multiplier(norms, mean_squares)
        mean: torch.Tensor | float = 1.0
        if self.scale == "paper":
            factor = loss_scale**self.degree
            multiplier = raw * factor
            mean = 0.0 if history is None else history.multiplier * factor
        else:
            multiplier = raw * mean_squares.scale(raw)
        if informed is not None:
            multiplier = torch.where(informed, multiplier, mean)
        return Coefficients(c=advantages * multiplier, fisher=fisher, norm=norm, raw=raw, noise=noise)
