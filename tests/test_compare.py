"""Runs are read from what they left behind, and compared in one picture and one table."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from isopo_trl.compare import CURVES, curve, draw, main, named, read_log


ROOT = Path(__file__).parents[1]
REWARD, ACCURACY, KL = CURVES


def log(*names, steps=3, shift=0.0):
    """A log as the trainer writes it: a line for the figures of training, one for those of validation."""
    lines = []
    for step in range(steps):
        for kind in ([REWARD], [ACCURACY, KL]):
            line = {name: shift + 0.1 * step + len(name) for name in kind if name in names}
            lines += [{**line, "epoch": step / 10, "step": step}] if line else []
    return [*lines, {"train_runtime": 1.0, "step": steps}]


def write(folder, lines, age=0):
    """The log in a folder of its own; `age` in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"log_history": lines, "global_step": 3}))
    os.utime(file, (1_000_000 - age, 1_000_000 - age))
    return folder


# Reading


def test_log_is_found_in_the_folder_of_a_run_in_a_checkpoint_and_by_its_file(tmp_path):
    lines = log(REWARD, KL)
    folder = write(tmp_path / "run", lines)
    write(tmp_path / "run" / "checkpoint-2", log(REWARD, steps=2))
    assert read_log(folder) == read_log(str(folder)) == read_log(folder / "trainer_state.json") == lines
    assert read_log(folder / "checkpoint-2") == log(REWARD, steps=2)


def test_log_of_a_run_that_left_checkpoints_alone_is_that_of_the_last_one(tmp_path):
    for step, age in ((2, 20), (4, 0), (10, 10)):
        write(tmp_path / f"checkpoint-{step}", log(REWARD, steps=step), age)
    assert read_log(tmp_path) == log(REWARD, steps=4)  # written last: ten steps were of a run before


BROKEN = {
    "no file": (None, "cannot be read"),
    "empty": ("", "is not a trainer_state.json"),
    "broken": ('{"log_history": [', "is not a trainer_state.json"),
    "binary": (b"\xff\xfe\x00\x80", "cannot be read"),
    "list": ("[1, 2]", "is not a trainer_state.json"),
    "text": ('"log_history"', "is not a trainer_state.json"),
    "other keys": ('{"history": []}', "is not a trainer_state.json"),
    "null log": ('{"log_history": null}', "is not a trainer_state.json"),
    "log of text": ('{"log_history": ["reward"]}', "is not a trainer_state.json"),
    "line without step": ('{"log_history": [{"reward": 1.0}]}', "is not a trainer_state.json"),
    "last line without step": (
        '{"log_history": [{"reward": 1.0, "step": 1}, {"loss": 1.0}]}',
        "is not a trainer_state",
    ),
    "reward of text": ('{"log_history": [{"step": 1, "reward": "much"}]}', "is not a trainer_state.json"),
    "empty log": ('{"log_history": []}', "has none of reward, validation/accuracy, validation/kl"),
    "another trainer": ('{"log_history": [{"loss": 1.0, "step": 1}]}', "has none of reward"),
    "rewards of none": ('{"log_history": [{"step": 1, "reward": null}]}', "has none of reward"),
}


def broken(folder, case):
    content, message = BROKEN[case]
    file = folder / "trainer_state.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file, message


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_a_log_is_refused_with_its_name(case, tmp_path):
    file, message = broken(tmp_path, case)
    with pytest.raises(ValueError, match=message) as error:
        read_log(file)
    assert str(file) in str(error.value)


def test_folder_without_a_log_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="nor has a checkpoint in it: give the output folder of a run"):
        read_log(tmp_path)


# Curves


def test_curve_has_the_steps_at_which_its_figure_was_logged():
    lines = [{"step": 0, KL: 0.0}, {"step": 1, REWARD: 0.5}, {"step": 2, REWARD: None}, {"step": 3, REWARD: 0.25}]
    assert curve(lines, REWARD) == ([1, 3], [0.5, 0.25])
    assert curve(lines, KL) == ([0], [0.0])
    assert curve(lines, ACCURACY) == ([], [])


def test_of_a_step_that_was_logged_twice_the_last_value_counts():
    lines = [{"step": step, REWARD: value} for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4), (3, 0.5))]
    assert curve(lines, REWARD) == ([1, 2, 3], [0.1, 0.4, 0.5])


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, as matplotlib has them."""
    kept, write_png = [], FigureCanvasAgg.print_png

    def keep(canvas, *args, **kwargs):
        kept.append(canvas.figure)
        return write_png(canvas, *args, **kwargs)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)
    return kept


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def legends(figure):
    found = [*figure.legends, *(panel.get_legend() for panel in figure.axes)]
    return {text.get_text() for legend in found if legend for text in legend.get_texts()}


def test_picture_of_one_run_has_a_panel_for_each_curve_and_no_legend(figures, tmp_path):
    draw({"isopo": log(*CURVES)}, tmp_path / "one.png")
    (figure,) = figures
    assert [panel.get_title() for panel in figure.axes] == list(CURVES.values())
    for panel, name in zip(figure.axes, CURVES, strict=True):
        (line,) = panel.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == curve(log(*CURVES), name)
        assert panel.get_xlabel() == "optimizer step"
    assert figure.axes[2].get_ylim()[0] == 0 and not legends(figure)
    width, height = png_size(tmp_path / "one.png")
    assert width > 1000 and height > 300


def test_picture_of_several_runs_has_a_line_for_each_with_its_name(figures, tmp_path):
    logs = {"isopo": log(*CURVES), "grpo": log(*CURVES, shift=0.5), "third": log(*CURVES, steps=40)}
    draw(logs, str(tmp_path / "several.png"))
    (figure,) = figures
    for panel in figure.axes:
        assert [line.get_label() for line in panel.lines] == list(logs)
        assert len({line.get_color() for line in panel.lines}) == 3
    assert legends(figure) == set(logs)
    assert png_size(tmp_path / "several.png")[0] > 1000


@pytest.mark.parametrize("names", [[REWARD], [ACCURACY, KL], [KL]])
def test_curves_that_no_run_has_get_no_panel(names, figures, tmp_path):
    draw({"one": log(*names), "two": log(*names[:1])}, tmp_path / "missing.png")
    assert [panel.get_title() for panel in figures[0].axes] == [CURVES[name] for name in names]
    png_size(tmp_path / "missing.png")


def test_a_run_keeps_its_color_where_another_has_no_curve(figures, tmp_path):
    draw({"without": log(REWARD), "with": log(*CURVES)}, tmp_path / "colors.png")
    colors = {}
    for panel in figures[0].axes:
        for line in panel.lines:
            colors.setdefault(line.get_label(), set()).add(line.get_color())
    assert len(colors["with"]) == 1 and colors["with"].isdisjoint(colors["without"])


def test_a_run_without_the_first_curve_is_in_the_legend(figures, tmp_path):
    draw({"rewards": log(REWARD), "validation": log(ACCURACY)}, tmp_path / "legend.png")
    assert legends(figures[0]) == {"rewards", "validation"}


# Names


def test_a_run_is_named_after_its_folder_or_as_asked(tmp_path, monkeypatch):
    folder = write(tmp_path / "isopo", log(REWARD))
    assert named(str(folder)) == ("isopo", str(folder))
    assert named(f"{folder}/") == ("isopo", f"{folder}/")
    assert named(f"{folder}/trainer_state.json") == ("isopo", f"{folder}/trainer_state.json")
    assert named(f"ours={folder}") == ("ours", str(folder))
    assert named("ours=a=b") == ("ours", "a=b")
    monkeypatch.chdir(folder)
    assert named(".") == ("isopo", ".")
    assert named("trainer_state.json") == ("isopo", "trainer_state.json")


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(tmp_path):
    folder = write(tmp_path / "beta=0.1", log(REWARD))
    assert named(str(folder)) == ("beta=0.1", str(folder))
    assert named(f"ours={folder}") == ("ours", str(folder))


# The command


def test_command_prints_the_last_figures_of_each_run(tmp_path, capsys):
    isopo = write(tmp_path / "isopo", log(*CURVES, steps=4))
    grpo = write(tmp_path / "grpo", log(REWARD, shift=0.5))
    picture = tmp_path / "picture.png"
    assert main([str(isopo), f"baseline={grpo}", "--output", str(picture)]) == 0
    output, errors = capsys.readouterr()
    head, first, second, last = output.splitlines()
    assert head.split() == ["last", "step", "reward", "accuracy", "KL"]
    assert first.split() == ["isopo", "4", "6.300", "19.300", "13.300"]
    assert second.split() == ["baseline", "3", "6.700", "-", "-"]
    assert last == f"Drawn to {picture}" and not errors
    png_size(picture)


def test_runs_in_folders_of_the_same_name_are_told_apart_by_their_paths(figures, tmp_path, capsys):
    folders = [str(write(tmp_path / part / "run", log(REWARD))) for part in ("one", "two")]
    assert main([*folders, "--output", str(tmp_path / "picture.png")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:3]] == folders
    assert legends(figures[0]) == set(folders)


def assert_refused(arguments, capsys, message=""):
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.startswith("isopo-compare: ") and message in errors
    assert errors.count("\n") == 1 and "Traceback" not in errors


@pytest.mark.parametrize("case", BROKEN)
def test_command_answers_a_bad_file_with_one_sentence(case, tmp_path, capsys):
    file, message = broken(tmp_path, case)
    good = str(write(tmp_path / "good", log(REWARD)))
    assert_refused([good, str(file), "--output", str(tmp_path / "picture.png")], capsys, message)
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize("run", ["nowhere", "ours=nowhere", "", "ours="])
def test_command_answers_a_bad_path_with_one_sentence(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused([run], capsys)


@pytest.mark.parametrize("output", ["missing/picture.png", ".", "trainer_state.json/picture.png"])
def test_command_answers_an_output_that_cannot_be_written_with_one_sentence(output, tmp_path, capsys):
    folder = write(tmp_path, log(REWARD))
    assert_refused([str(folder), "--output", str(tmp_path / output)], capsys, str(tmp_path))


def test_command_says_what_to_install_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert main([str(write(tmp_path, log(REWARD))), "--output", str(tmp_path / "picture.png")]) == 2
    output, errors = capsys.readouterr()
    assert not output and errors == "isopo-compare needs matplotlib: pip install matplotlib\n"


def test_command_runs_as_a_module(tmp_path):
    folder = write(tmp_path / "run", log(*CURVES))
    command = [sys.executable, "-m", "isopo_trl.compare", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("Drawn to comparison.png\n")
    png_size(tmp_path / "comparison.png")
