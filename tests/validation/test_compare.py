"""`isopo-compare`: runs in one picture and one table, and one sentence for whatever cannot be compared."""

import runpy
import sys

import pytest

from isopo_trl.validation.compare import main, named
from tests.validation.runs import BROKEN, CURVES, REWARD, broken, legends, log, png_size, write


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


def test_command_compares_runs_with_any_name(figures, tmp_path, capsys):
    names = ["_one", "$two", "__", "10$ or 20$"]
    folders = [str(write(tmp_path / name, log(REWARD))) for name in names]
    assert main([*folders, "--output", str(tmp_path / "picture.png")]) == 0
    rows = capsys.readouterr().out.splitlines()[1:-1]
    assert [row[: max(map(len, names))].strip() for row in rows] == names
    assert legends(figures[0]) == set(names)


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


def test_command_runs_as_a_module(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "run", log(*CURVES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["isopo-compare", str(folder)])
    monkeypatch.delitem(sys.modules, "isopo_trl.validation.compare")  # else Python warns that it is there already
    with pytest.raises(SystemExit) as end:
        runpy.run_module("isopo_trl.validation.compare", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.endswith("Drawn to comparison.png\n")
    png_size(tmp_path / "comparison.png")
