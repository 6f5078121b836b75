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
from tests import oracle
from tests.rules import several_steps


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


def test_a_microbatch_under_way_goes_on_with_the_direction_that_it_began_with():
    model = nn.Linear(3, 2, bias=False)
    isopo, ones = ISOPO(model, "none"), torch.ones(2, 3)
    isopo.hold({"weight": ones})
    with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, 4)):
        loss = model(torch.ones(2, 4, 3)).sum()
        isopo.hold({"weight": 5 * ones})
        loss.backward()
    assert isopo.projections()["weight"].tolist() == [24.0, 24.0]
    with pytest.raises(ValueError, match="'weight' is on meta, the parameter on cpu: move it there"):
        isopo.hold({"weight": ones.to("meta")})


def held_out_loss(model):
    """What is not trained on: the loss of other completions, with their advantages in it."""
    batch = oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=99)
    logps = oracle.token_logps(model, batch)
    return -(logps * batch.completion_mask * batch.advantages.unsqueeze(1)).sum()


@pytest.mark.parametrize("rule", ["none", "fisher", "interacting"])
@pytest.mark.parametrize("name", several_steps.RUNS)
def test_the_influence_of_a_sequence_is_what_a_step_along_it_does_to_held_out_problems(
    name, rule, tmp_path, float64_throughout
):
    """
    For plain steps along `A_s V_s` the slope of the held-out loss, by finite differences; under any rule, influences
    add up to what the gradient that was made does, sequences without an advantage included.
    """
    kind, model, settings = several_steps.RUNS[name]
    run = kind(model, tmp_path, rule=rule, **settings)
    trained = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
    D = torch.autograd.grad(held_out_loss(run.model), [p for _, p in trained])
    run.isopo.hold({n: x for (n, _), x in zip(trained, D, strict=True)})
    uses, found = several_steps.parameters(run.model), []
    for part in range(2):
        batch, V = several_steps.gradients(model, 0, part)
        run.backward(batch, 2)
        found.append(run.isopo.influences())
        if rule != "none":
            continue
        for s, of_s in enumerate(found[-1]):
            step = {p: torch.zeros_like(p) for _, p in trained}
            for use, of in uses.items():
                several_steps.add(step, of, batch.advantages[s] * V[use][s] / 2)
            values = {}
            for rate in (-2e-4, -1e-4, 1e-4, 2e-4):
                with torch.no_grad():
                    for p, x in step.items():
                        p.sub_(rate * x)
                    values[rate] = float(held_out_loss(run.model))
                    for p, x in step.items():
                        p.add_(rate * x)
            slope = (8 * (values[1e-4] - values[-1e-4]) - (values[2e-4] - values[-2e-4])) / 12e-4
            assert float(of_s) == pytest.approx(-slope, rel=1e-7, abs=1e-9)
            assert float(of_s) != 0 or batch.advantages[s] == 0
    together = sum((x * p.grad).sum() for (_, p), x in zip(trained, D, strict=True))
    torch.testing.assert_close(torch.cat(found).sum(), together, rtol=1e-9, atol=1e-12)


def test_influences_without_a_direction_are_an_error():
    model = nn.Linear(3, 2)
    isopo = ISOPO(model)
    with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, 4)):
        model(torch.randn(2, 4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="call `hold` before"):
        isopo.influences()
