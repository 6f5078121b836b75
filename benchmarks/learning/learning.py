"""
What ISOPO does to learning: runs of a matrix of methods, learning rates and seeds, and a report from their results.

    python benchmarks/learning/learning.py status
    python benchmarks/learning/learning.py run --model DIR --data DIR --deadline 1500
    python benchmarks/learning/learning.py run --group sums --parallel 1 --deadline 7200      # the embedded model
    python benchmarks/learning/learning.py report

`run` takes the next unfinished runs of the matrix, several at a time, each in a process of its own, and stops before
the deadline. A run leaves one JSON file behind, or nothing. Nothing is run twice, and results of different days add
up. The model is a folder with an instruct model, the data a folder with GSM8K's `train.jsonl` and `test.jsonl`.
"""

import argparse
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

from matrix import Matrix, Run, read_results
from scheduling import Schedule, multi_process_service, worker_command, worker_environment


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "make the next runs of the matrix"),
        ("status", "what is made, and what comes next"),
        ("report", "tables and figures from the results alone"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--matrix", type=Path, default=HERE / "matrix.yaml")
        command.add_argument("--results", type=Path, default=HERE / "runs")
        if name == "report":
            command.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of runs.md")
            continue
        command.add_argument("--group", action="append", help="this group of the matrix alone; may be repeated")
        command.add_argument("--smoke", action="store_true", help="everything small, with transformers' generation")
        if name == "status":
            continue
        command.add_argument(
            "--model",
            action="append",
            help="folder of a model whose runs are made; may be repeated; the sums have the embedded one",
        )
        command.add_argument("--data", help="folder with train.jsonl and test.jsonl")
        command.add_argument("--parallel", type=int, default=5, help="runs at a time")
        command.add_argument("--stagger", type=float, default=8.0, help="seconds between two starts")
        command.add_argument("--memory", type=float, default=20.0, help="GiB of the GPU, for runs of a new kind")
        command.add_argument("--logs", type=Path, help="folder of the workers' logs (default: outputs/learning)")
        command.add_argument(
            "--mps", action="store_true", help="kernels of several runs at the same time: NVIDIA's MPS"
        )
        command.add_argument("--commit", help="what is recorded as the commit, where there is no repository")
        end = command.add_mutually_exclusive_group(required=True)
        end.add_argument("--deadline", type=float, help="seconds after which everything must have ended")
        end.add_argument("--until", help="time at which it must have ended, HH:MM or HH:MM:SS")
    worker = commands.add_parser("work", help="one run (started by `run`)")
    for name in ("name", "settings", "results"):
        worker.add_argument(f"--{name}", required=True)
    for name in ("model", "data"):
        worker.add_argument(f"--{name}")
    return parser.parse_args(arguments)


def end_time(deadline: float | None, until: str | None, now: float) -> float:
    """Time of `time.time` at which everything must have ended."""
    if deadline is not None:
        return now + deadline
    clock = datetime.strptime(str(until), "%H:%M:%S" if str(until).count(":") == 2 else "%H:%M")
    today = datetime.fromtimestamp(now)
    end = today.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
    return (end if end > today else end + timedelta(days=1)).timestamp()


def commit(given: str | None) -> str:
    """Commit of this tree: as given, or git's."""
    if given or os.environ.get("LEARNING_COMMIT"):
        return given or os.environ["LEARNING_COMMIT"]
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def folders_of_models(matrix: Matrix, folders: list[str], smoke: bool) -> dict[str, str]:
    """Folder of each of the matrix's models that there is; with `smoke` the last one stands for all of them."""
    if smoke:
        return {name: folder for folder in folders for name in matrix.content["models"]}
    return {matrix.model_in(folder): folder for folder in folders}


def embedded_models(matrix: Matrix) -> set[str]:
    """Models of the matrix that need no folder."""
    return {task["model"] for task in matrix.content["tasks"].values() if "model" in task}


def run(options: argparse.Namespace) -> int:
    matrix = Matrix.read(options.matrix, options.smoke)
    unknown = set(options.group or ()) - set(matrix.groups)
    if unknown:
        print(
            f"learning.py: no group {', '.join(sorted(unknown))}: there are {', '.join(matrix.groups)}.",
            file=sys.stderr,
        )
        return 2
    try:
        models = folders_of_models(matrix, options.model or [], options.smoke)
    except (OSError, ValueError) as error:
        print(f"learning.py: --model: {error}", file=sys.stderr)
        return 2
    given = {"data": options.data, "results": options.results.resolve()}
    deadline = end_time(options.deadline, options.until, time.time())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended as well
    with multi_process_service() if options.mps else contextlib.nullcontext({}) as shared:
        schedule = Schedule(
            matrix,
            options.results,
            functools.partial(worker_command, str(Path(__file__).resolve()), given, models),
            deadline,
            options.parallel,
            options.stagger,
            options.logs or Path("outputs") / "learning",
            options.memory,
            options.group,
            {**worker_environment(options.parallel), **shared, "LEARNING_COMMIT": commit(options.commit)},
            {*models, *embedded_models(matrix)},
        )
        print({name: len(names) for name, names in schedule.go().items()})
    return 0


def status(options: argparse.Namespace) -> int:
    matrix = Matrix.read(options.matrix, options.smoke)
    results = read_results(options.results)
    group = None
    for item in matrix.runs(results, options.group):
        if item.group != group:
            group = item.group
            print(f"\n{group}: {matrix.groups[group]}")
        if isinstance(item, Run):
            result = results.get(item.name)
            made = f"test {result['test']['accuracy']:.1%}" if result else "to be run"
            print(f"  {item.name:48} {made}")
        else:
            given = ", ".join(f"{key} {value}" for key, value in item.given.items() if key != "learning_rate")
            print(f"  {item.method}, {given}: waits for the rates of {item.rates_of}")
    runs = list(matrix.runs(results, options.group))
    made = sum(isinstance(item, Run) and item.name in results for item in runs)
    print(f"\n{made} of {len(runs)} made.")
    return 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.command == "work":
        sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
        import training_run

        training_run.main(options)
        return 0
    if options.command == "report":
        import report

        return report.main(options.matrix, options.results, options.docs)
    return {"run": run, "status": status}[options.command](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
