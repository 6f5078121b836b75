"""`isopo-compare`: runs in one picture and one table, and one sentence for whatever cannot be compared."""

import sys

import pytest

from isopo_trl.validation.compare import main, named
from tests.validation.runs import CURVES, REWARD, broken, legends, log, png_size, write


def test_a_run_is_named_after_its_folder_or_as_asked(tmp_path, monkeypatch):
    folder = write(tmp_path / "beta=0.1", log(REWARD))
    for path in (f"{folder}", f"{folder}/", f"{folder}/trainer_state.json"):
        assert named(path) == ("beta=0.1", path)
        assert named(f"ours={path}") == ("ours", path)
    monkeypatch.chdir(folder)
    for path in (".", "trainer_state.json"):
        assert named(path) == ("beta=0.1", path)


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["good", "broken"],
        ["nowhere"],
        ["ours=nowhere"],
        [""],
        ["ours="],
        ["good", "--output=missing/picture.png"],
        ["good", "--output=."],
    ],
    ids=" ".join,
)
def test_command_answers_what_cannot_be_compared_with_one_sentence(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good", log(REWARD))
    (tmp_path / "broken").mkdir()
    broken(tmp_path / "broken", "list")
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.startswith("isopo-compare: ") and errors.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


def test_command_says_what_to_install_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert main([str(write(tmp_path, log(REWARD))), "--output", str(tmp_path / "picture.png")]) == 2
    output, errors = capsys.readouterr()
    assert not output and errors == "isopo-compare needs matplotlib: pip install matplotlib\n"
