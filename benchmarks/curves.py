"""
How ISOPO's cost depends on one quantity while the others stay: time and memory of one microbatch, relative to GRPO.

Measured as in `step_time.py`. The quantities are `length` (positions of a sequence), `sequences` (of a microbatch),
`samples` (`fisher_samples`) and `lora` (the rank); what the options say is the point that the curves have in common.
Without values, a quantity takes the grid written below, which is meant for one GPU.

    python benchmarks/curves.py --length 64 --vary length 32 64 --vary lora 2 4          # a small model, for CPUs
    python benchmarks/curves.py --shape 0.6b --sequences 4 --length 512 --vary length --vary sequences \
        --vary samples --vary lora --output curves.json --plot curves.png                # for one GPU
"""

import argparse
import copy
import json

from setting import (
    HEADER,
    Variant,
    add_case_options,
    add_variant_options,
    environment,
    import_pyplot,
    measure,
    random_batch,
    release,
    row,
    variant_names,
)


GRIDS = {
    "length": (512, 1024, 2048, 4096, 8192),
    "sequences": (1, 2, 4, 8, 16, 32, 64),
    "samples": (16, 32, 64, 128, 256, 512, 1024),
    "lora": (4, 8, 16, 32, 64, 128, 256),
}
LABELS = {
    "length": "length of a sequence",
    "sequences": "sequences per microbatch",
    "samples": "Fisher samples",
    "lora": "LoRA rank",
}


def parse() -> tuple[argparse.Namespace, dict[str, list[int]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_case_options(parser)
    add_variant_options(parser, ["fisher"])
    parser.add_argument(
        "--vary",
        nargs="+",
        action="append",
        required=True,
        metavar=("{" + ",".join(GRIDS) + "}", "VALUE"),
        help="quantity, and the values it takes; may be repeated",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--plot", help="PNG file with one panel per quantity")
    options = parser.parse_args()
    vary = {}
    for quantity, *values in options.vary:
        if quantity not in GRIDS:
            parser.error(f"--vary {quantity}: expected one of {', '.join(GRIDS)}")
        vary[quantity] = [int(value) for value in values] or list(GRIDS[quantity])
    return options, vary


def make_variants(case: argparse.Namespace) -> dict[str, Variant]:
    return {name: Variant(name, case) for name in variant_names(case)}


def set_samples(variants: dict[str, Variant], samples: int) -> None:
    for variant in variants.values():
        if hasattr(variant.trainer, "isopo"):
            variant.trainer.isopo.fisher_samples = samples


def curve(quantity: str, values: list[int], options: argparse.Namespace) -> list[dict]:
    """The figures at each value; one set of trainers serves them all, but for LoRA's rank."""
    print(f"\n{quantity:9} {'':12} {HEADER}")
    variants = {} if quantity == "lora" else make_variants(options)
    points = []
    for value in values:
        case = copy.copy(options)
        setattr(case, quantity, value)
        if quantity == "lora":
            variants.clear()
            release()
            variants = make_variants(case)
        set_samples(variants, case.samples)
        results = measure(variants, random_batch(case, case.sequences), case.repeats)
        for name, figures in results.items():
            print(f"{value:9} {name:12} {row(figures)}")
        points.append({"value": value, "results": results})
    return points


def plot(curves: dict[str, list[dict]], path: str) -> None:
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(1, len(curves), squeeze=False, sharey=True, figsize=(1 + 3.6 * len(curves), 3.6))
    for panel, (quantity, points) in zip(panels[0], curves.items(), strict=True):
        values = [point["value"] for point in points]
        for number, name in enumerate(name for name in points[0]["results"] if name != "grpo"):
            for kind, label, style in (("ratio", "time", "o-"), ("memory_ratio", "memory", "s--")):
                ratios = [point["results"][name][kind] for point in points]
                if None not in ratios:
                    panel.plot(values, ratios, style, color=f"C{number}", label=f"{name}, {label}", markersize=4)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, values)
        panel.minorticks_off()
        panel.set_xlabel(LABELS[quantity])
    panels[0, 0].set_ylabel("ratio to GRPO")
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    options, vary = parse()
    if options.plot:
        import_pyplot()
    report = {"environment": environment(), "options": vars(options), "curves": {}}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    print(f"{options.shape}, {options.sequences} x {options.length}, {options.samples} samples, LoRA {options.lora}")
    for quantity, values in vary.items():
        report["curves"][quantity] = curve(quantity, values, options)
        release()
        if options.output:  # after every curve, so that a run that is cut short leaves something
            with open(options.output, "w") as file:
                json.dump(report, file, indent=2)
    if options.plot:
        plot(report["curves"], options.plot)


if __name__ == "__main__":
    main()
