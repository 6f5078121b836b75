"""Run by `process_group.launch`: imports what all ranks need, and only then becomes them.

launcher.py RANKS, a JSON list: environment variables of each rank, and the `arguments` that its process has

A rank by itself would spend most of its time on imports.
"""

import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import runpy
import sys

import torch.multiprocessing


def become(number, ranks):
    """Run as this one of the ranks."""
    variables = dict(ranks[number])
    sys.argv = variables.pop("arguments")
    os.environ.update({name: str(value) for name, value in variables.items()})
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    gc.disable()  # until a rank runs, see `tests/conftest.py`
    ranks = json.loads(sys.argv[1])
    can_fork = sys.platform == "linux"
    if can_fork:
        import peft  # noqa: F401
        import trl.trainer.grpo_trainer  # noqa: F401

        import isopo_trl  # noqa: F401

        if importlib.util.find_spec("deepspeed") is not None:
            import deepspeed

            # What it would compile on a machine that has a compiler, for minutes: ranks exchange without it, too
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            torch.compile(torch.nn.Identity())  # as it does on its first use, which imports the compiler
        # See `tests/conftest.py`
        importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                device.manual_seed_all = lambda seed: None
    method = "fork" if can_fork else "spawn"
    # Where one of them fails, the others are ended
    torch.multiprocessing.start_processes(become, (ranks,), nprocs=len(ranks), start_method=method)
