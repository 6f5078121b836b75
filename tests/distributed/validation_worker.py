"""Run by a launcher on one or two ranks: train with a `ValidationCallback` and write what it measured, and of what.

validation_worker.py OUTPUT MODE-WEIGHTS... with the mode one of ddp, fsdp2, zero3, and the weights full or lora

Every run is a real `ISOPOTrainer.train()`. One thing is forced: Accelerate does not shard on CPUs, so for `fsdp2` it
is told to, once it has set itself up for processes on them. How it shards is its own. With `zero3-full`, generation
gathers one layer after the other, not the whole model as by default.
"""

import contextlib
import gc
import os
import sys
import traceback

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.validation import ValidationCallback
from tests import tiny


RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS, KL_ROWS = 5, 3  # shares of two ranks: 3 and 2 rows, 2 and 1


class Sharded(ISOPOTrainer):
    """Under FSDP2, on CPUs."""

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


class Watching(ValidationCallback):
    """Keeps the weights before and after each validation, and the completions that it made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.record = []

    def validate(self):
        model = self.trainer.model
        self.record.append({"weights": full_weights(model), "completed": []})
        figures = super().validate()
        self.record[-1] |= {"weights_after": full_weights(model), "training": model.training}
        return figures

    def _complete(self, prompts):
        ids = super()._complete(prompts)
        self.record[-1]["completed"].append(ids)
        return ids


def full_weights(model):
    """The trained parameters as a forward pass would see them."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gathered = contextlib.nullcontext()
    if any(hasattr(p, "ds_tensor") for p in parameters.values()):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathered:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters.items()
        }


def build(weights):
    """The model before training, and what the trainer makes of it."""
    model = tiny.model("qwen3", tie=False)
    return model, LoraConfig(r=2, lora_alpha=8, target_modules="all-linear") if weights == "lora" else None


def train(output, mode, weights):
    config = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    args = ISOPOConfig(
        f"{output}.{mode}-{weights}",
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        save_strategy="no",
        deepspeed=config if mode == "zero3" else None,
        ds3_gather_for_generation=weights == "lora",
    )
    model, adapter = build(weights)
    trainer = (Sharded if mode == "fsdp2" else ISOPOTrainer)(
        model,
        tiny.reward,
        args,
        tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        peft_config=adapter,
    )
    # One row a pass: more than one pass, after which parameters may stay gathered
    callback = Watching(trainer, tiny.prompts(ROWS), tiny.reward, steps=2, batch_size=1, kl_prompts=KL_ROWS)
    trainer.add_callback(callback)
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    return {"history": callback.history, "record": callback.record, "wrapped": wrapped}


def main(output, *runs):
    torch.set_num_threads(1)
    results = {}
    for run in runs:
        try:
            results[run] = train(output, *run.split("-"))
        except Exception:
            results[run] = {"error": traceback.format_exc()}
        gc.collect()
    everyone = [None] * WORLD
    if WORLD > 1:
        torch.distributed.all_gather_object(everyone, results)
        torch.distributed.destroy_process_group()
    else:
        everyone = [results]
    if RANK == 0:
        torch.save({run: [results[run] for results in everyone] for run in runs}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
