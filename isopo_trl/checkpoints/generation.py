"""
Resuming inside a generation, whose completions are used for more than one optimizer step: a checkpoint holds them, and
how far the run has got with them, so that it goes on as if it had not been interrupted.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME

from ..trl_seam.generation import Progress
from ..trl_seam.loans import intercepted


logger = get_logger(__name__)

# What decides which microbatch of which generation comes next
_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    *("num_generations", "group_microbatches"),
)


def file_name(rank: int) -> str:
    """Name of the file of a checkpoint that holds a rank's part of the generation."""
    return f"isopo_generation_{rank}.pt"


def position(trainer: Any) -> dict[str, Any]:
    """The place of a run in its generations, and the settings that give it a meaning, for the checkpoint's state."""
    progress = Progress(trainer)
    settings = {name: getattr(trainer.args, name) for name in _SETTINGS}
    return {
        "microbatches": progress.microbatches,
        "is_inside_generation": _is_inside(progress),
        "settings": {"processes": trainer.accelerator.num_processes, **settings},
    }


def save(trainer: Any, folder: str | os.PathLike) -> None:
    """Write this rank's part of the generation, if the run is inside one; to be called on every rank."""
    progress = Progress(trainer)
    if _is_inside(progress) and not trainer.args.save_only_model:
        os.makedirs(folder, exist_ok=True)
        torch.save(progress.batches, os.path.join(folder, file_name(trainer.accelerator.process_index)))


def restore(trainer: Any, folder: Path, saved: dict[str, Any], needed: Sequence[str] = ()) -> bool:
    """
    Put the trainer in the place where the run was [saved][position], and warn where its completions cannot be used any
    more. To be called on every rank; `needed` are names that the loss will look up in a batch.

    Returns whether the generation was restored.
    """
    if trainer.args.ignore_data_skip:  # the data begin anew, and so do the generations
        return False
    before, now = saved["settings"], position(trainer)["settings"]
    changed = ", ".join(f"{name}={before[name]} to {now[name]}" for name in now if before[name] != now[name])
    inside, batches = saved["is_inside_generation"], None
    if not changed:
        batches = _batches(trainer, folder, needed) if inside else None
        Progress(trainer).set(saved["microbatches"], batches)
    if inside and batches is None:
        _warn(trainer, changed)
    return batches is not None


@contextmanager
def past_epochs(trainer: Any, folder: Path | None) -> Iterator[None]:
    """Context for `train`, in which the data are in the order of the checkpoint's epoch: TRL begins with the first."""
    epochs = 0
    if folder is not None and not trainer.args.ignore_data_skip:
        epochs = math.floor(json.loads((folder / TRAINER_STATE_NAME).read_text())["epoch"])

    def stand_in(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampler = method(*args, **kwargs)
        for _ in range(epochs):  # each iteration draws an order
            next(iter(sampler), None)
        return sampler

    with intercepted(trainer, "_get_train_sampler", stand_in):
        yield


def _is_inside(progress: Progress) -> bool:
    """Whether completions are to be used again; without batches, the generation has been ended before its time."""
    return progress.batches is not None and progress.is_inside_generation


def _batches(trainer: Any, folder: Path, needed: Sequence[str]) -> list[dict[str, Any]] | None:
    """This rank's part of the saved generation, or `None` on all ranks if one of them cannot go on with its own."""
    device = trainer.accelerator.device
    path = folder / file_name(trainer.accelerator.process_index)
    batches = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else []
    can_go_on = bool(batches) and all(name in batch for batch in batches for name in needed)
    everywhere = trainer.accelerator.gather(torch.tensor([can_go_on], dtype=torch.int32, device=device))
    return send_to_device(batches, device) if everywhere.min() else None


def _warn(trainer: Any, changed: str) -> None:
    """Warn that completions cannot be used again, and say how often to save so that none have to be."""
    every = trainer.args.microbatches_per_generation
    accumulation = trainer.args.gradient_accumulation_steps
    reason = "a rank's are not in it, or the loss now asks for more than was noted of them"
    if changed:
        reason = f"settings have changed since: {changed}"
    logger.warning(
        f"The checkpoint was saved between two uses of the same completions, and cannot go on with them ({reason}): "
        "others are generated, and the run goes on differently from one that was not interrupted. A checkpoint does "
        f"not need them where `save_steps` is a multiple of {every // math.gcd(every, accumulation)}."
    )
