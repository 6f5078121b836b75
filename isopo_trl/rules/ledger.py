"""Where the coefficients of a microbatch are entered, layer by layer."""

from dataclasses import dataclass, field

import torch

from .rule import Coefficients, Expectations, Rule


# Columns of a layer's row of the history
HISTORY = ("fisher^2", "norm^2", "relative^2", "scale", "multiplier", "known")


@dataclass
class Ledger:
    """
    The coefficients of every layer in one microbatch, and what they are made from; all on the device.

    Args:
        rule ([`Rule`]): the rule.
        advantages (`torch.Tensor`): `[m]`.
        history (`torch.Tensor`): `[L, 6]`, the running means of each layer, in the order of `HISTORY`: those of the
            [`Expectations`], and 1 where there are any.
        loss_scale (`float`): constant that the loss carries.
        prompts (`torch.Tensor`, *optional*): `[m]`, number of each sequence's prompt, for figures alone.
        signs (`torch.Tensor`, *optional*): `[m]`, signs that the loss contains, likewise; 0 does not count.
        beside_terms (`bool`): whether the gradient holds more than the rescaled one.
        table (`torch.Tensor`): `[L, 5, m]`, the fields of [`Coefficients`], zero where the rule has no such figure.
        ntk (`torch.Tensor`, *optional*): `[L, m, m]`, the kernel of each layer, in any unit, if the rule needs it.
        projection (`torch.Tensor`, *optional*): `[L, m]`, the projections on a direction, if there are any; zero where
            a layer has none.
    """

    rule: Rule
    advantages: torch.Tensor
    history: torch.Tensor
    loss_scale: float = 1.0
    prompts: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    beside_terms: bool = False
    table: torch.Tensor = field(init=False)
    ntk: torch.Tensor | None = field(init=False, default=None)
    projection: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self):
        layers, m = len(self.history), len(self.advantages)
        rows = len(Coefficients._fields)
        # One behind the other, so that a kernel that is given the table finds all
        needs = self.rule.needs
        sizes = [layers * number * m for number in (rows, m * needs.ntk, needs.direction)]
        table, ntk, projection = self.advantages.new_zeros(sum(sizes)).split(sizes)
        self.table = table.view(layers, rows, m)
        if needs.ntk:
            self.ntk = ntk.view(layers, m, m)
        if needs.direction:
            self.projection = projection.view(layers, m)
        self._nothing = self.advantages.new_zeros(m)
        if not any(needs):
            self.table[:, 0] = self.advantages

    def record(
        self,
        index: int | slice,
        result: Coefficients,
        ntk: torch.Tensor | None = None,
        projection: torch.Tensor | None = None,
    ) -> None:
        """Enter the coefficients of layer `index`, or of several layers, and the statistics that are kept of them."""
        nothing = self._nothing
        rows = [(nothing if x is None else x.to(nothing.dtype)).expand_as(result.c) for x in result]
        torch.stack(rows, dim=-2, out=self.table[index])
        if self.ntk is not None and ntk is not None:
            self.ntk[index] = ntk
        if projection is not None:
            if self.projection is None:
                self.projection = self.table.new_zeros(self.table.shape[0], self.table.shape[2])
            self.projection[index] = projection


def expectations_of(history: torch.Tensor) -> Expectations:
    """What a rule refers to, from a layer's row of the history, `[6]`."""
    return Expectations(history[:3], history[3], history[4])
