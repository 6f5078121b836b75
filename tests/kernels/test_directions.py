"""
Rules that compare gradients with a direction, by kernels: projections and coefficients against the definition, and
against the same in plain PyTorch.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.kernels import elementwise, experts, launch, linear, rms_norm, v
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.rules import Spring, make_rule
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EACH_DTYPE,
    EXACT,
    HISTORY,
    INTERACTING,
    KNOWN,
    LAYERS,
    STATISTIC,
    UNKNOWN,
    Run,
    batch,
    check_elementwise,
    close,
    named,
    plain_statistics,
    run_linear,
    thinned,
)
from tests.kernels.test_coefficients import SITUATIONS


pytestmark = batches.of_kernels

SPRING, PROMA = map(make_rule, ("spring", "proma"))
RULES = [
    SPRING,
    make_rule("spring", regularization=0.3, spring_decay=0.5),
    make_rule("spring", spring_decay=0.0),
    PROMA,
    make_rule("proma", proma_strength=0.4, proma_bound=30.0, scale="paper"),
    make_rule("proma", proma_bound=0.0),
]
# Layer, constant of the loss, and unit of the direction
WHERE = [(KNOWN, 0.25, 0.5), (UNKNOWN, 0.5, 3.0)]
# Of a direction, whatever the gradients are in
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def direction_of(given, scale=1.0, dtype=EXACT, bias=None, seed=3):
    """Of a linear layer's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    p, d = given.g.shape[1], given.a.shape[1]
    shapes = [(p, d), (p,)] if (given.bias if bias is None else bias) else [(p, d)]
    return tuple((scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype) for shape in shapes)


# The formulas, from gradients as they stand


@pytest.mark.parametrize(("place", "scale"), [(0, 1.0), (1, 1.0), (0, 100.0), (1, 100.0)])
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_the_coefficients_are_those_of_the_definition(rule, place, scale):
    """In units of the loss without its constant k, in which the direction is D times its unit; PROMA's has k in it."""
    index, k, unit = WHERE[place]
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(5, 4, 9, generator=generator).double() * torch.arange(1.0, 6.0).view(5, 1, 1)
    D = scale * torch.randn(4, 9, generator=generator).double()
    if not rule.needs.direction:
        D = torch.zeros_like(D)
    elif rule.name == "proma":
        unit = 1.0
    given = batch(5, 1, 1, 1, 1)
    A, run = given.advantages.double().cpu(), Run.of(given, rule, index, k, unit=unit)
    of_layer = (D.to(DEVICE, EXACT),) if rule.needs.direction else None
    v.v_coefficients((k * V).to(DEVICE, EXACT), run.entry, direction=of_layer)
    flat, D = V.flatten(1), unit * D.flatten()
    if rule.name == "proma":
        S, R = flat / flat.norm(dim=1, keepdim=True), D / k
        P = S.T @ torch.linalg.solve(S @ S.T + 0.01 * torch.eye(5).double(), S @ R)
        g = A @ flat
        shortened = min(1.0, rule.proma_bound * (g.norm() / P.norm()).item())
        assert (shortened < 1) == (rule.proma_bound * g.norm() < P.norm())
        expected = g - rule.proma_strength * shortened * P
    else:
        c0 = rule.regularization * (HISTORY[1] if index == KNOWN else flat.square().sum(1).mean())
        right = A - rule.spring_decay * flat @ D
        expected = flat.T @ torch.linalg.solve(flat @ flat.T + c0 * torch.eye(5).double(), right) / k**2
    c = run.ledger.table[index, 0].cpu()
    close(c @ flat, expected, 100 * STATISTIC[EXACT])
    if run.book.projection is not None:
        close(run.book.projection[index].cpu(), k * flat @ D, STATISTIC[EXACT])


# A layer's statistics and coefficients, against plain PyTorch


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("rule", [RULES[1], RULES[4]], ids=named)
@pytest.mark.parametrize(("m", "rows"), [(1, None), (3, 1), (8, 3), (17, None)])
def test_projections_of_gradients_in_any_number_of_blocks(m, rule, rows, dtype):
    """With a bias or without one, and the direction of a matrix that is transposed, or in another type."""
    given = batch(m, 5, 4, 33, 5, bias=m in (3, 17), dtype=dtype)
    where = WHERE[m == 8]
    for of_direction in {dtype, *TYPES}:
        direction = direction_of(given, dtype=of_direction)
        for each in (direction, (direction[0].t().contiguous().t(), *direction[1:])):
            run = Run.of(given, rule, *where[:2], unit=where[2])
            run_linear(given, run, rows, each)
            exact = tuple(D.double() for D in direction)
            run.check(plain_statistics(given, rule.needs, direction=exact)[0], STATISTIC[dtype])


@pytest.mark.parametrize("rule", [SPRING, PROMA], ids=named)
@pytest.mark.parametrize(("m", "p", "d"), [(2, 130, 130), (17, 70, 121), (17, 80, 128), (1, 70, 3)])
def test_projections_of_gradients_that_take_several_programs(m, p, d, rule):
    generator = torch.Generator().manual_seed(0)
    V, D = (torch.randn(*shape, p, d, generator=generator).to(DEVICE) for shape in ((m,), ()))
    run = Run.of(batch(m, 1, 1, 1, 1), rule, unit=2.0)
    sums = v.VBlocks([(p - 65) * d, 65 * d], run.entry)
    for part, of_part in zip(V.split([p - 65, 65], 1), D.split([p - 65, 65]), strict=True):
        sums.add(part.contiguous(), (of_part,))
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    along = torch.einsum("ipd,pd->i", V.double(), D.double())
    run.check(Statistics(ntk=ntk, projection=along), STATISTIC[torch.float32])


@pytest.mark.parametrize(
    ("m", "changes"),
    [(3, {}), (3, {"pairs": False, "rows": 16, "warps": 1}), (17, {}), (17, {"matrix": False})],
    ids=str,
)
def test_projections_do_not_depend_on_how_the_kernel_between_sequences_is_cut(m, changes):
    """In two levels, with blocks of unequal size, the last of which leaves some programs without any work."""
    given, generator = batch(m, 1, 1, 1, 1), torch.Generator().manual_seed(m)
    V, D = (torch.randn(*shape, 3, 1030, generator=generator).to(DEVICE, EXACT) for shape in ((m,), ()))
    small = {"width": 16, "least": 40, "programs": 45, "grouped": True}
    cut = v.tiling(m, V.dtype.itemsize, 2**16)._replace(**{**small, **changes})
    run = Run.of(given, SPRING)
    blocks = v.VBlocks([2060, 1030], run.entry, cut=cut)
    for part, of_part in zip(V.split(2, dim=1), D.split(2), strict=True):
        blocks.add(part.contiguous(), (of_part,))
    ntk = torch.einsum("ipd,jpd->ij", V.double(), V.double())
    along = torch.einsum("ipd,pd->i", V.double(), D.double())
    run.check(Statistics(ntk=ntk, projection=along), STATISTIC[EXACT])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [RULES[1], RULES[4]], ids=named)
@pytest.mark.parametrize("parts", [1, 2])
def test_an_elementwise_parameter_is_projected(rule, parts, dtype):
    """Of several blocks of features; a scale and a shift are one vector."""
    given = batch(3, 65, 130, 1, 1, dtype=dtype)
    (D,) = direction_of(given, bias=False, dtype=dtype)
    direction = D.flatten().split(130 // parts)
    for index, k, unit in WHERE:
        check_elementwise(given, Run.of(given, rule, index, k, unit=unit), direction)


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_without_a_direction_there_is_nothing_to_compare_with(rule):
    given = batch(3, 7, 5, 4, 6)
    for index, k, unit in WHERE:
        run = Run.of(given, rule, index, k, unit=unit)
        run_linear(given, run)
        run.check(plain_statistics(given, rule.needs)[0], STATISTIC[EXACT])
        check_elementwise(given, Run.of(given, rule, index, k, unit=unit))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize(
    ("rule", "situation"),
    thinned(3, [SPRING, PROMA], SITUATIONS, names=lambda x: x if isinstance(x, str) else named(x)),
)
def test_sequences_without_a_gradient_and_broken_ones_leave_the_others_alone(rule, situation):
    given = batch(3, 7, 5, 4, 6)
    direction = direction_of(given)
    SITUATIONS[situation](given)
    place = len(situation) % 2
    run, vector = (Run.of(given, rule, *WHERE[p][:2], unit=WHERE[p][2]) for p in (place, 1 - place))
    run_linear(given, run, direction=direction)
    exact = tuple(D.double() for D in direction)
    run.check(plain_statistics(given, rule.needs, direction=exact)[0], STATISTIC[EXACT])
    check_elementwise(given, vector, (direction[0][:, 0],))
    for one in (run, vector):
        assert one.ledger.table[one.index, 0].isfinite().sum() >= 2
        one.running.add(one.book, [layer == one.index for layer in range(LAYERS)])
        assert one.running.step()["broken_sequences"] == ("NaN" in situation or "infinity" in situation)


# Models, over microbatches and steps


class Experts(nn.Module):
    """Each position goes to two of four experts."""

    def __init__(self):
        super().__init__()
        config = MixtralConfig(hidden_size=8, intermediate_size=5, num_local_experts=4)
        config._experts_implementation = "eager"
        self.experts = MixtralExperts(config)

    def forward(self, x):
        rows = x.reshape(-1, 8)
        choices = torch.arange(len(rows), device=x.device).unsqueeze(1) % torch.tensor([4, 3], device=x.device)
        choices[:, 1] += choices[:, 0] == choices[:, 1]
        weights = torch.full(choices.shape, 0.5, device=x.device, dtype=x.dtype)
        return self.experts(rows, choices, weights).view_as(x)


KINDS = {
    "linear": lambda: nn.Linear(8, 8, bias=False),
    "linear with a bias": lambda: nn.Linear(8, 8),
    "Conv1D": lambda: Conv1D(8, 8),
    "RMSNorm": lambda: LlamaRMSNorm(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "experts": Experts,
}
MASK = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
MICROBATCHES = [2, 1, 1]  # of each step; in the second and third, the direction has another unit


class Stack(nn.Module):
    """An embedding, and a layer of each kind."""

    def __init__(self, kinds):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([KINDS[kind]() for kind in kinds])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def stack(kinds, dtype, lora=False):
    torch.manual_seed(0)
    model = Stack(kinds)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=r"layers\.[01]"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model.to(DEVICE, dtype)


def trained(model, rule, dtype, by_kernels, monkeypatch):
    """Gradients and projections of each microbatch, over steps with a history."""
    monkeypatch.setattr(launch, "ENABLED", by_kernels)
    model, found, generator = copy.deepcopy(model), [], torch.Generator().manual_seed(2)
    isopo = ISOPO(model, rule)
    mask = torch.tensor(MASK, device=DEVICE)
    for microbatches in MICROBATCHES:
        model.zero_grad()
        for _ in range(microbatches):
            ids = torch.randint(11, mask.shape, generator=generator).to(DEVICE)
            advantages = torch.randn(4, generator=generator).to(DEVICE)
            cotangent = torch.randn(*mask.shape, 8, generator=generator).to(DEVICE, dtype)
            with isopo.microbatch(advantages, attention_mask=mask, loss_scale=1 / microbatches) as microbatch:
                y = model(ids)
                ((y + y.square()) * cotangent * mask.unsqueeze(-1)).sum().div(microbatches).backward()
            assert (microbatch._kernel_ledger is not None) == by_kernels
            found += [p.grad.clone() for p in model.parameters() if p.requires_grad]
            found += [x.clone() for x in isopo.projections().values()]
        isopo.step()
        found += [p.grad.clone() for p in model.parameters() if p.requires_grad]
    isopo.detach()
    return found


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("rule", [RULES[1], RULES[4]], ids=named)
@pytest.mark.parametrize(
    ("kinds", "lora", "strategy"),
    [([*KINDS], False, "whole"), (["linear", "linear with a bias"], True, "whole"), ([*KINDS][:3], False, "blocks")],
    ids=["every kind", "LoRA", "in blocks"],
)
def test_steps_of_several_microbatches_are_those_of_plain_pytorch(
    kinds, lora, strategy, rule, dtype, monkeypatch, request
):
    if dtype == torch.float64:
        request.getfixturevalue("float64_throughout")
    monkeypatch.setattr("isopo_trl.layers.linear.choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 100)  # a few rows in a block
    model = stack(kinds, dtype, lora)
    one, other = (trained(model, rule, dtype, by_kernels, monkeypatch) for by_kernels in (True, False))
    assert all(x.any() for x in one[-sum(p.requires_grad for p in model.parameters()) :])
    for mine, theirs in zip(one, other, strict=True):
        # In a projection, terms of both signs all but cancel each other
        close(mine, theirs, {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1))


@dataclass(frozen=True, kw_only=True)
class OwnSpring(Spring):
    """Its formula may be another one."""


@pytest.mark.parametrize("rule", [OwnSpring(), INTERACTING], ids=["a rule of one's own", "one that is held"])
def test_with_another_direction_pytorch_makes_the_statistics(rule):
    model = stack(["linear", "LayerNorm"], EXACT)
    isopo, mask = ISOPO(model, rule), torch.tensor(MASK, device=DEVICE)
    for step in range(2):
        if rule is INTERACTING:
            isopo.hold({name: p.grad.clone() for name, p in model.named_parameters()} if step else None)
        model.zero_grad()
        with isopo.microbatch(torch.ones(4, device=DEVICE), attention_mask=mask) as microbatch:
            (model(mask).square() * mask.unsqueeze(-1)).sum().backward()
        assert (microbatch._kernel_ledger is None) == (step == 1 or rule is not INTERACTING)
        isopo.step()
    assert all(x.any() for x in isopo.projections().values())


def test_another_unit_takes_no_other_program(monkeypatch):
    """It is among the rule's numbers, not in what a kernel is compiled for."""
    plans = []
    monkeypatch.setattr(v, "launch", lambda kernel, plan, *_: plans.append(plan))
    given = batch(3, 7, 5, 4, 6)
    for unit in (0.5, 0.25):
        run_linear(given, Run.of(given, SPRING, unit=unit), direction=direction_of(given))
    assert plans[0] is plans[1]
    run_linear(given, Run.of(given, SPRING))
    assert plans[2] is not plans[0]


# What it costs


class Counter(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = ("view", "slice", "select.", "empty", "detach", "alias", ".t.", "as_strided")
        if not any(word in str(function) for word in views):
            self.number += 1
        return function(*args, **(kwargs or {}))


def operations(kinds, layers, rule, monkeypatch):
    """Launches, and operations beside them, of the second microbatch of the second step, through so many layers."""
    model, mask = stack(kinds * layers, torch.float32), torch.ones(2, 2, device=DEVICE, dtype=torch.long)
    isopo, counter, launches = ISOPO(model, rule), Counter(), []

    def counted(kernel, *args):
        before = counter.number
        launch.launch(kernel, *args)
        counter.number = before
        launches.append(kernel)

    for module in (elementwise, experts, linear, rms_norm, v):
        monkeypatch.setattr(module, "launch", counted)
    for _ in range(2):
        model.zero_grad()
        for _ in range(2):
            launches.clear()
            counter.number = 0
            with isopo.microbatch(torch.ones(2, device=DEVICE), attention_mask=mask):
                loss = model(mask).square().sum()
                with counter:
                    loss.backward()
        isopo.step()
    assert launches
    return len(launches), counter.number


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if INTERPRET and kind == "experts" else kind for kind in KINDS]
)
def test_a_direction_comes_with_the_launches_that_there_are(kind, monkeypatch):
    """
    Weights and vectors take no operation more than without a direction. But two vectors of a layer are put together,
    and PyTorch projects the two stacks of a mixture's experts.
    """
    growth = {}
    for rule in ("interacting", "spring", "proma"):
        one, two = (operations([kind], number, rule, monkeypatch) for number in (1, 2))
        growth[rule] = [y - x for x, y in zip(one, two, strict=True)]
    more = {"LayerNorm": 1, "experts": 2 * 20}.get(kind, 0)
    for rule in ("spring", "proma"):
        assert growth[rule][0] == growth["interacting"][0] > 0
        assert growth[rule][1] <= growth["interacting"][1] + more
