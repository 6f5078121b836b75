"""
What changed between versions: `step_time.py` of several checkouts, in turns on one machine.

Every checkout runs its own script with the same arguments, `--rounds` times, in the given order and back again. All
processes start at once, import what is heavy, and wait for their turn, so that a GPU is busy all the time. Figures are
medians over a checkout's processes, and ratios to the first checkout's. With `--profile`, which needs a GPU, they are
the GPU's own time and the launches of a step; else the step's time by the clock.

    git worktree add ../before HEAD~10
    python benchmarks/speed/checkouts.py ../before . -- --shape 0.6b --length 1024 --profile --case "rules=fisher,none"
    python benchmarks/speed/checkouts.py ../before . -- --shape tiny --rules fisher                  # for CPUs
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


# What takes long to import
HEAVY = "import accelerate, datasets, peft, torch, transformers, trl; from trl import GRPOTrainer"
# In a process of its own, which gets the folder, the script and its arguments
WAITING = """
import os, runpy, sys
folder, script, *sys.argv[1:] = sys.argv[1:]
os.chdir(folder)
sys.path[:0] = [folder, os.path.dirname(script)]
exec(os.environ["HEAVY"])
sys.stdin.readline()
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
# Where the script is, and was
SCRIPTS = ("benchmarks/speed/step_time.py", "benchmarks/step_time.py")
FIGURES = ("gpu_seconds", "launches", "seconds")


def script_of(checkout: Path) -> Path:
    for script in SCRIPTS:
        if (checkout / script).is_file():
            return (checkout / script).resolve()
    raise SystemExit(f"{checkout} is no checkout of this project: there is no {SCRIPTS[0]} in it.")


def run(checkouts: list[Path], rounds: int, arguments: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The reports of each checkout's runs."""
    reports: dict[str, list[dict[str, Any]]] = {str(checkout): [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        turns, environment = [], {**os.environ, "HEAVY": HEAVY}
        for turn in range(rounds):
            for checkout in checkouts if turn % 2 == 0 else checkouts[::-1]:
                output = Path(folder) / f"{len(turns)}.json"
                command = [sys.executable, "-c", WAITING, str(checkout.resolve()), str(script_of(checkout))]
                command += [*arguments, "--output", str(output)]
                turns.append((checkout, output, subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)))
        try:
            for checkout, output, process in turns:
                process.communicate(b"\n")
                if process.returncode:
                    raise SystemExit(f"The run of {checkout} failed: {process.returncode}.")
                reports[str(checkout)].append(json.loads(output.read_text()))
        finally:
            for _, _, process in turns:
                process.kill()
    return reports


def table(reports: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Lines of a Markdown table: a row per case, variant and checkout."""
    first = next(iter(reports))
    found = [name for name in FIGURES if name in reports[first][0]["cases"][0]["results"]["grpo"]]
    names = [name for name in found if name != "seconds" or len(found) == 1]
    lines = [f"| case | variant | checkout | {' | '.join(f'{name} | ratio' for name in names)} |"]
    lines.append("|---" * (3 + 2 * len(names)) + "|")
    for number, case in enumerate(reports[first][0]["cases"]):
        for variant in case["results"]:
            medians = {
                checkout: [
                    statistics.median(report["cases"][number]["results"][variant][name] for report in of_checkout)
                    for name in names
                ]
                for checkout, of_checkout in reports.items()
            }
            for checkout, values in medians.items():
                pairs = zip(values, medians[first], strict=True)
                cells = " | ".join(f"{value:.6g} | {value / base:.3f}" for value, base in pairs)
                lines.append(f"| {case['title']} | {variant} | {checkout} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders; ratios are to the first one's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file for all reports")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    for checkout in options.checkouts:
        script_of(checkout)
    reports = run(options.checkouts, options.rounds, sys.argv[cut + 1 :])
    if options.output:
        options.output.write_text(json.dumps(reports, indent=2))
    print("\n".join(table(reports)))


if __name__ == "__main__":
    main()
