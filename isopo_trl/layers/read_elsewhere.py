"""
Who reads a trained parameter. ISOPO rescales what a layer of its own takes from a parameter. If the model also reads
the parameter elsewhere, past its layer, the gradient of that has neither the coefficients nor the advantages in it.
"""

from typing import Any

import torch
from torch import nn

from ..microbatch import Microbatch


# Casts and views, through which a parameter is handed to whoever reads it
_HANDED_ON = {
    f"{name}Backward0"
    for name in ("Alias", "Clone", "Expand", "Permute", "Squeeze", "T", "ToCopy", "Transpose", "Unsqueeze", "View")
}


def read_past_layers(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that both a layer of ISOPO's and something else read, by the graph of the loss."""
    root: Any = loss.grad_fn
    readers: dict[Any, list[Any]] = {root: []}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for read, _ in node.next_functions:
            if read is None:
                continue
            if read not in readers:
                readers[read] = []
                waiting.append(read)
            readers[read].append(node)
    found = []
    for node in readers:
        if hasattr(node, "variable"):
            # Layers' functions know the microbatch
            known = {isinstance(getattr(reader, "microbatch", None), Microbatch) for reader in _actual(node, readers)}
            if known == {True, False}:
                found.append(node.variable)
    return found


def _actual(node: Any, readers: dict[Any, list[Any]]) -> list[Any]:
    """Readers of what `node` gives, itself or handed on."""
    direct = readers[node]
    handed_on = [further for reader in direct if _hands_on(reader) for further in _actual(reader, readers)]
    return [reader for reader in direct if not _hands_on(reader)] + handed_on


def _hands_on(node: Any) -> bool:
    return type(node).__name__ in _HANDED_ON


def refuse_readers(loss: torch.Tensor, model: nn.Module) -> None:
    """Refuse a loss in which a trained parameter is read past its layer."""
    found = read_past_layers(loss)
    if not found:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [names.get(id(p), f"a parameter of shape {list(p.shape)}") for p in found]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    raise RuntimeError(
        f"{', '.join(listed[:8])}{more}: the model reads this not only in the layer that it belongs to, but also "
        "elsewhere, and no rule would reach the gradient of that. Freeze it, or let the model call the layer, or "
        "detach what is read elsewhere."
    )
