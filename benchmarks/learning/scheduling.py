"""Several runs of `learning.py` side by side on one machine, each in a process of its own, until a deadline."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix import Matrix, Run, read_results


# Lines by which a worker says how far it is; behind STEP are the number of the step and the seconds of training so far
READY, ENDING, STEP = "@ready", "@ending", "@step"
POLL = 0.5
# Steps over which a worker's pace is taken; an even number, since every second step has a generation
WINDOW = 6
# Of the time that is left, by which a run must be late to be given up: paces are no better known
DOUBT = 0.15
MPS = "nvidia-cuda-mps-control"
# Below those that systems hand out by themselves (Linux from 32768 on): such a one may be another's by the time that
# the worker has come to use it, half a minute later
PORTS = range(20_000, 30_000)


@dataclass
class Worker:
    run: Run
    process: subprocess.Popen
    log: Path
    started: float
    slot: int
    read: int = 0
    marks: set[str] = field(default_factory=set)
    steps: list[tuple[int, float]] = field(default_factory=list)

    def look(self) -> None:
        """Read what was written to the log since the last look."""
        with open(self.log, errors="replace") as file:
            file.seek(self.read)
            lines = file.readlines()
            if lines and not lines[-1].endswith("\n"):
                lines.pop()
        self.read += sum(len(line.encode(errors="replace")) for line in lines)
        for line in lines:
            if line.startswith(STEP):
                _, step, seconds = line.split()
                self.steps.append((int(step), float(seconds)))
            elif line.startswith("@"):
                self.marks.add(line.strip())

    @property
    def ready(self) -> bool:
        return READY in self.marks

    @property
    def seconds_left(self) -> float | None:
        """Of training, at the pace of the last steps; None where there are too few."""
        if len(self.steps) <= WINDOW:
            return None
        (first, before), (last, now) = self.steps[-1 - WINDOW], self.steps[-1]
        return (self.run.settings["steps"] - last) * (now - before) / (last - first)

    def kill(self, pause: float = 0.0) -> None:
        """
        Args:
            pause: seconds between stopping and ending it. What others share a GPU with must not be ended amid its
                kernels: under the multi-process service they may fail with it.
        """
        try:
            if pause:
                os.killpg(self.process.pid, signal.SIGSTOP)
                time.sleep(pause)
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Schedule:
    """
    Takes the next unfinished runs of a matrix until all are made or the deadline comes.

    Starts are `stagger` seconds apart. Runs that are under way together have compilers' caches of their own, so that
    none waits for what another compiles; the run that takes the place of one that has ended has its caches, too.
    Memory goes on growing while runs train, so what all of them may come to take has to fit into what was free before.

    Towards the deadline fewer than `parallel` are made at a time, and so faster, as long as that lets another one end.
    A run that is behind at its pace is given up before the deadline: the one that has most to do, so that the others,
    which are the faster for it, end in time. After that nothing is started. Where as many attempts as there are places
    failed and none got to its first step, the next ones would fail as well, and it ends at once.

    Args:
        matrix: the runs.
        results: folder of the finished ones; a worker leaves `<name>.json` there.
        command: from a run, the worker's command line.
        deadline: time (of `time.time`) at which everything must have ended.
        parallel: number of runs at a time.
        stagger: seconds between two starts.
        logs: folder of the workers' logs.
        memory: GiB of the GPU that a run may come to take, where none like it is finished.
        groups: names of the groups to take, all if None.
        environment: added to the workers' environment.
        models: names of the models whose runs can be made, all if None.
    """

    def __init__(
        self,
        matrix: Matrix,
        results: Path,
        command: Callable[[Run], list[str]],
        deadline: float,
        parallel: int,
        stagger: float,
        logs: Path,
        memory: float = 0.0,
        groups: list[str] | None = None,
        environment: dict[str, str] | None = None,
        models: Collection[str] | None = None,
    ):
        self.matrix, self.results, self.command = matrix, results, command
        self.deadline, self.parallel, self.stagger = deadline, parallel, stagger
        self.logs, self.memory, self.groups, self.environment = logs, memory, groups, environment or {}
        self.models = models
        self.running: list[Worker] = []
        self.ports: set[int] = set()  # that a worker was given
        self.failures: Counter[str] = Counter()
        self.shared = "LEARNING_MPS" in {*os.environ, *self.environment}  # also if somebody else has started it
        self.earlier = read_results(results)  # from which it is known what a run takes
        self.gib = gib_for(parallel / int(self.environment.get("LEARNING_PARALLEL", parallel)))
        self.paces: list[float] = []  # seconds taken over seconds expected, of each run made
        self.last_start = float("-inf")
        self.given_up: list[str] = []
        self.fruitless = 0  # attempts that failed, without one that got to its first step

    def go(self) -> dict[str, list[str]]:
        """Work until nothing is left or the deadline; the names of runs made, failed and discarded."""
        self.results.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        made: list[str] = []
        discarded = self.given_up
        try:
            while time.time() < self.deadline:
                made += self._reap()
                self._give_up_the_late()
                if self.fruitless >= max(3, self.parallel):
                    self._say(f"the last {self.fruitless} attempts failed: ended")
                    break
                candidates = self._candidates() if self._has_room() and not self.given_up else []
                if not candidates and not self.running:
                    break
                if run := self._next_of(candidates):
                    self._start(run)
                time.sleep(min(POLL, max(0.0, self.deadline - time.time())))
            made += self._reap()
        finally:
            for worker in self.running:
                worker.kill()
                self._tidy(worker.run)
                discarded.append(worker.run.name)
                self._say(f"discarded {worker.run.name}: not finished at the deadline")
            self.running = []
        failed = [name for name, count in self.failures.items() if count > 1]
        return {"made": made, "failed": failed, "discarded": discarded}

    def _candidates(self) -> list[Run]:
        """Runs, in order, that are neither made nor under way nor given up, and that can end before the deadline."""
        results = read_results(self.results)
        taken = {worker.run.name for worker in self.running} | set(results)
        return [
            run
            for run in self.matrix.runs(results, self.groups)
            if isinstance(run, Run)
            and run.name not in taken
            and (self.models is None or run.settings.get("model") in self.models)
            and self.failures[run.name] < 2
            and self._can_end(run)
        ]

    def _can_end(self, run: Run) -> bool:
        """Before the deadline: beside as many as there may be, or beside those alone that are training now."""
        left = self.deadline - time.time()
        # The slowest of this stretch says more than earlier ones
        if max(self.paces, default=1.0) * self._expected(run) < left:
            return True
        several = 1 + sum(ENDING not in worker.marks for worker in self.running)
        if several >= self.parallel:
            return False
        # The last one of this stretch, as the slowest are those that had to compile; what is late is given up
        pace = self.paces[-1] if self.paces else 1.0
        return pace * self.matrix.expected_seconds(run, self.earlier, several, self.shared) < left

    def _expected(self, run: Run) -> float:
        return self.matrix.expected_seconds(run, self.earlier, self.parallel, self.shared)

    def _give_up_the_late(self) -> None:
        """End the run that would end last, where that is too late and others have the machine's time of it."""
        training = [worker for worker in self.running if ENDING not in worker.marks]
        seconds = [worker.seconds_left for worker in training]
        if len(training) < 2 or None in seconds:
            return
        ends = [
            left + self.matrix.expected_end(worker.run, self.earlier, self.parallel, self.shared)
            for worker, left in zip(training, shared_seconds(seconds), strict=True)
        ]
        left = self.deadline - time.time()
        late = max(ends) - left
        if late <= DOUBT * left:
            return
        worker = training[ends.index(max(ends))]
        self._say(f"given up {worker.run.name}: it would end {late:.0f} s after the deadline")
        worker.kill(pause=2.0)
        self.running.remove(worker)
        self._tidy(worker.run)
        self.given_up.append(worker.run.name)
        for other in self.running:
            other.steps = other.steps[-1:]  # they are faster now

    def _has_room(self) -> bool:
        return sum(worker.run.settings["steps"] > 0 for worker in self.running) < self.parallel

    def _next_of(self, candidates: list[Run]) -> Run | None:
        """The first that there is memory for. One that is overtaken has it when the oldest of those under way ends."""
        if time.time() - self.last_start < self.stagger:
            return None
        under_way = [self._gib(worker.run) for worker in self.running]
        overtaken = 0.0
        for run in candidates:
            own = self._gib(run)
            # Alone, one is tried whatever it may take
            if not under_way or max(sum(under_way), sum(under_way[1:]) + overtaken) + own <= self.gib:
                return run
            overtaken = overtaken or own
        return None

    def _gib(self, run: Run) -> float:
        return self.matrix.expected_gib(run, self.earlier, self.memory)

    def _start(self, run: Run) -> None:
        attempt = self.failures[run.name] + 1
        log = self.logs / f"{run.name}.{attempt}.log"
        port = free_port(self.ports)
        self.ports.add(port)
        slot = min(set(range(len(self.running) + 1)) - {worker.slot for worker in self.running})
        own = {"PYTHONUNBUFFERED": "1", "MASTER_PORT": str(port), **self._caches(slot)}
        with open(log, "w") as file:
            process = subprocess.Popen(
                self.command(run),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment, **own},
            )
        self.last_start = time.time()
        self.running.append(Worker(run, process, log, self.last_start, slot))
        self._say(f"started {run.name}" + (" again" if attempt > 1 else ""))

    def _caches(self, slot: int) -> dict[str, str]:
        folder = self.logs.resolve() / "caches" / str(slot)
        return {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}

    def _reap(self) -> list[str]:
        made = []
        for worker in list(self.running):
            ended = worker.process.poll() is not None  # before the look, so that nothing is missed
            worker.look()
            if worker.ready:
                self.fruitless = 0
            if not ended:
                continue
            self.running.remove(worker)
            seconds = time.time() - worker.started
            if worker.process.returncode == 0 and (self.results / f"{worker.run.name}.json").exists():
                made.append(worker.run.name)
                if worker.run.settings["steps"]:  # one without says little about the others
                    self.paces.append(seconds / self._expected(worker.run))
                self._say(f"made {worker.run.name} in {seconds:.0f} s")
            else:
                self._tidy(worker.run)
                self.failures[worker.run.name] += 1
                self.fruitless += not worker.ready
                self._say(f"failed {worker.run.name} (exit {worker.process.returncode}), log {worker.log}:")
                print("    " + "    ".join(worker.log.read_text(errors="replace").splitlines(True)[-15:]), flush=True)
        return made

    def _tidy(self, run: Run) -> None:
        (self.results / f"{run.name}.json.part").unlink(missing_ok=True)

    def _say(self, text: str) -> None:
        left = self.deadline - time.time()
        print(f"[{time.strftime('%H:%M:%S')}, {left:.0f} s left, {len(self.running)} running] {text}", flush=True)


def shared_seconds(seconds: Sequence[float]) -> list[float]:
    """
    When each of several runs ends that share a machine evenly, from the seconds it would take at its present pace: as
    often as one ends, the others become faster.
    """
    ends, now, done = [0.0] * len(seconds), 0.0, 0.0
    for place, index in enumerate(sorted(range(len(seconds)), key=lambda i: seconds[i])):
        now += (seconds[index] - done) * (len(seconds) - place) / len(seconds)
        ends[index], done = now, seconds[index]
    return ends


def free_port(taken: set[int]) -> int:
    """
    A port that nobody listens on, and that no worker was given: it may not have come to use it yet. By itself TRL
    looks for one among four, and workers that start together find the same.
    """
    # In any order: another schedule on this machine looks among the same
    for port in random.sample(PORTS, len(PORTS)):
        if port not in taken:
            with contextlib.suppress(OSError), socket.socket() as listener:
                listener.bind(("", port))
                return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free: the workers need one each.")


def gib_for(share: float) -> float:
    """Memory of the GPU that is free, up to this share of all that it has; infinite where there is no GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        free, total = (float(mib) / 1024 for mib in output.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return float("inf")
    return min(free, share * total)


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """
    NVIDIA's multi-process service, under which kernels of several processes run on one GPU at the same time instead of
    taking turns, and the environment of a process that takes part.
    """
    if shutil.which(MPS) is None:
        raise FileNotFoundError(f"--mps needs {MPS}, which comes with NVIDIA's driver and is not on the PATH.")
    with tempfile.TemporaryDirectory(prefix="mps") as folder:  # of a short name, as sockets need it
        shared = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], check=True, env={**os.environ, **shared})
        try:
            yield {**shared, "LEARNING_MPS": "1"}
        finally:
            subprocess.run([MPS], input="quit\n", text=True, env={**os.environ, **shared}, capture_output=True)


def worker_environment(parallel: int) -> dict[str, str]:
    """
    What workers need where nothing can be downloaded, and their share of the cores. Where other schedules share the
    machine, `LEARNING_PARALLEL` says how many runs there are in all.
    """
    parallel = int(os.environ.get("LEARNING_PARALLEL", parallel))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // parallel))),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "LEARNING_PARALLEL": str(parallel),
    }


def worker_command(script: str, options: dict[str, Any], models: dict[str, str], run: Run) -> list[str]:
    """The command line of one run: `learning.py work`, with the folder of its model if that is among those given."""
    options = {**options, "model": models.get(run.settings["model"])}
    arguments = [sys.executable, script, "work", "--name", run.name, "--settings", json.dumps(run.settings)]
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments
