"""Labels in figures do not overlap."""

import pytest


@pytest.mark.parametrize("values", [[3.0], [1.0, 5.0], [2.0, 2.0, 2.1], [5.0, 1.0, 1.2, 4.9, 1.1], [0.0, 0.9, 1.8]])
def test_labels_keep_their_order_and_distance(importable, values):
    from card import spread_out

    places = spread_out(values, 1.0)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(places[b] - places[a] > 1 - 1e-9 for a, b in zip(order, order[1:], strict=False))
    assert sum(places) == pytest.approx(sum(values))  # nothing is pushed to one side
    if values == [1.0, 5.0]:
        assert places == values
