"""Shapes -> the cheapest way to get a layer's statistics."""

from typing import Literal, NamedTuple


Strategy = Literal["ghost", "kept", "blocks"]

# Largest number of elements that per-sequence gradients may take at once (64 MiB in float32)
KEPT_LIMIT = 2**24


class Needs(NamedTuple):
    """Which statistics a rule asks for."""

    overlap: bool = False
    norm: bool = False
    ntk: bool = False


def relative_costs(m: int, T: int, p: int, d: int, n: int, needs: Needs) -> dict[Strategy, float]:
    """
    Extra work of each strategy, in units of the product that makes the weight gradient (`m T p d` multiply-adds).

    - `ghost`: products between rows, `(g_j . g_t)(a_j . a_t)`; no per-sequence gradient is formed.
    - `kept`: `V_s` of every sequence is formed and kept; the weight gradient is then `sum_s c_s V_s`, so forming them
      costs nothing extra.
    - `blocks`: `V_s` is formed in blocks of output rows and dropped; the weight gradient is a second product.

    Args:
        m, T (`int`): number of sequences and their length.
        p, d (`int`): outputs and inputs of the layer.
        n (`int`): sampled positions.
        needs ([`Needs`]): statistics that the rule asks for.
    """
    N = m * T
    t_star = p * d / (p + d)
    ghost = needs.overlap * n / t_star + needs.norm * T / t_star + needs.ntk * N / t_star
    kept = needs.overlap * n / T + needs.norm / T + needs.ntk * m / T
    return {"ghost": ghost, "kept": kept, "blocks": 1 + kept}


def choose_strategy(m: int, T: int, p: int, d: int, n: int, needs: Needs) -> Strategy:
    """The cheapest strategy by [`relative_costs`] whose memory stays bounded."""
    costs = relative_costs(m, T, p, d, n, needs)
    if m * p * d > KEPT_LIMIT:
        del costs["kept"]
    return min(costs, key=lambda strategy: costs[strategy])


def block_rows(m: int, d: int) -> int:
    """How many output rows of `V` may be formed at once, so that `m * rows * d` stays under the limit."""
    return max(1, KEPT_LIMIT // (m * d))
