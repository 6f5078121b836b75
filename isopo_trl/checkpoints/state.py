"""The file of a checkpoint that is ISOPO's own: what is saved in it, and with which settings it can be loaded."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from ..isopo import ISOPO
from .files import STATE_FILE, has_optimizer, read_state


logger = get_logger(__name__)


@dataclass(frozen=True)
class OwnState:
    """
    What a run saves beside what TRL saves of it.

    Args:
        isopo ([`ISOPO`]): its statistics.
        chosen (`dict[str, Any]`): settings by which a checkpoint knows again what is done with tokens.
        binding (`Collection[str]`): names of the settings, among the chosen ones, that the statistics depend on.
        parts (`dict[str, Any]`): by their names in the file, others with a `state_dict` and a `load_state_dict`.
    """

    isopo: ISOPO
    chosen: dict[str, Any]
    binding: Collection[str]
    parts: dict[str, Any]

    def save(self, folder: str, place: dict[str, Any]) -> None:
        """Write all of it; `place`: where in its data the run is."""
        os.makedirs(folder, exist_ok=True)
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = {**self.isopo.state_dict(), "weighting": self.chosen, **place, **parts}
        torch.save(state, os.path.join(folder, STATE_FILE))

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """
        Go on from a checkpoint, before anything else of it is loaded, so that one that does not fit changes nothing.
        Returns the content of the file.
        """
        state, path = read_state(checkpoint), checkpoint / STATE_FILE
        saved, own = state["weighting"], self.chosen
        changed = [name for name in own if name in saved and saved[name] != own[name]]
        changes = ", ".join(f"{name}={saved[name]!r} to {own[name]!r}" for name in changed)
        if any(self.isopo.rule.needs) and set(self.binding).intersection(changed):
            raise ValueError(
                f"{path}: The saved ISOPO statistics are of gradients under other token weights ({changes}): resume "
                "with the saved settings, or start a new run from the saved weights."
            )
        try:
            self.isopo.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for name, part in self.parts.items():
            part.load_state_dict(state.get(name, {}))
        if changes:
            logger.warning(f"The run goes on with other settings than it was saved with: {changes}.")
        if not has_optimizer(checkpoint):
            logger.warning(
                f"{checkpoint} has no state of the optimizer (save_only_model=True leaves it out): it starts anew, "
                "and the run goes on differently from one that was not interrupted."
            )
        return state
