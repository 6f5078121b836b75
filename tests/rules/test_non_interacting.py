"""What rules `c = A f` share: the scale, what `f` is made from, and samples that say nothing."""

from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.cost import Needs
from isopo_trl.geometry.statistics import Statistics
from isopo_trl.rules import MeanSquares, NonInteracting, Norms, make_rule
from tests.rules.gradients import ADVANTAGES, HISTORY, computed, example


@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4"])
def test_every_sequence_gets_the_mean_multiplier_where_the_samples_say_nothing(rule):
    V, G = example()
    silent = torch.zeros_like(G)
    for history in (None, HISTORY):
        assert torch.equal(computed(V, silent, ADVANTAGES, make_rule(rule), history).c, ADVANTAGES)
    paper = computed(V, silent, ADVANTAGES, make_rule(rule, scale="paper"), HISTORY, loss_scale=0.5)
    expected = ADVANTAGES * HISTORY["fx"] / HISTORY["x"] * 0.5 ** make_rule(rule).degree
    torch.testing.assert_close(paper.c, expected)


@pytest.mark.parametrize("rule", ["fisher", "euclidean", "npg", "fig4"])
def test_relative_coefficients_keep_the_total_length(rule):
    # sum_s f_s x_s = sum_s x_s, with x the Fisher norm, or the Euclidean norm where that is all there is
    V, G = example()
    result = computed(V, G, torch.ones(5, dtype=torch.float64), make_rule(rule))
    x = result.fisher if make_rule(rule).needs.overlap else result.norm
    torch.testing.assert_close((result.c * x).sum(), x.sum(), rtol=1e-10, atol=0)


@dataclass(frozen=True, kw_only=True)
class Noted(NonInteracting):
    """`f = 1 / (F + N + F / N)`, of what it asks for, and notes what it was given."""

    overlap: bool = True
    norm: bool = True
    seen = []
    degree = -1.0

    @property
    def needs(self):
        return Needs(overlap=self.overlap, norm=self.norm)

    def multiplier(self, norms, mean_squares):
        self.seen[:] = [norms, mean_squares]
        return 1 / sum(x for x in norms if x is not None)


@pytest.mark.parametrize(("overlap", "norm"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
def test_a_multiplier_is_given_the_norms_that_it_asks_for_and_their_mean_squares(history, overlap, norm):
    V, G = example()
    rule = Noted(overlap=overlap, norm=norm, scale="paper")
    result = computed(2 * V, 2 * G, ADVANTAGES, rule, history, loss_scale=2.0)  # norms come without the constant
    F = torch.stack([((G @ v).square().sum() / G.square().sum()).sqrt() for v in V])
    N = V.norm(dim=1)
    asked = {"fisher": F if overlap else None, "norm": N if norm else None}
    asked["relative"] = F / N if overlap and norm else None
    norms, mean_squares = Noted.seen
    f = 1 / sum(x for x in asked.values() if x is not None)
    for name, x in asked.items():
        assert (getattr(norms, name) is None) == (x is None)
        if x is not None:
            torch.testing.assert_close(getattr(norms, name), x)
            expected = x.square().mean() if history is None else torch.tensor(history[f"{name}^2"]).double()
            torch.testing.assert_close(mean_squares[name], expected)
    torch.testing.assert_close(result.raw, f)
    # The degree says which power of the constant the coefficient carries
    torch.testing.assert_close(result.c, ADVANTAGES * f / 2)
    assert Noted(overlap=False, norm=False).coefficients(Statistics(), ADVANTAGES, None).c is ADVANTAGES


def test_mean_squares_leave_out_sequences_without_a_gradient_and_broken_ones():
    nan, inf = float("nan"), float("inf")
    norms = Norms(torch.tensor([1.0, 0.0, 3.0, nan, 4.0]), torch.tensor([2.0, 1.0, 6.0, 1.0, inf]), None)
    mean_squares = MeanSquares(norms, None)
    assert mean_squares["fisher"] == (1 + 9) / 2 and mean_squares["norm"] == (4 + 36) / 2
    # E[F] / E[f F] for f = 1 / F
    assert mean_squares.scale(torch.tensor([1, 0, 1 / 3, nan, 1 / 4])) == pytest.approx((1 + 3) / 2)


def test_a_rule_says_what_is_missing_of_it():
    class Unfinished(NonInteracting):
        needs, degree = Needs(), 0.0

    with pytest.raises(TypeError, match="multiplier"):
        Unfinished()
