"""What tests on several ranks share: running a worker on them; in the worker, its rank, whole weights and results."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from isopo_trl import ISOPOTrainer


ROOT = Path(__file__).parents[2]

# In a worker
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def launch(*groups):
    """
    Run workers, which are files of this folder, on CPUs; all of them must succeed.

    Args:
        groups: `(ranks, worker, *arguments)` of each group of ranks. All groups run at the same time, and each has a
            process group of its own, one of a single rank, too.
    """
    # Ranks meet where this process listens from now on, as torchrun has it: a port that is free now may be taken later
    stores = [torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in groups]
    ranks = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": store.port}
        | {"arguments": [str(Path(__file__).with_name(worker)), *map(str, arguments)]}
        for store, (world, worker, *arguments) in zip(stores, groups, strict=True)
        for rank in range(world)
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(Path(__file__).with_name("launcher.py")), json.dumps(ranks)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


class Sharded(ISOPOTrainer):
    """
    Under FSDP2, on CPUs. Accelerate does not shard there, so it is told to, once it has set itself up for processes on
    them. How it shards is its own.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def full_weights(model):
    """The trained parameters as a forward pass would see them."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gathered = contextlib.nullcontext()
    if any(hasattr(p, "ds_tensor") for p in parameters.values()):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathered:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
            for name, p in parameters.items()
        }


def save(result, output):
    """Write what the ranks have to say, a list of one `result` per rank."""
    everyone = [result]
    if WORLD > 1:
        everyone = [None] * WORLD
        torch.distributed.all_gather_object(everyone, result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if RANK == 0:
        torch.save(everyone, output)


def save_runs(run, names, output):
    """Run `run(*name.split("-"))` for each name; what came out, or the error, is in the output by name and rank."""
    torch.set_num_threads(1)
    gc.freeze()  # what the libraries have made on import need not be looked at: it takes longer than most runs
    gc.enable()
    results = {}
    for name in names:
        try:
            results[name] = run(*name.split("-"))
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        gc.collect()
    if WORLD > 1 and not torch.distributed.is_initialized():
        raise RuntimeError("No run came as far as the other ranks.\n" + "\n".join(map(str, results.values())))
    save(results, output)


def load_runs(output):
    """What [`save_runs`] wrote: name -> one result per rank."""
    everyone = torch.load(output)
    return {name: [results[name] for results in everyone] for name in everyone[0]}
