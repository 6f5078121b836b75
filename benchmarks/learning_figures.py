"""Figures of `learning.py report`."""

from pathlib import Path
from statistics import median
from typing import Any

from learning_statistics import hull


Result = dict[str, Any]
# One colour per method, whichever of them are there
COLORS = dict(
    zip(
        ("grpo", "reinforce", "fisher", "interacting", "fig4", "euclidean", "fisher_kl", "reinforce_kl"),
        ("#444444", "#999999", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#999999"),
        strict=True,
    )
)


def color(label: str) -> str:
    return COLORS[label.partition(",")[0]]


def accuracy(rows: dict[str, list[Result]], start: Result | None, file: Path) -> str:
    """Held-back accuracy by step, and by seconds of training: median over seeds, and range."""
    figure, axes = _figure(2)
    for label, results in rows.items():
        steps = sorted(set.intersection(*({v["step"] for v in r["validations"]} for r in results)))
        values = [[at(r, step)["accuracy"] for r in results] for step in steps]
        seconds = [median(r["steps"]["seconds"][step - 1] for r in results) for step in steps]
        if start:
            steps, seconds = [0, *steps], [0.0, *seconds]
            values = [[start["validations"][0]["accuracy"]] * len(results), *values]
        for axis, x in zip(axes, (steps, seconds), strict=True):
            middle = [100 * median(entries) for entries in values]
            low, high = ([100 * end(entries) for entries in values] for end in (min, max))
            axis.plot(x, middle, "o-", color=color(label), label=f"{label} (n = {len(results)})", markersize=4)
            axis.fill_between(x, low, high, color=color(label), alpha=0.12, linewidth=0)
    axes[0].set_xlabel("optimizer steps")
    axes[1].set_xlabel("seconds of training, beside other runs")
    axes[0].set_ylabel("accuracy on held-back problems, %")
    axes[0].legend(fontsize=8, frameon=False)
    return _saved(figure, file)


def divergence(rows: dict[str, list[Result]], start: Result | None, file: Path) -> str:
    """KL from the start against held-back accuracy at the last validation: a point per run, a hull per method."""
    figure, (axis,) = _figure(1)
    for label, results in rows.items():
        last = [r["validations"][-1] for r in results]
        points = [(v["kl"], 100 * v["accuracy"]) for v in last if v.get("kl") is not None]
        if not points:
            continue
        axis.scatter(*zip(*points, strict=True), color=color(label), label=f"{label} (n = {len(points)})", s=22)
        corners = hull(points)
        axis.fill(*zip(*corners, strict=True), color=color(label), alpha=0.12, linewidth=1)
    if start:
        axis.scatter(0, 100 * start["validations"][0]["accuracy"], color="black", marker="+", label="start (n = 1)")
    axis.set_xlim(left=-0.5)
    axis.set_xlabel("KL from the start, nats per completion")
    axis.set_ylabel("accuracy on held-back problems, %")
    axis.legend(fontsize=8, frameon=False)
    return _saved(figure, file)


def starts(rows: dict[str, dict[float, list[Result]]], start: Result | None, file: Path) -> str:
    """
    Test accuracy against the learning rate that runs started from, by method: median over seeds, and range. Methods
    with a target for their steps are drawn through, the others dashed.
    """
    figure, (axis,) = _figure(1)
    for method, by_rate in rows.items():
        rates = sorted(by_rate)
        values = [[100 * r["test"]["accuracy"] for r in by_rate[rate]] for rate in rates]
        style = "o-" if method.endswith("_kl") else "s--"
        runs = sum(map(len, values))
        axis.plot(rates, list(map(median, values)), style, color=color(method), label=f"{method} (n = {runs})")
        axis.fill_between(
            rates, list(map(min, values)), list(map(max, values)), color=color(method), alpha=0.12, linewidth=0
        )
    if start:
        axis.axhline(
            100 * start["test"]["accuracy"], color="black", linewidth=0.8, linestyle=":", label="start (n = 1)"
        )
    axis.set_xscale("log")
    axis.set_xlabel("starting learning rate")
    axis.set_ylabel("accuracy on test problems, %")
    axis.legend(fontsize=8, frameon=False)
    return _saved(figure, file)


def at(result: Result, step: int) -> dict[str, Any]:
    """The validation at a step."""
    return next(v for v in result["validations"] if v["step"] == step)


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saved(figure: Any, file: Path) -> str:
    # Without a date or version, so that the same results give the same file
    figure.savefig(file, dpi=130, metadata={"Software": None})
    return file.name
