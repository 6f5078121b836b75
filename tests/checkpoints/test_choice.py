"""The checkpoint that a run resumes from: the one that is meant, or an error that says which ones there are."""

import shutil

import pytest

from isopo_trl.checkpoints.choice import checkpoint_to_resume, checkpoints_in
from tests.checkpoints.interrupted import cut
from tests.test_config import sentences


def refused(given, output_dir, error):
    with pytest.raises(error) as info:
        checkpoint_to_resume(given, str(output_dir))
    message = str(info.value)
    assert sentences(message) == 1 and message.endswith("."), message
    return message


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", "checkpoint-5-copy", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_words_and_paths_choose_a_checkpoint(folder):
    last, first = folder / "checkpoint-3", folder / "checkpoint-1"
    for given, expected in [(None, None), (False, None), ("False", None), (True, last), ("true", last)]:
        assert checkpoint_to_resume(given, str(folder)) == expected
    assert checkpoint_to_resume(first, str(folder)) == checkpoint_to_resume(str(first), "elsewhere") == first


@pytest.mark.parametrize(
    "given", ["nonsense", "", 5, ["checkpoint-1"], "checkpoint-1/trainer_state.json", "."], ids=repr
)
def test_what_is_no_checkpoint_is_refused_with_those_there_are(given, folder, monkeypatch):
    monkeypatch.chdir(folder)  # "." is the folder of all of them
    (folder / "checkpoint-2" / "isopo_state.pt").unlink()  # as if another trainer had saved it
    message = refused(given, folder, FileNotFoundError)
    assert f"resume_from_checkpoint={given!r} leads to " in message
    assert "checkpoint-1'" in message and "checkpoint-2" not in message and "checkpoint-3'" in message


def test_the_last_checkpoint_of_a_folder_without_any_is_refused(tmp_path):
    assert "=True leads to no folder" in refused(True, tmp_path / "nowhere", FileNotFoundError)


@pytest.mark.parametrize("others", ["whole", "damaged", "none"])
def test_a_damaged_checkpoint_is_refused_with_its_file_and_the_one_to_use_instead(others, folder):
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    cut(folder / "checkpoint-3" / "optimizer.pt")
    if others == "damaged":
        cut(folder / "checkpoint-2" / "model.safetensors")
    if others == "none":
        for path in checkpoints_in(folder)[:2]:
            shutil.rmtree(path)
    message = refused(True, folder, ValueError)
    assert f"{folder / 'checkpoint-3'} was cut off" in message and "optimizer.pt, trainer_state.json" in message
    expected = {"whole": f"resume from {folder / 'checkpoint-2'}", "damaged": f"resume from {folder / 'checkpoint-1'}"}
    assert expected.get(others, "start a new run") in message
