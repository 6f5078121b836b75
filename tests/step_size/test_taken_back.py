"""A step is taken back along itself, whichever optimizer made it."""

import importlib.util
import re

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from isopo_trl.step_size import taken_back as module
from isopo_trl.step_size.optimizers import REFUSED
from isopo_trl.step_size.taken_back import AdamWSteps, KeptWeights, can_be_undone, kept_weights
from tests.documentation.test_docs import table


# What an optimizer of transformers needs that is not installed everywhere
NEEDS = {
    "bitsandbytes": ("bnb", "8bit", "32bit", "ademamix"),
    "torchao": ("torch_4bit", "torch_8bit", "anyprecision"),
    "galore_torch": ("galore",),
    "apollo_torch": ("apollo",),
    "grokadamw": ("grokadamw",),
    "optimi": ("stable_adamw",),
    "torch_xla": ("xla",),
    "torch_npu": ("npu",),
}


def is_installable(name: str) -> bool:
    wanted = next((package for package, parts in NEEDS.items() if any(part in name for part in parts)), None)
    return wanted is None or importlib.util.find_spec(wanted) is not None


NAMES = [name.value for name in OptimizerNames if name.value not in REFUSED and is_installable(name.value)]


def stepped(name, dtype, folder):
    """Weights before and after the second step of an optimizer, of which the last was kept."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((4, 6), (5,))]
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(
        TrainingArguments(str(folder), optim=name, learning_rate=0.1, weight_decay=0.1, use_cpu=True)
    )
    optimizer = optimizer_class(weights, **settings)
    kept = KeptWeights(weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        before = [weight.detach().clone() for weight in weights]
        kept.keep()
        optimizer.step()
    after = [weight.detach().clone() for weight in weights]
    return weights, kept, before, after


def test_the_usual_optimizers_are_among_those_tried():
    assert {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"} <= set(NAMES)
    assert set(REFUSED) <= {name.value for name in OptimizerNames}


def test_the_table_says_of_every_optimizer_of_transformers_what_becomes_of_its_steps(tmp_path):
    said = {name: how for names, how in table("target_kl.md", "Optimizers") for name in re.findall(r"`(\w+)`", names)}
    # A new one is tried first, and gets its place in the table or among the refused
    assert sorted(said) == sorted(name.value for name in OptimizerNames)
    for name, how in said.items():
        assert ("refused" in how) == (name in REFUSED), name
    for name in NAMES:
        arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimizer = optimizer_class([torch.zeros(3, requires_grad=True)], **settings)
        assert can_be_undone(optimizer) == ("moments" in said[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_the_step_is_kept(name, tmp_path):
    weights, kept, before, after = stepped(name, torch.float64, tmp_path)
    for share in (0.5, 0.01, 0.3):  # one after the other, also back towards the whole
        kept.move(share)
        for weight, start, end in zip(weights, before, after, strict=True):
            assert not torch.equal(start, end)
            torch.testing.assert_close(weight.detach(), start + share * (end - start), rtol=1e-13, atol=1e-13)
    kept.move(0.0)
    assert all(torch.equal(weight.detach(), start) for weight, start in zip(weights, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_is_rounded_once_in_the_type_of_the_weights(dtype, tmp_path):
    weights, kept, before, after = stepped("adamw_torch", dtype, tmp_path)
    kept.move(0.25)
    for weight, start, end in zip(weights, before, after, strict=True):
        exact = start.double() + 0.25 * (end.double() - start.double())
        torch.testing.assert_close(weight.detach().double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_weights_in_bf16_do_not_stay_where_they_were_rounded_to(tmp_path):
    weights, kept, before, after = stepped("adamw_torch", torch.bfloat16, tmp_path)
    rounding = {"rtol": torch.finfo(torch.bfloat16).eps / 2, "atol": 8 * torch.finfo(torch.float32).eps}
    for share in (0.01, *(0.9**number for number in range(20))):  # out again, and little by little
        kept.move(share)
        for weight, start, end in zip(weights, before, after, strict=True):
            exact = start.double() + share * (end.double() - start.double())
            torch.testing.assert_close(weight.detach().double(), exact, **rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_weights_are_moved_part_by_part_and_others_as_they_lie(dtype, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 5)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 4, generator=generator).to(dtype)
    weights = [whole.clone(), torch.randn(4, 7, generator=generator).to(dtype).t(), whole[:, ::2]]
    assert [part.numel() for (part,) in module.blocks(whole)] == [5] * 5 + [3]
    kept = KeptWeights(weights)
    kept.keep()
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight += 1
    after = [weight.clone() for weight in weights]
    for share in (0.5, 0.25, 0.0):
        kept.move(share)
        for weight, start, end in zip(weights, before, after, strict=True):
            exact = start.double() + share * (end.double() - start.double())
            torch.testing.assert_close(weight.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_step_that_is_settled_leaves_no_second_copy(tmp_path):
    _, kept, _, _ = stepped("sgd", torch.bfloat16, tmp_path)
    kept.move(0.5)
    assert kept._after
    kept.settle()
    assert not kept._after


def test_weights_are_those_that_parameters_have_at_the_step():
    weight = torch.nn.Parameter(torch.ones(3))
    kept = KeptWeights([weight])
    kept.keep()
    weight.data = torch.full((3,), 2.0)  # as callbacks do that exchange weights for an average
    kept.keep()
    with torch.no_grad():
        weight += 4
    kept.move(0.5)
    assert weight.tolist() == [4.0] * 3
    kept.move(0.0)
    assert weight.tolist() == [2.0] * 3


def test_a_step_in_bf16_knows_nothing_of_the_one_that_was_shortened_before_it(tmp_path):
    weights, kept, _, _ = stepped("sgd", torch.bfloat16, tmp_path)
    kept.move(0.5)
    kept.keep()
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.fill_(3.0)
    kept.move(0.5)
    for weight, start in zip(weights, before, strict=True):
        assert torch.equal(weight, (start.float() + 0.5 * (3.0 - start.float())).bfloat16())


def adamw(dtype, **settings):
    """Stepped three times: two groups, one of them without decay, and a weight without a gradient."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((4, 6), (5,), (3,))]
    groups = [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 0.1, "betas": (0.8, 0.95), **settings})
    steps = AdamWSteps(optimizer)
    for number in range(3):
        for weight in weights[:2]:
            weight.grad = 1000**number * torch.randn(weight.shape, generator=generator).to(dtype)
        before = [weight.detach().clone() for weight in weights]
        optimizer.param_groups[0]["lr"] = 0.1 * (number + 1)
        steps.keep()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0  # the schedule goes on
    return optimizer, weights, steps, before, [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_of_adamw_is_undone_by_what_it_keeps(dtype, settings, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 7)
    optimizer, weights, steps, before, after = adamw(dtype, **settings)
    assert can_be_undone(optimizer)
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}  # some roundings of the step
    for share in (0.5, 0.01, 0.3, 0.0):
        steps.move(share)
        for weight, start, end in zip(weights, before, after, strict=True):
            torch.testing.assert_close(weight.detach(), start + share * (end - start), **close)
    assert torch.equal(weights[2].detach(), before[2])


def test_a_copy_is_kept_where_it_is_small_asked_for_or_needed(monkeypatch):
    optimizer = adamw(torch.float32)[0]
    assert isinstance(kept_weights(optimizer), KeptWeights)
    monkeypatch.setattr(module, "SMALL", 8)
    assert isinstance(kept_weights(optimizer), AdamWSteps) and kept_weights(optimizer).bytes == 0
    assert isinstance(kept_weights(optimizer, offload=True), KeptWeights)
    for settings in ({"amsgrad": True}, {"maximize": True}):
        assert not can_be_undone(adamw(torch.float32, **settings)[0])
    assert not can_be_undone(adamw(torch.bfloat16)[0])
    parameters = list(optimizer.param_groups[0]["params"])
    assert not can_be_undone(torch.optim.SGD(parameters, lr=0.1)) and not can_be_undone(torch.optim.Adam(parameters))


def test_weights_that_cannot_be_computed_back_are_lost():
    _, weights, steps, _, _ = adamw(torch.float32)
    with torch.no_grad():
        weights[0].fill_(torch.inf)
    steps.move(0.1)
    assert not steps.lost  # or not yet
    steps.move(0.0)
    assert steps.lost


def test_weights_that_were_destroyed_come_back():
    weight = torch.ones(3, requires_grad=True)
    kept = KeptWeights([weight])
    kept.keep()
    with torch.no_grad():
        weight.fill_(torch.nan)
    kept.move(0.1)
    assert weight.isnan().all()
    kept.move(0.0)
    assert torch.equal(weight.detach(), torch.ones(3))
    assert kept.bytes == 12
