"""Files of a checkpoint: damage is found in each of them, and an error of the machine is not taken for it."""

import io
from pathlib import Path

import pytest

from isopo_trl.checkpoints.files import damaged_files, has_optimizer
from tests.checkpoints.interrupted import cut, flip


@pytest.mark.parametrize(
    "name, damage",
    [
        ("isopo_state.pt", cut),
        ("isopo_state.pt", flip),
        ("isopo_state.pt", lambda path: path.write_text("not a state")),
        ("model.safetensors", cut),
        ("optimizer.pt", cut),
        ("rng_state.pth", lambda path: path.write_bytes(b"")),
        ("trainer_state.json", cut),
        ("trainer_state.json", Path.unlink),  # it is written last, so the others may be missing
    ],
)
def test_a_damaged_file_is_named(name, damage, folder):
    assert damaged_files(folder / "checkpoint-3") == []
    damage(folder / "checkpoint-3" / name)
    assert damaged_files(folder / "checkpoint-3") == [name]


@pytest.mark.parametrize("error", [OSError("the disk does not answer"), MemoryError("no room")], ids=str)
@pytest.mark.parametrize("name", ["isopo_state.pt", "optimizer.pt", "trainer_state.json"])
def test_an_error_of_the_machine_is_raised_as_it_is(name, error, folder, monkeypatch):
    class Unreadable(io.BytesIO):
        def read(self, *_):
            raise error

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: Unreadable() if path.name == name else opened(path, *a, **k)
    )
    with pytest.raises(type(error), match=str(error)):
        damaged_files(folder / "checkpoint-3")


def test_weights_that_the_machine_cannot_read_are_not_called_damaged(folder):
    (folder / "checkpoint-3" / "model.safetensors").unlink()
    (folder / "checkpoint-3" / "model.safetensors").mkdir()
    with pytest.raises(OSError):
        damaged_files(folder / "checkpoint-3")


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin", "optimizer_0", "global_step3", "none"])
def test_the_optimizers_state_is_found_in_a_file_and_in_the_folders_of_fsdp_and_deepspeed(name, tmp_path):
    for path in (tmp_path / "model.safetensors", tmp_path / name):
        path.touch()
    assert has_optimizer(tmp_path) == (name != "none")
