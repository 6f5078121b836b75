"""The interacting rule: its coefficients against the kernel's linear system, solved as it stands."""

import math
from dataclasses import dataclass

import pytest
import torch

from isopo_trl.rules import Interacting, make_rule
from isopo_trl.rules.rule import KernelForm
from tests import oracle
from tests.rules.gradients import ADVANTAGES, HISTORY, computed, example, rule_of


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("regularization", [None, 0.3, 10.0])
@pytest.mark.parametrize("rule", ["interacting"], ids=str)
def test_coefficients_are_the_formula(rule, regularization, scale, history):
    V, G = example()
    settings = {"regularization": regularization, "scale": scale}
    result = computed(V, G, ADVANTAGES, rule_of(rule, **settings), history)
    expected = oracle.coefficients(V, G, ADVANTAGES, rule, history=history, **settings)
    torch.testing.assert_close(result.c, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("regularization", [None, 1e-4, 50.0, 1e6])
def test_interacting_solves_the_kernel_system(regularization, history):
    V, G = example()
    K = V @ V.T
    mean_eigenvalue = torch.linalg.eigvalsh(K).mean() if history is None else history["norm^2"]
    c0 = (1 if regularization is None else regularization) * mean_eigenvalue
    solution = torch.linalg.solve(K + c0 * torch.eye(5, dtype=K.dtype), ADVANTAGES)
    for scale, expected in (("paper", solution), ("relative", c0 * solution)):
        rule = make_rule("interacting", regularization=regularization, scale=scale)
        torch.testing.assert_close(computed(V, G, ADVANTAGES, rule, history).c, expected, rtol=1e-9, atol=1e-14)


def test_a_sequence_with_zero_advantage_takes_part_in_the_interacting_rule():
    V, G = example()
    rule = make_rule("interacting")
    others = [0, 1, 3, 4]
    result = computed(V, G, ADVANTAGES, rule, HISTORY)
    without = computed(V[others], G, ADVANTAGES[others], rule, HISTORY)
    assert result.c[2].abs() > 1e-3
    assert (result.c[others] - without.c).abs().max() > 1e-3


def test_identical_sequences_share_the_interacting_coefficient():
    # K singular: rank one of m = 4, and still one solve
    V = torch.ones(4, 3, dtype=torch.float64)
    result = computed(V, V, torch.ones(4, dtype=torch.float64), make_rule("interacting"))
    # K = 3 (1 1^T), c0 = 3: c0 (K + c0)^-1 1 = 1 / (4 + 1)
    assert result.c.tolist() == pytest.approx([0.2] * 4)


def test_what_is_recorded_is_what_the_rule_used():
    V, G = example()
    result = computed(V, G, ADVANTAGES, make_rule("interacting", scale="paper"))
    assert result.norm.tolist() == pytest.approx([v.norm().item() for v in V])
    assert result.fisher is None and result.raw is None


# Settings


def test_it_is_regularised_unless_told_otherwise():
    assert make_rule("interacting").regularization == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rule": "interacting", "regularization": 0.0}, "regularization=0"),
        ({"rule": "interacting", "regularization": 1e-30}, "at least 0.0001"),
        ({"rule": "interacting", "regularization": 1e-10, "scale": "paper"}, "regularization=1e-10"),
        ({"rule": "interacting", "regularization": 1e30}, "regularization=1e+30"),
        ({"rule": "interacting", "regularization": math.nan}, "regularization=nan"),
        ({"rule": "interacting", "regularization": -0.1}, "regularization=-0.1"),
        ({"rule": "interacting", "regularization": math.inf}, "regularization=inf"),
        ({"rule": "interacting", "fisher_power": -1.0}, "fisher_power"),
        ({"rule": "interacting", "norm_power": 0.0}, "norm_power"),
        ({"rule": "interacting", "relative_power": -1.0}, "relative_power"),
        ({"rule": "interacting", "keep_small": True}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError) as error:
        make_rule(**{"rule": "fisher", **settings})
    assert named in str(error.value)


@dataclass(frozen=True, kw_only=True)
class OtherFormula(Interacting):
    """The same settings, maybe another formula."""


def test_the_kernels_are_told_the_formula_but_not_of_a_subclass_that_may_have_changed_it():
    assert Interacting(regularization=0.3).kernel_form == KernelForm(0.3)
    assert OtherFormula(regularization=0.3).kernel_form is None
