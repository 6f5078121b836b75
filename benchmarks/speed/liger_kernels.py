"""
Liger's kernels in the model of one trainer, in a process where other trainers' models have none.

`use_liger_kernel=True` of TRL and transformers puts them in place when `train()` begins, and not before: a trainer
whose loss is taken without it runs the model's own layers. Norms and gated activations are exchanged in the model
itself, whether it was given as an object or by name; rotary embeddings are a function of transformers' module, and so
change for every model of the family. TRL's loss stays what it is: Liger's for GRPO is no longer a part of TRL.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_utils import unwrap_peft_model


ROTARY = "apply_rotary_pos_emb"


def is_installed() -> bool:
    return find_spec("liger_kernel") is not None


def modeling(model: torch.nn.Module) -> ModuleType:
    """The module of transformers that the model's class comes from."""
    return sys.modules[type(unwrap_peft_model(model)).__module__]


@contextmanager
def apart(model: torch.nn.Module) -> Iterator[None]:
    """What is exchanged inside in transformers' module, for every model of the family, is put back at the end."""
    names = vars(modeling(model))
    own = dict(names)
    try:
        yield
    finally:
        names.update(own)


class LigerKernels:
    """
    Puts them into a trainer's model as `train()` would. As a context: in which rotary embeddings are Liger's as well.
    """

    def __init__(self, trainer: Any):
        self._names = names = vars(modeling(trainer.model))
        own = dict(names)
        with apart(trainer.model):
            apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
            check(trainer)
            self._exchanged = {name: value for name, value in names.items() if value is not own.get(name)}
        self._own = {name: own[name] for name in self._exchanged}

    def __enter__(self):
        self._names.update(self._exchanged)

    def __exit__(self, *_):
        self._names.update(self._own)


def check(trainer: Any) -> None:
    """
    Raise unless Liger's kernels are what runs: in place of rotary embeddings, of gated activations, and of norms,
    where these are not ISOPO's.
    """
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    missing = []
    if not _comes_from(getattr(modeling(trainer.model), ROTARY, None), "liger_kernel"):
        missing.append(ROTARY)
    for name, module in trainer.model.named_modules():
        if hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
            expected: Any = LigerSwiGLUMLP.forward
        elif type(module).__name__.endswith("RMSNorm") and "_isopo_layer" not in module.__dict__:
            expected = LigerRMSNorm.forward
        else:
            continue
        if getattr(module.forward, "__func__", None) is not expected:
            missing.append(name)
    if missing:
        raise RuntimeError(f"Liger's kernels are not in place: {', '.join(missing[:8])} ({len(missing)} in all).")


def _comes_from(function: Any, package: str) -> bool:
    module = inspect.getmodule(function)
    return module is not None and module.__name__.partition(".")[0] == package
