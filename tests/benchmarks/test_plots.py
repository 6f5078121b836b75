"""Plots that are drawn again from tables show what the tables say, and their labels do not overlap."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_off_policy_plot_has_the_rewards_of_the_page(importable):
    import off_policy

    found = off_policy.read_table(RESULTS)
    page = (ROOT / "docs" / "off_policy.md").read_text()
    section = page.partition("\n## On a small task\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| (`|GRPO)", line)]
    assert len(rows) == len(off_policy.METHODS) and len(found) == len(off_policy.CASES) - 1
    for method, line in zip(off_policy.METHODS, rows, strict=True):
        for cell, of_case in zip(line.strip("|").split("|")[1:], found.values(), strict=True):
            middle, low, high = of_case[method]["reward"]
            assert cell.strip() == f"{middle:.2f} ({low:.2f} - {high:.2f})", method
            assert of_case[method]["kl"][1] <= of_case[method]["kl"][0] <= of_case[method]["kl"][2]


def test_what_runs_give_is_plotted_as_the_table_is(importable, tmp_path):
    import off_policy

    runs = [{"reward": [0.5, end], "kl": [None, 0.1, worst]} for end, worst in ((0.6, 1.0), (0.9, 3.0), (0.7, 2.0))]
    figures = off_policy.spreads({"on-policy": {"plain": runs}, "reuse": {"plain": runs, "KPO, fisher": runs}})
    assert figures.keys() == {"reuse"}
    assert figures["reuse"]["plain"] == {"reward": (0.7, 0.6, 0.9), "kl": (2.0, 1.0, 3.0)}
    off_policy.plot(figures, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_readme_says_what_small_microbatches_cost(importable, tmp_path):
    import curves

    found = curves.read_table(RESULTS, "## How the cost changes with the batch")
    assert list(found) == ["length", "sequences", "samples", "lora"]
    small = [point["results"]["fisher"]["ratio"] for point in found["sequences"] if point["value"] <= 8]
    readme = (ROOT / "README.md").read_text()
    assert f"took {min(small):.1f} to {max(small):.1f} of GRPO's time at 1 to 8 x 512 tokens" in readme
    largest = max(point["results"]["fisher"]["ratio"] for points in found.values() for point in points)
    assert f"[up to {largest:.1f}](benchmarks/curves_h200.png)" in readme
    curves.plot(found, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("values", [[3.0], [1.0, 5.0], [2.0, 2.0, 2.1], [5.0, 1.0, 1.2, 4.9, 1.1], [0.0, 0.9, 1.8]])
def test_labels_keep_their_order_and_distance(importable, values):
    from learning_figures import spread_out

    places = spread_out(values, 1.0)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(places[b] - places[a] > 1 - 1e-9 for a, b in zip(order, order[1:], strict=False))
    assert sum(places) == pytest.approx(sum(values))  # nothing is pushed to one side
    if values == [1.0, 5.0]:
        assert places == values
