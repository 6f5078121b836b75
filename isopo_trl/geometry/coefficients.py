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

A sequence without a gradient (`F_s = 0` or `N_s = 0`) keeps a zero one: `0^-1` counts as 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .cost import Needs
from .running import EXPECTATIONS
from .statistics import Statistics, fisher_norm, scalar_dtype


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

    @property
    def interacting(self) -> bool:
        return self.name == "interacting"

    @property
    def lambda_(self) -> float:
        return float(self.interacting) if self.regularization is None else float(self.regularization)

    @property
    def exponents(self) -> tuple[float, float, float]:
        """`(p, q, r)`; all zero for the interacting rule."""
        p, q, r = EXPONENTS.get(self.name, (0.0, 0.0, 0.0))
        return (
            p if self.fisher_power is None else float(self.fisher_power),
            q if self.norm_power is None else float(self.norm_power),
            r if self.relative_power is None else float(self.relative_power),
        )

    @property
    def needs(self) -> Needs:
        p, q, r = self.exponents
        return Needs(overlap=p != 0 or r != 0, norm=q != 0 or r != 0, ntk=self.interacting)

    @property
    def degree(self) -> float:
        """Power of a constant factor of the loss that the coefficient carries under `scale="paper"`."""
        return -2.0 if self.interacting else self.exponents[0] + self.exponents[1]


class Coefficients(NamedTuple):
    """
    What a layer's backward needs, `c`, and what is recorded of it; each `[m]`.

    Args:
        c: coefficient of each sequence's gradient.
        fisher: `F_s`, zero where the rule does not ask for it.
        norm: `N_s`, likewise.
        raw: `f_s` before the scale.
        multiplier: `f_s`; for the interacting rule, `c_s / A_s` (NaN where `A_s` is zero).
    """

    c: torch.Tensor
    fisher: torch.Tensor
    norm: torch.Tensor
    raw: torch.Tensor
    multiplier: torch.Tensor


def mean_over(x: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Mean of `x` `[m]` over the sequences that are `alive` `[m]`; zero if none is."""
    return torch.where(alive, x, 0).sum() / alive.sum().clamp(min=1)


def ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x / y`, and 0 where `y` is 0."""
    return torch.where(y > 0, x / torch.where(y > 0, y, 1), 0)


def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """`x^exponent` for `x >= 0`, and 0 where `x` is 0 whatever the exponent (1 for exponent 0)."""
    if exponent == 0:
        return torch.ones_like(x)
    return torch.where(x > 0, torch.where(x > 0, x, 1) ** exponent, 0)


def regularized(x: torch.Tensor, mean_square: torch.Tensor, rule: Rule) -> torch.Tensor:
    """`reg2(x)` with `mean_square` for `E[x^2]`."""
    if rule.lambda_ == 0:
        return x
    level = rule.lambda_ * mean_square
    if rule.keep_small:
        return torch.where(level > 0, (ratio(x.square(), level) + 1).sqrt(), 0)
    return (x.square() + level).sqrt()


def alive_sequences(fisher: torch.Tensor, norm: torch.Tensor, needs: Needs) -> torch.Tensor:
    """Sequences with a finite, non-zero value of every statistic that the rule asks for; `[..., m]`."""
    alive = torch.ones_like(fisher, dtype=torch.bool)
    if needs.overlap:
        alive = alive & (fisher > 0) & torch.isfinite(fisher)
    if needs.norm or needs.ntk:
        alive = alive & (norm > 0) & torch.isfinite(norm)
    return alive


def coefficients(
    statistics: Statistics,
    advantages: torch.Tensor,
    rule: Rule,
    history: torch.Tensor,
    known: torch.Tensor,
    loss_scale: float = 1.0,
) -> Coefficients:
    """
    Coefficients of one layer in one microbatch.

    Args:
        statistics ([`Statistics`]): what `rule.needs` asks for.
        advantages (`torch.Tensor`): `[m]`, `A_s`, or `|A_s|` where the loss contains the sign already, so that `V_s`
            carries it: every rule is invariant under moving signs from the one to the other.
        rule ([`Rule`]): the rule.
        history (`torch.Tensor`): `[5]`, the running means `EXPECTATIONS` of this layer.
        known (`torch.Tensor`): scalar, whether there is a history.
        loss_scale (`float`): constant that the loss carries; running means are kept without it, so that a change of it
            from one step to the next (a shorter last accumulation window) is not mistaken for a change of the
            gradients.
    """
    dtype = scalar_dtype(advantages.device)
    advantages = advantages.to(dtype)
    needs = rule.needs
    zeros = torch.zeros_like(advantages)
    factor = loss_scale**rule.degree if rule.scale == "paper" else 1.0

    if rule.interacting:
        assert statistics.ntk is not None
        ntk = statistics.ntk.to(dtype) / loss_scale**2
        norm = ntk.diagonal().clamp(min=0).sqrt()
        alive = alive_sequences(zeros, norm, needs)
        mean_square = torch.where(known, history[EXPECTATIONS.index("norm^2")], mean_over(norm.square(), alive))
        c = interacting_coefficients(ntk, advantages, rule.lambda_ * mean_square, alive, rule.scale) * factor
        multiplier = torch.where(advantages != 0, c / torch.where(advantages != 0, advantages, 1), torch.nan)
        return Coefficients(c=c, fisher=zeros, norm=norm, raw=zeros, multiplier=multiplier)

    fisher = norm = zeros
    if needs.overlap:
        assert statistics.overlap is not None and statistics.sample_norm is not None
        fisher = fisher_norm(statistics.overlap, statistics.sample_norm) / loss_scale
    if needs.norm:
        assert statistics.norm is not None
        norm = statistics.norm.to(dtype).clamp(min=0).sqrt() / loss_scale
    if not needs.overlap and not needs.norm:
        ones = torch.ones_like(advantages)
        return Coefficients(c=advantages, fisher=zeros, norm=zeros, raw=ones, multiplier=ones)

    relative = ratio(fisher, norm)
    alive = alive_sequences(fisher, norm, needs)
    x = fisher if needs.overlap else norm
    p, q, r = rule.exponents

    def expectation(name: str, own: torch.Tensor) -> torch.Tensor:
        return torch.where(known, history[EXPECTATIONS.index(name)], mean_over(own, alive))

    raw = torch.ones_like(advantages)
    for name, value, exponent in (("fisher", fisher, p), ("norm", norm, q), ("relative", relative, r)):
        if exponent != 0:
            raw = raw * power(regularized(value, expectation(f"{name}^2", value.square()), rule), exponent)
    # A statistic that is not finite marks a broken sequence; it is counted and reported by the caller
    raw = torch.where(torch.isfinite(raw), raw, 0)
    if rule.scale == "relative":
        multiplier = raw * ratio(expectation("x", x), expectation("fx", raw * x))
    else:
        multiplier = raw * factor
    return Coefficients(c=advantages * multiplier, fisher=fisher, norm=norm, raw=raw, multiplier=multiplier)


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
    matrix = matrix + torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor, _ = torch.linalg.cholesky_ex(matrix)
    solution = torch.cholesky_solve(torch.where(keep, advantages, 0).unsqueeze(1), factor).squeeze(1)
    solution = torch.where(keep, solution, 0)
    return solution if scale == "relative" else solution / safe
