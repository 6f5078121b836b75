"""
What it costs to note the sampler's log-probabilities while transformers generates, for token weights.

The same generation with and without [`~isopo_trl.loss.sampler.noting_logps`], in turns: medians, and the median of the
ratios of neighbouring rounds.

    python benchmarks/speed/recording_time.py                                             # a small model, for CPUs
    python benchmarks/speed/recording_time.py --shape 0.6b --sequences 64 --length 256    # for one GPU
"""

import argparse
import contextlib
import json
import statistics
import time

import torch
from setting import DEVICE, SHAPES, base_model, environment, synchronize

from isopo_trl.loss.sampler import noting_logps


def generate(model: torch.nn.Module, prompts: torch.Tensor, length: int, record: bool) -> float:
    """Seconds."""
    listening = noting_logps(model) if record else contextlib.nullcontext()
    synchronize()
    start = time.perf_counter()
    with listening as recorders, torch.no_grad():
        output = model.generate(
            prompts, do_sample=True, top_k=0, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
        )
        if record:
            recorders[0].logps(output[:, prompts.shape[1] :].tolist())
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="new tokens; prompts have 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    print(*(f"{name}: {value}" for name, value in environment().items()), sep=", ")
    model = base_model(options.shape, "bfloat16" if DEVICE == "cuda" else "float32").eval()
    prompts = torch.randint(2, SHAPES[options.shape][-1], (options.sequences, 64), device=DEVICE)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.repeats + 1):  # one to warm up
        for record in (False, True) if turn % 2 else (True, False):
            times[record].append(generate(model, prompts, options.length, record))
    plain, recorded = (times[record][1:] for record in (False, True))
    ratios = [b / a for a, b in zip(plain, recorded, strict=True)]
    results = {
        "plain_seconds": statistics.median(plain),
        "recorded_seconds": statistics.median(recorded),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    print(
        f"{options.sequences} x {options.length} tokens, {options.shape}: plain {results['plain_seconds']:.3f} s, ",
        end="",
    )
    print(f"recorded {results['recorded_seconds']:.3f} s, ratio {results['ratio']:.3f} ", end="")
    print(f"({min(ratios):.3f} - {max(ratios):.3f})")
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"environment": environment(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
