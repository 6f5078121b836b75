"""The choice of the checkpoint that a run resumes from."""

import os
import re
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..settings.types import shown
from .files import STATE_FILE, damaged_files


def checkpoint_to_resume(resume: Any, output_dir: str | None) -> Path | None:
    """
    The checkpoint that `train(resume_from_checkpoint=resume)` means, or `None` for a new run; raises
    `FileNotFoundError` where [`ISOPOTrainer`] has saved none there, and `ValueError` where it is damaged.

    Args:
        resume: `None` or `False`, `True` for the last checkpoint in the output folder, or a path; a command line's
            words `true` and `false` mean `True` and `False`.
        output_dir (`str`): the run's output folder.
    """
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = resume.lower() == "true"
    if resume is None or resume is False:
        return None
    own = checkpoints_in(output_dir or ".")
    given = own[-1] if resume is True and own else resume
    folder = Path(given) if isinstance(given, str | os.PathLike) else None
    if folder is None or not (folder / STATE_FILE).exists():
        inside = checkpoints_in(folder) if folder is not None else []
        known = [str(path) for path in inside or own if (path / STATE_FILE).exists()]
        raise FileNotFoundError(
            f"resume_from_checkpoint={shown(resume)} leads to "
            f"{'no folder' if folder is None else f'{str(folder)!r}, which has no {STATE_FILE}'}: give the path of a "
            f"checkpoint that ISOPOTrainer saved{f' (one of {known[-5:]})' if known else ''}, or None to start a new "
            "run (weights of another trainer can be loaded as its model)."
        )
    damaged = damaged_files(folder)
    if damaged:
        others = reversed(checkpoints_in(folder.parent))
        whole = next((path for path in others if not damaged_files(path)), None)
        remedy = "start a new run, as no other is whole" if whole is None else f"resume from {whole}"
        raise ValueError(
            f"The checkpoint {folder} was cut off while it was saved, or is damaged (missing or not whole: "
            f"{', '.join(damaged)}): delete it, and {remedy}."
        )
    return folder


def checkpoints_in(folder: str | os.PathLike) -> list[Path]:
    """Checkpoints in a folder, the last one last; none where there is no such folder."""
    if not os.path.isdir(folder):
        return []
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in Path(folder).iterdir())
    steps = {int(match[1]): path for match, path in named if match and path.is_dir()}
    return [steps[step] for step in sorted(steps)]
