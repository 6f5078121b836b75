r"""
The paper's non-interacting rules (`F_s` the Fisher norm, `N_s` the Euclidean norm of `V_s`):

    f_s = reg2(F_s)^p reg2(N_s)^q reg2(F_s / N_s)^r,    reg2(x) = sqrt(x^2 + lambda E[x^2])

`keep_small` replaces `reg2(x)` by `sqrt(x^2 / (lambda E[x^2]) + 1)`, which leaves sequences with small `x` alone.

A sequence without a gradient (`F_s = 0` or `N_s = 0`) keeps a zero one: `0^-1` counts as 0.

Lambda bounds the tail: `f` varies by no more than a factor `(1 + x^2 / (lambda E[x^2]))^(|exponent| / 2)` between a
norm of zero and one of `x`. Before there is any history, no `x^2` exceeds `m E[x^2]`, so no multiplier of the relative
scale exceeds `(1 + m / lambda)^((|p| + |q| + |r|) / 2)`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..geometry.cost import Needs
from ..geometry.guarded import power
from .non_interacting import MeanSquares, NonInteracting, Norms
from .registry import register_rule
from .rule import KernelForm, verify_regularization


# Lambda bounds the multiplier: at 0.1, a sequence with next to no gradient gets at most 3.3 times the multiplier that
# one of root mean square norm gets under p = -1. Where exponents add up to 3, as in `fig4`, it would be 36 times, and
# at 1 it is 2.8
DEFAULT_REGULARIZATION, STEEP_REGULARIZATION = 0.1, 1.0
SMALLEST_REGULARIZATION = 1e-12


@dataclass(frozen=True, kw_only=True)
class PowerRule(NonInteracting):
    """
    `f = reg2(F)^p reg2(N)^q reg2(F/N)^r`.

    Args:
        fisher_power, norm_power, relative_power (`float`): p, q, r.
        regularization (`float`):
            lambda. If `None`, 0.1, or 1 for exponents of more than 2 in all, which bounds the tail of `f`; 0 is the
            paper's formula.
        keep_small (`bool`): the variant of `reg2` that leaves small sequences alone.
        name, scale: see [`Rule`].
    """

    fisher_power: float = 0.0
    norm_power: float = 0.0
    relative_power: float = 0.0
    regularization: float | Any = None  # a number once the rule is made
    keep_small: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("fisher_power", "norm_power", "relative_power"):
            if not abs(getattr(self, name)) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number.")
        if self.regularization is None:
            steepness = sum(map(abs, self.exponents))
            default = STEEP_REGULARIZATION if steepness > 2 else DEFAULT_REGULARIZATION if steepness else 0.0
            object.__setattr__(self, "regularization", default)
        verify_regularization(self.regularization)
        if 0 < self.regularization < SMALLEST_REGULARIZATION:
            raise ValueError(
                f"regularization={self.regularization} is lost in rounding beside the norms: set it to 0, or to at "
                f"least {SMALLEST_REGULARIZATION:g}."
            )
        if self.keep_small and (self.regularization == 0 or not any(self.exponents)):
            raise ValueError(
                "keep_small=True changes how exponents are regularised, so it needs a rule with an exponent (not "
                f"rule={self.name!r} as set here) and regularization > 0: set both, or keep_small=False."
            )
        if self.regularization and not any(self.exponents):
            raise ValueError(
                f"regularization={self.regularization} has nothing to regularise in rule={self.name!r} without an "
                "exponent: remove it, or choose another rule."
            )

    @cached_property
    def exponents(self) -> tuple[float, float, float]:
        """`(p, q, r)`."""
        return float(self.fisher_power), float(self.norm_power), float(self.relative_power)

    @cached_property
    def needs(self) -> Needs:
        p, q, r = self.exponents
        return Needs(overlap=p != 0 or r != 0, norm=q != 0 or r != 0)

    @property
    def degree(self) -> float:
        if self.keep_small:  # a function of x^2 / E[x^2]
            return 0.0
        return self.exponents[0] + self.exponents[1]

    @property
    def kernel_form(self) -> KernelForm | None:
        # A subclass may have changed the formula
        known = type(self) is PowerRule
        return KernelForm(self.regularization, self.exponents, self.keep_small) if known else None

    def multiplier(self, norms: Norms, mean_squares: MeanSquares) -> torch.Tensor:
        f = None
        for name, x, exponent in zip(Norms._fields, norms, self.exponents, strict=True):
            if exponent == 0:
                continue
            assert x is not None
            if self.regularization > 0:
                x = self.regularized(x, mean_squares[name])
            part = power(x, exponent)
            f = part if f is None else f * part
        assert f is not None
        return f

    def regularized(self, x: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        """`reg2(x)` with `mean_square` for `E[x^2]`."""
        level = self.regularization * mean_square
        if self.keep_small:
            return (x.square() / level + 1).sqrt().masked_fill(level == 0, 0)
        return (x.square() + level).sqrt()


# f = 1 / F: bounds each sequence's contribution to the KL divergence
register_rule("fisher", PowerRule, fisher_power=-1.0)
# f = (F / N)^-2: the multiple of the gradient closest to the natural gradient
register_rule("npg", PowerRule, relative_power=-2.0)
# f = (F / N)^-2 / N: the setting of the paper's figure 4
register_rule("fig4", PowerRule, norm_power=-1.0, relative_power=-2.0)
# f = 1 / N: a control, normalised without the Fisher metric
register_rule("euclidean", PowerRule, norm_power=-1.0)
# f = 1: REINFORCE
register_rule("none", PowerRule)
