"""One microbatch: its coefficients and visits, what the kernels take of it, and where its positions are."""

from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.sequences import Sequences, draw_samples
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.microbatch import Microbatch
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


@pytest.mark.parametrize("loss_scale", [1.0, 0.5])
def test_coefficients_are_the_rules_and_are_entered_at_their_layer_without_the_losss_constant(loss_scale):
    given = microbatch(loss_scale=loss_scale)
    assert given.coefficients(2, SQUARES).tolist() == pytest.approx([1 / 2, -3 / 5])  # of the loss as it is
    assert given.visits == [0, 0, 1, 0]
    expected = torch.zeros(LAYERS, 5, B, dtype=torch.float64)  # c, F, N, f, noise
    N = torch.tensor([2.0, 5.0], dtype=torch.float64) / loss_scale
    expected[2] = torch.stack([torch.tensor([1 / 2, -3 / 5]), 0 * N, N, 1 / N, 0 * N])
    torch.testing.assert_close(given.ledger.table, expected)


def test_a_layer_with_a_history_goes_by_it_and_another_by_its_own_means():
    given = microbatch(make_rule("euclidean", scale="paper", regularization=1.0))
    mean = torch.zeros(LAYERS, 5, dtype=torch.float64)
    mean[1] = torch.tensor([0, 11, 0, 1, 1])  # E[N^2] = 11, in the order of EXPECTATIONS
    state = given.running.state_dict()
    given.running.load_state_dict({**state, "mean": mean, "known": [False, True, False, False]})
    assert given.coefficients(1, SQUARES).tolist() == pytest.approx([1 / 15**0.5, -3 / 36**0.5])
    assert given.coefficients(3, SQUARES).tolist() == pytest.approx([1 / 18.5**0.5, -3 / 39.5**0.5])


STACK = Statistics(norm=SQUARES.norm.expand(2, -1))


@pytest.mark.parametrize(
    "come",
    [lambda given: given.open_entry(1, 2), lambda given: given.stack_coefficients(range(1, 3), STACK)],
    ids=["kernels", "plain"],
)
def test_every_visit_to_a_layer_is_counted_and_one_after_the_end_is_an_error(come):
    given = microbatch()
    given.coefficients(2, SQUARES)
    come(given)
    assert given.visits == [0, 1, 2, 0]
    given.closed = True
    before = given.ledger.table.clone()
    with pytest.raises(RuntimeError, match="after its microbatch had ended"):
        come(given)
    assert given.visits == [0, 1, 2, 0] and torch.equal(given.ledger.table, before)


@dataclass(frozen=True, kw_only=True)
class OtherFormula(PowerRule):
    """A rule that the kernels do not know."""


@needs_kernels
def test_what_the_kernels_cannot_take_is_left_to_pytorch(monkeypatch):
    x = torch.ones(B * T, 2, device=DEVICE)
    known = microbatch(FISHER, device=DEVICE)
    assert known.kernels_take(x) and not known.kernels_take(x.long()) and known.kernels_take(x)
    other = microbatch(OtherFormula(fisher_power=-1.0), device=DEVICE)
    assert not other.kernels_take(x) and other.kernels_measure(x)
    packed = Sequences.from_ids(torch.tensor([0, 0, 1, 1, 1, -1], device=DEVICE), 2)
    assert not microbatch(FISHER, sequences=packed, device=DEVICE).kernels_measure(x)
    # On another device than the layer's: kernels are given addresses, and PyTorch says what is wrong
    elsewhere = microbatch(FISHER, device=DEVICE)
    elsewhere.advantages = elsewhere.advantages.to("meta")
    assert not elsewhere.kernels_take(x)
    elsewhere = microbatch(FISHER, device=DEVICE)
    elsewhere.samples = draw_samples(torch.ones(B * T, device="meta"), 3, 0)
    assert not elsewhere.kernels_take(x)
    monkeypatch.setattr("isopo_trl.microbatch.is_here", lambda x: False)  # on another device than the current one
    assert not microbatch(FISHER, device=DEVICE).kernels_take(x)


@pytest.mark.parametrize("positions", [(B, T), (B * T,), (1, B * T), (B, 1, T)])
def test_rows_are_the_positions_in_their_order(positions):
    x = torch.arange(B * T * 10).view(*positions, 2, 5)
    rows = microbatch().rows("layer", x, 2)
    assert rows.shape == (B * T, 2, 5) and torch.equal(rows.flatten(), x.flatten())


@pytest.mark.parametrize("positions", [(T, B), (B, T + 1), (B * T + 1,), (B * T, 1), (1, T), ()])
def test_positions_that_are_not_the_microbatchs_are_refused_by_name(positions):
    with pytest.raises(RuntimeError, match=rf"q_proj got positions of shape .* but the microbatch has {B} x {T}"):
        microbatch().verify_positions("q_proj", torch.ones(*positions, 5))
