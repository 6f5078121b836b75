"""
Where a direction comes from: given by hand, for rules of one's own. Those of the package have `test_spring.py` and
`test_proma.py`, and what layers make of it `tests/layers/test_direction.py`.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.rules import Coefficients, Needs, Rule


@dataclass(frozen=True, kw_only=True)
class Helpful(Rule):
    """Only sequences along which a held direction says that the loss falls."""

    asks: bool = True
    degree = 0.0

    @property
    def needs(self):
        return Needs(direction=self.asks)

    def coefficients(self, statistics, advantages, history, loss_scale=1.0):
        return Coefficients(c=advantages * (statistics.projection * advantages > 0))


def test_a_rule_of_ones_own_finds_the_projection_on_what_is_held():
    model = nn.Linear(3, 2, bias=False).double()
    isopo = ISOPO(model, Helpful())
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    V = x.sum(1)  # of each output's row

    def gradient():
        model.zero_grad()
        with isopo.microbatch(torch.tensor([1.0, -2.0], dtype=torch.float64), attention_mask=torch.ones(2, 4)):
            model(x).sum().backward()
        return model.weight.grad

    assert not gradient().any()  # there is no direction, and every projection is zero
    isopo.hold({"weight": V[:1].expand(2, 3) - 2 * V[1:].expand(2, 3)})
    along = [float(2 * v @ (V[0] - 2 * V[1])) for v in V]
    chosen = [a if a * p > 0 else 0.0 for a, p in zip((1.0, -2.0), along, strict=True)]
    assert any(chosen)
    torch.testing.assert_close(gradient(), (torch.tensor(chosen, dtype=V.dtype) @ V).expand(2, 3))
    assert isopo.projections()["weight"].tolist() == pytest.approx(along)
    isopo.hold(None)
    assert not gradient().any()
    with pytest.raises(ValueError, match=r"set `needs = Needs\(direction=True\)`"):
        ISOPO(nn.Linear(3, 2), Helpful(asks=False))
