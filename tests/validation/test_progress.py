"""The table of a run: what its rows say, where it is printed, and that nothing else of the run is changed."""

import io
import re
import sys

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from trl import GRPOTrainer

from isopo_trl.validation import ProgressTable, ValidationCallback
from isopo_trl.validation.progress import HEADER_EVERY
from tests import tiny, training


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Own(TrainerCallback):
    """Notes the logs that it gets."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


class OwnPrinter(PrinterCallback):
    def on_log(self, *args, **kwargs):
        pass


class OwnProgress(ProgressCallback):
    pass


def run(folder, validate=True, more=None, **settings):
    trainer = training.build(folder, **settings)
    if more is not False:
        trainer.add_callback(ProgressTable(trainer, more))
    if validate:
        trainer.add_callback(ValidationCallback(trainer, tiny.prompts(2), tiny.reward, steps=2, kl_prompts=2))
    trainer.train()
    return trainer


def cells(output):
    """Rows of a table as dictionaries; raises where a cell does not end where its column does."""
    ends, rows = {}, []
    for line in output.splitlines():
        if line.split()[0] == "step":
            ends = {found.end(): found[0] for found in re.finditer(r"\S+", line)}
            assert ends[max(ends)] == "trend"
            continue
        row, trend = {}, line[max(ends) - len("trend") :]
        for found in re.finditer(r"\S+", line.removesuffix(trend)):
            row[ends[found.end()]] = found[0]
        rows.append({**row, "trend": trend} if trend else row)
    return rows


# What it says


def test_rows_have_the_figures_of_the_log_under_their_titles(tmp_path, capfd):
    trainer = run(tmp_path, max_steps=3, target_kl=1e-3, more={"loss": "loss"})
    output, errors = capfd.readouterr()
    titles = "step reward accuracy nats/step drift rate tokens s/step loss trend"
    assert output.splitlines()[0].split() == titles.split()
    rows = cells(output)
    history = trainer.state.log_history
    assert [row["step"] for row in rows] == ["0/3", "1/3", "2/3", "2/3", "3/3", "3/3"]
    lines = [line for line in history if "reward" in line or "validation/accuracy" in line]
    for row, line in zip(rows, lines, strict=True):
        if "reward" in line:
            assert float(row["reward"]) == pytest.approx(line["reward"], abs=6e-4)
            assert float(row["nats/step"]) == pytest.approx(line["step/kl_per_completion"], rel=0.06)
            assert float(row["rate"]) == pytest.approx(line["learning_rate"], rel=0.06)
            assert float(row["tokens"]) == pytest.approx(line["completions/mean_length"], abs=0.51)
            assert float(row["s/step"]) == pytest.approx(line["step_time"], abs=0.06)
            assert float(row["loss"]) == pytest.approx(line["loss"], abs=6e-4)
            assert len(row["trend"]) == line["step"] and not {"accuracy", "drift"} & row.keys()
        else:
            assert float(row["accuracy"]) == pytest.approx(line["validation/accuracy"], abs=6e-4)
            assert float(row["drift"]) == pytest.approx(line["validation/kl"], abs=6e-4)
            assert row.keys() == {"step", "accuracy", "drift"}
    # To a file: no bars, no codes that move the cursor, no dictionaries
    assert not {"\x1b", "\r", "{"} & set(output + errors) and "it/s" not in errors


def test_a_run_of_grpo_with_an_evaluation_has_a_row_for_it(tmp_path, capfd):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3, "disable_tqdm": False}
    options = {"eval_dataset": tiny.prompts(3)}
    trainer = run(tmp_path, validate=False, kind=GRPOTrainer, options=options, **evaluated)
    output, errors = capfd.readouterr()
    *_, last = cells(output)
    (value,) = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
    assert last["step"] == "2/2" and float(last["eval"]) == pytest.approx(value, abs=6e-4)
    assert "nats/step" not in output and not {"\x1b", "\r", "{"} & set(output + errors)


def test_header_comes_again_with_a_new_column_and_after_twenty_rows(tmp_path, capsys):
    table = ProgressTable(training.build(tmp_path))
    state = TrainerState(max_steps=99, is_world_process_zero=True)
    for step in range(1, HEADER_EVERY + 3):
        state.global_step = step
        state.log_history.append({"reward": 0.5, "step": step})
        table.on_log(None, state, None, logs=dict(state.log_history[-1]))
    table.on_log(None, state, None, logs={"validation/accuracy": 0.25})
    table.on_log(None, state, None, logs={"grad_norm": 1.0})
    table.on_log(None, state, None, logs={"train_runtime": 1.0, "reward": 0.5})
    output = capsys.readouterr().out
    assert cells(output)[0]["step"] == "1/99" and cells(output)[-1]["step"] == "22/99"
    lines = output.splitlines()
    headers = [number for number, line in enumerate(lines) if "step" in line]
    assert headers == [0, HEADER_EVERY + 1, HEADER_EVERY + 4] and len(lines) == HEADER_EVERY + 6
    assert "accuracy" not in lines[0] and "accuracy" in lines[headers[-1]]
    state.is_world_process_zero = False
    table.on_log(None, state, None, logs={"reward": 0.5})
    assert not capsys.readouterr().out


def test_a_figure_that_is_not_known_leaves_its_cell_empty(tmp_path, capsys):
    table = ProgressTable(training.build(tmp_path), {"other": "rewards/other/mean"})
    state = TrainerState(max_steps=5, is_world_process_zero=True)
    table.on_log(None, state, None, logs={"reward": float("nan"), "rewards/other/mean": None, "step_time": 2.0})
    (row,) = cells(capsys.readouterr().out)
    assert row == {"step": "0/5", "reward": "nan", "s/step": "2.0"}


# Where it is printed


@pytest.mark.parametrize("disabled", [False, True])
def test_a_terminal_has_a_bar_below_the_rows_unless_bars_are_off(disabled, tmp_path, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(tmp_path, disable_tqdm=disabled)
    assert [row["step"] for row in cells(capsys.readouterr().out)] == ["0/2", "1/2", "2/2", "2/2"]
    assert ("2/2 [" in terminal.getvalue()) != disabled and ("validation:" in terminal.getvalue()) != disabled


def test_the_time_of_a_validation_is_none_of_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    trainer = training.build(tmp_path, disable_tqdm=False)
    state, table = TrainerState(max_steps=3, is_world_process_zero=True), ProgressTable(trainer)
    table.on_train_begin(trainer.args, state, None)
    bar = table.training_bar
    for name in ("start_t", "last_print_t"):
        setattr(bar, name, getattr(bar, name) - 1000)  # so long did the first validation take
    assert bar.format_dict["elapsed"] >= 1000
    table.on_log(trainer.args, state, None, logs={"validation/accuracy": 0.5})
    assert bar.format_dict["elapsed"] < 900
    table.on_train_end(trainer.args, state, None)
    table.on_log(trainer.args, state, None, logs={"validation/accuracy": 0.25})  # the last one may come after the bar
    assert [row["accuracy"] for row in cells(capsys.readouterr().out)] == ["0.500", "0.250"]


def test_an_output_without_blocks_has_the_figures(tmp_path, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    run(tmp_path, validate=False)
    written = output.buffer.getvalue().decode()  # what has been flushed: all of it
    assert "1/2" in written and "2/2" in written and "?" in written


# What it leaves alone


def test_log_and_own_callbacks_are_as_without_it(tmp_path, capfd):
    def logged(more):
        own = [Own(), OwnPrinter(), OwnProgress()]
        trainer = run(tmp_path, more=more, options={"callbacks": own}, log_step_kl=True)
        assert all(callback in trainer.callback_handler.callbacks for callback in own)
        timed = ("step_time", "runtime", "per_second")
        return [
            [{name: value for name, value in line.items() if not name.endswith(timed)} for line in lines]
            for lines in (trainer.state.log_history, own[0].logs)
        ], trainer.callback_handler.callbacks

    (without, before), (with_it, after) = logged(False), logged(None)
    assert with_it == without
    kinds = [{type(callback) for callback in callbacks} for callbacks in (before, after)]
    assert kinds[0] - kinds[1] == {PrinterCallback} and kinds[1] - kinds[0] == {ProgressTable}
