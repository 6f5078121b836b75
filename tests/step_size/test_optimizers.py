"""Optimizers without a step that could be measured, or taken back, are known by their type."""

from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from isopo_trl.step_size.optimizers import is_plain, refuse, refuse_by_state


class Lomo(torch.optim.SGD):
    """Has the name of one that steps in the backward pass."""


class CPUOffloadOptimizer:
    """Has the name of one that moves weights in the memory of the host, and copies them."""

    param_groups = [{"lr": 0.1}]


class AdamWScheduleFree(torch.optim.AdamW):
    """Has two modes, as schedule-free optimizers do."""

    def train(self):
        pass

    def eval(self):
        pass


WEIGHT = torch.zeros(2, 2, requires_grad=True)


def named(optimizer):
    return type(optimizer).__name__


@pytest.mark.parametrize("optimizer", [Lomo([WEIGHT], lr=0.1), LayerWiseDummyOptimizer()], ids=named)
@pytest.mark.parametrize("target_kl", [None, 1e-3], ids=str)
def test_what_steps_in_the_backward_pass_is_not_even_measured(optimizer, target_kl):
    with pytest.raises(ValueError, match=f"The steps of {named(optimizer)} cannot be measured"):
        refuse(optimizer, target_kl)


@pytest.mark.parametrize("optimizer", [AdamWScheduleFree([WEIGHT]), CPUOffloadOptimizer()], ids=named)
def test_what_has_other_points_than_the_weights_has_no_target(optimizer):
    refuse(optimizer, None)
    with pytest.raises(ValueError, match=f"does not work with {named(optimizer)}: it"):
        refuse(optimizer, 1e-3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_others_are_taken_as_they_are(kind):
    optimizer = kind([WEIGHT], lr=0.1)
    refuse(optimizer, 1e-3)
    refuse_by_state(optimizer)


def test_a_rate_of_zero_cannot_be_multiplied_but_a_schedule_may_begin_there():
    with pytest.raises(ValueError, match="SGD has none"):
        refuse(torch.optim.SGD([WEIGHT], lr=0.0), 1e-3)
    optimizer = torch.optim.SGD([WEIGHT], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    refuse(optimizer, 1e-3)


@pytest.mark.parametrize(
    ("optim_args", "plain"),
    [(None, True), ("momentum=0", True), ("momentum=0.0,dampening=0.5", True), ("momentum=0.9", False)],
    ids=str,
)
def test_steps_are_plain_where_there_is_no_momentum_or_one_of_zero(optim_args, plain):
    assert is_plain(None, SimpleNamespace(optim="sgd", optim_args=optim_args)) == plain
    assert not is_plain(None, SimpleNamespace(optim="adamw_torch", optim_args=optim_args))
