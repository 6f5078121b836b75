"""
Memory that training takes by the size of the model, and which GPUs have it: TRL's GRPO and ISOPO, full or LoRA.

The peak of one microbatch's forward, loss and backward, with the gradients of an earlier microbatch in place (as under
accumulation), is measured on a GPU in models of the right widths that are cut to two depths. Between two depths it
grows by the same amount with every layer, so the whole model's is found by going on in a straight line; the smallest
model is also measured as a whole, to see how far off that is. The optimizer's state is added by counting: AdamW keeps
two numbers for every trained one, of its type.

What is not in it: generation (vLLM beside the trainer takes `vllm_gpu_memory_utilization` of the GPU; transformers'
generation has its key-value cache), a reference model (`beta`), rewards that are models. The dtype is that of the
weights; with float32 weights, as TRL loads them by default, autocast computes in bfloat16. LoRA's factors are float32.

    python benchmarks/speed/memory.py --output memory.json           # for one GPU; models that the file has stay there
    python benchmarks/speed/memory.py --shapes tiny --depths 1 2 --microbatches 2x32     # for CPUs

On a CPU there is no peak to be measured: what is printed is weights, gradients and the optimizer's state alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from setting import DEVICE, SHAPES, PeakMemory, Variant, base_model, environment, random_batch, release


GPUS = (24, 40, 48, 80, 141)
SPARE = 0.1  # of a GPU, for CUDA's context and for gaps between tensors
METHODS = ("grpo", "fisher")
GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b", "8b", "14b"])
    parser.add_argument("--depths", nargs=2, type=int, default=[2, 4], help="numbers of layers that are measured")
    parser.add_argument("--microbatches", nargs="+", default=["8x1024", "1x4096"], help="sequences x positions")
    parser.add_argument("--lora", nargs="+", type=int, default=[0, 16], help="ranks; 0 for full weights")
    parser.add_argument("--samples", type=int, default=64, help="fisher_samples of ISOPO")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16" if DEVICE == "cuda" else "float32"
    )
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    if not 0 < options.depths[0] < options.depths[1]:
        parser.error(f"--depths {options.depths[0]} {options.depths[1]}: expected a smaller and a larger number")
    return options


# What is measured


def cut(shape: str, layers: int) -> str:
    """The name of a shape with as many layers as given."""
    hidden, intermediate, _, *others = SHAPES[shape]
    name = f"{shape}-{layers}layers"
    SHAPES[name] = (hidden, intermediate, layers, *others)
    return name


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_bytes(model: torch.nn.Module) -> int:
    """AdamW's state: two numbers for every trained one, of the same type."""
    return 2 * size(p for p in model.parameters() if p.requires_grad)


def peaks(method: str, shape: str, layers: int, lora: int, options: argparse.Namespace) -> dict[str, int]:
    """Bytes for each microbatch with checkpointing and without, by a text such as `8x1024 checkpointing`."""
    case = argparse.Namespace(
        shape=cut(shape, layers),
        dtype=options.dtype,
        experts=128,
        aux=False,
        samples=options.samples,
        lora=lora,
        checkpointing=True,
    )
    variant = Variant(method, case)
    trained = [p for p in variant.model.parameters() if p.requires_grad]
    state = optimizer_bytes(variant.model)
    found = {}
    for checkpointing in (True, False):
        if not checkpointing:
            variant.trainer.model.gradient_checkpointing_disable()
        for microbatch in options.microbatches:
            sequences, case.length = map(int, microbatch.split("x"))
            inputs = random_batch(case, sequences)
            if not found:
                variant.step(inputs)  # which brings what is kept from step to step into memory
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            with PeakMemory(variant.model) as peak:
                variant.step(inputs)
            measured = size(variant.model.parameters()) if peak.bytes is None else peak.bytes
            found[named(microbatch, checkpointing)] = measured + size(trained) + state
            del inputs
    return found


def named(microbatch: str, checkpointing: bool) -> str:
    return microbatch + " checkpointing" * checkpointing


def whole(depths: list[int], values: list[int], layers: int) -> int:
    """What `layers` layers take, in a straight line through what two numbers of them do."""
    (first, second), (low, high) = depths, values
    return round(low + (high - low) * (layers - first) / (second - first))


def figures(shape: str, lora: int, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Bytes of the whole model for each microbatch, by method."""
    found: dict[str, dict[str, int]] = {}
    for method in METHODS:
        of_depths = []
        for layers in options.depths:
            of_depths.append(peaks(method, shape, layers, lora, options))
            release()
        for name in of_depths[0]:
            values = [of_depth[name] for of_depth in of_depths]
            found.setdefault(name, {})[method] = whole(options.depths, values, SHAPES[shape][2])
    return found


# What is printed


def smallest_gpu(needed: int) -> str:
    """The first of `GPUS` that it fits with some room to spare."""
    fitting = [gpu for gpu in GPUS if needed <= (1 - SPARE) * gpu * GIB]
    return f"{fitting[0]} GB" if fitting else "none of them"


def table(results: dict[str, dict[str, dict]], microbatches: list[str]) -> list[str]:
    """Lines of a Markdown table: a row per model, kind of weights and microbatch."""
    lines = [
        "| model | weights | microbatch | checkpointing: GRPO | `fisher` | fits | without: GRPO | `fisher` | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, found in results.items():
        shape, weights = model.split(", ")
        for microbatch in microbatches:
            cells = [shape, weights, microbatch.replace("x", " x ")]
            for checkpointing in (True, False):
                of_method = found[named(microbatch, checkpointing)]
                cells += [f"{of_method[method] / GIB:.1f}" for method in METHODS]
                cells.append(smallest_gpu(of_method["fisher"]))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def measured_before(options: argparse.Namespace, where: dict[str, str]) -> dict[str, dict]:
    """What `--output` has of models measured in the same way, with the same hardware and versions."""
    if not options.output or not Path(options.output).exists():
        return {}
    before = json.loads(Path(options.output).read_text())
    alike = ("depths", "microbatches", "samples", "dtype")
    if before["environment"] != where or any(before["options"][name] != vars(options)[name] for name in alike):
        raise SystemExit(f"{options.output} was made in another way: give another file, or remove it.")
    return before["results"]


def main():
    options = parse()
    report = {"environment": environment(), "options": vars(options)}
    report["results"] = measured_before(options, report["environment"])
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    if DEVICE == "cpu":
        print("No GPU: weights, gradients and the optimizer's state alone, without what a step needs beside them.")
    begin = time.perf_counter()
    for shape in options.shapes:
        for lora in options.lora:
            model = f"{shape.upper()}, {f'LoRA r={lora}' if lora else 'full'}"
            if model in report["results"]:
                continue
            report["results"][model] = figures(shape, lora, options)
            base_model.cache_clear()
            release()
            print(f"{time.perf_counter() - begin:6.1f} s  {model}", flush=True)
            if options.output:  # after every model, so that a run that is cut short leaves something
                with open(options.output, "w") as file:
                    json.dump(report, file, indent=2)
    print(f"\nGiB at the peak of a step, weights in {options.dtype}, AdamW; depths {options.depths}")
    print("\n".join(table(report["results"], options.microbatches)))
    if DEVICE == "cuda":
        shape, lora = options.shapes[0], options.lora[0]
        straight = next(iter(report["results"].values()))
        for name, found in peaks("fisher", shape, SHAPES[shape][2], lora, options).items():
            print(
                f"{shape} as a whole, {name}: {found / GIB:.2f} measured, {straight[name]['fisher'] / GIB:.2f} above"
            )
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
