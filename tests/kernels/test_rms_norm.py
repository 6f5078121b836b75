"""The fused RMSNorm against autograd on its definition, in float64, and its weight's gradient against the formula."""

import itertools

import pytest
import torch

from isopo_trl.geometry.sequences import Samples
from isopo_trl.geometry.statistics import elementwise_statistics
from isopo_trl.kernels import rms_norm
from isopo_trl.kernels.elementwise import elementwise_gradient
from isopo_trl.kernels.launch import Plan
from isopo_trl.kernels.rms_norm import Flavour
from tests.kernels import batches
from tests.kernels.batches import (
    DEVICE,
    DTYPES,
    EUCLIDEAN,
    EXACT,
    FIG4,
    GRADIENT,
    INTERACTING,
    STATISTIC,
    UNKNOWN,
    Run,
    batch,
    close,
    named,
    thinned,
)


pytestmark = batches.of_kernels

FLAVOURS = {
    "llama": Flavour(eps=1e-6, offset=0.0, early=True),
    "T5": Flavour(eps=1e-2, offset=0.0, early=False),
    "gemma": Flavour(eps=1e-6, offset=1.0, early=False),
}


def example(m, T, d, heads=None, dtype=EXACT, weight_dtype=None):
    """Sequences and samples of a batch, an input `[m, T, (H,) d]`, a cotangent that is zero on padding, a weight."""
    given = batch(m, T, d, 1, 6)
    generator = torch.Generator().manual_seed(m + T)
    shape = (m, T, d) if heads is None else (m, T, heads, d)
    x = torch.randn(shape, generator=generator) * 2
    real = (given.g != 0).any(1).cpu().view(m, T, *[1] * (len(shape) - 2))
    g = torch.randn(shape, generator=generator) * real
    weight = torch.rand(d, generator=generator) + 0.5
    return given, x.to(DEVICE, dtype), g.to(DEVICE, dtype), weight.to(DEVICE, weight_dtype or dtype)


def definition(x, weight, flavour):
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + flavour.eps) * (weight + flavour.offset)


def by_position(x, g, weight, flavour):
    """Gradient of the input, and of the weight at each position `[N, d]`, by autograd in float64."""
    x = x.double().requires_grad_()
    own = weight.double().expand_as(x).clone().requires_grad_()
    definition(x, own, flavour).backward(g.double())
    of_weight = own.grad if x.dim() == 3 else own.grad.sum(2)
    return x.grad, of_weight.flatten(0, 1)


SHAPES = [
    (1, 1, 1, None),
    (3, 7, 5, None),
    (2, 65, 33, None),
    (2, 130, 130, None),  # several parts of a sequence
    (2, 3, 600, None),
    (3, 7, 5, 3),
    (2, 70, 64, 2),
]


def check_backward(flavour, given, x, g, weight, scale):
    """Hold the kernel's backward against gradients by position; returns its sums by sequence."""
    dx, sums, of_samples = rms_norm.backward(x, g, weight, scale, flavour, given.sequences, given.samples)
    expected, v = by_position(x, g, weight, flavour)
    # One feature alone is divided by its own size: two terms cancel, and what is left is next to their rounding
    terms = g * (weight + flavour.offset) * scale.view(*x.shape[:-1], 1)
    tolerance = GRADIENT[EXACT] * max(1.0, (terms.abs().max() / expected.abs().max()).item())
    close(dx, expected, tolerance if x.shape[-1] == 1 else GRADIENT[EXACT])
    close(sums.sum(1), given.sequences.padded(v).sum(1), STATISTIC[EXACT])
    there = ~given.samples.absent
    close(of_samples[there], v[given.samples.rows[there]], STATISTIC[EXACT])
    return sums


@pytest.mark.parametrize(("shape", "flavour"), thinned(3, SHAPES, FLAVOURS))
def test_output_and_gradients_are_those_of_the_definition(shape, flavour):
    flavour = FLAVOURS[flavour]
    given, x, g, weight = example(*shape)
    y, scale = rms_norm.forward(x, weight, flavour)
    close(y, definition(x, weight, flavour), GRADIENT[EXACT])
    check_backward(flavour, given, x, g, weight, scale)


@pytest.mark.parametrize("rows", [4, 7, 2**19 + 4])
def test_factors_of_norms_do_not_overlap(rows):
    factors, x = rms_norm.Factors(), torch.zeros(1, device=DEVICE)
    taken = [factors.take(x, rows, dtype) for dtype in (torch.float32, torch.float64) for _ in range(3)]
    taken += [factors.take(x, rows + 4, torch.float32) for _ in range(20 if rows < 100 else 1)]
    places = sorted((y.data_ptr(), y.data_ptr() + y.nbytes) for y in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert all(start % 16 == 0 for start, _ in places)
    assert {tuple(y.shape) for y in taken} == {(rows,), (rows + 4,)}


def test_norms_that_share_a_piece_of_memory_have_the_factors_that_they_have_alone():
    flavour, factors = FLAVOURS["gemma"], rms_norm.Factors()
    _, x, _, weight = example(2, 10, 6)
    inputs = [x * scale + scale for scale in (1, 2, 3)]
    shared = [rms_norm.forward(x, weight, flavour, factors) for x in inputs]
    for x, (y, scale) in zip(inputs, shared, strict=True):
        expected, alone = rms_norm.forward(x, weight, flavour)
        assert torch.equal(y, expected) and torch.equal(scale, alone)


def test_sums_of_norms_are_in_the_memory_that_is_given():
    flavour, memory = FLAVOURS["gemma"], rms_norm.Factors()
    given, x, g, weight = example(2, 10, 6)
    _, scale = rms_norm.forward(x, weight, flavour)
    arguments = (weight, scale, flavour, given.sequences, None)
    expected, fresh, _ = rms_norm.backward(x, g, *arguments)
    places = set()
    for _ in range(2):
        dx, sums, _ = rms_norm.backward(x, g, *arguments, ledger=memory)
        assert torch.equal(dx, expected) and torch.equal(sums, fresh)
        places.add(sums.data_ptr())
    assert len(places) == 1 and fresh.data_ptr() not in places


def test_other_samples_of_the_same_shapes_are_not_taken_for_those_before():
    flavour, memory = FLAVOURS["gemma"], rms_norm.Factors()
    given, x, g, weight = example(3, 7, 33)
    other = Samples(given.samples.rows.flip(0), given.samples.absent.flip(0))
    _, scale = rms_norm.forward(x, weight, flavour)
    _, v = by_position(x, g, weight, flavour)
    for samples in (given.samples, other, given.samples):
        *_, found = rms_norm.backward(x, g, weight, scale, flavour, given.sequences, samples, ledger=memory)
        there = ~samples.absent
        close(found[there], v[samples.rows[there]], STATISTIC[EXACT])


def test_a_program_that_has_a_whole_sequence_sums_all_of_its_positions(monkeypatch):
    """As with hundreds of sequences, which would take long under the interpreter."""
    made = rms_norm._backward_plan

    def whole(m, T, *rest):
        return Plan((1, m, 1), made(m, T, *rest)[0].constants), T

    monkeypatch.setattr(rms_norm, "_backward_plan", whole)
    flavour = FLAVOURS["gemma"]
    given, x, g, weight = example(3, 70, 130)
    _, scale = rms_norm.forward(x, weight, flavour)
    assert check_backward(flavour, given, x, g, weight, scale).shape[1] == 1


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_type_is_rounded_where_the_model_rounds(flavour, weight_dtype, dtype):
    flavour = FLAVOURS[flavour]
    given, x, g, weight = example(3, 7, 33, dtype=dtype, weight_dtype=weight_dtype)
    y, scale = rms_norm.forward(x, weight, flavour)
    plain = flavour(x, weight)
    assert y.dtype == plain.dtype
    close(y, plain, max(GRADIENT[dtype], 1e-6) if y.dtype != torch.float64 else 1e-6)
    g = g.to(y.dtype)
    dx, sums, of_samples = rms_norm.backward(x, g, weight, scale, flavour, given.sequences, given.samples)
    expected, v = by_position(x, g, weight, flavour)
    assert dx.dtype == x.dtype
    close(dx, expected, GRADIENT[dtype])
    tolerance = max(STATISTIC[dtype], GRADIENT[dtype] if flavour.early else 0)
    close(sums.sum(1), given.sequences.padded(v).sum(1), tolerance)
    there = ~given.samples.absent
    close(of_samples[there], v[given.samples.rows[there]], tolerance)


@pytest.mark.parametrize("layout", ["positions first", "heads first", "features first", "one value for all"])
def test_the_cotangent_may_lie_in_memory_in_any_way(layout):
    flavour = FLAVOURS["gemma"]
    given, x, g, weight = example(2, 7, 8, 3)
    turned = {
        "positions first": g,
        "heads first": g.transpose(1, 2).contiguous().transpose(1, 2),
        "features first": g.transpose(1, 3).contiguous().transpose(1, 3),
        "one value for all": g[:, :, :1, :1].expand_as(g),
    }[layout]
    _, scale = rms_norm.forward(x, weight, flavour)
    arguments = (weight, scale, flavour, given.sequences, given.samples)
    there = ~given.samples.absent
    of_turned, of_plain = (
        rms_norm.backward(x, turned, *arguments),
        rms_norm.backward(x, turned.contiguous(), *arguments),
    )
    assert torch.equal(of_turned[0], of_plain[0]) and torch.equal(of_turned[1], of_plain[1])
    assert torch.equal(of_turned[2][there], of_plain[2][there])


@pytest.mark.parametrize(
    ("shape", "rule"),
    thinned(
        2,
        [(3, 7, 5, None), (2, 130, 130, None), (17, 3, 16, 2)],
        [FIG4, EUCLIDEAN, INTERACTING, batches.FISHER, batches.make_rule("none")],
        names=lambda x: str(x) if isinstance(x, tuple) else named(x),
    ),
)
def test_the_gradient_of_the_weight_is_that_of_an_elementwise_parameter(shape, rule):
    flavour = FLAVOURS["llama"]
    given, x, g, weight = example(*shape)
    samples = given.samples if rule.needs.overlap else None
    _, scale = rms_norm.forward(x, weight, flavour)
    _, sums, of_samples = rms_norm.backward(x, g, weight, scale, flavour, given.sequences, samples)
    run = Run.of(given, rule, UNKNOWN)
    arguments = (given.sequences, samples, run.entry, EXACT)
    result = elementwise_gradient(of_samples, *arguments, sums)
    _, v = by_position(x, g, weight, flavour)
    statistics, V = elementwise_statistics(v, given.sequences, given.samples, rule.needs)
    expected = run.check(statistics, STATISTIC[EXACT])
    close(result, expected.c @ V, GRADIENT[EXACT])
    again = elementwise_gradient(of_samples, *arguments, sums)
    assert torch.equal(again, result) and not run.ledger.counter.any()
    parts = torch.linspace(-1, 2, 70 * x.shape[-1], device=x.device, dtype=sums.dtype).view(70, -1)
    close(elementwise_gradient(of_samples, *arguments, sums, parts), expected.c @ V + parts.sum(0), GRADIENT[EXACT])
