"""
The largest model that trains with full weights on a GPU of so much memory: TRL's GRPO with AdamW, and plain steps.

Each case is a run of `trainer.train()` with a few optimizer steps, in a process that may use no more of the GPU than
the limit (`torch.cuda.set_per_process_memory_fraction`), on a randomly initialised model of Qwen3's shape, with
gradient checkpointing. A case fits where all of its steps are made. Limits are tried from the smallest, and those that
weights, gradients and the optimizer's state alone exceed are left out. Where a case fits, its peak and the time of its
last step are noted.

Generation is left out: a `rollout_func` returns ready completions. With vLLM beside the trainer,
`shared_weights.py --shape 8b` makes a whole step.

    python benchmarks/speed/largest_model.py --output largest_model.json      # for one GPU of 80 GB or more
    python benchmarks/speed/largest_model.py --shapes tiny --length 32 --methods plain-float32     # for CPUs

GRPO with weights in bf16 and AdamW's moments in 8 bits needs bitsandbytes.
"""

import argparse
import gc
import importlib.util
import json
import time
from typing import Any

import torch
from optimizer_step import Clock, random_reward, ready_completions
from setting import DEVICE, SHAPES, base_model, environment, make_trainer, release
from transformers import PrinterCallback


GIB = 2**30
# Of each method: the trainer, the type of the weights, its settings, and the bytes per weight that it is sure to have:
# weight, gradient and the optimizer's state
METHODS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "grpo-float32": ("grpo", "float32", {"optim": "adamw_torch_fused"}, 16),
    "grpo-8bit": ("grpo", "bfloat16", {"optim": "adamw_bnb_8bit"}, 6),
    "plain-float32": ("fisher@step", "float32", {"optim": "sgd"}, 8),
    "plain-exact": ("fisher@step", "bfloat16", {"optim": "sgd", "bf16_updates": "exact"}, 6),
    "plain-stochastic": ("fisher@step", "bfloat16", {"optim": "sgd", "bf16_updates": "stochastic"}, 4),
}
NAMES = {
    "grpo-float32": "GRPO, AdamW, float32",
    "grpo-8bit": "GRPO, AdamW in 8 bits, bf16",
    "plain-float32": "`fisher`, plain steps, float32",
    "plain-exact": "`fisher`, plain steps, bf16 and a remainder",
    "plain-stochastic": "`fisher`, plain steps, bf16",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b", "8b", "14b"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--limits", nargs="+", type=float, default=[24, 48, 80], help="GB of the GPUs, in 2**30 bytes")
    parser.add_argument("--sequences", type=int, default=8, help="per microbatch")
    parser.add_argument("--length", type=int, default=1024, help="positions, half of them prompt")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches of one optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    if "grpo-8bit" in options.methods and importlib.util.find_spec("bitsandbytes") is None:
        parser.error("grpo-8bit needs bitsandbytes: pip install bitsandbytes, or leave it out of --methods.")
    return options


# What is measured


def numbers(shape: str) -> int:
    """How many weights a model of that shape has."""
    return sum(p.numel() for p in base_model.__wrapped__(shape, "bfloat16", device="meta").parameters())


def train(method: str, shape: str, options: argparse.Namespace) -> dict[str, float]:
    """A few steps. Returns the time of the last, in seconds, and the peaks of memory, in bytes."""
    name, dtype, settings, _ = METHODS[method]
    case = argparse.Namespace(
        **vars(options), shape=shape, dtype=dtype, experts=128, aux=False, samples=64, lora=0, checkpointing=True
    )
    case.full, case.steps_per_generation, case.equal = True, options.accumulation, 0.0
    microbatches = options.accumulation * options.steps
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(
        name,
        case,
        random_reward(case),
        prompts=microbatches,
        rollout_func=ready_completions(case),
        model=base_model.__wrapped__(shape, dtype),
        per_device_train_batch_size=options.sequences,
        num_generations=options.sequences,
        steps_per_generation=options.accumulation,
        gradient_accumulation_steps=options.accumulation,
        max_completion_length=options.length // 2,
        max_steps=options.steps,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    clock = Clock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        # Gradients and the optimizer's state are held by many, and the next case needs their memory
        trainer.model.to("meta") if DEVICE == "cuda" else None
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.accelerator.free_memory()
    (before, _), (end, _) = clock.stamps[-2:]
    found = {"seconds": end - before}
    if DEVICE == "cuda":
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


def smallest(method: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """The smallest of the limits under which a case fits, with what was measured; or that none is enough."""
    sure = METHODS[method][-1] * numbers(shape)
    for limit in sorted(options.limits):
        if sure > limit * GIB:
            continue
        if DEVICE == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GIB / total))
        try:
            return {"limit": limit, **train(method, shape, options)}
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None
        gc.collect()
        release()
    return {"limit": None}


# What is printed


def table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Lines of a Markdown table: a row per method, a column per model."""
    shapes = list(next(iter(results.values())))
    lines = [f"| | {' | '.join(shape.upper() for shape in shapes)} |", "|---" * (len(shapes) + 1) + "|"]
    for method, found in results.items():
        cells = []
        for shape in shapes:
            figures = found.get(shape, {"limit": None})
            if figures["limit"] is None:
                cells.append("-")
                continue
            peak = f", {figures['reserved'] / GIB:.1f} GiB" if "reserved" in figures else ""
            cells.append(f"{figures['limit']:g} GB{peak}, {figures['seconds']:.2f} s")
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return lines


def main():
    options = parse()
    report: dict[str, Any] = {"environment": environment(), "options": vars(options), "results": {}}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    begin = time.perf_counter()
    for method in options.methods:
        for shape in options.shapes:
            found = smallest(method, shape, options)
            release()
            report["results"].setdefault(method, {})[shape] = found
            print(f"{time.perf_counter() - begin:6.1f} s  {method}, {shape}: {found}", flush=True)
            if options.output:  # after every case, so that a run that is cut short leaves something
                with open(options.output, "w") as file:
                    json.dump(report, file, indent=2)
    print(
        f"\nThe smallest GPU on which {options.steps} steps of {options.accumulation} x {options.sequences} x "
        f"{options.length} tokens are made, memory reserved at the peak, and seconds of the last step"
    )
    print("\n".join(table(report["results"])))


if __name__ == "__main__":
    main()
