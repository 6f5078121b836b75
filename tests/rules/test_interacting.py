"""The interacting rule: its coefficients against the kernel's linear system, solved as it stands."""

import math

import pytest
import torch

from isopo_trl.rules import Interacting, make_rule
from isopo_trl.rules.rule import KernelForm
from tests.rules.gradients import ADVANTAGES, HISTORY, computed, example


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("regularization", [None, 1e-4, 0.3, 1e6])
def test_interacting_solves_the_kernel_system(regularization, history):
    V, G = example()
    K = V @ V.T
    mean_eigenvalue = torch.linalg.eigvalsh(K).mean() if history is None else history["norm^2"]
    c0 = (1 if regularization is None else regularization) * mean_eigenvalue
    solution = torch.linalg.solve(K + c0 * torch.eye(5, dtype=K.dtype), ADVANTAGES)
    assert solution[2].abs() > 0 and ADVANTAGES[2] == 0  # a sequence without an advantage takes part
    for scale, expected in (("paper", solution), ("relative", c0 * solution)):
        rule = make_rule("interacting", regularization=regularization, scale=scale)
        result = computed(V, G, ADVANTAGES, rule, history)
        torch.testing.assert_close(result.c, expected, rtol=1e-9, atol=1e-14)
        assert result.norm.tolist() == pytest.approx([v.norm().item() for v in V])
        assert result.fisher is None and result.raw is None


def test_identical_sequences_share_the_interacting_coefficient():
    # K = 3 (1 1^T) is singular, c0 = 3: c0 (K + c0)^-1 1 = 1 / (4 + 1)
    V = torch.ones(4, 3, dtype=torch.float64)
    result = computed(V, V, torch.ones(4, dtype=torch.float64), make_rule("interacting"))
    assert result.c.tolist() == pytest.approx([0.2] * 4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"regularization": 0.0}, "regularization=0"),
        ({"regularization": 1e-10, "scale": "paper"}, "regularization=1e-10.*at least 0.0001"),
        ({"regularization": 1e30}, "regularization=1e\\+30"),
        ({"regularization": math.nan}, "regularization=nan"),
        ({"regularization": -0.1}, "regularization=-0.1"),
        ({"norm_power": 0.0}, "norm_power"),
        ({"keep_small": True}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        make_rule("interacting", **settings)


def test_the_kernels_are_told_the_formula_but_not_of_a_subclass_that_may_have_changed_it():
    class OtherFormula(Interacting):
        pass

    assert Interacting(regularization=0.3).kernel_form == KernelForm(0.3)
    assert OtherFormula(regularization=0.3).kernel_form is None
