"""
Curves of runs: read from what a run has logged, and drawn, one panel per curve and one line per run.

A run leaves its log behind in `trainer_state.json`, in its output folder and in every checkpoint.
"""

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any


# What is logged, and its title
CURVES = {
    "reward": "training reward",
    "eval_reward": "evaluation reward",
    "validation/accuracy": "validation accuracy, greedy",
    "validation/kl": "KL from the start, nats per completion",
    "step/kl_per_completion": "KL of a step, nats per completion",
    "learning_rate": "learning rate",
}
# Any trainer has a learning rate: a run that can be compared has one of these
OUTCOMES = ("reward", "eval_reward", "validation/accuracy", "validation/kl")
# Drawn as a mean over a tenth of the log, in front of what was logged, where there are as many lines as this
NOISY, MANY = ("reward", "step/kl_per_completion"), 30
# Dark enough to be read as text on white
COLORS = ("#0072b2", "#c04a00", "#007a5a", "#a0307a", "#444444", "#806600")
STATE = "trainer_state.json"
PICTURE = "curves.png"
MARKS = "▁▂▃▄▅▆▇█"

Log = list[dict[str, Any]]


def read_log(path: str | os.PathLike) -> Log:
    """
    The log of a run, from the folder it was written to, one of its checkpoints, or the file itself.

    Raises `ValueError` with a sentence that says what is wrong.
    """
    file = Path(path)
    if not file.exists():
        raise ValueError(f"There is no {path}: give the output folder of a run.")
    if file.is_dir():
        found = list(file.glob(STATE)) or list(file.glob(f"checkpoint-*/{STATE}"))
        if not found:
            raise ValueError(
                f"{file} has no {STATE}, nor has a checkpoint in it: give the output folder of a run that has "
                "validated or saved at least once."
            )
        file = max(found, key=lambda file: file.stat().st_mtime)
    try:
        log = json.loads(file.read_text())["log_history"]
        has_outcome = any(curve(log, name)[0] for name in OUTCOMES)
        logged = {name for entry in log for name in entry} - {"step", "epoch"}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a {STATE} of a Trainer: give the output folder of a run.") from error
    if not has_outcome:
        raise ValueError(
            f"{file} has none of {', '.join(OUTCOMES)} in its log, but {', '.join(sorted(logged)[:8]) or 'nothing'}: "
            "is it a run of a GRPO-like trainer?"
        )
    return log


def curve(log: Log, name: str) -> tuple[list[int], list[float]]:
    """
    Steps and values at which `name` was logged as a finite number; where a step comes twice (after resuming), the last
    counts.
    """
    points = {
        entry["step"]: entry[name] for entry in log if entry.get(name) is not None and math.isfinite(entry[name])
    }
    return list(points), list(points.values())


def sparkline(values: list[float], width: int = 24) -> str:
    """The values as a line of blocks, between the least and the largest; means, where there are more than `width`."""
    parts = min(width, len(values))
    cuts = pairwise(part * len(values) // parts for part in range(parts + 1)) if parts else ()
    means = [sum(values[start:end]) / (end - start) for start, end in cuts]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(MARKS[round((mean - low) / span * (len(MARKS) - 1)) if span else 0] for mean in means)


def in_text(log: Log) -> str:
    """The curves that the log has as text, one line each: first value, course and last value."""
    curves = {title: curve(log, name)[1] for name, title in CURVES.items()}
    return "\n".join(
        f"  {title:{max(map(len, curves))}}  {values[0]:9.3g} {sparkline(values)} {values[-1]:.3g}"
        for title, values in curves.items()
        if values
    )


def draw(logs: dict[str, Log], path: str | os.PathLike) -> None:
    """
    Draw the curves that the logs have as one PNG, one panel per curve and one line per run; nothing if there are none.

    Of more than 30 rewards or steps the mean over a tenth of the log is drawn, in front of the values themselves.

    Args:
        logs (`dict[str, list[dict]]`): name of the run -> `trainer.state.log_history`.
        path (`str`): where the picture goes.
    """
    # Not pyplot: the caller's figures and backend (a notebook's, say) stay as they are
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in CURVES if any(curve(log, name)[0] for log in logs.values())]
    if not names:
        return
    # Small, so that letters are large where a telephone shows it: names of lines need one column
    columns = min(2, len(names)) if len(logs) == 1 else 1
    rows = -(-len(names) // columns)
    size = (3.4 * columns if len(logs) == 1 else 3.6 + 0.08 * max(map(len, logs)), 1.9 * rows)
    figure = Figure(figsize=size, dpi=200, layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels[len(names) :]:
        panel.remove()
    for panel, name in zip(panels, names, strict=False):
        curves = {run: curve(log, name) for run, log in logs.items()}
        colors = {run: COLORS[number % len(COLORS)] for number, run in enumerate(logs)}
        ends = {}
        for run, (steps, values) in curves.items():
            marker = "o" if len(steps) < MANY else None
            if name in NOISY and len(steps) >= MANY:
                panel.plot(steps, values, color=colors[run], linewidth=0.6, alpha=0.35)
                values = _means(values, len(values) // 10)
            panel.plot(steps, values, marker=marker, markersize=3, color=colors[run])
            if values:
                ends[run] = values[-1]
        values = [value for _, values in curves.values() for value in values]
        if name == "learning_rate" and max(values) > 10 * min(values) > 0:
            panel.set_yscale("log")
        if name in ("validation/kl", "step/kl_per_completion"):
            panel.set_ylim(bottom=0)
        panel.set_title(CURVES[name], fontsize=10)
        panel.tick_params(labelsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        if len(logs) > 1:
            _name_ends(panel, ends, colors)
    for panel in panels[max(0, len(names) - columns) : len(names)]:
        panel.set_xlabel("optimizer step", fontsize=9)
    FigureCanvasAgg(figure).print_png(str(path))


def _means(values: list[float], window: int) -> list[float]:
    """Of each value and those before it, `window` in all."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _name_ends(panel: Any, ends: dict[str, float], colors: dict[str, str]) -> None:
    """Names of runs on the right, as high as their lines end there, but apart from each other."""
    apart = 0.13
    panel.get_ylim()  # now, where it would be found when the panel is drawn
    place = panel.transData + panel.transAxes.inverted()
    heights = dict(sorted(((run, place.transform((0, y))[1]) for run, y in ends.items()), key=lambda end: end[1]))
    low = -math.inf
    for run, height in heights.items():
        low = heights[run] = max(height, low + apart)
    high = 1.0 + apart
    for run in reversed(heights):
        high = heights[run] = min(heights[run], high - apart)
        style = {"color": colors[run], "fontsize": 9, "verticalalignment": "center", "transform": panel.transAxes}
        panel.text(1.03, high, run, **style).set_parse_math(False)  # matplotlib takes $ for a formula
