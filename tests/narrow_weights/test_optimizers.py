"""Steps on weights in bf16 are those of PyTorch's optimizers in float32, and are kept."""

import copy

import pytest
import torch

from isopo_trl.narrow_weights.bits import join, rounded, split
from isopo_trl.narrow_weights.optimizers import NarrowAdamW, NarrowSGD
from isopo_trl.narrow_weights.stream import key, noise
from isopo_trl.step_size import taken_back
from tests import tiny


KINDS = {
    "sgd": (NarrowSGD, torch.optim.SGD, {}),
    "momentum": (NarrowSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (NarrowSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adamw": (NarrowAdamW, torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "maximized": (NarrowAdamW, torch.optim.AdamW, {"maximize": True}),
}
kinds = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(taken_back, "_BLOCK", 64)  # a part of a matrix; whole vectors of the processor's


def model(dtype=torch.bfloat16):
    """One with a norm in float32, and a parameter that gets no gradient."""
    result = tiny.model("qwen3", dtype=dtype)
    result.model.norm.float()
    result.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=dtype)))
    return result


def optimizer_of(kind, weights, **settings):
    groups = [{"params": weights[:5], "weight_decay": 0.3}, {"params": weights[5:], "weight_decay": 0.0}]
    return kind(groups, lr=1e-3, **settings)


def backward(network, number):
    ids = torch.randint(9, 100, (2, 12), generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", torch.bfloat16):
        network(input_ids=ids, labels=ids).loss.backward()


def train(network, optimizer, steps, before=lambda: None):
    for number in steps:
        before()
        optimizer.zero_grad()
        backward(network, number)
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)  # as a schedule would
        optimizer.step()


def wide(optimizer):
    """The weights in float32, that is with their remainders."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    remainders = [optimizer.state.get(p, {}).get("remainder") for p in weights]
    return [
        p.detach() if remainder is None else join(p.detach(), remainder.view(torch.int16))
        for p, remainder in zip(weights, remainders, strict=True)
    ]


@kinds
def test_with_remainders_a_run_is_that_of_a_float32_optimizer_to_the_last_bit(name):
    kind, theirs, settings = KINDS[name]
    network, twin = model(), model()
    ours = optimizer_of(kind, list(network.parameters()), updates="exact", **settings)
    backward(network, 0)
    ours.give_remainders()
    assert all(map(torch.equal, network.parameters(), twin.parameters()))
    masters = [weight.float().clone().requires_grad_() for weight in wide(ours)]
    train(network, ours, range(4))

    expected = optimizer_of(theirs, masters, foreach=False, **settings)
    for number in range(4):
        with torch.no_grad():
            for p, master in zip(twin.parameters(), masters, strict=True):
                p.copy_(split(master)[0] if p.dtype == torch.bfloat16 else master)
        twin.zero_grad()
        backward(twin, number)
        for p, master in zip(twin.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        expected.param_groups[0]["lr"] = 1e-3 / (1 + number)
        expected.step()

    lost = 0
    for p, mine, master in zip(network.parameters(), wide(ours), masters, strict=True):
        assert torch.equal(mine, master.to(mine.dtype)), name
        lost += (p.detach().float() != master).sum().item()
    assert lost > 1000  # in bf16 alone


@kinds
def test_steps_rounded_at_random_are_those_of_float32_with_the_numbers_of_their_place(name):
    kind, theirs, settings = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 10), (5,))]
    mine = [torch.nn.Parameter(weight.clone()) for weight in start]
    ours = kind(mine, updates="stochastic", seed=3, lr=1e-3, weight_decay=0.3, **settings)
    masters = [weight.float().requires_grad_() for weight in start]
    expected = theirs(masters, foreach=False, lr=1e-3, weight_decay=0.3, **settings)
    for step in (1, 2, 3):
        for p, master in zip(mine, masters, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            with torch.no_grad():
                master.copy_(p)  # a step begins at what the last one was rounded to
            master.grad = p.grad.float()
        ours.step()
        expected.step()
        for place, (p, master) in enumerate(zip(mine, masters, strict=True)):
            numbers = noise(key(3, step, place), 0, p.numel()).view(p.shape)
            assert torch.equal(p.detach(), rounded(master.detach(), numbers)), step
    assert all("remainder" not in state for state in ours.state.values())


def test_remainders_begin_evenly_spread_and_leave_the_model_as_it_was():
    """So a step that is a thousandth of the distance of two numbers in bf16 moves a thousandth of the weights."""
    values = torch.cat([torch.full((2**16,), 1.5), torch.tensor([0.0, -0.0, 3.3e38, -3.3e38, 1e-40, -1e-40])])
    weight = torch.nn.Parameter(values.bfloat16())
    before = weight.detach().clone()
    optimizer = NarrowSGD([weight], updates="exact", lr=1.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, before)
    (spread,) = wide(optimizer)
    assert torch.equal(spread[-6:-4], torch.zeros(2)) and spread.isfinite().all()
    distance = 2**-7
    places = (spread[:-6] - 1.5) / distance
    assert abs(places.mean().item()) < 0.01 and abs(places.square().mean().item() - 1 / 12) < 0.002
    weight.grad[:-6] = 1e-3 * distance
    optimizer.step()
    moved = (before[:-6] - weight[:-6].detach()).float().mean().item()
    assert moved == pytest.approx(1e-3 * distance, rel=0.5)


@pytest.mark.parametrize(("name", "updates"), [("sgd", "stochastic"), ("momentum", "exact"), ("adamw", "exact")])
def test_a_run_resumes_to_the_last_bit(name, updates, tmp_path):
    kind, theirs, settings = KINDS[name]
    settings = {**settings, "updates": updates}
    whole = model()
    through = optimizer_of(kind, list(whole.parameters()), **settings)
    train(whole, through, range(2))
    saved = copy.deepcopy(whole)
    torch.save(through.state_dict(), tmp_path / "optimizer.pt")
    train(whole, through, range(2, 4))

    resumed = optimizer_of(kind, list(saved.parameters()), **settings)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(saved, resumed, range(2, 4))
    for one, other in zip(wide(through), wide(resumed), strict=True):
        assert torch.equal(one, other)
    # Nor is it lost what an optimizer of PyTorch's has saved
    plain = optimizer_of(theirs, list(saved.parameters()), **KINDS[name][2])
    train(saved, plain, [4])
    state = plain.state_dict()
    resumed.load_state_dict(state)
    train(saved, resumed, [5])
    for of in resumed.state.values():
        assert all(value.dtype == torch.float32 for key, value in of.items() if key != "remainder")


def test_what_has_no_weights_in_bf16_or_settings_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="trained weights in bf16, but those here are in torch.float32"):
        NarrowSGD([torch.zeros(3, requires_grad=True)], updates="exact", lr=0.1)
    with pytest.raises(ValueError, match="does not work with amsgrad=True"):
        weight = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
        NarrowAdamW([weight], updates="exact", lr=0.1, amsgrad=True)
