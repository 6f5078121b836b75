r"""
What a rule is: statistics and advantages of a microbatch at one layer -> the coefficient `c_s` in front of each `V_s`.

`E` below is a running mean per layer over the sequences that have a gradient there ([`~rules.running`]); before there
is any history it is the microbatch's own mean.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ..geometry.cost import Needs
from ..geometry.statistics import Statistics
from ..settings.types import type_fields
from .direction import GivenDirection


SCALES = ("relative", "paper")
# Beyond it, float32 cannot tell a rule's gradient from a plain one
LARGEST_REGULARIZATION = 1e6


def verify_regularization(value: float) -> None:
    """Raise if lambda is negative or not a number, or so large that nothing is left of the rule."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"regularization={value} must be a finite number and not negative.")
    if value > LARGEST_REGULARIZATION:
        raise ValueError(
            f"regularization={value} leaves nothing of the rule, whose gradient tends to the plain one as lambda "
            f"grows: set at most {LARGEST_REGULARIZATION:g} (0.1 to 10 are usual), or rule='none'."
        )


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
        noise: `[m]`, whether a norm cannot be told from rounding ([`~geometry.guarded.below_noise`]): then the
            sequence does not count. `None` where that was not asked.
    """

    c: torch.Tensor
    fisher: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    noise: torch.Tensor | None = None


class KernelForm(NamedTuple):
    """
    The formulas that the kernels know: the power rules', with lambda, the exponents p, q, r, and the variant of
    `reg2`; or where the rule needs the NTK, the interacting one, with SPRING's mu, or PROMA's, with its s and b.
    """

    regularization: float = 0.0
    exponents: tuple[float, float, float] = (0.0, 0.0, 0.0)
    keep_small: bool = False
    decay: float = 0.0
    proma: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """
    A rule with its settings, which are the fields of a frozen dataclass and are validated when it is made.

    A subclass says what it `needs`, its `degree` and its `coefficients`; [`NonInteracting`] makes the last easier.

    Args:
        name (`str`): what it is registered as.
        scale (`str`): `"relative"`, coefficients of order one; or `"paper"`, the formula to the letter.
    """

    name: str = ""
    scale: str = "relative"

    def __post_init__(self):
        type_fields(self)
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} is unknown: choose one of {', '.join(map(repr, SCALES))}.")

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """The statistics that it asks for; none of them means that coefficients are the advantages."""

    @property
    @abstractmethod
    def degree(self) -> float:
        """Power of a constant factor of the loss that the coefficient carries under `scale="paper"`."""

    @abstractmethod
    def coefficients(
        self,
        statistics: Statistics,
        advantages: torch.Tensor,
        history: Expectations | None,
        loss_scale: float = 1.0,
    ) -> Coefficients:
        """
        Coefficients of one layer in one microbatch.

        Runs once per layer and backward, so it should be written with few operations in mind: what can be computed for
        all layers at once is left to [`~rules.running.RunningStatistics`].

        Args:
            statistics ([`Statistics`]): what `needs` asks for.
            advantages (`torch.Tensor`): `[m]`, `A_s`, or `|A_s|` where the loss contains the sign already, so that
                `V_s` carries it: a rule must be invariant under moving signs from the one to the other.
            history ([`Expectations`], *optional*): running means of this layer; `None` before there are any, when the
                microbatch's own means stand in.
            loss_scale (`float`): constant that the loss carries; running means are kept without it, so that a change
                of it from one step to the next (a shorter last accumulation window) is not mistaken for a change of
                the gradients.
        """

    def direction(self) -> GivenDirection:
        """Where the direction of `needs.direction` comes from: what [`~isopo.ISOPO.hold`] was given."""
        return GivenDirection()

    @property
    def settings(self) -> dict[str, Any]:
        """Its name and settings, by which a checkpoint knows the rule again."""
        return asdict(self)

    @property
    def kernel_form(self) -> KernelForm | None:
        """What the kernels need to know to compute its coefficients; `None`: they cannot, plain PyTorch does."""
        return None
