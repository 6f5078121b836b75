r"""
PROMA (arXiv 2601.10498) between the microbatches of an optimizer step: what the step has accumulated so far gives way
to a microbatch where it would move that microbatch's sequences.

With the accumulated gradient `R`, and `S` the microbatch's gradients `V_s`, divided by their norms `N_s`,

    P = S^T (S S^T + 0.01 I)^-1 S R,    shrunk so that |P| <= b |g|,    g = sum_s A_s V_s
    R <- R - s P + g

`P` is a combination of the `V_s`. So what the microbatch adds to `R` is `sum_s c_s V_s` with

    c_s = A_s - s x_s / N_s,    x = (S S^T + 0.01 I)^-1 S R, shrunk as P is

and all of it follows from the kernel `K` (`S S^T` is `K` without its norms, `|P|^2 = x^T S S^T x`, `|g|^2 = A^T K A`)
and from the projections `<V_s, R>`. `R` is `p.grad` itself: it has the loss's constant, its sign and what signs of
advantages the loss contains, as `V_s` has, so that the coefficients have no unit. The first microbatch of a step finds
nothing there, and has `c = A`.
"""

import math
from dataclasses import dataclass

import torch

from ..geometry.cost import Needs
from ..geometry.guarded import alive_sequences, below_noise
from ..geometry.statistics import Statistics
from .direction import GivenDirection, GradientSoFar
from .registry import register_rule
from .rule import Coefficients, Expectations, KernelForm, Rule


# Added to the eigenvalues of `S S^T`, whose mean is 1
RIDGE = 0.01


@register_rule("proma")
@dataclass(frozen=True, kw_only=True)
class Proma(Rule):
    """
    `c_s = A_s - s x_s / N_s`.

    Args:
        proma_strength (`float`): s, how much of the projection is taken away; `0` leaves plain REINFORCE.
        proma_bound (`float`): b, its largest length beside the microbatch's own gradient.
        name, scale: see [`Rule`]; both scales are the same.
    """

    proma_strength: float = 1.0
    proma_bound: float = 0.5

    needs = Needs(ntk=True, direction=True)
    degree = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("proma_strength", "proma_bound"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number and not negative.")

    def direction(self) -> GivenDirection:
        return GradientSoFar()

    @property
    def kernel_form(self) -> KernelForm | None:
        # A subclass may differ
        return KernelForm(proma=(self.proma_strength, self.proma_bound)) if type(self) is Proma else None

    def coefficients(
        self,
        statistics: Statistics,
        advantages: torch.Tensor,
        history: Expectations | None,
        loss_scale: float = 1.0,
    ) -> Coefficients:
        assert statistics.ntk is not None and statistics.projection is not None
        ntk, projection = (x.to(advantages.dtype) for x in (statistics.ntk, statistics.projection))
        length = ntk.diagonal().clamp(min=0).sqrt()
        norm = length if loss_scale == 1 else length / loss_scale
        noise = below_noise(norm, None if history is None else history.mean_square[1], statistics.ntk.dtype)
        alive = alive_sequences(None, norm) & ~noise
        # The others' numbers may not be finite, and are not to reach these
        inverse = torch.where(alive, 1 / length, 0)
        both = alive.unsqueeze(0) & alive.unsqueeze(1)
        cosines = torch.where(both, ntk * inverse.unsqueeze(0) * inverse.unsqueeze(1), 0)
        matrix = cosines.clone()
        matrix.diagonal().add_(RIDGE)
        factor, _ = torch.linalg.cholesky_ex(matrix)
        right = torch.where(alive, projection * inverse, 0)
        x = torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1)
        square = x @ cosines @ x
        allowed = self.proma_bound**2 * (advantages @ ntk @ advantages).clamp(min=0)
        shrunk = torch.where(square > allowed, allowed / square, 1).sqrt()
        c = advantages - self.proma_strength * shrunk * x * inverse
        return Coefficients(c=c, norm=norm, noise=noise)
