"""
Arithmetic that leaves out what has no gradient: a sequence whose statistic is zero keeps a zero, never `0 / 0`.

A gradient that is zero in exact arithmetic rarely is one in floating point. Where a position attends to itself alone,
the gradient of its attention score is the difference of two equal numbers, which were rounded differently: `q`, `k`
and their norms get some units of rounding of a term that is no part of the layer. What the layer can compare them with
is the size of other gradients there, so anything below `NOISE` units of rounding of their root mean square counts as
no gradient. `benchmarks/questions/rounding_noise.py` measures it: 22 units at most at the layers of a trained model.
"""

import torch


# In units of rounding (`torch.finfo(dtype).eps`) of the type in which statistics are summed
NOISE = 256


def noise_level(dtype: torch.dtype) -> float:
    """Below which part of the other sequences' norm one is noise: 2^-15 for sums in float32, 2^-44 in float64."""
    return NOISE * torch.finfo(dtype).eps


def below_noise(x: torch.Tensor, mean_square: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """
    Sequences whose norm cannot be told from rounding; `[m]`. What is not finite is not among them.

    Args:
        x (`torch.Tensor`): `[m]`, a norm of each sequence's gradient.
        mean_square (`torch.Tensor`, *optional*): scalar, its running mean square: all of a microbatch may be noise.
        dtype (`torch.dtype`): in which the statistics were summed.
    """
    square = x.square()
    level = square.nan_to_num(0.0, 0.0).mean()
    if mean_square is not None:
        level = torch.maximum(level, mean_square)
    return square < level * noise_level(dtype) ** 2


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
