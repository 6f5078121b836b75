"""
Runs side by side: a table of their figures at equal steps, and their curves in one figure.

    isopo-compare outputs/isopo outputs/grpo --output comparison.png

A run is the output folder of an ISOPOTrainer, of TRL's GRPOTrainer or of one like it, a checkpoint in it, or a
`trainer_state.json`; `NAME=PATH` gives it a name. Runs are compared as far as all of them have gone: at the first, the
middle and the last step, by the newest value that was logged up to it, and by the mean over the last tenth.
"""

import argparse
import os
import sys
from pathlib import Path

from .curves import CURVES, STATE, Log, curve, draw, read_log


# Rows of the table
FIGURES = {**CURVES, "step_time": "seconds per step"}


def named(text: str) -> tuple[str, str]:
    """`NAME=PATH`, or a path, which is named after its folder."""
    name, equals, path = text.partition("=")
    if equals and not os.path.exists(text):
        return name, path
    folder = Path(text).parent if Path(text).name == STATE else Path(text)
    return folder.resolve().name, text


def at_equal_steps(curves: list[tuple[list[int], list[float]]]) -> dict[str, list[float | None]]:
    """
    Values of each run at the first step that all have, at the middle and the last one, and means of the last tenth.

    Args:
        curves (`list[tuple[list[int], list[float]]]`): steps and values of each run; empty where it has none.
    """
    first = max(steps[0] for steps, _ in curves if steps)
    last = min(steps[-1] for steps, _ in curves if steps)
    if last < first:
        return {}
    rows: dict[str, list[float | None]] = {}
    for step in sorted({first, (first + last) // 2, last}):
        newest = [[v for s, v in zip(steps, values, strict=True) if s <= step] for steps, values in curves]
        rows[f"step {step}"] = [values[-1] if values else None for values in newest]
    tenth = last - (last - first) / 10
    ends = [[v for s, v in zip(steps, values, strict=True) if tenth <= s <= last] for steps, values in curves]
    # Without a log line in it, the newest one before
    means = [sum(v) / len(v) if v else newest for v, newest in zip(ends, rows[f"step {last}"], strict=True)]
    return {**rows, "last tenth": means}


def table(logs: dict[str, Log]) -> str:
    """A table of the runs side by side, of all figures that any of them has."""
    ends = {run: max(entry["step"] for entry in log) for run, log in logs.items()}
    equal = [[entry for entry in log if entry["step"] <= min(ends.values())] for log in logs.values()]
    blocks = {}
    for name, title in FIGURES.items():
        curves = [curve(log, name) for log in equal]
        if any(steps for steps, _ in curves):
            blocks[title] = at_equal_steps(curves) or {"no step in common": [None] * len(logs)}
    margin = 2 + max(len(moment) for rows in blocks.values() for moment in rows)
    widths = [max(9, len(run)) for run in logs]
    lines = [" " * margin + "".join(f"  {run:>{width}}" for run, width in zip(logs, widths, strict=True))]
    for title, rows in blocks.items():
        lines.append(title)
        for moment, values in rows.items():
            cells = ["-" if value is None else f"{value:.4g}" for value in values]
            row = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append(f"{'  ' + moment:{margin}}{row}")
    if len(set(ends.values())) > 1:
        lines.append(f"Last steps: {', '.join(f'{run} {step}' for run, step in ends.items())}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="isopo-compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="output folders of runs")
    parser.add_argument("--output", default="comparison.png", help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    drawn = f"Drawn to {options.output}"
    try:
        pairs = [named(text) for text in options.runs]
        if len({name for name, _ in pairs}) < len(pairs):  # folders of one name: tell them apart by their paths
            pairs = [(path, path) for _, path in pairs]
        logs = {name: read_log(path) for name, path in pairs}
        draw(logs, options.output)
    except ImportError:
        drawn = "Not drawn, which needs matplotlib: pip install matplotlib"
    except (ValueError, OSError) as error:
        print(f"isopo-compare: {error}", file=sys.stderr)
        return 2
    print(table(logs))
    print(drawn)
    return 0
