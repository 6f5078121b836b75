"""The coefficients of a stack of layers of one shape (the experts of a mixture), in one go."""

from typing import Any

import torch

from ..geometry.statistics import Statistics
from .ledger import expectations_of
from .rule import Coefficients, Expectations, Rule


_STATISTICS = ("overlap", "sample_norm", "norm", "ntk", "projection")


def stacked_coefficients(
    rule: Rule,
    statistics: Statistics,
    advantages: torch.Tensor,
    history: torch.Tensor,
    known: list[bool],
    loss_scale: float = 1.0,
) -> Coefficients:
    """
    What [`~rules.rule.Rule.coefficients`] gives for each of `E` layers, `[E, m]` each.

    The rule's own formula is run on all layers at once (`torch.vmap`); one that cannot be, since it looks at the
    values of its statistics, is run layer by layer.

    Args:
        statistics ([`Statistics`]): of the layers, with a first dimension `E`; which samples are a sequence's `own` is
            the same for all of them, `[n, m]`.
        advantages (`torch.Tensor`): `[m]`.
        history (`torch.Tensor`): `[E, 6]`, the layers' rows of the history, and in `known` which of them have one.
    """
    values = {name: x for name in _STATISTICS if (x := getattr(statistics, name)) is not None}
    if not values:
        c = rule.coefficients(Statistics(), advantages, None, loss_scale).c
        return Coefficients(c=c.expand(len(known), -1))
    own = statistics.own
    with_past = _over_stack(rule, values, own, advantages, history, loss_scale) if any(known) else None
    without = _over_stack(rule, values, own, advantages, None, loss_scale) if not all(known) else None
    if with_past is None or without is None:
        result = with_past or without
        assert result is not None
        return result
    has_past = history.new_tensor(known).bool().unsqueeze(1)
    pairs = zip(with_past, without, strict=True)
    return Coefficients(*(None if x is None else torch.where(has_past, x, y) for x, y in pairs))  # type: ignore[arg-type]


def _over_stack(
    rule: Rule,
    values: dict[str, torch.Tensor],
    own: torch.Tensor | None,
    advantages: torch.Tensor,
    history: torch.Tensor | None,
    loss_scale: float,
) -> Coefficients:
    names: list[str] = []

    def one(values: dict[str, torch.Tensor], row: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        past: Expectations | None = None if row is None else expectations_of(row)
        result = rule.coefficients(Statistics(**values, own=own), advantages, past, loss_scale)
        given = {name: x for name, x in zip(Coefficients._fields, result, strict=True) if x is not None}
        names[:] = given
        return tuple(given.values())

    try:
        columns: Any = torch.vmap(one, in_dims=(0, None if history is None else 0))(values, history)
    except RuntimeError:
        count = len(next(iter(values.values())))
        rows = [
            one({name: x[e] for name, x in values.items()}, None if history is None else history[e])
            for e in range(count)
        ]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Coefficients(**dict(zip(names, columns, strict=True)))
