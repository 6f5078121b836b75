"""One microbatch: its coefficients and visits, what the kernels take of it, and where its positions are."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from isopo_trl.geometry.sequences import Sequences, draw_samples
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.microbatch import CurrentMicrobatch, Microbatch
from isopo_trl.rules import PowerRule, make_rule
from isopo_trl.rules.running import RunningStatistics
from tests.kernels.batches import DEVICE, FISHER, needs_kernels


B, T, LAYERS = 2, 3, 4
EUCLIDEAN = make_rule("euclidean", scale="paper", regularization=0)
SQUARES = Statistics(norm=torch.tensor([4.0, 25.0], dtype=torch.float64))  # N = (2, 5)


def microbatch(rule=EUCLIDEAN, advantages=(1.0, -3.0), sequences=None, device="cpu", **settings):
    running = RunningStatistics(LAYERS, 0.9, rule, torch.device(device))
    samples = draw_samples(torch.ones(B * T, device=device), 3, 0) if rule.needs.overlap else None
    sequences = sequences or Sequences.regular(B, T)
    advantages = torch.tensor(advantages, device=device, dtype=torch.float64)
    return Microbatch((B, T), sequences, samples, advantages, rule, running, **settings)


# Coefficients and visits


def test_coefficients_are_the_rules_and_are_entered_at_their_layer():
    given = microbatch()
    assert given.coefficients(2, SQUARES).tolist() == pytest.approx([1 / 2, -3 / 5])
    assert given.visits == [0, 0, 1, 0]
    expected = torch.zeros(LAYERS, 5, B, dtype=torch.float64)  # c, F, N, f, noise
    expected[2] = torch.tensor([[1 / 2, -3 / 5], [0, 0], [2, 5], [1 / 2, 1 / 5], [0, 0]])
    torch.testing.assert_close(given.ledger.table, expected)


def test_the_constant_of_the_loss_reaches_the_rule():
    given = microbatch(loss_scale=0.5)
    # N without the constant is (4, 10), and c = A / N of the loss as it is
    assert given.coefficients(0, SQUARES).tolist() == pytest.approx([1 / 2, -3 / 5])
    assert given.ledger.table[0, 2].tolist() == pytest.approx([4, 10])


def test_a_layer_with_a_history_goes_by_it_and_another_by_its_own_means():
    rule = make_rule("euclidean", scale="paper", regularization=1.0)
    given = microbatch(rule)
    mean = torch.zeros(LAYERS, 5, dtype=torch.float64)
    mean[1] = torch.tensor([0, 11, 0, 1, 1])  # E[N^2] = 11, in the order of EXPECTATIONS
    state = given.running.state_dict()
    given.running.load_state_dict({**state, "mean": mean, "known": [False, True, False, False]})
    assert given.coefficients(1, SQUARES).tolist() == pytest.approx([1 / 15**0.5, -3 / 36**0.5])
    assert given.coefficients(3, SQUARES).tolist() == pytest.approx([1 / 18.5**0.5, -3 / 39.5**0.5])


@pytest.mark.parametrize("come", [lambda given: given.coefficients(1, SQUARES), lambda given: given.open_entry(1)])
def test_a_backward_that_comes_after_the_end_is_an_error_and_is_not_counted(come):
    given = microbatch()
    come(given)
    come(given)
    assert given.visits == [0, 2, 0, 0]
    given.closed = True
    before = given.ledger.table.clone()
    with pytest.raises(RuntimeError, match="after its microbatch had ended"):
        come(given)
    assert given.visits == [0, 2, 0, 0] and torch.equal(given.ledger.table, before)


@pytest.mark.parametrize("of_kernels", [True, False])
def test_the_layers_of_a_stack_are_counted_one_by_one_and_not_after_the_end(of_kernels):
    given = microbatch()
    squares = Statistics(norm=SQUARES.norm.expand(2, -1))
    given.coefficients(2, SQUARES)

    def come():
        return given.open_entry(1, 2) if of_kernels else given.stack_coefficients(range(1, 3), squares)

    come()
    assert given.visits == [0, 1, 2, 0]
    given.closed = True
    with pytest.raises(RuntimeError, match="after its microbatch had ended"):
        come()
    assert given.visits == [0, 1, 2, 0]


def test_kernels_enter_where_plain_pytorch_does():
    given = microbatch()
    first, last = given.open_entry(0), given.open_entry(3)
    assert first.ledger is last.ledger and first.ledger.table is given.ledger.table
    assert (first.first, last.first) == (0, 3)


def test_one_trained_parameter_of_a_module_stands_for_it_in_the_graph():
    given = microbatch()
    linear = nn.Linear(2, 2)
    given.add_to_graph(linear)
    linear.weight.requires_grad_(False)
    given.add_to_graph(linear)
    linear.bias.requires_grad_(False)
    given.add_to_graph(linear)
    assert [p is q for p, q in zip(given.in_graph, (linear.weight, linear.bias), strict=True)] == [True, True]


def test_there_is_no_current_microbatch_until_one_is_put_there():
    assert CurrentMicrobatch().microbatch is None


# What the kernels take


@dataclass(frozen=True, kw_only=True)
class OtherFormula(PowerRule):
    """A rule that the kernels do not know."""


@needs_kernels
def test_packed_sequences_are_left_to_pytorch():
    x = torch.ones(B * T, 2, device=DEVICE)
    packed = Sequences.from_ids(torch.tensor([0, 0, 1, 1, 1, -1], device=DEVICE), 2)
    assert microbatch(FISHER, device=DEVICE).kernels_take(x)
    assert not microbatch(FISHER, sequences=packed, device=DEVICE).kernels_take(x)


@needs_kernels
def test_data_on_another_device_than_the_layers_are_left_to_pytorch():
    """Which says so: kernels are given addresses."""
    x = torch.ones(B * T, 2, device=DEVICE)
    elsewhere = microbatch(FISHER, device=DEVICE)
    elsewhere.advantages = elsewhere.advantages.to("meta")
    assert not elsewhere.kernels_take(x)
    elsewhere = microbatch(FISHER, device=DEVICE)
    elsewhere.samples = draw_samples(torch.ones(B * T, device="meta"), 3, 0)
    assert not elsewhere.kernels_take(x)


@needs_kernels
def test_a_rule_that_the_kernels_do_not_know_and_other_types_are_left_to_pytorch():
    x = torch.ones(B * T, 2, device=DEVICE)
    assert not microbatch(OtherFormula(fisher_power=-1.0), device=DEVICE).kernels_take(x)
    known = microbatch(FISHER, device=DEVICE)
    assert known.kernels_take(x) and not known.kernels_take(x.long()) and known.kernels_take(x)


# The layout of positions


@pytest.mark.parametrize("positions", [(B, T), (B * T,), (1, B * T)])
@pytest.mark.parametrize("features", [(), (5,), (2, 5)])
def test_rows_are_the_positions_in_their_order(positions, features):
    x = torch.arange(B * T * torch.Size(features).numel()).view(*positions, *features)
    rows = microbatch().rows("layer", x, len(features))
    assert rows.shape == (B * T, *features) and torch.equal(rows.flatten(), x.flatten())


@pytest.mark.parametrize("positions", [(T, B), (B, T + 1), (B * T + 1,), (B * T, 1), (1, T), ()])
def test_positions_that_are_not_the_microbatchs_are_refused_by_name(positions):
    with pytest.raises(RuntimeError, match=rf"q_proj got positions of shape .* but the microbatch has {B} x {T}"):
        microbatch().verify_positions("q_proj", torch.ones(*positions, 5))
