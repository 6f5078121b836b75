"""Rules that the kernels do not know, on statistics that they find, against the same in plain PyTorch."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.statistics import fisher_norm
from isopo_trl.kernels import launch
from isopo_trl.rules import PowerRule
from isopo_trl.rules.interacting import Interacting
from isopo_trl.rules.rule import Coefficients, Rule
from tests.kernels import batches
from tests.kernels.batches import DEVICE, EXACT, GRADIENT, close


pytestmark = batches.of_kernels

ADVANTAGES = [1.0, -0.5, 2.0, 0.0]
MASK = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]


@dataclass(frozen=True, kw_only=True)
class OwnPower(PowerRule):
    """Its formula may be another one."""


@dataclass(frozen=True, kw_only=True)
class OwnInteracting(Interacting):
    """The same."""


@dataclass(frozen=True, kw_only=True)
class OfEverything(Rule):
    """It asks for all statistics at once."""

    needs = Needs(True, True, True)
    degree = 0.0

    def coefficients(self, statistics, advantages, history, loss_scale=1.0):
        F, _ = fisher_norm(statistics.overlap, statistics.sample_norm, statistics.own)
        mean = statistics.ntk.sum() / len(advantages) + statistics.norm.mean()
        f = F * F / mean + statistics.norm / mean
        return Coefficients(c=advantages * f.to(advantages.dtype), fisher=F, norm=statistics.norm.double().sqrt())


RULES = {
    "fisher": OwnPower(fisher_power=-1.0),
    "fig4": OwnPower(norm_power=-1.0, relative_power=-2.0),
    "interacting": OwnInteracting(),
    "everything": OfEverything(),
    "no statistics": OwnPower(),
}


@pytest.mark.parametrize(
    ("rule", "scope", "strategy"),
    [
        ("fisher", "step", "whole"),
        ("fig4", "step", "blocks"),
        ("interacting", "microbatch", "whole"),
        ("everything", "step", "blocks"),
        ("no statistics", "microbatch", "whole"),
    ],
)
def test_a_rule_that_the_kernels_do_not_know_has_its_statistics_from_them(rule, scope, strategy, monkeypatch):
    """Over two steps, with a history and rows of the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9, bias=False)).to(DEVICE, EXACT)
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE, EXACT)
    monkeypatch.setattr("isopo_trl.layers.linear.choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 150)  # a few rows in a block

    def gradients(by_kernels):
        monkeypatch.setattr(launch, "ENABLED", by_kernels)
        isopo = ISOPO(model, RULES[rule], fisher_samples=7, fisher_scope=scope)
        found = []
        for values in x:
            model.zero_grad()
            mask, advantages = torch.tensor(MASK, device=DEVICE), torch.tensor(ADVANTAGES, device=DEVICE)
            with isopo.microbatch(advantages, attention_mask=mask) as microbatch:
                (model(values).square().sum(-1) * mask).sum().backward()
            assert (microbatch._kernel_ledger is not None) == by_kernels
            isopo.step()
            found += [p.grad.clone() for p in model.parameters()]
        isopo.detach()
        return found

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert one.abs().max() > 0
        close(one, other, GRADIENT[EXACT])
