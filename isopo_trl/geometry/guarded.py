"""Arithmetic that leaves out what has no gradient: a sequence whose statistic is zero keeps a zero, never `0 / 0`."""

import torch


def alive_sequences(fisher: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
    """Sequences with a finite, non-zero value of every statistic that there is; `[..., m]`."""
    given = [x for x in (fisher, norm) if x is not None]
    alive = (given[0] > 0) & torch.isfinite(given[0])
    return alive if len(given) == 1 else alive & (given[1] > 0) & torch.isfinite(given[1])


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
