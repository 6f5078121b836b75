r"""
SPRING (arXiv 2401.10190), layer by layer: natural gradient steps that begin where the step before has ended.

With the direction `phi` of the last step, and `V`, `A` the gradients and advantages of a microbatch,

    c = (K + c0 I)^-1 (A - mu V phi),    c0 = lambda E[N^2]
    phi <- mu phi + V^T c

so that phi is the least change of `mu phi` with `V phi` near `A`: what the sequences say is fitted, and what they say
nothing about is remembered. `mu phi` is added once per optimizer step. phi is the gradient that the optimizer gets,
before clipping and without its learning rate.

Units. `V_s` is the gradient of the loss over sequence s, which is minimised: it has the loss's sign, and the sign of
the advantage where the loss contains that. Both drop out of `V^T c`, which is always a gradient to descend along; phi
is held as one. The constant k that the loss carries (`loss_scale`) does not: with `V = k v`, all of the above is meant
for v. So the projection is divided by k as the kernel is by k^2, and phi is held in units of `A / v`. What the
optimizer gets is `phi / k`, as under `interacting` to the letter.

Several microbatches of a step, and ranks, solve a system each, all from the same phi. Their mean is taken:

    phi <- mu phi + mean over microbatches of v^T c

Were it their sum, a direction that n of them share would be corrected n times. Beyond `1 + 1 / mu` times, a correction
is longer than what it corrects, and phi grows from step to step without end: at norms and biases, whose few numbers
all sequences share, a few microbatches are enough. So phi is the step's gradient times `k / n`; in the trainer, with
k = 1 / n, the optimizer gets `n^2 phi`.
"""

import math
from dataclasses import dataclass

import torch

from ..geometry.cost import Needs
from ..geometry.statistics import Statistics
from .direction import GivenDirection, LastStep
from .interacting import Interacting
from .registry import register_rule
from .rule import Coefficients, Expectations, KernelForm


@register_rule("spring")
@dataclass(frozen=True, kw_only=True)
class Spring(Interacting):
    """
    `c = (K + c0 I)^-1 (A - mu V phi)`, and `interacting` to the letter where `mu = 0`.

    Args:
        spring_decay (`float`): mu, in [0, 1).
        regularization, name: see [`~rules.interacting.Interacting`].
        scale (`str`): always `"paper"`: a factor would take `V phi` apart from `A`.
    """

    scale: str = "paper"
    spring_decay: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        if self.scale != "paper":
            raise ValueError(
                f"scale={self.scale!r} would multiply the direction that rule={self.name or 'spring'!r} measures "
                "against the advantages: leave it out, the rule is always to the letter."
            )
        if not (0 <= self.spring_decay < 1 and math.isfinite(self.spring_decay)):
            raise ValueError(
                f"spring_decay={self.spring_decay} is the part of the last step's direction that is kept: give a "
                "number from 0 to below 1 (0.9 is the default)."
            )

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(ntk=True, direction=self.spring_decay > 0)

    def direction(self) -> GivenDirection:
        return LastStep(self.spring_decay) if self.spring_decay > 0 else super().direction()

    @property
    def kernel_form(self) -> KernelForm | None:
        # A subclass may differ
        return KernelForm(self.regularization, decay=self.spring_decay) if type(self) is Spring else None

    def coefficients(
        self,
        statistics: Statistics,
        advantages: torch.Tensor,
        history: Expectations | None,
        loss_scale: float = 1.0,
    ) -> Coefficients:
        if self.spring_decay > 0:
            assert statistics.projection is not None
            along = statistics.projection.to(advantages.dtype)
            advantages = advantages - self.spring_decay * (along if loss_scale == 1 else along / loss_scale)
        return super().coefficients(statistics, advantages, history, loss_scale)
