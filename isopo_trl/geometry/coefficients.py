r"""
Statistics and advantages -> the coefficient `c_s` in front of each sequence's gradient.

Non-interacting rules (`A_s` the advantage, `F_s` the Fisher norm, `N_s` the Euclidean norm of `V_s`):

    c_s = A_s f_s,    f_s = reg2(F_s)^p reg2(N_s)^q reg2(F_s / N_s)^r,    reg2(x) = sqrt(x^2 + lambda E[x^2])

`keep_small` replaces `reg2(x)` by `sqrt(x^2 / (lambda E[x^2]) + 1)`, which leaves sequences with small `x` alone.

Interacting rule (`K_ij = <V_i, V_j>`):

    c = (K + c0 I)^-1 A,    c0 = lambda E[mean eigenvalue of K] = lambda E[N^2]

`E` is a running mean per layer over the sequences that have a gradient there ([`~geometry.running`]); before there is
any history it is the microbatch's own mean. With `scale="relative"`, `f` is divided by `E[f x] / E[x]`, where `x` is
`F`, or `N` for a rule without `F`, and the interacting `c` is multiplied by `c0`: coefficients become dimensionless
and of order one. `scale="paper"` is the formula to the letter.

A sequence without a gradient (`F_s = 0` or `N_s = 0`) keeps a zero one: `0^-1` counts as 0. Where no sampled position
has a gradient at a layer (a few long prompts before short completions, and the last layers, which only completions
reach), its Fisher norms are not known, and every sequence gets the layer's mean multiplier: `f = 1` in the relative
scale; in the paper's, 0 before there is any history.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from .cost import Needs
from .statistics import Statistics, fisher_norm


# name: (p, q, r)
EXPONENTS: dict[str, tuple[float, float, float]] = {
    "fisher": (-1.0, 0.0, 0.0),
    "npg": (0.0, 0.0, -2.0),
    "fig4": (0.0, -1.0, -2.0),
    "euclidean": (0.0, -1.0, 0.0),
    "none": (0.0, 0.0, 0.0),
}
RULES = (*EXPONENTS, "interacting")
SCALES = ("relative", "paper")
# The kernels count once for a layer, and once for each block of features of an elementwise parameter
COUNTERS = 1024


@dataclass(frozen=True)
class Rule:
    """
    A rule with its settings, validated.

    Args:
        name (`str`): one of `RULES`.
        fisher_power, norm_power, relative_power (`float`, *optional*): p, q, r; default to the rule's.
        regularization (`float`, *optional*): lambda; defaults to 0, and to 1 for `"interacting"`.
        keep_small (`bool`): the variant of `reg2` that leaves small sequences alone.
        scale (`str`): `"relative"` or `"paper"`.
    """

    name: str = "fisher"
    fisher_power: float | None = None
    norm_power: float | None = None
    relative_power: float | None = None
    regularization: float | None = None
    keep_small: bool = False
    scale: str = "relative"

    def __post_init__(self):
        if self.name not in RULES:
            raise ValueError(f"rule={self.name!r} is unknown: choose one of {', '.join(map(repr, RULES))}.")
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} is unknown: choose one of {', '.join(map(repr, SCALES))}.")
        powers = {
            name: getattr(self, name)
            for name in ("fisher_power", "norm_power", "relative_power")
            if getattr(self, name) is not None
        }
        for name, power in powers.items():
            if not abs(power) < float("inf"):
                raise ValueError(f"{name}={power} must be a finite number.")
        if self.interacting and powers:
            raise ValueError(
                f"{next(iter(powers))} has no meaning for rule='interacting', which has no exponents: remove it, or "
                "choose another rule."
            )
        if not 0 <= self.lambda_ < float("inf"):
            raise ValueError(f"regularization={self.regularization} must be a finite number and not negative.")
        if self.interacting and self.lambda_ == 0:
            raise ValueError(
                "regularization=0 leaves the kernel of rule='interacting' singular: set regularization > 0 (1 is the "
                "default)."
            )
        if self.keep_small and (self.interacting or self.lambda_ == 0 or not any(self.exponents)):
            raise ValueError(
                "keep_small=True changes how exponents are regularised, so it needs a rule with an exponent (not "
                f"rule={self.name!r} as set here) and regularization > 0: set both, or keep_small=False."
            )
        if self.regularization and not self.interacting and not any(self.exponents):
            raise ValueError(
                f"regularization={self.regularization} has nothing to regularise in rule={self.name!r} without an "
                "exponent: remove it, or choose another rule."
            )

    @property
    def interacting(self) -> bool:
        return self.name == "interacting"

    @property
    def lambda_(self) -> float:
        return float(self.interacting) if self.regularization is None else float(self.regularization)

    @cached_property
    def exponents(self) -> tuple[float, float, float]:
        """`(p, q, r)`; all zero for the interacting rule."""
        p, q, r = EXPONENTS.get(self.name, (0.0, 0.0, 0.0))
        return (
            p if self.fisher_power is None else float(self.fisher_power),
            q if self.norm_power is None else float(self.norm_power),
            r if self.relative_power is None else float(self.relative_power),
        )

    @cached_property
    def needs(self) -> Needs:
        p, q, r = self.exponents
        return Needs(overlap=p != 0 or r != 0, norm=q != 0 or r != 0, ntk=self.interacting)

    @cached_property
    def traits(self) -> int:
        """What the kernels are compiled for, a bit each: needs, exponents, regularisation, scale."""
        regularization = (self.lambda_ > 0, self.keep_small, self.scale == "paper")
        return sum(bool(trait) << bit for bit, trait in enumerate((*self.needs, *self.exponents, *regularization)))

    @property
    def degree(self) -> float:
        """Power of a constant factor of the loss that the coefficient carries under `scale="paper"`."""
        if self.keep_small:  # a function of x^2 / E[x^2]
            return 0.0
        return -2.0 if self.interacting else self.exponents[0] + self.exponents[1]


class Expectations(NamedTuple):
    """
    What one layer's rule refers to, from its running means.

    Args:
        mean_square (`torch.Tensor`): `[3]`, `E[F^2]`, `E[N^2]`, `E[(F/N)^2]`.
        scale (`torch.Tensor`): scalar, `E[x] / E[f x]`.
        multiplier (`torch.Tensor`): scalar, `E[f x] / E[x]`, the mean multiplier of the formula to the letter.
    """

    mean_square: torch.Tensor
    scale: torch.Tensor
    multiplier: torch.Tensor


class Coefficients(NamedTuple):
    """
    What a layer's backward needs, `c` `[m]`, and what is kept of it for the running means and the log.

    Args:
        c: coefficient of each sequence's gradient.
        fisher: `F_s` `[m]`, `None` where the rule does not ask for it.
        norm: `N_s` `[m]`, likewise.
        raw: `f_s` `[m]` before the scale; `None` where `c` does not come from one.
    """

    c: torch.Tensor
    fisher: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    raw: torch.Tensor | None = None


@dataclass
class Ledger:
    """
    The coefficients of every layer in one microbatch, and what they are made from; all on the device.

    Args:
        rule ([`Rule`]): the rule.
        advantages (`torch.Tensor`): `[m]`.
        history (`torch.Tensor`): `[L, 6]`, the [`Expectations`] of each layer, and 1 where there are any.
        settings (`torch.Tensor`): `[6]`, p, q, r, lambda, one over the constant that the loss carries, and that
            constant to the power of the rule's degree.
        table (`torch.Tensor`): `[L, 4, m]`, the fields of [`Coefficients`], zero where the rule has no such figure.
        counter (`torch.Tensor`): zeros, with which the programs of a kernel find out which of them is the last.
    """

    rule: Rule
    advantages: torch.Tensor
    history: torch.Tensor
    settings: torch.Tensor
    table: torch.Tensor = field(init=False)
    counter: torch.Tensor = field(init=False)

    def __post_init__(self):
        layers, m = len(self.history), len(self.advantages)
        self.table = self.advantages.new_zeros(layers, len(Coefficients._fields), m)
        self.counter = torch.zeros(COUNTERS, device=self.advantages.device, dtype=torch.int32)
        if not any(self.rule.needs):
            self.table[:, 0] = self.advantages
        self.tensors = (self.counter, self.table, self.advantages, self.history, self.settings)
        self.traits = self.rule.traits

    def record(self, index: int, result: Coefficients) -> None:
        """Enter the coefficients of layer `index`."""
        for place, values in enumerate(result):
            if values is not None:
                self.table[index, place] = values


def mean_over(x: torch.Tensor | None, alive: torch.Tensor | None) -> torch.Tensor:
    """Mean of `x` `[m]` over the sequences that are `alive` `[m]`; zero if none is."""
    assert x is not None and alive is not None
    return torch.where(alive, x, 0).sum() / alive.sum().clamp(min=1)


def ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x / y`, and 0 where `y` is 0."""
    return (x / y).masked_fill(y == 0, 0)


def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """`x^exponent` for `x >= 0`, and 0 where `x` is 0 whatever the exponent."""
    return x.pow(exponent).masked_fill(x == 0, 0)


def regularized(x: torch.Tensor, mean_square: torch.Tensor, rule: Rule) -> torch.Tensor:
    """`reg2(x)` with `mean_square` for `E[x^2]`."""
    level = rule.lambda_ * mean_square
    if rule.keep_small:
        return (x.square() / level + 1).sqrt().masked_fill(level == 0, 0)
    return (x.square() + level).sqrt()


def alive_sequences(fisher: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
    """Sequences with a finite, non-zero value of every statistic that there is; `[..., m]`."""
    given = [x for x in (fisher, norm) if x is not None]
    alive = (given[0] > 0) & torch.isfinite(given[0])
    return alive if len(given) == 1 else alive & (given[1] > 0) & torch.isfinite(given[1])


def coefficients(
    statistics: Statistics,
    advantages: torch.Tensor,
    rule: Rule,
    history: Expectations | None,
    loss_scale: float = 1.0,
) -> Coefficients:
    """
    Coefficients of one layer in one microbatch.

    Runs once per layer and backward, so it is written with few operations in mind: what can be computed for all layers
    at once is left to [`~geometry.running.RunningStatistics`].

    Args:
        statistics ([`Statistics`]): what `rule.needs` asks for.
        advantages (`torch.Tensor`): `[m]`, `A_s`, or `|A_s|` where the loss contains the sign already, so that `V_s`
            carries it: every rule is invariant under moving signs from the one to the other.
        rule ([`Rule`]): the rule.
        history ([`Expectations`], *optional*): running means of this layer; `None` before there are any, when the
            microbatch's own means stand in.
        loss_scale (`float`): constant that the loss carries; running means are kept without it, so that a change of it
            from one step to the next (a shorter last accumulation window) is not mistaken for a change of the
            gradients.
    """
    if not any(rule.needs):
        return Coefficients(c=advantages)
    if rule.interacting:
        return _interacting(statistics, advantages, rule, history, loss_scale)
    return _non_interacting(statistics, advantages, rule, history, loss_scale)


def _non_interacting(
    statistics: Statistics, advantages: torch.Tensor, rule: Rule, history: Expectations | None, loss_scale: float
) -> Coefficients:
    fisher = norm = relative = informed = None
    if rule.needs.overlap:
        assert statistics.overlap is not None and statistics.sample_norm is not None
        fisher, informed = fisher_norm(statistics.overlap, statistics.sample_norm)
        fisher = fisher if loss_scale == 1 else fisher / loss_scale
    if rule.needs.norm:
        assert statistics.norm is not None
        norm = statistics.norm.to(advantages.dtype).clamp(min=0).sqrt()
        norm = norm if loss_scale == 1 else norm / loss_scale
    if fisher is not None and norm is not None:
        relative = ratio(fisher, norm)
    alive = alive_sequences(fisher, norm) if history is None else None

    raw = None
    for place, (value, exponent) in enumerate(zip((fisher, norm, relative), rule.exponents, strict=True)):
        if exponent == 0:
            continue
        assert value is not None
        if rule.lambda_ > 0:
            mean_square = mean_over(value.square(), alive) if history is None else history.mean_square[place]
            value = regularized(value, mean_square, rule)
        part = power(value, exponent)
        raw = part if raw is None else raw * part
    assert raw is not None
    mean: torch.Tensor | float = 1.0
    if rule.scale == "paper":
        factor = loss_scale**rule.degree
        multiplier = raw * factor
        mean = 0.0 if history is None else history.multiplier * factor
    elif history is not None:
        multiplier = raw * history.scale
    else:
        x = fisher if fisher is not None else norm
        assert x is not None
        multiplier = raw * ratio(mean_over(x, alive), mean_over(raw * x, alive))
    if informed is not None:
        multiplier = torch.where(informed, multiplier, mean)
    return Coefficients(c=advantages * multiplier, fisher=fisher, norm=norm, raw=raw)


def _interacting(
    statistics: Statistics, advantages: torch.Tensor, rule: Rule, history: Expectations | None, loss_scale: float
) -> Coefficients:
    assert statistics.ntk is not None
    ntk = statistics.ntk.to(advantages.dtype)
    ntk = ntk if loss_scale == 1 else ntk / loss_scale**2
    norm = ntk.diagonal().clamp(min=0).sqrt()
    alive = alive_sequences(None, norm)
    mean_square = mean_over(norm.square(), alive) if history is None else history.mean_square[1]
    c = interacting_coefficients(ntk, advantages, rule.lambda_ * mean_square, alive, rule.scale)
    return Coefficients(c=c * loss_scale**rule.degree if rule.scale == "paper" else c, norm=norm)


def interacting_coefficients(
    ntk: torch.Tensor, advantages: torch.Tensor, c0: torch.Tensor, alive: torch.Tensor, scale: str
) -> torch.Tensor:
    """
    `(K + c0 I)^-1 A` for `scale="paper"`, `c0` times that for `"relative"`; `[m]`.

    Args:
        ntk (`torch.Tensor`): `[m, m]`, K.
        advantages (`torch.Tensor`): `[m]`, A.
        c0 (`torch.Tensor`): scalar.
        alive (`torch.Tensor`): `[m]`; the others have no gradient, and their rows of K are left out.
        scale (`str`): `"relative"` or `"paper"`.
    """
    keep = alive & (c0 > 0)
    # In units of c0 the matrix is K / c0 + I, which is well conditioned whatever the size of the gradients
    safe = torch.where(c0 > 0, c0, 1)
    matrix = torch.where(keep.unsqueeze(0) & keep.unsqueeze(1), ntk / safe, 0)
    matrix.diagonal().add_(1)
    factor, _ = torch.linalg.cholesky_ex(matrix)
    solution = torch.cholesky_solve((advantages * keep).unsqueeze(1), factor).squeeze(1) * keep
    return solution if scale == "relative" else solution / safe
