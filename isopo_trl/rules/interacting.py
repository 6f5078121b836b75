r"""
The paper's interacting rule, through the layer's neural tangent kernel `K_ij = <V_i, V_j>`:

    c = (K + c0 I)^-1 A,    c0 = lambda E[mean eigenvalue of K] = lambda E[N^2]

With `scale="relative"`, `c` is multiplied by `c0`, as in the author's code. Sequences without an advantage take part.

`K` is summed in float32: what it has below some 1e-5 of its mean eigenvalue is rounding. A `c0` down there stabilises
nothing, and shrinks the relative coefficients with it, until the optimizer does not see them. So lambda has a lower
limit.

A gradient that cannot be told from rounding is left out: with a small lambda its row of `K` would reach the others.
"""

from dataclasses import dataclass

import torch

from ..geometry.cost import Needs
from ..geometry.guarded import alive_sequences, below_noise, mean_over
from ..geometry.statistics import Statistics
from .registry import register_rule
from .rule import Coefficients, Expectations, KernelForm, Rule, verify_regularization


SMALLEST_REGULARIZATION = 1e-4


@register_rule("interacting")
@dataclass(frozen=True, kw_only=True)
class Interacting(Rule):
    """
    `c = (K + c0 I)^-1 A`.

    Args:
        regularization (`float`): lambda, at least `SMALLEST_REGULARIZATION`.
        name, scale: see [`Rule`].
    """

    regularization: float = 1.0

    needs = Needs(ntk=True)
    degree = -2.0

    def __post_init__(self):
        super().__post_init__()
        verify_regularization(self.regularization)
        if self.regularization < SMALLEST_REGULARIZATION:
            raise ValueError(
                f"regularization={self.regularization:g} leaves the kernel of rule={self.name or 'interacting'!r} "
                f"singular to rounding, and its coefficients next to zero: set regularization > 0, at least "
                f"{SMALLEST_REGULARIZATION:g} (1 is the default)."
            )

    @property
    def kernel_form(self) -> KernelForm | None:
        return KernelForm(self.regularization) if type(self) is Interacting else None  # a subclass may differ

    def coefficients(
        self,
        statistics: Statistics,
        advantages: torch.Tensor,
        history: Expectations | None,
        loss_scale: float = 1.0,
    ) -> Coefficients:
        assert statistics.ntk is not None
        ntk = statistics.ntk.to(advantages.dtype)
        ntk = ntk if loss_scale == 1 else ntk / loss_scale**2
        norm = ntk.diagonal().clamp(min=0).sqrt()
        past = None if history is None else history.mean_square[1]
        noise = below_noise(norm, past, statistics.ntk.dtype)
        alive = alive_sequences(None, norm) & ~noise
        mean_square = mean_over(norm.square(), alive) if past is None else past
        c = solved(ntk, advantages, self.regularization * mean_square, alive, self.scale)
        return Coefficients(c=c * loss_scale**self.degree if self.scale == "paper" else c, norm=norm, noise=noise)


def solved(
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
    # What a broken sequence has in place of an advantage, with a projection in it, is not to reach the others
    right = torch.where(keep, advantages, 0)
    solution = torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1) * keep
    return solution if scale == "relative" else solution / safe
