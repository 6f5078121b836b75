"""A gradient that is not finite stops the step, and one that is cut away is told of."""

import math
from types import SimpleNamespace

import pytest

from isopo_trl.rules import make_rule
from isopo_trl.step_size.gradient import GradientCheck
from tests import training


def check():
    return GradientCheck(make_rule("fisher"), SimpleNamespace(max_grad_norm=1.0, target_kl=None, scale="relative"))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"broken_sequences": 2, "broken_by_rule": 3}, "rule='fisher' returned coefficients .* at 3 layers"),
        ({"broken_sequences": 2}, "not finite .statistics of 2 sequences"),
        ({"broken_sequences": 0, "grad_norm": math.inf, "multiplier_max": 7.0}, "norm is inf, the largest .* 7 times"),
    ],
    ids=str,
)
def test_a_broken_step_is_refused_with_what_broke_it(figures, said):
    with pytest.raises(FloatingPointError, match=said):
        check().passed(figures)


def test_figures_that_pass_are_those_of_the_log():
    figures = {"broken_sequences": 0, "grad_norm": 2.0, "multiplier_max": 7.0}
    assert check().passed(figures) == {"multiplier_max": 7.0}
    assert len(figures) == 3


@pytest.mark.parametrize(
    ("norm", "stepped", "said"),
    [(math.nan, False, "as they were before"), (-1.0, True, "weights are lost"), (math.inf, True, "weights are lost")],
)
def test_a_norm_of_deepspeeds_that_is_not_one_is_refused(norm, stepped, said):
    check().of_deepspeed(1.0, stepped)
    with pytest.raises(FloatingPointError, match=said):
        check().of_deepspeed(norm, stepped)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({}, True), ({"max_grad_norm": 0.0}, False), ({"scale": "relative"}, False), ({"target_kl": 1e-4}, False)],
    ids=str,
)
def test_clipping_that_takes_the_length_of_a_gradient_in_the_papers_units_is_said_once(
    settings, warned, tmp_path, caplog
):
    settings = {"rule": "euclidean", "scale": "paper", "max_grad_norm": 0.05, **settings}
    trainer = training.build(tmp_path, **settings)
    trainer.train()
    messages = [record.message for record in caplog.records if "max_grad_norm=0.05 cuts it to" in record.message]
    assert len(messages) == warned
    norm = trainer.state.log_history[0]["grad_norm"]
    if warned:
        assert norm > 5 and f"(grad_norm={norm:,.4g})" in messages[0] and "scale='relative'" in messages[0]
