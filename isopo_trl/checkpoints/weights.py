"""Weights that a checkpoint lacks, or has in another form than the model."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def lost_weights(model: nn.Module, missing: Sequence[str]) -> list[str]:
    """
    Names, among the ones `missing` from a checkpoint, of weights that it should have and has under no other name, as
    tied weights do.
    """
    weights, absent = model.state_dict(keep_vars=True), set(missing)
    there = {id(weight) for name, weight in weights.items() if name not in absent}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return [name for name in missing if name in weights and id(weights[name]) not in there and name not in ignored]


def load_converted(model: nn.Module, folder: str | os.PathLike, lost: Sequence[str]) -> None:
    """
    Load a model's weights from a checkpoint as `from_pretrained` does; raises `ValueError` where some are not there.

    transformers saves experts one by one, and the weights of some models under other names; nothing else of it reads
    them back. `lost` names the weights that were not found otherwise.
    """
    if isinstance(model, PreTrainedModel):
        widths = {p.dtype for p in model.parameters() if p.is_floating_point()}
        loaded: Any = type(model).from_pretrained(
            folder, dtype=functools.reduce(torch.promote_types, widths), output_loading_info=True
        )
        saved, outcome = loaded
        lost = sorted(outcome["missing_keys"])
        if not lost:
            model.load_state_dict(saved.state_dict())
            return
    listed = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    raise ValueError(
        f"The checkpoint {folder} has no weights for {listed}, which would stay as they are at the start of a run: "
        "resume with the model, and the version of transformers, that saved it."
    )
