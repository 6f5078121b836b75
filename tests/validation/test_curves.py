"""Runs are read from what they left behind, and drawn as they were."""

import pytest

from isopo_trl.validation.curves import CURVES, curve, draw, read_log
from tests.validation.runs import ACCURACY, BROKEN, KL, REWARD, broken, legends, log, png_size, write


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


def test_curve_has_the_last_value_of_each_step_at_which_its_figure_was_logged():
    values = ((0, KL, 0.0), (1, REWARD, 0.1), (2, REWARD, None), (3, REWARD, 0.3), (4, REWARD, 0.4), (3, REWARD, 0.5))
    lines = [{"step": step, name: value} for step, name, value in values]
    assert curve(lines, REWARD) == ([1, 3, 4], [0.1, 0.5, 0.4])
    assert curve(lines, KL) == ([0], [0.0])
    assert curve(lines, ACCURACY) == ([], [])


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


def test_picture_of_several_runs_has_a_line_of_one_color_for_each_with_its_name_as_it_is(figures, tmp_path):
    # Matplotlib would leave out names that begin with _, and take $ for a formula
    logs = {name: log(*CURVES) for name in ("isopo", "_hidden", "$x^2$", "cost_$5")} | {"reward alone": log(REWARD)}
    draw(logs, str(tmp_path / "several.png"))
    (figure,) = figures
    for panel in figure.axes:
        assert [line.get_color() for line in panel.lines] == [f"C{number}" for number in range(len(logs))]
    (legend,) = [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == list(logs)
    assert not any(text.get_parse_math() for text in legend.get_texts())


@pytest.mark.parametrize("names", [[REWARD], [ACCURACY, KL], [KL]])
def test_curves_that_no_run_has_get_no_panel(names, figures, tmp_path):
    draw({"one": log(*names), "two": log(*names[:1])}, tmp_path / "missing.png")
    assert [panel.get_title() for panel in figures[0].axes] == [CURVES[name] for name in names]
