"""Runs are read from what they left behind, and drawn as they were."""

import pytest

from isopo_trl.validation.curves import COLORS, CURVES, MARKS, curve, draw, in_text, read_log, sparkline
from tests.validation.runs import ACCURACY, BROKEN, KL, RATE, REWARD, broken, log, names_of_lines, png_size, write


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


def test_folder_that_is_not_there_is_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match="There is no .*nowhere: give the output folder"):
        read_log(tmp_path / "nowhere")


# Curves


def test_curve_has_the_last_value_of_each_step_at_which_its_figure_was_logged():
    values = ((0, KL, 0.0), (1, REWARD, 0.1), (2, REWARD, None), (3, REWARD, 0.3), (4, REWARD, 0.4), (3, REWARD, 0.5))
    lines = [{"step": step, name: value} for step, name, value in values]
    lines.append({"step": 5, REWARD: float("nan")})
    assert curve(lines, REWARD) == ([1, 3, 4], [0.1, 0.5, 0.4])
    assert curve(lines, KL) == ([0], [0.0])
    assert curve(lines, ACCURACY) == ([], [])


def test_sparkline_goes_from_the_least_to_the_largest_mean_of_its_parts():
    assert sparkline([0.0, 3.5, 7.0]) == MARKS[0] + MARKS[4] + MARKS[7]
    assert sparkline([3.0, -4.0, 3.0, 10.0], width=2) == MARKS[0] + MARKS[7]  # of -0.5 and 6.5
    assert sparkline([0.5] * 3) == MARKS[0] * 3 and sparkline([]) == ""
    assert len(sparkline(list(map(float, range(100))), width=24)) == 24


def test_curves_in_text_have_their_first_and_last_values():
    lines = in_text(log(REWARD, KL)).splitlines()
    assert [line[:40].strip() for line in lines] == [CURVES[REWARD], CURVES[KL]]
    assert lines[0].split()[-3:] == ["6", sparkline([6.0, 6.1, 6.2]), "6.2"]


def test_picture_of_one_run_has_a_panel_for_each_curve_and_names_no_line(figures, tmp_path):
    names = [name for name in CURVES if name != "eval_reward"]
    draw({"isopo": log(*names)}, tmp_path / "one.png")
    (figure,) = figures
    assert [panel.get_title() for panel in figure.axes] == [CURVES[name] for name in names]
    for panel, name in zip(figure.axes, names, strict=True):
        (line,) = panel.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == curve(log(*names), name)
    assert [panel.get_xlabel() for panel in figure.axes] == [""] * 3 + ["optimizer step"] * 2
    assert figure.axes[2].get_ylim()[0] == 0 and not names_of_lines(figure.axes[0])
    width, height = png_size(tmp_path / "one.png")
    assert width > 1000 and height > 300


def test_picture_of_several_runs_has_their_names_as_they_are_in_the_colors_of_their_lines_and_apart(figures, tmp_path):
    # Matplotlib would take $ for a formula
    names = ["isopo", "_hidden", "$x^2$", "cost_$5"]
    logs = {name: log(REWARD, ACCURACY, KL) for name in names} | {"reward alone": log(REWARD, shift=1.0)}
    draw(logs, str(tmp_path / "several.png"))
    (figure,) = figures
    for panel in figure.axes:
        assert [line.get_color() for line in panel.lines] == list(COLORS[: len(logs)])
        texts = names_of_lines(panel)
        there = [*names, *["reward alone"] * (panel is figure.axes[0])]
        assert {text.get_text(): text.get_color() for text in texts} == dict(zip(there, COLORS, strict=False))
        assert not any(text.get_parse_math() for text in texts)
        boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    # The line that ends highest has its name highest
    heights = {text.get_text(): text.get_position()[1] for text in names_of_lines(figure.axes[0])}
    assert max(heights, key=heights.get) == "reward alone"
    # Of lines that end at the bottom they are beside the panel, too
    falling = [{"step": step, REWARD: 1.0, RATE: 1.0 - step / 10} for step in range(5)]
    draw({name: falling for name in names}, str(tmp_path / "falling.png"))
    (_, panel) = figures[-1].axes
    assert all(0 < text.get_position()[1] < 1 for text in names_of_lines(panel))
    # As it is shown on a telephone: letters of 9 points, 72 to the inch
    assert 9 / 72 * 390 / figure.get_figwidth() > 8


def test_many_rewards_are_drawn_behind_their_means_and_rates_that_differ_much_by_their_logarithm(figures, tmp_path):
    lines = [{"step": step, REWARD: float(step % 2), RATE: 1e-6 * step} for step in range(1, 41)]
    draw({"one": lines}, tmp_path / "many.png")
    reward, rate = figures[0].axes
    logged, means = (list(line.get_ydata()) for line in reward.lines)
    assert logged == [1.0, 0.0] * 20 and means == [1.0, 0.5, 2 / 3] + [0.5] * 37
    assert len(rate.lines) == 1 and rate.get_yscale() == "log" and reward.get_yscale() == "linear"


@pytest.mark.parametrize("names", [[REWARD], [ACCURACY, KL], [KL]])
def test_curves_that_no_run_has_get_no_panel(names, figures, tmp_path):
    draw({"one": log(*names), "two": log(*names[:1])}, tmp_path / "missing.png")
    assert [panel.get_title() for panel in figures[0].axes] == [CURVES[name] for name in names]
