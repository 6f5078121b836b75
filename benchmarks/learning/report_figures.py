"""Figures of `learning.py report`."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from card import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, PINK, SMALL, card, name_ends
from report_statistics import hull


Result = dict[str, Any]
End = tuple[float, float, str, str]  # where a line ends, what it is called, and its colour
# One colour per method, whichever of them are there
COLORS = dict(
    zip(
        ("grpo", "reinforce", "fisher", "interacting", "fig4", "euclidean"),
        (GREY, LIGHT_GREY, BLUE, GREEN, ORANGE, PINK),
        strict=True,
    )
)

EDGE = 10.0  # points of difference beyond which a method stands at the edge of the figure, with its number


def color(label: str) -> str:
    return COLORS[label.partition(",")[0]]


def accuracy(
    rows: dict[str, list[Result]], start: Result | None, file: Path, seconds_of_step: dict[str, float] | None = None
) -> str:
    """
    Held-back accuracy by step, and by seconds of training: median over seeds, and range. The seconds are those of
    steps of the method alone on the machine, where they are known for all, else as the runs had them.
    """
    ends: list[list[End]] = [[], []]
    names, rate = _short(rows)
    last = {label: [100 * r["validations"][-1]["accuracy"] for r in results] for label, results in rows.items()}
    finals = list(map(median, last.values()))
    title = f"{_many(len(rows), 'method')} within {max(finals) - min(finals):.1f} points\nof one another at the end"
    with card(file, 6.2, title) as figure:
        axes = figure.subplots(2, 1, sharey=True)
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
            middle = [100 * median(entries) for entries in values]
            low, high = ([100 * end(entries) for entries in values] for end in (min, max))
            for axis, x, of_panel in zip(axes, (steps, seconds), ends, strict=True):
                axis.plot(x, middle, "o-", color=color(label))
                axis.fill_between(x, low, high, color=color(label), alpha=0.1, linewidth=0)
                of_panel.append((x[-1], middle[-1], f"{names[label]} (n = {len(results)})", color(label)))
        axes[0].set_xlabel("optimizer steps")
        axes[1].set_xlabel("seconds of training" + ("" if seconds_of_step else ", beside other runs"))
        axes[0].set_title("accuracy on held-back problems, %" + (f"; rate {rate}" if rate else ""), loc="left")
        for axis, of_panel in zip(axes, ends, strict=True):
            name_ends(axis, of_panel, 0.075)
    return file.name


def divergence(rows: dict[str, list[Result]], start: Result | None, file: Path) -> str:
    """KL from the start against held-back accuracy at the last validation: a point per run, a hull per method."""
    names, rate = _short(rows)
    last = {label: [r["validations"][-1] for r in results] for label, results in rows.items()}
    points = {
        label: [(v["kl"], 100 * v["accuracy"]) for v in validations if v.get("kl") is not None]
        for label, validations in last.items()
    }
    points = {label: of_label for label, of_label in points.items() if of_label}
    title = "Distance from the start, and accuracy"
    if points:
        kl, right = zip(*(point for of_label in points.values() for point in of_label), strict=True)
        title = f"Runs of {_many(len(points), 'method')} end at {min(right):.0f} to {max(right):.0f} %,\n"
        title += f"{min(kl):.0f} to {max(kl):.0f} nats from the start"
    with card(file, 3.9, title) as figure:
        axis = figure.subplots()
        ends: list[End] = []
        for label, of_label in points.items():
            axis.scatter(*zip(*of_label, strict=True), color=color(label), s=18)
            ends.append((*max(of_label), f"{names[label]} (n = {len(of_label)})", color(label)))
            axis.fill(*zip(*hull(of_label), strict=True), color=color(label), alpha=0.12, linewidth=1)
        if start:
            level = 100 * start["validations"][0]["accuracy"]
            axis.scatter(0, level, color="black", marker="+")
            axis.annotate("start (n = 1)", (0, level), xytext=(7, 0), textcoords="offset points", va="center")
        axis.set_xlim(left=-0.5)
        axis.set_xlabel("KL from the start, nats per completion")
        axis.set_title("accuracy on held-back problems, %" + (f"; rate {rate}" if rate else ""), loc="left")
        if ends:
            name_ends(axis, ends, 0.07)
    return file.name


def starts(rows: dict[str, dict[float, list[Result]]], start: Result | None, file: Path) -> str:
    """
    Test accuracy against the learning rate that runs started from, by method: median over seeds, and range. Methods
    with a target for their steps are drawn through, the others dashed.
    """
    values = {
        method: {rate: [100 * r["test"]["accuracy"] for r in by_rate[rate]] for rate in sorted(by_rate)}
        for method, by_rate in rows.items()
    }
    names, target = _short(method for method in rows if has_target(method))
    found = {}
    for aimed in (True, False):
        of_kind = [median(v) for method, at in values.items() if has_target(method) == aimed for v in at.values()]
        found[aimed] = f"{min(of_kind):.0f} to {max(of_kind):.0f} %" if of_kind else None
    title = f"With a target for steps, all starts end at {found[True]}"
    if found[False]:
        title = f"With a target for steps, all starts end at\n{found[True]}; without one, at {found[False]}"
    with card(file, 3.6, title) as figure:
        axis = figure.subplots()
        ends: list[End] = []
        for method, by_rate in values.items():
            rates, entries = list(by_rate), list(by_rate.values())
            fewest, most = min(map(len, entries)), max(map(len, entries))
            seeds = f"n = {fewest}" if fewest == most else f"n = {fewest} to {most}"
            middle = list(map(median, entries))
            axis.plot(rates, middle, "o-" if has_target(method) else "s--", color=color(method))
            name = f"{names[method]}, target" if method in names else method
            ends.append((rates[-1], middle[-1], f"{name} ({seeds})", color(method)))
            low, high = list(map(min, entries)), list(map(max, entries))
            axis.fill_between(rates, low, high, color=color(method), alpha=0.12, linewidth=0)
        if start:
            level = 100 * start["test"]["accuracy"]
            axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
            ends.append((max(rate for by_rate in rows.values() for rate in by_rate), level, "before training", GREY))
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("learning rate at the start")
        axis.set_title("accuracy on test problems, %" + (f"; {target}" if target else ""), loc="left")
        name_ends(axis, ends, 0.075)
    return file.name


def differences(blocks: dict[str, dict[str, Any]], file: Path) -> str:
    """Differences in test accuracy with their intervals, a line each; hollow where that is of the problems alone."""
    intervals = [interval for block in blocks.values() for _, interval, _ in block.values() if interval]
    around = sum(low <= 0 <= high for low, high in intervals)
    title = f"Against GRPO: {around} of {len(intervals)} intervals contain zero"
    lines = sum(map(len, blocks.values())) + 1.7 * len(blocks)
    with card(file, 0.75 + 0.168 * lines, title) as figure:
        axis = figure.subplots()
        axis.spines["left"].set_visible(False)
        axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
        beside = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": SMALL}
        places, ticks, height = [], [], 0.0
        for name, block in blocks.items():
            names, shared = _short(block)
            axis.text(
                -0.02,
                height,
                f"{name}, {shared}" if shared else name,
                weight="bold",
                ha="right",
                **{**beside, "fontsize": 8},
            )
            axis.text(1.0, height, "n", **beside)
            height -= 1
            for label, (values, interval, of_problems) in block.items():
                mean = sum(values) / len(values)
                low, high = interval or (mean, mean)
                hue = color(label)
                if abs(mean) > EDGE:
                    arrow = "\N{LEFTWARDS ARROW} {:.1f}" if mean < 0 else "{:.1f} \N{RIGHTWARDS ARROW}"
                    side = {"ha": "left"} if mean < 0 else {"ha": "right"}
                    axis.text(0.02 if mean < 0 else 0.95, height, arrow.format(mean), color=hue, **side, **beside)
                else:
                    axis.plot((low, high), (height, height), color=hue, linewidth=1.4, alpha=0.4 if of_problems else 1)
                    axis.plot(mean, height, "o", color=hue, fillstyle="none" if of_problems else "full")
                axis.text(1.0, height, str(len(values)), **beside)
                places.append(height)
                ticks.append(names[label])
                height -= 1
            height -= 0.7
        axis.set_yticks(places, ticks)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(height + 0.9, 0.7)
        axis.set_xlabel("test accuracy, difference from GRPO in points", x=1, ha="right")
    return file.name


def at(result: Result, step: int) -> dict[str, Any]:
    """The validation at a step."""
    return next(v for v in result["validations"] if v["step"] == step)


def has_target(label: str) -> bool:
    """Whether runs of this label have a target for their steps."""
    return ", target " in label


def _short(labels: Iterable[str]) -> tuple[dict[str, str], str]:
    """Labels without the last part that all of them have, such as a learning rate, and that part."""
    labels = list(labels)
    tails = {label.rpartition(", ")[2] for label in labels}
    if len(tails) != 1 or not all(", " in label for label in labels):
        return {label: label for label in labels}, ""
    return {label: label.rpartition(", ")[0] for label in labels}, tails.pop()


def _many(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")
