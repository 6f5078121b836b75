"""Figures of `learning.py report`."""

from pathlib import Path
from statistics import median
from typing import Any

from report_statistics import hull


Result = dict[str, Any]
End = tuple[float, float, str, str]  # where a line ends, what it is called, and whose colour it has
# One colour per method, whichever of them are there
COLORS = dict(
    zip(
        ("grpo", "reinforce", "fisher", "interacting", "fig4", "euclidean"),
        ("#444444", "#999999", "#0072b2", "#009e73", "#d55e00", "#cc79a7"),
        strict=True,
    )
)


def color(label: str) -> str:
    return COLORS[label.partition(",")[0]]


def accuracy(
    rows: dict[str, list[Result]], start: Result | None, file: Path, seconds_of_step: dict[str, float] | None = None
) -> str:
    """
    Held-back accuracy by step, and by seconds of training: median over seeds, and range. The seconds are those of
    steps of the method alone on the machine, where they are known for all, else as the runs had them.
    """
    figure, axes = _figure(2)
    ends: list[list[End]] = [[], []]
    for label, results in rows.items():
        steps = sorted(set.intersection(*({v["step"] for v in r["validations"]} for r in results)))
        values = [[at(r, step)["accuracy"] for r in results] for step in steps]
        if seconds_of_step:
            seconds = [step * seconds_of_step[label.partition(",")[0]] for step in steps]
        else:
            seconds = [median(r["steps"]["seconds"][step - 1] for r in results) for step in steps]
        if start:
            steps, seconds = [0, *steps], [0.0, *seconds]
            values = [[start["validations"][0]["accuracy"]] * len(results), *values]
        for axis, x, names in zip(axes, (steps, seconds), ends, strict=True):
            middle = [100 * median(entries) for entries in values]
            low, high = ([100 * end(entries) for entries in values] for end in (min, max))
            axis.plot(x, middle, "o-", color=color(label), markersize=4)
            axis.fill_between(x, low, high, color=color(label), alpha=0.12, linewidth=0)
            names.append((x[-1], middle[-1], label if axis is axes[1] else f"{label} (n = {len(results)})", label))
    axes[0].set_xlabel("optimizer steps")
    axes[1].set_xlabel("seconds of training" + ("" if seconds_of_step else ", beside other runs"))
    axes[0].set_ylabel("accuracy on held-back problems, %")
    for axis, names in zip(axes, ends, strict=True):
        _name_ends(axis, names)
    return _saved(figure, file)


def divergence(rows: dict[str, list[Result]], start: Result | None, file: Path) -> str:
    """KL from the start against held-back accuracy at the last validation: a point per run, a hull per method."""
    figure, (axis,) = _figure(1)
    names: list[End] = []
    for label, results in rows.items():
        last = [r["validations"][-1] for r in results]
        points = [(v["kl"], 100 * v["accuracy"]) for v in last if v.get("kl") is not None]
        if not points:
            continue
        axis.scatter(*zip(*points, strict=True), color=color(label), s=22)
        right = max(points)
        names.append((right[0], right[1], f"{label} (n = {len(points)})", label))
        corners = hull(points)
        axis.fill(*zip(*corners, strict=True), color=color(label), alpha=0.12, linewidth=1)
    if start:
        level = 100 * start["validations"][0]["accuracy"]
        axis.scatter(0, level, color="black", marker="+")
        axis.annotate("start (n = 1)", (0, level), xytext=(7, 0), textcoords="offset points", fontsize=9, va="center")
    axis.set_xlim(left=-0.5)
    axis.set_xlabel("KL from the start, nats per completion")
    axis.set_ylabel("accuracy on held-back problems, %")
    if names:
        _name_ends(axis, names)
    return _saved(figure, file)


def starts(rows: dict[str, dict[float, list[Result]]], start: Result | None, file: Path) -> str:
    """
    Test accuracy against the learning rate that runs started from, by method: median over seeds, and range. Methods
    with a target for their steps are drawn through, the others dashed.
    """
    figure, (axis,) = _figure(1)
    names: list[End] = []
    for method, by_rate in rows.items():
        rates = sorted(by_rate)
        values = [[100 * r["test"]["accuracy"] for r in by_rate[rate]] for rate in rates]
        style = "o-" if has_target(method) else "s--"
        fewest, most = min(map(len, values)), max(map(len, values))
        seeds = f"n = {fewest}" if fewest == most else f"n = {fewest} to {most}"
        middle = list(map(median, values))
        axis.plot(rates, middle, style, color=color(method))
        names.append((rates[-1], middle[-1], f"{method} ({seeds})", method))
        axis.fill_between(
            rates, list(map(min, values)), list(map(max, values)), color=color(method), alpha=0.12, linewidth=0
        )
    if start:
        level = 100 * start["test"]["accuracy"]
        axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
        names.append((max(rate for by_rate in rows.values() for rate in by_rate), level, "before training", "grpo"))
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("starting learning rate")
    axis.set_ylabel("accuracy on test problems, %")
    _name_ends(axis, names)
    return _saved(figure, file)


def differences(blocks: dict[str, dict[str, Any]], file: Path) -> str:
    """Differences in test accuracy with their intervals, a line each; hollow where that is of the problems alone."""
    from matplotlib.figure import Figure

    lines = sum(map(len, blocks.values())) + 1.4 * len(blocks)
    figure = Figure(figsize=(6.2, 0.6 + 0.21 * lines), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
    places, names, height = [], [], 0.0
    for title, block in blocks.items():
        title_at = {"transform": axis.get_yaxis_transform(), "va": "center"}
        axis.text(0, height, title, fontsize=9, weight="bold", backgroundcolor="white", **title_at)
        height -= 1
        for label, (values, interval, of_problems) in block.items():
            mean = sum(values) / len(values)
            low, high = interval or (mean, mean)
            hue = color(label)
            axis.plot((low, high), (height, height), color=hue, linewidth=1.4, alpha=0.4 if of_problems else 1)
            axis.plot(mean, height, "o", color=hue, markersize=5, fillstyle="none" if of_problems else "full")
            places.append(height)
            names.append(f"{label} (n = {len(values)})")
            height -= 1
        height -= 0.4
    axis.set_yticks(places, names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(height + 0.6, 0.7)
    axis.set_xlabel("test accuracy, difference from GRPO in points", fontsize=9)
    return _saved(figure, file)


def at(result: Result, step: int) -> dict[str, Any]:
    """The validation at a step."""
    return next(v for v in result["validations"] if v["step"] == step)


def has_target(label: str) -> bool:
    """Whether runs of this label have a target for their steps."""
    return ", target " in label


def spread_out(values: list[float], gap: float) -> list[float]:
    """
    Places for labels of points at `values`, in the same order: at least `gap` apart, each group of those that would
    overlap around its own mean.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    groups: list[list[int]] = []

    def middle(group: list[int]) -> float:
        return sum(values[i] for i in group) / len(group)

    for index in order:
        groups.append([index])
        while len(groups) > 1:
            lower, upper = groups[-2:]
            if middle(upper) - middle(lower) >= gap * (len(lower) + len(upper)) / 2:
                break
            groups[-2:] = [lower + upper]
    places = [0.0] * len(values)
    for group in groups:
        for rank, index in enumerate(group):
            places[index] = middle(group) + gap * (rank - (len(group) - 1) / 2)
    return places


def _name_ends(axis: Any, ends: list[End]) -> None:
    """Names in the colours of the lines that end there, in one column on the right, in place of a legend."""
    bottom, top = axis.get_ylim()
    heights = spread_out([y for _, y, _, _ in ends], 0.055 * (top - bottom))
    right = max(x for x, _, _, _ in ends)
    for (x, y, name, label), height in zip(ends, heights, strict=True):
        leader = {"arrowstyle": "-", "color": color(label), "linewidth": 0.6, "alpha": 0.5}
        axis.annotate(
            name,
            (x, y),
            xytext=(right, height),
            textcoords=axis.transData + _points(axis, 7),
            color=color(label),
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops=leader if x < right else None,
        )


def _points(axis: Any, right: float) -> Any:
    from matplotlib.transforms import ScaledTranslation

    return ScaledTranslation(right / 72, 0, axis.figure.dpi_scale_trans)


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 4.4 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saved(figure: Any, file: Path) -> str:
    # Without a date or version, so that the same results give the same file
    figure.savefig(file, dpi=130, metadata={"Software": None})
    return file.name
