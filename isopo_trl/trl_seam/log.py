"""TRL's log: what the next log line is the mean of."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .loans import borrowed
from .required import require


require("trl.GRPOTrainer._generate_and_score_completions", mentions=("_logs", "advantages"))


def add_to_log(trainer: Any, mode: str, figures: dict[str, float]) -> None:
    """Add to what the next log line of `mode`, `"train"` or `"eval"`, is the mean of."""
    for name, value in figures.items():
        trainer._metrics[mode][name].append(value)


def replace_logged_advantages(trainer: Any, advantages: list[float]) -> None:
    """Put other advantages in the table of completions, in place of those of the last generation, of all ranks."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(logged), len(advantages))):
        logged.pop()
    logged.extend(advantages)


@contextmanager
def figures_apart(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Context in which TRL adds nothing to the log: its figures, a list of values per name, are returned instead."""
    figures: dict[str, list[float]] = defaultdict(list)
    with borrowed(trainer, _metrics={"train": figures, "eval": figures}):
        yield figures


def add_all_to_log(trainer: Any, mode: str, figures: dict[str, list[float]]) -> None:
    """Add figures that were [set apart][figures_apart] to the log after all."""
    for name, values in figures.items():
        trainer._metrics[mode][name].extend(values)
