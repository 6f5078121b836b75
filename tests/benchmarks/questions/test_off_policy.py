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
