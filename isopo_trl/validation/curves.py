"""
Curves of runs: read from what a run has logged, and drawn, one panel per curve and one line per run.

A run leaves its log behind in `trainer_state.json`, in its output folder and in every checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Any


# What is logged, and the label of its axis
CURVES = {
    "reward": "training reward",
    "validation/accuracy": "validation accuracy, greedy",
    "validation/kl": "KL from the initial policy, nats per completion",
}
STATE = "trainer_state.json"

Log = list[dict[str, Any]]


def read_log(path: str | os.PathLike) -> Log:
    """
    The log of a run, from the folder it was written to, one of its checkpoints, or the file itself.

    Raises `ValueError` with a sentence that says what is wrong.
    """
    file = Path(path)
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
        has_curves = any(curve(log, name)[0] for name in CURVES)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a {STATE} of a Trainer: give the output folder of a run.") from error
    if not has_curves:
        raise ValueError(f"{file} has none of {', '.join(CURVES)} in its log: is it a run of a GRPO-like trainer?")
    return log


def curve(log: Log, name: str) -> tuple[list[int], list[float]]:
    """Steps and values at which `name` was logged; where a step comes twice (after resuming), the last counts."""
    points = {entry["step"]: entry[name] for entry in log if entry.get(name) is not None}
    return list(points), list(points.values())


def draw(logs: dict[str, Log], path: str | os.PathLike) -> None:
    """
    Draw the curves that the logs have as one PNG, one panel per curve and one line per run; nothing if there are none.

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
    figure = Figure(figsize=(1 + 3.8 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for number, (run, log) in enumerate(logs.items()):
            steps, values = curve(log, name)
            marker = "o" if len(steps) < 30 else None
            panel.plot(steps, values, marker=marker, markersize=3, color=f"C{number}", label=run)
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_title(CURVES[name], fontsize=10)
        panel.grid(alpha=0.3)
        if name == "validation/kl":
            panel.set_ylim(bottom=0)
    if len(logs) > 1:
        # Names are put in afterwards: matplotlib leaves out those that begin with _, and takes $ for a formula
        legend = panels[0].legend(panels[0].lines, [str(number) for number in range(len(logs))], fontsize=8)
        for text, run in zip(legend.get_texts(), logs, strict=True):
            text.set_parse_math(False)
            text.set_text(run)
    FigureCanvasAgg(figure).print_png(str(path))
