"""The file of a checkpoint that is ISOPO's own: what is saved in it, and with which settings it can be loaded."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from ..isopo import ISOPO
from ..settings.optim_args import sgd_settings
from .files import STATE_FILE, has_optimizer, read_state


logger = get_logger(__name__)

# Names of `optim` that stand for one optimizer, with one kind of state
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
_OF_SGD = ("momentum", "dampening", "nesterov")


def described(args: Any, given: Any = None, given_class: tuple[Any, dict[str, Any]] | None = None) -> dict[str, Any]:
    """
    What a checkpoint knows its optimizer again by: the name in `optim` and, for SGD, the settings of its momentum. On
    resuming, the saved groups of parameters take the place of the optimizer's own, momentum included.

    Args:
        args ([`ISOPOConfig`]): says it where none is given.
        given (`torch.optim.Optimizer`, *optional*): an optimizer of the user's.
        given_class (`tuple`, *optional*): the class of one, and its settings.
    """
    if given is None and given_class is None:
        optim = str(getattr(args.optim, "value", args.optim))
        of_sgd = sgd_settings(args.optim_args) if optim == "sgd" else {}
        return {"optim": "adamw_torch" if optim in _ADAMW else optim, **of_sgd}
    kind: Any = type(given) if given_class is None else given_class[0]
    classes = kind.__mro__ if isinstance(kind, type) else ()
    if torch.optim.SGD in classes:
        settings = given.param_groups[0] if given_class is None else given_class[1]
        return {"optim": "sgd", **{name: settings.get(name, 0) for name in _OF_SGD}}
    name = getattr(kind, "__name__", type(kind).__name__)  # transformers takes objects that make one, too
    return {"optim": "adamw_torch" if torch.optim.AdamW in classes else name}


@dataclass(frozen=True)
class OwnState:
    """
    What a run saves beside what TRL saves of it.

    Args:
        isopo ([`ISOPO`]): its statistics.
        chosen (`dict[str, Any]`): settings by which a checkpoint knows again what is done with tokens.
        binding (`Collection[str]`): names of the settings, among the chosen ones, that the statistics depend on.
        parts (`dict[str, Any]`): by their names in the file, others with a `state_dict` and a `load_state_dict`.
        optimizer (`dict[str, Any]`): what it is [described] by.
    """

    isopo: ISOPO
    chosen: dict[str, Any]
    binding: Collection[str]
    parts: dict[str, Any]
    optimizer: dict[str, Any]

    def save(self, folder: str, place: dict[str, Any]) -> None:
        """Write all of it; `place`: where in its data the run is."""
        os.makedirs(folder, exist_ok=True)
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = {**self.isopo.state_dict(), "weighting": self.chosen, "optimizer": self.optimizer, **place, **parts}
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
        if has_optimizer(checkpoint):
            self._refuse_other_optimizer(state["optimizer"], path)
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

    def _refuse_other_optimizer(self, saved: dict[str, Any], path: Path) -> None:
        own = self.optimizer
        names = ["optim"] if saved["optim"] != own["optim"] else [name for name in own if saved[name] != own[name]]
        if names:
            changes = ", ".join(f"{name}={saved[name]!r} to {own[name]!r}" for name in names)
            raise ValueError(
                f"{path}: The saved state is another optimizer's ({changes}): resume with the saved "
                f"{'optim, or the optimizer that was given' if names == ['optim'] else 'settings (optim_args)'}, or "
                "start a new run from the saved weights."
            )
