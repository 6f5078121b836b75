"""The curves of cost, drawn again from their table, show what the table says, and so does the page on speed."""

from pathlib import Path


ROOT = Path(__file__).parents[3]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_the_page_on_speed_says_what_small_microbatches_cost(importable, tmp_path):
    import curves

    found = curves.read_table(RESULTS, "## How the cost changes with the batch")
    assert list(found) == ["length", "sequences", "samples", "lora"]
    small = [point["results"]["fisher"]["ratio"] for point in found["sequences"] if point["value"] <= 8]
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    assert f"took {min(small):.1f} to {max(small):.1f} of GRPO's time at 1 to 8 x 512 tokens" in page
    largest = max(point["results"]["fisher"]["ratio"] for points in found.values() for point in points)
    assert f"[up to {largest:.1f}](../benchmarks/speed/curves_h200.png)" in page
    curves.plot(found, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000
