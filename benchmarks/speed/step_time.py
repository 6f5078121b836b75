"""
Time and memory of forward, loss and backward of one microbatch: TRL's GRPO, each ISOPO rule, and the hook recipe.

All are built on copies of one randomly initialised model, set up as `train()` would, and fed the same synthetic batch.
Every round runs each of them once; the figures are medians over the rounds, and medians of the ratios to GRPO in the
same round. Memory (GPUs only) is the peak above what was allocated before the step, plus the weights of one model.

    python benchmarks/speed/step_time.py --recipe                                   # a small model, for CPUs
    python benchmarks/speed/step_time.py --shape 0.6b --sequences 8 --length 1024   # for one GPU
    python benchmarks/speed/step_time.py --table --output table.json

With Liger's kernels in the model (`pip install liger-kernel`), GRPO and ISOPO, which keeps its own norms:

    python benchmarks/speed/step_time.py --shape 0.6b --length 1024 --rules grpo:liger fisher fisher:liger

Compiled, which ISOPO refuses in training: here the decoder's blocks are compiled around its layers:

    python benchmarks/speed/step_time.py --shape 0.6b --length 1024 --rules grpo:compiled fisher fisher:compiled

Several cases in one process, each given as the options in which it differs from the command line's:

    python benchmarks/speed/step_time.py --shape 0.6b --length 1024 \
        --case "rules=fisher,fig4 recipe" --case "lora=16 rules=fisher" --case "checkpointing rules=fisher"
"""

import argparse
import copy
import json
import statistics

from setting import (
    DEVICE,
    HEADER,
    MIXTURES,
    Variant,
    add_case_options,
    add_variant_options,
    environment,
    measure,
    profiles,
    random_batch,
    release,
    row,
    variant_names,
)


TABLE = (
    "shape=0.6b sequences=8 length=1024 rules=grpo:liger,none,fisher,fig4,interacting,fisher:liger recipe",
    "shape=0.6b sequences=16 length=512 rules=fisher",
    "shape=0.6b sequences=8 length=1024 rules=fisher checkpointing",
    "shape=0.6b sequences=8 length=1024 rules=grpo:liger,fisher,fig4,interacting,fisher:liger lora=16",
    "shape=8b-6layers sequences=4 length=2048 rules=grpo:liger,fisher,fisher:liger",
)


def case_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_case_options(parser)
    add_variant_options(parser, ["none", "fisher", "fig4", "interacting"])
    return parser


def parse_case(text: str, defaults: argparse.Namespace) -> argparse.Namespace:
    """`"shape=0.6b rules=fisher,fig4 recipe"` on top of the options given to the command."""
    words = []
    for word in text.split():
        name, _, value = word.partition("=")
        words += [f"--{name}", *filter(None, value.split(","))]
    return case_parser().parse_args(words, copy.copy(defaults))


def parse() -> tuple[argparse.Namespace, list[argparse.Namespace]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[case_parser()]
    )
    parser.add_argument("--case", action="append", default=[], help="options of one case, as above; may be repeated")
    parser.add_argument("--table", action="store_true", help="the cases of the project's table, for one GPU")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="also the GPU's own time and the launches of one step")
    parser.add_argument("--kernels", type=int, default=0, help="of the profile: so many kernels by name in --output")
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    defaults = argparse.Namespace(**{name: getattr(options, name) for name in vars(case_parser().parse_args([]))})
    texts = [*(TABLE if options.table else ()), *options.case]
    cases = [parse_case(text, defaults) for text in texts] or [defaults]
    for case in cases:  # refuses what cannot run before anything does
        variant_names(case)
    return options, cases


def title(case: argparse.Namespace) -> str:
    weights = f"LoRA {case.lora}" if case.lora else "full weights"
    shape = case.shape
    if shape in MIXTURES:
        shape += f", {case.experts} experts" + ", load balancing" * case.aux
    checkpointing = ", checkpointing" if case.checkpointing else ""
    return f"{shape}, {case.sequences} x {case.length}, {weights}, {case.dtype}{checkpointing}"


def over_liger(figures: dict[str, dict]) -> list[str]:
    """Lines with time and memory over those of GRPO with Liger's kernels, round by round, where it is measured."""
    liger = figures.get("grpo:liger")
    if liger is None:
        return []
    lines = [f"{'over liger':12} {'ratio':>6} {'(range)':>13} {'memory':>7}"]
    for name, of in figures.items():
        ratios = [a / b for a, b in zip(of["times"], liger["times"], strict=True)]
        text = f"{name:12} {statistics.median(ratios):6.3f} ({min(ratios):5.2f}-{max(ratios):5.2f})"
        memory = f"{of['peak_bytes'] / liger['peak_bytes']:7.3f}" if of["peak_bytes"] else f"{'-':>7}"
        lines.append(f"{text} {memory}")
    return lines


def run(case: argparse.Namespace, repeats: int, with_profile: bool, kernels: int) -> dict[str, dict]:
    variants = {name: Variant(name, case) for name in variant_names(case)}
    inputs = random_batch(case, case.sequences)
    figures = measure(variants, inputs, repeats)
    print(f"\n{title(case)}, {case.samples} samples, {repeats} rounds")
    print(f"{'':12} {HEADER}")
    for name, values in figures.items():
        print(f"{name:12} {row(values)}")
    for line in over_liger(figures):
        print(line)
    if with_profile:
        profiled = profiles(variants, inputs, kernels)
        print(f"{'one step':12} {'GPU ms':>9} {'ratio':>6} {'launches':>8} {'host ms':>8}")
        for name, values in profiled.items():
            ratio = values["gpu_seconds"] / profiled["grpo"]["gpu_seconds"]
            gpu, host = 1e3 * values["gpu_seconds"], 1e3 * values["host_seconds"]
            print(f"{name:12} {gpu:9.1f} {ratio:6.3f} {values['launches']:8} {host:8.1f}")
            figures[name].update(values)
    return figures


def main():
    options, cases = parse()
    if options.profile and DEVICE == "cpu":
        raise SystemExit("--profile counts a GPU's kernels, and there is none: leave it out.")
    report = {"environment": environment(), "repeats": options.repeats, "cases": []}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    for case in cases:
        results = run(case, options.repeats, options.profile, options.kernels)
        release()
        report["cases"].append({"title": title(case), "options": vars(case), "results": results})
        if options.output:  # after every case, so that a run that is cut short leaves something
            with open(options.output, "w") as file:
                json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
