"""A share of a step on weights in bf16 is the step with that share of its learning rate."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isopo_trl.narrow_weights import way_back
from isopo_trl.narrow_weights.optimizers import NarrowAdamW, NarrowSGD
from isopo_trl.step_size import taken_back
from isopo_trl.step_size.taken_back import way_back_of
from tests.narrow_weights.test_optimizers import KINDS, wide


SHAPES = ((9, 30), (5,), (3,))


def stepped(name, updates, steps=2, **more):
    """An optimizer before its last step, with the gradient of that; one weight has none, another is in float32."""
    kind, _, settings = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    weights[1] = weights[1].float()
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = kind(parameters, updates=updates, lr=1e-2, weight_decay=0.3, **settings, **more)
    for number in range(steps):
        for p in parameters[:2]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if number < steps - 1:
            optimizer.step()
    return optimizer


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def stepped_with(optimizer, share, before=None):
    """A copy that has made the step, from the weights `before` if they are given, at a share of the learning rate."""
    other = copy.deepcopy(optimizer)
    other.updates, other.seed = optimizer.updates, optimizer.seed
    mine, theirs = parameters_of(optimizer), parameters_of(other)
    for p, q, start in zip(mine, theirs, before or mine, strict=True):
        q.data.copy_(start.detach())
        q.grad = None if p.grad is None else p.grad.clone()
    other.param_groups[0]["lr"] *= share
    other.step()
    return other


def with_rate(optimizer, share):
    """The weights after the step at a share of the learning rate."""
    return wide(stepped_with(optimizer, share))


@pytest.mark.parametrize("kept", ["copied", "computed"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("updates", ["exact", "stochastic"])
@pytest.mark.parametrize("name", ["adamw", "maximized"])
def test_a_share_of_a_step_is_the_step_at_that_share_of_the_rate(name, updates, steps, kept, monkeypatch):
    monkeypatch.setattr(taken_back, "_BLOCK", 64)
    monkeypatch.setattr(way_back, "SMALL", 2**28 if kept == "copied" else 0)
    optimizer = stepped(name, updates, steps)
    steps_back = way_back_of(optimizer)
    expected = {share: with_rate(optimizer, share) for share in (1.0, 0.5, 0.01, 0.3)}
    optimizer.give_remainders()
    before = [weight.clone() for weight in wide(optimizer)]
    steps_back.remember()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0  # the schedule goes on
    assert (steps_back.bytes == 0) == (kept == "computed" and updates == "exact")
    for share in (0.5, 0.01, 0.3, 1.0, 0.0):
        steps_back.move(share)
        for weight, goal in zip(wide(optimizer), expected.get(share, before), strict=True):
            goal = goal.to(weight.dtype)
            if steps_back.bytes:
                assert torch.equal(weight, goal), share
            else:
                torch.testing.assert_close(weight, goal, rtol=1e-6, atol=1e-7)  # float32's rounding, a few times
    assert not steps_back.lost


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("updates", ["exact", "stochastic"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_a_step_of_sgd_is_tried_as_it_will_be_made_and_leaves_no_bit_behind(name, updates, steps, monkeypatch):
    monkeypatch.setattr(taken_back, "_BLOCK", 64)
    optimizer = stepped(name, updates, steps)
    trials = way_back_of(optimizer)
    optimizer.give_remainders()
    parameters = parameters_of(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    before = [p.detach().clone() for p in parameters]
    made = with_rate(optimizer, 1.0)
    trials.remember()
    for share in (1e30, 1.0, 0.01, 0.3, 1.0):
        trials.move(share)
        assert all(map(torch.equal, parameters, parameters_of(stepped_with(optimizer, share, before)))), share
    trials.settle()
    assert all(map(torch.equal, parameters, before))
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0, equal_nan=True)
    optimizer.step()
    assert all(map(torch.equal, wide(optimizer), made))


@pytest.mark.parametrize("kept", ["copied", "computed"])
def test_a_step_that_has_destroyed_weights_comes_back_from_a_copy_or_is_lost(kept, monkeypatch):
    monkeypatch.setattr(way_back, "SMALL", 2**28 if kept == "copied" else 0)
    optimizer = stepped("adamw", "exact")
    before = [weight.clone() for weight in wide(optimizer)]
    steps_back = way_back_of(optimizer)
    steps_back.remember()
    optimizer.step()
    optimizer.param_groups[0]["params"][0].data.fill_(torch.inf)
    steps_back.move(0.5)
    assert not steps_back.lost  # or not yet
    steps_back.move(0.0)
    assert steps_back.lost == (kept == "computed")
    assert steps_back.lost or all(map(torch.equal, wide(optimizer), before))


class Allocations(TorchDispatchMode):
    """Notes storages of at least `bytes` that come into being, beside those that were there."""

    def __init__(self, least, known):
        super().__init__()
        self.least, self.found = least, {}
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.found[storage.data_ptr()] = tensor  # alive, so that no other has its place
        return result


@pytest.mark.parametrize("kind", [NarrowSGD, NarrowAdamW])
@pytest.mark.parametrize("updates", ["exact", "stochastic"])
def test_nothing_of_the_size_of_the_weights_is_made_but_remainders_and_moments(kind, updates, monkeypatch):
    """
    Over a step that is then shortened and taken back, or was tried before; AdamW's that are rounded at random have a
    copy for that.
    """
    monkeypatch.setattr(taken_back, "_BLOCK", 64)
    monkeypatch.setattr(way_back, "SMALL", 0)
    weight = torch.nn.Parameter(torch.randn(80, 80).bfloat16())
    weight.grad = torch.randn(80, 80).bfloat16()
    optimizer = kind([weight], updates=updates, lr=1e-3)
    steps_back = way_back_of(optimizer)
    with Allocations(weight.numel() * 2, [weight, weight.grad]) as allocations:
        if kind is NarrowSGD:
            steps_back.remember()
            for share in (1.0, 0.5, 0.0):
                steps_back.move(share)
        elif updates == "exact":
            steps_back.remember()
        optimizer.step()
        for share in (0.5, 0.0) if kind is NarrowAdamW and updates == "exact" else ():
            steps_back.move(share)
    state = [value for name, value in optimizer.state[weight].items() if name != "step"]
    assert len(state) == (updates == "exact") + 2 * (kind is NarrowAdamW)
    assert set(allocations.found) == {value.untyped_storage().data_ptr() for value in state}
