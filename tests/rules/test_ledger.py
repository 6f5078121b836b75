"""Where coefficients are entered: one layer's row at a time."""

import pytest
import torch

from isopo_trl.rules import Coefficients, make_rule
from isopo_trl.rules.ledger import HISTORY, Ledger, expectations_of


ADVANTAGES = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
LAYERS = 4


def ledger(rule):
    return Ledger(make_rule(rule), ADVANTAGES, torch.zeros(LAYERS, len(HISTORY), dtype=torch.float64))


@pytest.mark.parametrize("given", [("c",), ("c", "fisher", "norm", "raw")])
def test_a_layers_coefficients_are_entered_in_its_own_row_and_what_there_is_not_stays_zero(given):
    values = {name: torch.arange(3.0) + place for place, name in enumerate(given, 1)}
    book = ledger("fig4")
    book.record(2, Coefficients(**values))
    for layer in range(LAYERS):
        for name, row in zip(Coefficients._fields, book.table[layer], strict=True):
            expected = values[name] if layer == 2 and name in values else torch.zeros(3)
            assert row.tolist() == expected.tolist()


def test_a_rule_that_needs_no_statistics_has_its_coefficients_from_the_beginning():
    table = ledger("none").table
    assert torch.equal(table[:, 0], ADVANTAGES.expand(LAYERS, 3)) and not table[:, 1:].any()
    assert not ledger("fisher").table.any()


def test_projections_have_a_place_where_the_rule_asks_for_them_and_one_is_made_where_it_does_not():
    along = torch.arange(3.0)
    for rule in ("spring", "interacting"):
        book = ledger(rule)
        assert (book.projection is None) == (rule == "interacting")
        book.record(2, Coefficients(c=torch.ones(3)), torch.eye(3), along)
        assert book.projection[2].tolist() == along.tolist() and not book.projection[[0, 1, 3]].any()
        assert torch.equal(book.ntk[2], torch.eye(3).double()) and not book.ntk[[0, 1, 3]].any()
        assert book.table[2, 0].tolist() == [1.0] * 3 and not book.table[[0, 1, 3]].any()


def test_expectations_are_read_from_a_row_of_the_history_by_its_columns():
    numbers = {name: float(place) for place, name in enumerate(HISTORY, 1)}
    expectations = expectations_of(torch.tensor(list(numbers.values())))
    squares = [numbers[name] for name in ("fisher^2", "norm^2", "relative^2")]
    assert expectations.mean_square.tolist() == squares
    assert (expectations.scale, expectations.multiplier) == (numbers["scale"], numbers["multiplier"])
