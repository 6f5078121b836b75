"""Checkpoints: which one a run resumes from, whether all of it is there and can be read, and how its weights are."""

import functools
import io
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..settings.types import shown


STATE_FILE = "isopo_state.pt"


def chosen(resume: Any, output_dir: str | None) -> Path | None:
    """
    The folder that `train(resume_from_checkpoint=resume)` means, if any; raises `ValueError` if there is none.

    Args:
        resume: `None` or `False`, `True` for the last checkpoint in the output folder, or a path; what a command line
            makes of the words `True` and `False` is taken as well.
        output_dir (`str`): the run's output folder.
    """
    if isinstance(resume, str) and resume.lower() in ("true", "false") and not os.path.isdir(resume):
        resume = resume.lower() == "true"
    if resume is None or resume is False:
        return None
    own = in_folder(output_dir or ".")
    if resume is True:
        if not own:
            raise ValueError(
                f"resume_from_checkpoint=True asks for the last checkpoint in the output folder {str(output_dir)!r}, "
                "which has none: give the path of one, or start a new run without it."
            )
        return own[-1]
    listed = f" ({str(output_dir)!r} has {', '.join(path.name for path in own[-5:])})" if own else ""
    if not isinstance(resume, str | os.PathLike) or not os.fspath(resume) or not os.path.isdir(resume):
        raise ValueError(
            f"resume_from_checkpoint={shown(resume)} is not a folder: give the path of a checkpoint{listed}, True for "
            "the last one in the output folder, or None to start a new run."
        )
    folder = Path(resume)
    inside = in_folder(folder)
    if inside and not (folder / STATE_FILE).exists():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is not a checkpoint, but a folder of them: give one of "
            f"{', '.join(str(path) for path in inside[-5:])}."
        )
    return folder


def in_folder(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in a folder, the last one last."""
    if not os.path.isdir(folder):
        return []
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in Path(folder).iterdir())
    steps = {int(match[1]): path for match, path in named if match and path.is_dir()}
    return [steps[step] for step in sorted(steps)]


def read(folder: Path) -> dict[str, Any]:
    """
    ISOPO's state out of a checkpoint, of which all files have been looked at: raises `FileNotFoundError` where
    [`ISOPOTrainer`] did not save it, and `ValueError` where it is not complete, with what to use in its place. Where
    the machine cannot read what is there, its own `OSError` or `MemoryError` is raised.
    """
    if not (folder / STATE_FILE).exists():
        raise FileNotFoundError(
            f"{folder} has no {STATE_FILE}, so it is not a checkpoint, or not one that ISOPOTrainer saved: to go on "
            "from its weights, load them as the model and start a new run."
        )
    state, found = _state(folder), problems(folder)
    if state is not None and not found:
        return state
    others = [path for path in in_folder(folder.parent) if path.resolve() != folder.resolve()]
    complete = next((path for path in reversed(others) if _complete(path)), None)
    remedy = "start a new run (no other can be read and is complete)"
    if complete is not None:
        remedy = f"resume from {complete}, the last one that is complete"
    raise ValueError(
        f"The checkpoint {folder} is damaged, or was cut off while it was saved ({', '.join(found)}): delete it, and "
        f"{remedy}."
    )


def problems(folder: Path) -> list[str]:
    """What is missing from a checkpoint of ISOPOTrainer's, or cannot be read, file by file."""
    state = _state(folder) or {}
    wanted = missing(folder) if state.get("save_only_model") is False else []
    if not (folder / TRAINER_STATE_NAME).exists():
        wanted.append(TRAINER_STATE_NAME)
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") or path.is_dir()]
    if all(path.name == TRAINING_ARGS_NAME for path in weights):
        wanted.append("the model")
    broken = [path.name for path in sorted(folder.iterdir()) if not _readable(path)]
    return [*(f"{name} cannot be read" for name in broken), *(f"{name} is missing" for name in wanted)]


def missing(folder: Path) -> list[str]:
    """Those of the optimizer's, the scheduler's and the random streams' states that a checkpoint does not have."""
    names = [path.name for path in folder.iterdir()]
    if any(name.startswith("global_step") for name in names):  # DeepSpeed has the first two inside
        return []
    # FSDP writes a folder or a .bin in place of the optimizer's file, and every rank a random state of its own
    parts = {OPTIMIZER_NAME: "optimizer", SCHEDULER_NAME: SCHEDULER_NAME, "rng_state.pth": "rng_state"}
    return [file for file, part in parts.items() if not any(part in name for name in names)]


def lost(model: nn.Module, names: Sequence[str]) -> list[str]:
    """
    Those of the names that a checkpoint does not have whose weights it should have, and has under no other name, as
    tied ones.
    """
    weights, absent = model.state_dict(keep_vars=True), set(names)
    there = {id(weight) for name, weight in weights.items() if name not in absent}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return [name for name in names if name in weights and id(weights[name]) not in there and name not in ignored]


def load_converted(model: nn.Module, folder: str | os.PathLike, names: Sequence[str]) -> None:
    """
    Load weights that are saved in another form than the model has them in: transformers writes experts one by one, and
    some models under other names, and only its `from_pretrained` reads them so. Raises `ValueError` where those of the
    given names are missing for another reason.
    """
    if isinstance(model, PreTrainedModel):
        widths = {p.dtype for p in model.parameters() if p.is_floating_point()}
        loaded: Any = type(model).from_pretrained(
            folder, dtype=functools.reduce(torch.promote_types, widths), output_loading_info=True
        )
        saved, outcome = loaded
        names = sorted(outcome["missing_keys"])
        if not names:
            model.load_state_dict(saved.state_dict())
            return
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ValueError(
        f"The checkpoint {folder} has no weights for {listed}, which would stay as they are at the start of a run: "
        "resume with the model, and the version of transformers, that saved it."
    )


def _complete(folder: Path) -> bool:
    """Whether a checkpoint can be offered in another's place."""
    try:
        return (folder / STATE_FILE).exists() and not problems(folder)
    except OSError:
        return False


def _state(folder: Path) -> dict[str, Any] | None:
    """ISOPO's state, or `None` where there is none that can be read; raises `OSError` where the disk is at fault."""
    try:
        content = (folder / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # torch.load raises what it likes of a file that is not its own
        return None
    return state if isinstance(state, dict) else None


def _readable(path: Path) -> bool:
    """
    Whether a file of a checkpoint has a beginning and an end; weights and the optimizer's state are not read.

    A file that may not be opened, or a disk that does not answer, says nothing of what was saved: that `OSError` is
    raised as it is, lest a good checkpoint be taken for a damaged one and deleted.
    """
    try:
        if path.name == STATE_FILE:
            return _state(path.parent) is not None
        if path.name == TRAINER_STATE_NAME:
            return "global_step" in json.loads(path.read_text())
        if path.suffix in (".safetensors", ".pt", ".pth", ".bin") and not path.is_dir():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 1))
                file.read(1)  # `is_zipfile` would take what cannot be read for what is no archive
                if path.suffix != ".safetensors":
                    return zipfile.is_zipfile(file)  # the table of contents is at its end
            with safe_open(path, framework="pt"):
                return True
    except FileNotFoundError:  # a link to what is gone
        return False
    except (TypeError, ValueError, SafetensorError):
        return False
    return True
