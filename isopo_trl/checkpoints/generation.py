"""
Resuming where completions are used for more than one optimizer step: a checkpoint inside a generation keeps what was
generated, and how far the run had got with it, so that it goes on as if it had not been interrupted.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
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
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "group_microbatches",
)


def file_name(rank: int) -> str:
    """The file of a checkpoint that holds a rank's part of the generation."""
    return f"isopo_generation_{rank}.pt"


def position(trainer: Any) -> dict[str, Any]:
    """How far the run has got with its generations, for the checkpoint's state."""
    settings = {name: getattr(trainer.args, name) for name in _SETTINGS}
    progress = Progress(trainer)
    # Where its completions are not to be used any more, the run is not inside a generation
    ended = progress.batches is None
    return {
        "microbatches": progress.microbatches,
        "ended": ended,
        "processes": trainer.accelerator.num_processes,
        **settings,
    }


def save(trainer: Any, folder: str | os.PathLike) -> None:
    """Write this rank's part of the generation, if the run is inside of one; to be called on every rank."""
    progress = Progress(trainer)
    if progress.batches is None or not progress.is_inside_generation or trainer.args.save_only_model:
        return
    os.makedirs(folder, exist_ok=True)
    torch.save(progress.batches, os.path.join(folder, file_name(trainer.accelerator.process_index)))


def restore(trainer: Any, folder: Path, saved: dict[str, Any], needed: Sequence[str] = ()) -> bool:
    """
    Put the trainer where the run was when it was saved, and warn where that cannot be. Called on every rank.

    Args:
        folder (`Path`): the checkpoint.
        saved (`dict`): its [`position`].
        needed (`Sequence[str]`): what the loss will look for in a batch that its settings have put there.

    Returns whether the generation was restored.
    """
    if trainer.args.ignore_data_skip:  # the data begin anew, and so do the generations
        return False
    own = position(trainer)
    inside = saved["microbatches"] % (saved["steps_per_generation"] * saved["num_iterations"])
    if saved["ended"]:
        inside = 0
    others = [name for name in own if name not in ("microbatches", "ended") and saved[name] != own[name]]
    changed = ", ".join(f"{name}={saved[name]} to {own[name]}" for name in others)
    if changed:
        if inside:
            _warn(trainer, f"settings have changed since: {changed}")
        return False
    device = trainer.accelerator.device
    batches = _read(folder / file_name(trainer.accelerator.process_index))
    lacking = batches is not None and any(name not in batch for batch in batches for name in needed)
    # All ranks or none: generating is done together
    found = torch.tensor([batches is not None and not lacking], dtype=torch.int32, device=device)
    restored = bool(inside) and bool(trainer.accelerator.gather(found).min())
    Progress(trainer).set(saved["microbatches"], send_to_device(batches, device) if restored else None)
    if inside and lacking:
        _warn(trainer, "settings have changed since, and the loss now asks for more than was noted of them")
    elif inside and not restored:
        _warn(trainer, "they are missing from it on one rank at least, or cannot be read")
    return restored


@contextmanager
def past_epochs(trainer: Any, folder: Path | None) -> Iterator[None]:
    """Context for `train`, in which the data are in the order of the checkpoint's epoch: TRL begins with the first."""
    epochs = 0
    if folder is not None and not trainer.args.ignore_data_skip:
        epochs = math.floor(json.loads((folder / TRAINER_STATE_NAME).read_text()).get("epoch") or 0)

    def stand_in(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampler = method(*args, **kwargs)
        for _ in range(epochs):  # each iteration draws an order
            next(iter(sampler), None)
        return sampler

    with intercepted(trainer, "_get_train_sampler", stand_in):
        yield


def _read(path: Path) -> list[dict[str, Any]] | None:
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError):
        return None


def _warn(trainer: Any, reason: str) -> None:
    every = trainer.args.microbatches_per_generation
    accumulation = trainer.args.gradient_accumulation_steps
    logger.warning(
        f"The checkpoint was saved between two uses of the same completions, and cannot go on with them ({reason}): "
        "others are generated, and the run goes on differently from one that was not interrupted. A checkpoint does "
        f"not need them where `save_steps` is a multiple of {every // math.gcd(every, accumulation)}."
    )
