"""
How ISOPO's cost depends on one quantity while the others stay: time and memory of one microbatch, relative to GRPO.

Measured as in `step_time.py`. The quantities are `length` (positions of a sequence), `sequences` (of a microbatch),
`samples` (`fisher_samples`) and `lora` (the rank); what the options say is the point that the curves have in common.
Without values, a quantity takes the grid written below, which is meant for one GPU.

    python benchmarks/speed/curves.py --length 64 --vary length 32 64 --vary lora 2 4         # a small model, for CPUs
    python benchmarks/speed/curves.py --draw benchmarks/RESULTS.md --section "How the cost changes" --plot curves.png
    python benchmarks/speed/curves.py --shape 0.6b --sequences 4 --length 512 --vary length --vary sequences \
        --vary samples --vary lora --output curves.json --plot curves.png              # for one GPU
"""

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

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


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

from card import BLUE, GREEN, ORANGE, PINK, card  # noqa: E402


COLORS = (BLUE, ORANGE, GREEN, PINK)
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
        default=[],
        metavar=("{" + ",".join(GRIDS) + "}", "VALUE"),
        help="quantity, and the values it takes; may be repeated",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--plot", help="PNG file with one panel per quantity")
    parser.add_argument(
        "--draw", metavar="RESULTS.md", help="measure nothing: draw the plot from a table of this file"
    )
    parser.add_argument("--section", default="", help="words that come before that table")
    options = parser.parse_args()
    if not options.draw and not options.vary:
        parser.error("--vary: say which quantity, or --draw a table")
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


def read_table(text: str, section: str) -> dict[str, list[dict]]:
    """The curves of `fisher` from a table in which a row names a quantity and its values, and the next ones ratios."""
    curves: dict[str, list[dict]] = {}
    rows = itertools.dropwhile(lambda line: not line.startswith("|"), text[text.index(section) :].splitlines())
    for line in itertools.takewhile(lambda line: line.startswith("|"), rows):
        name, *cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        cells = [cell for cell in cells if cell]
        if name.split()[-1] in ("length", "sequences", "samples", "rank"):
            points = curves["lora" if name == "LoRA rank" else name] = [
                {"value": int(cell), "results": {"fisher": {"ratio": None, "memory_ratio": None}}} for cell in cells
            ]
        elif name in ("time", "memory"):
            for point, cell in zip(points, cells, strict=True):
                point["results"]["fisher"]["ratio" if name == "time" else "memory_ratio"] = float(cell)
    return curves


def lines(points: list[dict]) -> Iterator[tuple[str, str, str, list[float]]]:
    """What there is of a quantity: name, style, colour and ratios of each line."""
    rules = [name for name in points[0]["results"] if name != "grpo"]
    for rule, color in zip(rules, itertools.cycle(COLORS)):
        for kind, name, style in (("ratio", "time", "o-"), ("memory_ratio", "memory", "s--")):
            ratios = [point["results"][rule][kind] for point in points]
            if None not in ratios:
                yield name if len(rules) == 1 else f"{rule}, {name}", style, color, ratios


def plot(curves: dict[str, list[dict]], path: str) -> None:
    """A panel per quantity, a line for time and a dashed one for memory."""
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    ranges: dict[str, list[float]] = {}
    for name, _, _, ratios in itertools.chain.from_iterable(map(lines, curves.values())):
        ranges.setdefault(name, []).extend(ratios)
    found = ", ".join(f"{name} {min(all_of):.2f} to {max(all_of):.2f}" for name, all_of in ranges.items())
    title = fill(f"{found[0].upper()}{found[1:]} of GRPO's", 40)
    with card(path, 0.6 + 1.75 * rows, title) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for panel in panels.flat[len(curves) :]:
            panel.remove()
        for panel, (quantity, points) in zip(panels.flat, curves.items(), strict=False):
            values = [point["value"] for point in points]
            for name, style, color, ratios in lines(points):
                panel.plot(values, ratios, style, color=color)
                if panel is panels[0, 0]:
                    beside = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
                    panel.annotate(name, (values[0], ratios[0]), color=color, **beside)
            panel.axhline(1, color="grey", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_xticks(values, values)
            panel.minorticks_off()
            panel.set_xlabel(LABELS[quantity])
        for panel in panels[:, 0]:
            panel.set_ylabel("ratio to GRPO")


def main():
    options, vary = parse()
    if options.plot:
        import_pyplot()
    if options.draw:
        with open(options.draw) as file:
            return plot(read_table(file.read(), options.section), options.plot)
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
