"""A run as a table in the terminal: one short row per log line, in place of all of its figures."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers import trainer as transformers_trainer
from transformers.utils import is_in_notebook

from .curves import curve, sparkline


# The title of a column, what is logged, and how it is written; 80 characters in all, where there are 3 digits of steps
COLUMNS = (
    ("reward", "reward", "7.3f"),
    ("eval", "eval_reward", "6.3f"),
    ("accuracy", "validation/accuracy", "8.3f"),
    ("nats/step", "step/kl_per_completion", "9.2g"),
    ("drift", "validation/kl", "6.3f"),
    ("rate", "learning_rate", "7.1e"),
    ("tokens", "completions/mean_length", "6.0f"),
    ("s/step", "step_time", "6.1f"),
)
# There from the first row on; others as soon as they are logged
ALWAYS = ("reward", "rate", "tokens", "s/step")
# A log line with one of these is a row
OF_A_ROW = {"reward", "eval_reward", "validation/accuracy", "validation/kl"}
HEADER_EVERY, TREND = 20, 8


def hides_bars(args: Any) -> bool:
    """Whether no bar is to be seen: by `disable_tqdm`, or because they would go to a file."""
    return args.disable_tqdm or not (sys.stderr.isatty() or is_in_notebook())


class ProgressTable(ProgressCallback):
    """
    Prints a table of the run, one row per log line, and takes the place of transformers' dictionaries.

    A row has the step and, as far as they are logged: `reward`, the reward of an evaluation (`eval`), the accuracy and
    the divergence from the start of a [`ValidationCallback`] (`accuracy`, `drift`), the divergence of the step
    (`nats/step`), the learning rate that it was made with, tokens per completion, seconds per step, and the course of
    the last rewards (`trend`). Divergences are in nats per completion. The header comes again every 20 rows, and where
    a column is new.

    The rows go to the standard output of the first process, with a bar below them on a terminal and in a notebook,
    unless `disable_tqdm` is set. What goes to `trainer.state.log_history`, to trackers and to other callbacks is as it
    was.

    Example:

    ```python
    >>> from isopo_trl.validation import ProgressTable

    >>> trainer.add_callback(ProgressTable(trainer))
    >>> trainer.train()
    ```

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer, of any kind derived from TRL's `GRPOTrainer`. The callback that transformers has put there to
            print its log is removed.
        more (`dict[str, str]`, *optional*):
            Further columns: title -> name of what is logged, such as `{"format": "rewards/format_reward/mean"}`.
    """

    def __init__(self, trainer: Trainer, more: dict[str, str] | None = None):
        super().__init__()
        more = more or {}
        self.training_bar: Any = None
        prints = (PrinterCallback, ProgressCallback, transformers_trainer.DEFAULT_PROGRESS_CALLBACK)
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback) in prints:  # and not the user's own, which may be derived from them
                trainer.remove_callback(callback)
        self.columns = (*COLUMNS, *((title, name, f"{max(6, len(title))}.3f") for title, name in more.items()))
        self._shown = {*ALWAYS, *more}
        if getattr(trainer.args, "measures_steps", False):
            self._shown.add("nats/step")
        self._until_header = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=hides_bars(args))

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if not hides_bars(args):
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or OF_A_ROW.isdisjoint(logs) or "train_runtime" in logs:
            return
        new = {title for title, name, _ in self.columns if logs.get(name) is not None} - self._shown
        self._shown |= new
        of_steps = f"{state.max_steps}"
        titles, cells = [f"{'step':>{2 * len(of_steps) + 1}}"], [f"{state.global_step}/{of_steps}"]
        for title, name, form in self.columns:
            if title in self._shown:
                value, width = logs.get(name), int(form.partition(".")[0])
                titles.append(f"{title:>{width}}")
                cells.append(" " * width if value is None else f"{value:{form}}")
        if new or not self._until_header:
            self._until_header = HEADER_EVERY
            self._write(*titles, "trend")
        self._until_header -= 1
        rewards = curve(state.log_history, "reward")[1] if "reward" in logs else []
        self._write(cells.pop(0).rjust(len(titles[0])), *cells, sparkline(rewards[-TREND:]))
        if "reward" not in logs and self.training_bar is not None:
            self.training_bar.unpause()  # the time that is left is that of steps

    def _write(self, *cells: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        line = "  ".join(cells).encode(encoding, "replace").decode(encoding).rstrip()
        tqdm.write(line)  # above the bars
        sys.stdout.flush()  # to a file, at once
