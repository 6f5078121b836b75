"""
The LM head alone, forward and backward of a microbatch: with what its forward takes along, and as it would be without.

    python benchmarks/speed/head_time.py                                                  # small enough for a CPU
    python benchmarks/speed/head_time.py --hidden 1024 --vocabulary 151936 --length 384 --dtype bfloat16   # Qwen3-0.6B

Products over the vocabulary are counted, in units of tokens x vocabulary x hidden. Times are medians over rounds, in
each of which both ways take turns; on a CPU they are of the processor, so that other work counts less. Memory is the
peak on a GPU, after over before. `fisher` has its metric of the step before, and `frozen` is a head that is not
trained. A case whose two numbers of products are equal has only one way.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from setting import DEVICE, synchronize
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer import utils as trl_utils

from isopo_trl import ISOPO
from isopo_trl.layers import lm_head
from isopo_trl.loss.frozen_head import _FrozenHead
from isopo_trl.trl_seam.head import ChunkedLogProbFunction


WAYS = ("before", "after")
CASES = ("none", "fisher", "fisher+terms", "fig4", "interacting", "frozen")


class Head(torch.nn.Module):
    def __init__(self, case: argparse.Namespace):
        super().__init__()
        self.lm_head = torch.nn.Linear(case.hidden, case.vocabulary, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def counter() -> FlopCounterMode:
    def added(total, x, y, *_, **__):
        return 2 * x[0] * x[1] * y[1]

    def batched(x, y, *_, **__):
        return 2 * x[0] * x[1] * x[2] * y[2]

    # PyTorch's own formula for `bmm` does not take a type of the result
    own = {torch.ops.aten.addmm_: added, torch.ops.aten.addmm: added, torch.ops.aten.bmm: batched}
    return FlopCounterMode(display=False, custom_mapping=own)


def prepared(name: str, case: argparse.Namespace) -> Callable[[str], None]:
    """A function that runs forward and backward in one of the ways."""
    rule, *terms = name.split("+")
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    model = Head(case).to(DEVICE, dtype).requires_grad_(rule != "frozen")
    N = case.sequences * case.length
    hidden = torch.randn(N, case.hidden, device=DEVICE).to(dtype).requires_grad_()
    targets = torch.randint(case.vocabulary, (N,), device=DEVICE)
    mask = torch.ones(case.sequences, case.length + 1, dtype=torch.long, device=DEVICE)
    weight = model.lm_head.weight
    settings: Any = (1.0, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))
    if rule == "frozen":

        def run_frozen(way: str) -> None:
            function = _FrozenHead if way == "after" else ChunkedLogProbFunction
            function.apply(hidden, weight, None, targets, *settings)[0].sum().backward()

        return run_frozen
    isopo = ISOPO(model, rule, fisher_samples=case.samples)
    advantages = torch.randn(case.sequences, device=DEVICE)

    def run(way: str) -> None:
        weight.grad = hidden.grad = None
        own = lm_head.are_exact
        with (
            mock.patch.object(lm_head, "are_exact", lambda args: way == "after" and own(args)),
            isopo.microbatch(advantages, attention_mask=mask, completion_mask=mask[:, 1:]),
        ):
            logps = trl_utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, *settings)[0]
            for _ in terms:
                isopo.unscaled(logps.square().sum() / N)
            (logps.sum() / N).backward()
        isopo.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="scored tokens of a sequence")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    case = parser.parse_args()
    clock = time.perf_counter if DEVICE == "cuda" else time.process_time
    product = 2 * case.sequences * case.length * case.vocabulary * case.hidden
    print("| case | products before | after | ms before | after | ratio | range | memory |")
    print("|---" * 8 + "|")
    for name in case.cases:
        run, products, peaks = prepared(name, case), {}, {}
        for way in WAYS * 2:  # what is left from the first step is there in the second
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with counter() as flops:
                run(way)
            products[way] = flops.get_total_flops() / product
            peaks[way] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(case.rounds):
            for way in WAYS:
                synchronize()
                start = clock()
                run(way)
                synchronize()
                times[way].append(1e3 * (clock() - start))
        before, after = (statistics.median(times[way]) for way in WAYS)
        ratios = sorted(y / x for x, y in zip(times["before"], times["after"], strict=True))
        memory = f"{peaks['after'] / peaks['before']:.3f}" if DEVICE == "cuda" else ""
        print(
            f"| `{name}` | {products['before']:.2f} | {products['after']:.2f} | {before:.1f} | {after:.1f} "
            f"| {statistics.median(ratios):.2f} | {ratios[0]:.2f} - {ratios[-1]:.2f} | {memory} |"
        )


if __name__ == "__main__":
    main()
