"""A step is taken back along itself, whichever optimizer made it."""

import importlib.util
import re

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from isopo_trl.step_size import taken_back
from isopo_trl.step_size.optimizers import REFUSED
from isopo_trl.step_size.taken_back import AdamWSteps, SGDSteps, WeightCopy, can_be_undone, way_back_of
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


def of_transformers(name, weights, folder):
    arguments = TrainingArguments(str(folder), optim=name, learning_rate=0.1, weight_decay=0.1, use_cpu=True)
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return optimizer_class(weights, **settings)


def assert_moved(weights, before, after, share, **tolerance):
    """The weights are where they would be with a share of the step, in their own type."""
    for weight, start, end in zip(weights, before, after, strict=True):
        exact = start.double() + share * (end.double() - start.double())
        torch.testing.assert_close(weight.detach().double(), exact, **tolerance)


def test_the_table_says_of_every_optimizer_of_transformers_what_becomes_of_its_steps(tmp_path):
    said = {name: how for names, how in table("target_kl.md", "Optimizers") for name in re.findall(r"`(\w+)`", names)}
    # A new one is tried first, and gets its place in the table or among the refused
    assert sorted(said) == sorted(name.value for name in OptimizerNames)
    for name, how in said.items():
        assert ("refused" in how) == (name in REFUSED), name
    for name in NAMES:
        optimizer = of_transformers(name, [torch.zeros(3, requires_grad=True)], tmp_path)
        assert can_be_undone(optimizer) == ("moments" in said[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_the_second_step_is_kept(name, tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in ((4, 6), (5,))]
    optimizer, way_back = of_transformers(name, weights, tmp_path), WeightCopy(weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).double()
        before = [weight.detach().clone() for weight in weights]
        way_back.remember()
        optimizer.step()
    after = [weight.detach().clone() for weight in weights]
    assert not any(map(torch.equal, before, after))
    for share in (0.5, 0.01, 0.3):  # one after the other, also back towards the whole
        way_back.move(share)
        assert_moved(weights, before, after, share, rtol=1e-13, atol=1e-13)
    way_back.move(0.0)
    assert all(map(torch.equal, weights, before))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_once_wherever_they_lie_and_do_not_stay_where_they_were_rounded_to(dtype, monkeypatch):
    monkeypatch.setattr(taken_back, "_BLOCK", 5)  # which is less than all
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 4, generator=generator).to(dtype)
    weights = [whole.clone(), torch.randn(4, 7, generator=generator).to(dtype).t(), whole[:, ::2]]
    # The way out multiplies what was rounded before, unless there is a second copy, as of bf16
    precise = torch.promote_types(dtype, torch.float32)
    close = {
        "rtol": torch.finfo(dtype).eps,
        "atol": (8 if dtype == torch.bfloat16 else 200) * torch.finfo(precise).eps,
    }
    moved, way_back = [], WeightCopy(weights, moved=lambda: moved.append(weights[0][0, 0].item()))
    for _ in range(2):  # the second step knows nothing of the first, which was shortened
        way_back.remember()
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight += torch.randn(weight.shape, generator=generator).to(dtype) / 10
        after = [weight.clone() for weight in weights]
        for share in (0.01, *(0.9**number for number in range(9)), 0.5):  # out again, and little by little
            way_back.move(share)
            assert_moved(weights, before, after, share, **close)
            assert moved[-1] == weights[0][0, 0]  # whoever makes other weights from them is told
    assert len(moved) == 22


def test_a_settled_step_leaves_no_second_copy_and_a_destroyed_one_can_be_taken_back():
    weight = torch.ones(3, dtype=torch.bfloat16)
    way_back = WeightCopy([weight])
    way_back.remember()
    weight.fill_(torch.nan)
    way_back.move(0.1)
    assert weight.isnan().all() and way_back._after
    way_back.move(0.0)
    way_back.settle()
    assert weight.tolist() == [1.0] * 3 and way_back.bytes == 6 and not way_back._after


def test_weights_are_those_that_parameters_have_at_the_step():
    weight = torch.nn.Parameter(torch.ones(3))
    way_back = WeightCopy([weight])
    weight.data = torch.full((3,), 2.0)  # as callbacks do that exchange weights for an average
    way_back.remember()
    weight.data += 4
    for share, expected in ((0.5, 4.0), (0.0, 2.0)):
        way_back.move(share)
        assert weight.tolist() == [expected] * 3


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
        steps.remember()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0  # the schedule goes on
    return optimizer, weights, steps, before


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_of_adamw_is_undone_by_what_it_keeps_unless_it_was_destroyed(dtype, settings, monkeypatch):
    monkeypatch.setattr(taken_back, "_BLOCK", 7)
    optimizer, weights, steps, before = adamw(dtype, **settings)
    after, rounding = [weight.detach().clone() for weight in weights], 8 * torch.finfo(dtype).eps
    assert can_be_undone(optimizer)
    for share in (0.5, 0.01, 0.3, 0.0):
        steps.move(share)
        assert_moved(weights, before, after, share, rtol=rounding, atol=rounding)
    assert torch.equal(weights[2], before[2]) and not steps.lost
    weights[0].data.fill_(torch.inf)
    steps.move(0.1)
    assert not steps.lost  # or not yet
    steps.move(0.0)
    assert steps.lost


def test_a_copy_is_kept_where_it_is_small_asked_for_or_needed(monkeypatch):
    optimizer = adamw(torch.float32)[0]
    assert isinstance(way_back_of(optimizer), WeightCopy)
    monkeypatch.setattr(taken_back, "SMALL", 8)
    assert isinstance(way_back_of(optimizer), AdamWSteps) and way_back_of(optimizer).bytes == 0
    assert isinstance(way_back_of(optimizer, offload=True), WeightCopy)
    parameters = list(optimizer.param_groups[0]["params"])
    for offload in (False, True):
        assert isinstance(way_back_of(torch.optim.SGD(parameters, lr=0.1), offload), SGDSteps)
    others = [torch.optim.Adam(parameters), adamw(torch.bfloat16)[0]]
    for other in (*others, *(adamw(torch.float32, **{name: True})[0] for name in ("amsgrad", "maximize"))):
        assert isinstance(way_back_of(other), WeightCopy)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.3, "maximize": True},
        {"weight_decay": 0.3, "momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_sgd_is_tried_as_it_will_be_made_and_leaves_no_bit_behind(dtype, settings, monkeypatch):
    """Weights of any size beside the step, some of them 0, in blocks, in two groups, and in any order in memory."""
    monkeypatch.setattr(taken_back, "_BLOCK", 100)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        size = 10 ** (6 * torch.rand(shape, generator=generator, dtype=torch.float64) - 4)
        return torch.randn(shape, generator=generator, dtype=torch.float64) * size

    values = [random(17, 30), random(30, 9).t(), torch.zeros(8), random(3)]
    weights = [torch.nn.Parameter(value.to(dtype)) for value in values]
    optimizer = torch.optim.SGD([{"params": weights[:2], "lr": 0.3}, {"params": weights[2:]}], lr=0.01, **settings)
    way_back = SGDSteps(optimizer)
    for _ in range(3):
        for weight in weights[:3]:
            weight.grad = random(*weight.shape).to(dtype)
        before = [weight.detach().clone() for weight in weights]
        way_back.remember()
        for share in (1.0, 0.01, 1e30, 1e300, 1.0):  # far too long leaves nothing of the weights
            way_back.move(share)
            assert torch.equal(weights[3], before[3])
        tried = [weight.detach().clone() for weight in weights]
        way_back.settle()
        assert all(map(torch.equal, weights, before))
        optimizer.step()
        for weight, value in zip(weights, tried, strict=True):
            # PyTorch may round a direction and its product with the rate once instead of twice
            largest = 0 if weight.grad is None else weight.grad.abs().max().item()
            torch.testing.assert_close(
                weight.detach(), value, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps * largest
            )
    assert not way_back._noted


def test_a_step_of_sgd_is_tried_without_a_copy():
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, 1000, generator=generator))
    weight.grad = torch.randn(1000, 1000, generator=generator)
    optimizer = torch.optim.SGD([weight], lr=1e-5)
    way_back = way_back_of(optimizer)
    way_back.remember()
    way_back.move(1.0)
    noted = sum(noted.places[0].numel() for noted in way_back._noted)
    assert 0 < noted < 1e-3 * weight.numel()


def test_what_is_noted_takes_no_more_memory_than_the_weights():
    weights = torch.arange(1000.0)
    for count, is_all in ((0, False), (499, False), (501, True), (1000, True)):
        wanted = torch.arange(1000) < count
        noted = taken_back.Noted(weights, wanted)  # a place takes four bytes, as a weight does
        assert (noted.places is None) == is_all
        moved = torch.where(wanted, -1.0, weights)
        noted.put_back(moved)
        assert torch.equal(moved, weights)


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}], ids=str)
def test_an_error_on_the_way_leaves_the_weights_as_they_were(settings, monkeypatch):
    """As where a trial runs out of memory."""
    weights = [torch.nn.Parameter(torch.rand(7)) for _ in range(5)]
    for weight in weights:
        weight.grad = torch.rand(7)
    before = [weight.detach().clone() for weight in weights]
    way_back = way_back_of(torch.optim.SGD(weights, lr=0.1, **settings))
    way_back.remember()
    added, calls = taken_back._added, []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")
        return added(*arguments)

    monkeypatch.setattr(taken_back, "_added", fails)
    with pytest.raises(torch.OutOfMemoryError):
        way_back.move(1.0)
    way_back.settle()
    assert all(map(torch.equal, weights, before))
