"""Files of a checkpoint: which of them holds ISOPO's state, and which are damaged."""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer import TRAINER_STATE_NAME


STATE_FILE = "isopo_state.pt"


def read_state(folder: Path) -> dict[str, Any]:
    """ISOPO's state, out of a checkpoint without damage."""
    return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)


def has_optimizer(folder: Path) -> bool:
    """Whether the optimizer's state is in a checkpoint: in a file, in FSDP's folder, or in DeepSpeed's."""
    return any("optimizer" in path.name or path.name.startswith("global_step") for path in folder.iterdir())


def damaged_files(folder: Path) -> list[str]:
    """
    Names of a checkpoint's files that are missing, cut short or otherwise damaged.

    A checkpoint that was cut off while it was saved lacks `trainer_state.json`, which transformers writes last.
    """
    names = {STATE_FILE, TRAINER_STATE_NAME, *(path.name for path in folder.iterdir())}
    return [name for name in sorted(names) if not _is_whole(folder / name)]


def _is_whole(path: Path) -> bool:
    """
    Whether a file is there from beginning to end, as far as its format tells; weights are not read, being large.

    What the machine cannot read may well be whole: its `OSError` or `MemoryError` is raised as it is, lest a good
    checkpoint be deleted.
    """
    try:
        if path.suffix in (".pt", ".pth", ".bin"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 1))
                file.read(1)  # zipfile takes an end that cannot be read for one that is not there
                with zipfile.ZipFile(file) as archive:
                    return path.name != STATE_FILE or archive.testzip() is None
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return True
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        return True
    except FileNotFoundError:
        return False
    except (OSError, MemoryError):
        raise
    except Exception:  # of many kinds, where a file is not what its name says
        return False
