"""The plot of stale data shows what runs give, and drawn again from its table, what the table says."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[3]
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
