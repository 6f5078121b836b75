"""
Curves of one run or several in one figure: training reward, validation accuracy, KL from the initial policy.

    isopo-compare outputs/isopo outputs/grpo --output comparison.png

A run is its output folder, a checkpoint in it, or a `trainer_state.json`; `NAME=PATH` gives it a name in the legend.
"""

import argparse
import os
import sys
from pathlib import Path

from .curves import CURVES, STATE, curve, draw, read_log


def named(text: str) -> tuple[str, str]:
    """`NAME=PATH`, or a path, which is named after its folder."""
    name, equals, path = text.partition("=")
    if equals and not os.path.exists(text):
        return name, path
    folder = Path(text).parent if Path(text).name == STATE else Path(text)
    return folder.resolve().name, text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="isopo-compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="output folders of runs")
    parser.add_argument("--output", default="comparison.png", help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        pairs = [named(text) for text in options.runs]
        if len({name for name, _ in pairs}) < len(pairs):  # folders of one name: tell them apart by their paths
            pairs = [(path, path) for _, path in pairs]
        logs = {name: read_log(path) for name, path in pairs}
        draw(logs, options.output)
    except ImportError:
        print("isopo-compare needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"isopo-compare: {error}", file=sys.stderr)
        return 2
    width = max(len(name) for name in logs)
    print(f"{'':{width}}  {'last step':>9} {'reward':>8} {'accuracy':>8} {'KL':>8}")
    for name, log in logs.items():
        last = [curve(log, curve_name)[1][-1:] for curve_name in CURVES]
        cells = " ".join(f"{values[0]:8.3f}" if values else f"{'-':>8}" for values in last)
        print(f"{name:{width}}  {max(entry['step'] for entry in log):9} {cells}")
    print(f"Drawn to {options.output}")
    return 0
