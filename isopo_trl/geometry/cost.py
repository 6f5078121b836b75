"""Shapes -> the cheapest way to get a layer's statistics."""

from functools import lru_cache
from typing import Literal, NamedTuple


Strategy = Literal["ghost", "whole", "blocks"]

# Largest number of elements that per-sequence gradients may take at once (128 MiB in float32)
WHOLE_LIMIT = 2**25
# The same where kernels take them, which read each twice and no more (1 GiB)
WHOLE_BY_KERNELS = 2**28
# A GPU's matrix products are fast where rows begin at multiples of so many elements
_ALIGNMENT = 128


class Needs(NamedTuple):
    """Which statistics a rule asks for."""

    overlap: bool = False
    norm: bool = False
    ntk: bool = False
    direction: bool = False


# Operations in the time of moving one byte: of a data-centre GPU in bf16, of a CPU in float32
_BALANCE = {"cuda": 150.0, "cpu": 5.0}


def relative_costs(m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str = "cpu") -> dict[Strategy, float]:
    """
    Extra time of each strategy, in units of the product that makes the weight gradient (`m T p d` multiply-adds).

    - `ghost`: products between rows, `(g_j . g_t)(a_j . a_t)`; no per-sequence gradient is formed.
    - `whole`: `V_s` of every sequence is formed; the weight gradient is then `sum_s c_s V_s`, so forming them
      costs nothing extra, but they are written once and read once or twice.
    - `blocks`: `V_s` is formed in blocks of output rows and dropped; the weight gradient is a second product.

    Args:
        m, T (`int`): number of sequences and their length.
        p, d (`int`): outputs and inputs of the layer.
        n (`int`): sampled positions.
        needs ([`Needs`]): statistics that the rule asks for.
        device (`str`): type of the device, which says what a byte of memory traffic costs.
    """
    N = m * T
    t_star = p * d / (p + d)
    # In multiply-adds of the product; intermediate results are in float32
    byte = _BALANCE.get(device, _BALANCE["cuda"]) / (2 * N * p * d)
    written = 8 * byte  # and read again
    rows = (p + d) * N * 2 * byte
    ghost = needs.overlap * (n / t_star + rows + n * N * 2 * written)
    ghost += needs.norm * (T / t_star + m * T * T * 2 * written) + needs.ntk * (N / t_star + N * N * 2 * written)
    ghost += needs.direction * (1 + N * min(p, d) * 2 * written)
    read = m * p * d * 4 * byte
    statistics = needs.overlap * n / T + (needs.norm + needs.direction) / T + needs.ntk * m / T
    statistics += any(needs) * m * p * d * written
    # The second product of a narrow layer takes as long as its operands take to be read
    return {"ghost": ghost, "whole": statistics + any(needs) * read, "blocks": max(1, rows) + statistics}


def choose_strategy(
    m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str = "cpu", kernels: bool = False
) -> Strategy:
    """
    The cheapest strategy by [`relative_costs`] whose memory stays bounded. Where `kernels` take gradients that are
    formed whole, nothing else is cheaper for small ones: products between rows are some thirty launches, which take
    longer than those `V_s` take to be written and read. They take larger ones as well, where the costs say so.
    """
    size = m * p * d
    if kernels and size <= WHOLE_LIMIT:
        return "whole"
    return _cheapest(m, T, p, d, n, needs, device, size <= (WHOLE_BY_KERNELS if kernels else WHOLE_LIMIT))


@lru_cache(maxsize=4096)
def _cheapest(m: int, T: int, p: int, d: int, n: int, needs: Needs, device: str, keep: bool) -> Strategy:
    costs = relative_costs(m, T, p, d, n, needs, device)
    if not keep:
        del costs["whole"]
    return min(costs, key=lambda strategy: costs[strategy])


def block_rows(m: int, d: int) -> int:
    """How many output rows of `V`, aligned, may be formed at once so that `m * rows * d` stays under the limit."""
    return aligned(max(1, WHOLE_LIMIT // (m * d)))


def aligned(size: int) -> int:
    """At most `size`, and the same if it is small: a length of rows at which a GPU's products of matrices are fast."""
    return size - size % _ALIGNMENT if size > _ALIGNMENT else size
