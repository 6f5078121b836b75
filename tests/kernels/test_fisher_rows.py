"""Samples that are rows from before, and the copying of rows for later, against the same in plain PyTorch."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isopo_trl import ISOPO
from isopo_trl.geometry import reservoir
from isopo_trl.geometry.routing import Routing
from isopo_trl.geometry.sequences import SampleRows, Sequences
from isopo_trl.geometry.statistics import elementwise_statistics, linear_statistics
from isopo_trl.kernels import elementwise, fisher_rows, launch, linear, rms_norm, v
from isopo_trl.rules import make_rule
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    EACH_DTYPE,
    EXACT,
    FIG4,
    FISHER,
    GRADIENT,
    STATISTIC,
    Run,
    batch,
    close,
    names_of,
)


pytestmark = batches.of_kernels

# m, T, p, d, n: no dimension is a multiple of a block everywhere
SHAPES = [(1, 1, 1, 1, 1), (3, 7, 5, 33, 130), (8, 65, 16, 16, 64), (2, 130, 130, 5, 9)]


def from_before(given, n, seed=7):
    """Rows of another batch, the last of which are absent, that is, zero."""
    generator = torch.Generator().manual_seed(seed)
    g, a = (torch.randn(n, x.shape[1], generator=generator).to(x) for x in (given.g, given.a))
    present = (torch.arange(n) < max(1, n - 2)).unsqueeze(1).to(g)
    return SampleRows(g * present, a * present)


def plain(given, samples, needs):
    of_rows = SampleRows(samples.g.double(), samples.inputs.double())
    g, a = given.g.double(), given.a.double()
    return linear_statistics(g, a, given.bias, given.sequences, of_rows, needs, "whole")


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlaps_with_rows_from_before_are_those_of_plain_pytorch(shape, dtype):
    given = batch(*shape, bias=sum(shape) % 2 == 0, dtype=dtype)
    samples = from_before(given, shape[4])
    m, n = shape[0], shape[4]
    names, own = names_of(n, m)
    run = Run.of(given, FISHER, names=names)
    arguments = (given.g, given.a, given.bias, given.sequences, samples, run.entry)
    linear.overlaps(*arguments, finish=True)
    result, _, _ = linear.overlaps(*arguments)
    expected = replace(plain(given, samples, FISHER.needs)[0], own=own)
    close(result[:n], expected.sample_norm, STATISTIC[dtype])
    close(result[n:].view(m, -1, n).sum(1).t(), expected.overlap, STATISTIC[dtype])
    run.check(expected, STATISTIC[dtype])


@pytest.mark.parametrize(("shape", "slots"), [((2, 3, 5, 17, 130), None), ((1, 2, 40, 1, 9), 4)], ids=str)
def test_what_measures_a_layer_also_keeps_its_rows(shape, slots):
    """In whichever program, and whichever of the slots there are."""
    given = batch(*shape, bias=True)
    samples, n, rows = from_before(given, shape[4]), shape[4], len(given.g)
    numbers = torch.arange(slots or n) % (rows + 2) - 2  # the first two: zeros, and left alone
    source = reservoir.Source(numbers.to(DEVICE))
    empty = [torch.full((len(numbers), x.shape[1]), 7.0, device=DEVICE, dtype=EXACT) for x in (given.g, given.a)]
    run, alone = Run.of(given, FISHER), Run.of(given, FISHER)
    arguments = (given.g, given.a, given.bias, given.sequences, samples)
    linear.overlaps(*arguments, alone.entry, finish=True)
    for entry in (run.entry, alone.entry):  # also behind a layer of the same shape that keeps none
        found = [x.clone() for x in empty]
        linear.overlaps(*arguments, entry, into=(*found, source.numbers), finish=True)
        for x, own, kept in zip((given.g, given.a), empty, found, strict=True):
            expected = own.clone()
            source.put(expected, x)
            assert torch.equal(kept, expected)
        assert torch.equal(run.ledger.table, alone.ledger.table)


def test_rows_of_experts_are_copied_with_their_experts():
    k, N, n = 2, 6, 5
    generator = torch.Generator().manual_seed(5)
    routing = Routing.of(torch.rand(N, 4, generator=generator).topk(k).indices.to(DEVICE), 4, Sequences.regular(2, 3))
    g, a = (torch.randn(N * k, width, generator=generator).to(DEVICE, EXACT) for width in (5, 1500))
    source = torch.tensor([4, reservoir.KEEP, reservoir.NOTHING, 0, 5], device=DEVICE)
    buffers = {"g": torch.full((n, k, 5), 7.0), "a": torch.full((n, k, 1500), 7.0), "choices": torch.full((n, k), 3)}
    buffers = {name: x.to(DEVICE, torch.long if name == "choices" else EXACT) for name, x in buffers.items()}
    assert fisher_rows.take_routed(g, a, buffers) and not fisher_rows.take_routed(g, a.long(), buffers)
    fisher_rows.put_routed(buffers, g, a, routing.choices, routing.places, source)
    for slot, position in enumerate(source.tolist()):
        for i in range(k):
            row = routing.places[position * k + i]
            if position >= 0:
                expected = {"g": g[row], "a": a[row], "choices": routing.choices[position, i]}
            else:
                left = position == reservoir.KEEP
                expected = {"g": 7.0 * left, "a": 7.0 * left, "choices": 3 * left}
            assert all((buffers[name][slot, i] == x).all() for name, x in expected.items()), (slot, i)


def test_a_rule_with_both_norms_takes_them_too():
    given = batch(3, 7, 5, 33, 6)
    names, own = names_of(6, 3)
    samples, run = from_before(given, 6), Run.of(given, FIG4, names=names)
    arguments = (given.g, given.a, given.bias, given.sequences, samples, run.entry)
    overlap = linear.overlaps(*arguments)
    expected, V = plain(given, samples, FIG4.needs)
    v.v_coefficients(V.to(EXACT), run.entry, overlap)
    run.check(replace(expected, own=own), STATISTIC[EXACT])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize(("m", "T", "d", "n"), [(1, 1, 1, 1), (3, 7, 5, 130), (8, 65, 70, 33)])
def test_an_elementwise_parameter_takes_rows_from_before(m, T, d, n, dtype, wide):
    given = batch(m, T, d, 1, n, dtype=dtype)
    kept, (names, own) = from_before(given, n).g, names_of(n, m)
    samples = SampleRows(kept.to(torch.promote_types(dtype, torch.float32)) if wide else kept)
    run = Run.of(given, FIG4, names=names)
    result = elementwise.elementwise_gradient(given.g, given.sequences, samples, run.entry, dtype)
    exact = SampleRows(samples.g.double())
    statistics, V = elementwise_statistics(given.g.double(), given.sequences, exact, FIG4.needs)
    run.check(replace(statistics, own=own), STATISTIC[dtype])
    close(result, run.ledger.table[run.index, 0] @ V, GRADIENT[dtype])


def test_what_measures_an_elementwise_parameter_also_keeps_its_rows():
    m, T, d, n = 2, 70, 70, 5
    given = batch(m, T, d, 1, n)
    samples, run, alone = SampleRows(from_before(given, n).g), Run.of(given, FIG4), Run.of(given, FIG4)
    slots = torch.full((m * T,), -1, dtype=torch.int32, device=DEVICE)
    slots[3], slots[69], slots[139] = 4, 0, 2
    kept = torch.full((n, d), 7.0, device=DEVICE, dtype=torch.promote_types(EXACT, torch.float32))
    arguments = (given.g, given.sequences, samples)
    result = elementwise.elementwise_gradient(*arguments, run.entry, EXACT, into=(kept, slots))
    assert torch.equal(kept[[4, 0, 2]], given.g[[3, 69, 139]].to(kept)) and (kept[[1, 3]] == 7).all()
    assert torch.equal(result, elementwise.elementwise_gradient(*arguments, alone.entry, EXACT))


@pytest.mark.parametrize("dtype", EACH_DTYPE, ids=str)
@pytest.mark.parametrize("widths", [(1,), (5, 33), (1500, 16), (16, 1500)], ids=str)
def test_rows_are_copied_to_their_slots_and_others_are_left(widths, dtype):
    generator = torch.Generator().manual_seed(1)
    names = ("g", "a")[: len(widths)]
    rows = {n: torch.randn(9, w, generator=generator).to(DEVICE, dtype) for n, w in zip(names, widths, strict=True)}
    source = torch.tensor([4, reservoir.KEEP, 8, reservoir.NOTHING, 0, reservoir.KEEP], device=DEVICE)
    # A part of the features is what the LM head puts at a time
    whole = {n: torch.full((6, x.shape[1] + 3), 7.0, device=DEVICE, dtype=dtype) for n, x in rows.items()}
    buffers = {n: x[:, 2:-1] for n, x in whole.items()}
    expected = {n: x.clone() for n, x in buffers.items()}
    assert fisher_rows.take(rows, buffers)
    fisher_rows.put(buffers, rows, source)
    for name, x in expected.items():
        reservoir.Source(source).put(x, rows[name])
        assert torch.equal(buffers[name], x), name
        assert (whole[name][:, [0, 1, -1]] == 7).all(), name


def test_rows_that_the_kernel_cannot_read_are_left_to_pytorch():
    x, ids = torch.zeros(3, 4, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE)
    assert fisher_rows.take({"g": x}, {"g": x})
    assert not fisher_rows.take({"g": x, "a": ids}, {"g": x, "a": ids})
    assert not fisher_rows.take({"g": x.t()}, {"g": x})
    assert not fisher_rows.take({"g": x}, {"g": x[:0]})


@pytest.mark.parametrize("heads", [None, 3])
def test_a_norms_rows_go_where_they_are_kept(heads):
    shape = (2, 7, 5) if heads is None else (2, 7, heads, 5)
    generator = torch.Generator().manual_seed(2)
    x, g = (torch.randn(shape, generator=generator).to(DEVICE, EXACT) for _ in range(2))
    weight = torch.ones(5, device=DEVICE, dtype=EXACT)
    flavour, sequences = rms_norm.Flavour(1e-6, 0.0, False), Sequences.regular(2, 7)
    _, scale = rms_norm.forward(x, weight, flavour)
    slots = torch.full((14,), -1, dtype=torch.int32, device=DEVICE)
    slots[3], slots[11] = 2, 0
    buffer = torch.full((4, 5), 7.0, device=DEVICE, dtype=torch.promote_types(EXACT, torch.float32))
    _, sums, returned = rms_norm.backward(x, g, weight, scale, flavour, sequences, None, (buffer, slots))
    assert returned is buffer and (buffer[[1, 3]] == 7).all()
    per_position = g * x * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    per_position = per_position if heads is None else per_position.sum(2)
    close(buffer[[2, 0]], per_position.reshape(14, 5)[[3, 11]], STATISTIC[EXACT])
    run = Run.of(batch(2, 7, 5, 1, 4), make_rule("fisher"))
    samples = SampleRows(torch.randn(4, 5, generator=generator).to(buffer))
    total = elementwise.elementwise_gradient(samples.g, sequences, samples, run.entry, EXACT, sums)
    exact = SampleRows(samples.g.double())
    statistics, V = elementwise_statistics(per_position.reshape(14, 5).double(), sequences, exact, FISHER.needs)
    run.check(statistics, STATISTIC[EXACT])
    close(total, run.ledger.table[run.index, 0] @ V, GRADIENT[EXACT])


class Counter(TorchDispatchMode):
    """Counts operations that write to memory, outside of kernels."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(word in str(function) for word in ("view", "slice", "select.", "empty", "detach", "alias", ".t.")):
            self.number += 1
        return function(*args, **(kwargs or {}))


def operations(layers, scope, monkeypatch):
    """Launches, and operations beside them, of the second microbatch of the third step, through so many layers."""
    kinds = (nn.Linear(8, 8, bias=False), LlamaRMSNorm(8), nn.LayerNorm(8))
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers) for layer in kinds)).to(DEVICE, torch.float32)
    isopo = ISOPO(model, fisher_samples=4, fisher_scope=scope)
    launches = []
    counter = Counter()

    def counted(kernel, *args):
        launches.append(kernel)
        before = counter.number
        launch.launch(kernel, *args)
        counter.number = before

    for module in (elementwise, fisher_rows, linear, rms_norm):
        monkeypatch.setattr(module, "launch", counted)
    mask = torch.ones(2, 3, device=DEVICE)
    for microbatches in (1, 1, 2):
        for _ in range(microbatches):
            launches.clear()
            counter.number = 0
            with isopo.microbatch(torch.ones(2, device=DEVICE), attention_mask=mask):
                y = model(torch.linspace(-1, 1, 48, device=DEVICE).sin().view(2, 3, 8)).square().sum()
                with counter:
                    y.backward()
        isopo.step()
    return len(launches), counter.number


def test_a_layer_takes_as_many_launches_as_by_the_microbatch(monkeypatch):
    """Linear layers and norms: rows of the step before cost what those of the batch do, and keeping some is free."""
    growth = {}
    for scope in ("microbatch", "step"):
        one, two = (operations(number, scope, monkeypatch) for number in (1, 2))
        growth[scope] = [y - x for x, y in zip(one, two, strict=True)]
    assert growth["step"][0] == growth["microbatch"][0] > 0
    assert growth["step"][1] <= growth["microbatch"][1]
