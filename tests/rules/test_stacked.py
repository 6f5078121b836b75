"""The coefficients of a stack of layers are those of each layer by itself."""

from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules.ledger import expectations_of
from isopo_trl.rules.non_interacting import NonInteracting
from isopo_trl.rules.registry import make_rule
from isopo_trl.rules.stacked import stacked_coefficients


E, M, N = 5, 3, 5
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LooksAtValues(NonInteracting):
    """A rule that decides by a number on the host, which `vmap` cannot do for all layers at once."""

    needs = Needs(norm=True)
    degree = 0.0

    def multiplier(self, norms, mean_squares):
        return norms.norm if norms.norm.max().item() > 1 else 2 * norms.norm


def statistics(needs):
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(E, M, 7, generator=generator, dtype=torch.float64)
    G = torch.randn(E, N, 7, generator=generator, dtype=torch.float64)
    V[1] = 0  # a layer that nothing reaches
    G[2] = 0  # one without a sample
    V[3, 0], V[3, 1], V[4, 2] = 0, 1e-15 * V[3, 1], torch.nan  # nothing, rounding noise, and what is not finite
    ntk = V @ V.transpose(1, 2)
    every = {"norm": ntk.diagonal(dim1=1, dim2=2)} if needs.norm else {"ntk": ntk} if needs.ntk else {}
    return every | ({"overlap": G @ V.transpose(1, 2), "sample_norm": G.square().sum(2)} if needs.overlap else {})


@pytest.mark.parametrize("known", [[False] * E, [True, False, True, False, True]], ids=str)
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "euclidean", "interacting", "none", LooksAtValues])
def test_coefficients_are_those_of_each_layer_alone(rule, scale, known):
    rule = make_rule(rule, scale=scale) if isinstance(rule, str) else rule(scale=scale)
    history = torch.rand(E, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    fields = statistics(rule.needs)
    together = stacked_coefficients(rule, Statistics(**fields), ADVANTAGES, history, known, 0.5)
    assert together.c.shape == (E, M)
    for e in range(E):
        past = expectations_of(history[e]) if known[e] else None
        alone = rule.coefficients(Statistics(**{n: x[e] for n, x in fields.items()}), ADVANTAGES, past, 0.5)
        for name, x, y in zip(alone._fields, together, alone, strict=True):
            assert (x is None) == (y is None), name
            if y is not None:
                torch.testing.assert_close(x[e], y, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
