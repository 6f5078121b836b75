"""
What Python costs in a step, without a GPU: models and layers so narrow that there is nearly nothing to compute.

Triton's kernels are on, but launching one does nothing, so that results are meaningless and what is measured is all
that happens on the way to a launch. Triton's launcher itself is not in the figures, unless `--launcher` asks for what
of it is Python; launches and their arguments are counted and printed. Run it on a quiet machine, one thread
(`OMP_NUM_THREADS=1`).

    python benchmarks/speed/python_time.py                    # steps beside GRPO's, 28 blocks
    python benchmarks/speed/python_time.py --launcher         # with Triton's Python around each launch
    python benchmarks/speed/python_time.py --lora 4           # the same with LoRA
    python benchmarks/speed/python_time.py --layers           # microseconds per layer, forward and backward
    python benchmarks/speed/python_time.py --plain            # plain PyTorch instead of the kernels' path
    python benchmarks/speed/python_time.py --functions fisher # where a step's time goes, by cProfile
    python benchmarks/speed/python_time.py --operations       # what a backward asks of the device, counted
"""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from setting import WARM_UP, Variant, random_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from isopo_trl import ISOPO
from isopo_trl.integrations.autograd_thread import calling_thread
from isopo_trl.kernels import launch
from isopo_trl.layers import linear


RULES = ("none", "fisher", "fig4", "interacting")
LAYERS = ("linear", "rms norm", "lora")
WIDTH = 64
# Times are read around this many calls
AT_ONCE = 20


class Launches:
    """
    Stands in for all that Triton compiles, and counts: `numbers` of launches by kernel, `arguments` of them all. With
    `launcher`, by way of Triton's own (3.7 or later), whose last call, in C, is the first that is left out.
    """

    def __init__(self, launcher: bool = False):
        self.numbers: Counter[str] = Counter()
        self.arguments = 0
        self.launcher = launcher

    def forget(self) -> None:
        self.numbers.clear()
        self.arguments = 0

    def compiled(self, kernel):
        """What `kernel` compiles to: `compiled[grid](*arguments)` launches it."""
        launches, name = self, kernel.__name__
        if self.launcher:
            return self._with_launcher(name)

        class Compiled:
            def __getitem__(self, grid):
                return run

        def run(*arguments, **_):
            launches.numbers[name] += 1
            launches.arguments += len(arguments)

        return Compiled()

    def _with_launcher(self, name):
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.compiler.compiler import CompiledKernel

        def launch(*given):
            *_, of_launch, enter, leave, _, _, _, _, arguments = given
            self.numbers[name] += 1
            self.arguments += len(arguments)
            for hook in (enter, leave):
                if hook is not None:
                    hook(of_launch)

        launcher = CudaLauncher.__new__(CudaLauncher)
        nothing = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
        nothing += ("gsan_enabled", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
        vars(launcher).update(dict.fromkeys(nothing, 0), launch=launch, num_ctas=1)
        compiled = CompiledKernel.__new__(CompiledKernel)
        # There is nothing to unload
        vars(compiled).update(_run=launcher, module=None, function=0, packed_metadata=(), name=name, src=None)
        return compiled


class Driver:
    """Stands in for Triton's, of a device that is not there."""

    def get_current_device(self):
        return torch.get_num_threads() and 0  # about what PyTorch takes to answer

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def launches_that_do_nothing(launcher: bool = False):
    """A context in which the kernels take CPU tensors; yields the [`Launches`], with Triton's `launcher` or not."""
    import triton
    from triton.compiler.compiler import CompiledKernel

    launches = Launches(launcher)
    with (
        patch.object(CompiledKernel, "_init_handles", lambda _: None),
        patch.object(triton.runtime.driver, "_active", Driver()),
        patch.object(triton.JITFunction, "__getitem__", lambda kernel, _: lambda *_, **__: launches.compiled(kernel)),
        patch.object(launch, "_INTERPRETED", (torch.float32,)),
        patch.object(linear, "choose_strategy", lambda *_: "whole"),  # as layers of the usual sizes on a GPU
        # What is not computed must be finite
        patch.object(torch, "empty", torch.zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ):
        yield launches


# Steps


def thin_case(options: argparse.Namespace) -> argparse.Namespace:
    """Options as `setting.py` has them."""
    own = {name: getattr(options, name) for name in ("sequences", "length", "lora", "checkpointing")}
    return argparse.Namespace(**own, shape="thin", dtype="float32", samples=64, experts=8, aux=False)


def steps(options: argparse.Namespace, launches: Launches) -> None:
    names = ["grpo", *options.rules]
    case = thin_case(options)
    variants = {name: Variant(name, case) for name in names}
    inputs = random_batch(case, case.sequences)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + options.repeats):
        for name, variant in variants.items():
            start = time.process_time()
            variant.step(inputs)
            if turn >= WARM_UP:
                times[name].append(time.process_time() - start)
    print(f"{case.sequences} x {case.length}, {options.repeats} rounds, CPU time")
    print(f"{'':12} {'ms':>8} {'least':>8} {'ratio':>6} {'of least':>8} {'launches':>8} {'arguments':>9}")
    for name, own in times.items():
        launches.forget()
        variants[name].step(inputs)
        ratio = statistics.median(x / grpo for x, grpo in zip(own, times["grpo"], strict=True))
        print(
            f"{name:12} {1e3 * statistics.median(own):8.1f} {1e3 * min(own):8.1f} {ratio:6.3f} "
            f"{min(own) / min(times['grpo']):8.3f} {sum(launches.numbers.values()):8} {launches.arguments:9}"
        )


def functions(options: argparse.Namespace) -> None:
    case = thin_case(options)
    variant = Variant(options.functions, case)
    inputs = random_batch(case, case.sequences)
    for _ in range(3):
        variant.step(inputs)
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(5):
            variant.step(inputs)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(60)


# Operations


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do but views."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


def operations(options: argparse.Namespace, launches: Launches) -> None:
    """
    Of a backward in the second microbatch of the second step, where there is all that a rule may go by. A launch of
    Triton's is not among the operations.
    """
    case = thin_case(options)
    inputs = random_batch(case, case.sequences)
    print(f"{'':12} {'operations':>10} {'launches':>8}")
    for name in options.rules:
        variant = Variant(name, case)
        trainer = variant.trainer
        for _ in range(2):
            for _ in range(2):
                launches.forget()
                loss = trainer.compute_loss(variant.model, inputs)
                with Operations() as counter, calling_thread(True):
                    loss.backward()
            trainer.isopo.step()
            variant.model.zero_grad()
        print(f"{name:12} {counter.number:10} {sum(launches.numbers.values()):8}")


# Layers


def layer_module(kind: str) -> nn.Module:
    """A module of that kind, trained."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    if kind == "rms norm":
        return nn.Sequential(Qwen3RMSNorm(WIDTH))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    return get_peft_model(module, LoraConfig(r=4, target_modules=["0"])).base_model.model


def passes(module: nn.Module, rule: str | None, options: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """Runs forward and backward `AT_ONCE` times; seconds of each, per call."""
    shape = (options.sequences, options.length)
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    cotangent = torch.randn(*shape, WIDTH)
    isopo = None if rule is None else ISOPO(module, rule=rule, fisher_scope="microbatch")

    def run() -> tuple[float, float]:
        microbatch = None
        if isopo is not None:
            microbatch = isopo.begin(torch.ones(shape[0]), attention_mask=torch.ones(shape))
        start = time.process_time()
        outputs = [module(x) for _ in range(AT_ONCE)]
        middle = time.process_time()
        for output in outputs:
            output.backward(cotangent)
        end = time.process_time()
        if isopo is not None and microbatch is not None:
            isopo.abort()
        return (middle - start) / AT_ONCE, (end - middle) / AT_ONCE

    return run


def layers(options: argparse.Namespace) -> None:
    print(f"{options.sequences} x {options.length}, width {WIDTH}, least of {options.repeats} rounds")
    print("microseconds of CPU time per layer, forward + backward")
    print(f"{'':10} {'module':>14}" + "".join(f" {rule:>14}" for rule in options.rules))
    for kind in LAYERS:
        runs = [passes(layer_module(kind), rule, options) for rule in (None, *options.rules)]
        rounds = [[run() for run in runs] for _ in range(3 + options.repeats)][3:]
        cells = []
        for column in range(len(runs)):
            pairs = [one[column] for one in rounds]
            forward, backward = (min(pair[way] for pair in pairs) for way in (0, 1))
            cells.append(f"{1e6 * forward:6.1f} +{1e6 * backward:6.1f}")
        print(f"{kind:10} " + " ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 for full weights")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--launcher", action="store_true", help="with the Python of Triton's launcher")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in place of the kernels' path")
    parser.add_argument("--layers", action="store_true", help="layer by layer instead of whole steps")
    parser.add_argument("--operations", action="store_true", help="operations and launches of a backward instead")
    parser.add_argument("--functions", metavar="RULE", help="a profile of this rule's steps instead")
    options = parser.parse_args()
    with (
        contextlib.nullcontext(Launches()) if options.plain else launches_that_do_nothing(options.launcher) as launches
    ):
        if options.layers:
            layers(options)
        elif options.operations:
            operations(options, launches)
        elif options.functions:
            functions(options)
        else:
            steps(options, launches)


if __name__ == "__main__":
    main()
