"""`isopo-compare`: runs in one picture and one table, and one sentence for whatever cannot be compared."""

import re
import sys

import pytest
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.validation import ProgressTable, ValidationCallback
from isopo_trl.validation.compare import at_equal_steps, main, named
from isopo_trl.validation.curves import CURVES, curve
from tests import tiny, training
from tests.validation.runs import ACCURACY, KL, REWARD, broken, log, names_of_lines, png_size, write


def test_a_run_is_named_after_its_folder_or_as_asked(tmp_path, monkeypatch):
    folder = write(tmp_path / "beta=0.1", log(REWARD))
    for path in (f"{folder}", f"{folder}/", f"{folder}/trainer_state.json"):
        assert named(path) == ("beta=0.1", path)
        assert named(f"ours={path}") == ("ours", path)
    monkeypatch.chdir(folder)
    for path in (".", "trainer_state.json"):
        assert named(path) == ("beta=0.1", path)


def rows(output):
    """Of the table: title -> moment -> cells."""
    found, title = {}, ""
    for line in output.splitlines()[1:]:
        if line.startswith("  "):
            moment, *cells = re.split(r"\s{2,}", line.strip())
            found[title][moment] = cells
        else:
            title = line
            found[title] = {}
    return {title: moments for title, moments in found.items() if moments}


def test_table_has_the_figures_of_each_run_side_by_side_at_equal_steps(tmp_path, capsys):
    isopo = write(tmp_path / "isopo", log(REWARD, ACCURACY, KL, steps=41))
    grpo = write(tmp_path / "grpo", log(REWARD, shift=0.5, steps=21))
    picture = tmp_path / "picture.png"
    assert main([str(isopo), f"baseline={grpo}", "--output", str(picture)]) == 0
    output, errors = capsys.readouterr()
    assert output.split()[:2] == ["isopo", "baseline"] and not errors
    table = rows(output)
    assert list(table) == [CURVES[name] for name in (REWARD, ACCURACY, KL)]
    assert table[CURVES[REWARD]] == {
        "step 0": ["6", "6.5"],
        "step 10": ["7", "7.5"],
        "step 20": ["8", "8.5"],
        "last tenth": ["7.9", "8.4"],  # of the steps 18 to 20
    }
    assert table[CURVES[ACCURACY]]["step 21"] == ["21.1", "-"]
    *_, lasts, drawn = output.splitlines()
    assert lasts == "Last steps: isopo 41, baseline 21." and drawn == f"Drawn to {picture}"
    png_size(picture)


def test_runs_that_log_at_other_steps_are_compared_by_the_newest_values():
    every_second, every_third = ([2, 4, 6, 8], [0.2, 0.4, 0.6, 0.8]), ([3, 6, 9], [3.0, 6.0, 9.0])
    expected = {"step 3": [0.2, 3.0], "step 5": [0.4, 3.0], "step 8": [0.8, 6.0], "last tenth": [0.8, 6.0]}
    assert at_equal_steps([every_second, every_third]) == expected
    nothing = [[*values, None] for values in expected.values()]
    assert list(at_equal_steps([every_second, every_third, ([], [])]).values()) == nothing
    assert at_equal_steps([([1, 2], [0.1, 0.2]), ([5], [0.5])]) == {}


def test_runs_of_both_trainers_compare_by_what_they_leave(tmp_path, capsys):
    for kind in (ISOPOTrainer, GRPOTrainer):
        of_isopo = {"target_kl": 1e-3} if kind is ISOPOTrainer else {}
        folder = tmp_path / kind.__name__.removesuffix("Trainer").lower()
        saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
        trainer = training.build(folder, kind=kind, max_steps=2, **saved, **of_isopo)
        trainer.add_callback(ProgressTable(trainer))
        if kind is ISOPOTrainer:
            trainer.add_callback(ValidationCallback(trainer, tiny.prompts(2), tiny.reward, kl_prompts=0))
        trainer.train()
        rates = curve(trainer.state.log_history, "learning_rate")[1]
    capsys.readouterr()
    assert main([str(tmp_path / "isopo"), str(tmp_path / "grpo"), f"--output={tmp_path / 'both.png'}"]) == 0
    table = rows(capsys.readouterr().out)
    for title in ("training reward", "learning rate", "seconds per step"):
        assert all("-" not in cells for cells in table[title].values())
    assert [float(table["learning rate"][f"step {step}"][1]) for step in (1, 2)] == pytest.approx(rates, rel=1e-3)
    assert table["KL of a step, nats per completion"]["step 2"][1] == "-"
    assert table["validation accuracy, greedy"]["step 0"][1] == "-"
    png_size(tmp_path / "both.png")


def test_runs_in_folders_of_the_same_name_are_told_apart_by_their_paths(figures, tmp_path, capsys):
    folders = [str(write(tmp_path / part / "run", log(REWARD))) for part in ("one", "two")]
    assert main([*folders, "--output", str(tmp_path / "picture.png")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == folders
    assert {text.get_text() for text in names_of_lines(figures[0].axes[0])} == set(folders)


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


def test_without_matplotlib_there_is_the_table_and_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert main([str(write(tmp_path, log(REWARD))), "--output", str(tmp_path / "picture.png")]) == 0
    output, errors = capsys.readouterr()
    assert rows(output)[CURVES[REWARD]]["step 2"] == ["6.2"] and not errors
    assert output.splitlines()[-1] == "Not drawn, which needs matplotlib: pip install matplotlib"
