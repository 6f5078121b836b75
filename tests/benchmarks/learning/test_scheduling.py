"""Runs side by side, with workers that take no time: what is started when, and what is left."""

import contextlib
import itertools
import json
import os
import random
import socket
import sys
import threading
import time

import pytest


# Stands in for a run: notes when it started and ended, and does what its name asks for
WORKER = """
import os, pathlib, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
start, draft, failed = time.time(), folder / "runs" / f"{name}.json.part", folder / f"{name} failed"
draft.write_text("half")
if "slow" in name:
    time.sleep(1e6)  # until it is killed
if "breaks" in name or ("once" in name and not failed.exists()):
    failed.touch()
    sys.exit("CUDA out of memory")
print("@ready", flush=True)
for step in range(1, 9 * ("paced" in name)):  # 8 of its steps, each of which took so many seconds
    print(f"@step {step} {step * float(name.rpartition('-')[2])}", flush=True)
while "paced" in name and not (folder / "go on").exists():
    time.sleep(0.05)
time.sleep(0.2)
own = os.environ["MASTER_PORT"], os.environ["VLLM_CACHE_ROOT"]
(folder / "done").open("a").write(f"{start} {time.time()} {' '.join(own)}\\n")
draft.write_text('{"validations": [{"accuracy": 0.5}]}')
draft.rename(folder / "runs" / f"{name}.json")
"""


def content(methods, steps=1, **expected):
    """A matrix of one run per method."""
    return {
        "defaults": {"task": "t", "steps": steps, "completions": 1, "microbatch": 1},
        "tasks": {"t": {}},
        "expected": {"start": 0, "end": 0, "step": 0, "microbatch": 0, "alone": 0} | expected,
        "methods": {method: {} for method in methods},
        "groups": [{"group": "all", "over": {"method": list(methods)}}],
    }


@pytest.fixture
def scheduled(tmp_path, monkeypatch):
    """Schedules runs of the given methods, and returns the outcome, the order of the starts, and what is left."""
    import scheduling
    from matrix import Matrix

    kill = scheduling.Worker.kill
    monkeypatch.setattr(scheduling, "POLL", 0.05)
    monkeypatch.setattr(scheduling.Worker, "kill", lambda worker, pause=0.0: kill(worker, min(pause, 0.05)))
    script, runs = tmp_path / "worker.py", tmp_path / "runs"
    script.write_text(WORKER)

    def schedule(methods, deadline=1e6, parallel=2, steps=1, expected=1.0, until=None, memory=0.0):
        started = []

        def command(run):
            started.append(run.name)
            if until == run.name:
                threading.Thread(target=end, daemon=True).start()
            return [sys.executable, str(script), run.name, str(tmp_path)]

        def end():
            """Time is up once the run is made and every slow one has begun, however long that took."""
            files = [runs / f"{until}.json", *(runs / f"{name}.json.part" for name in methods if "slow" in name)]
            while not all(file.exists() for file in files) or any(w.run.name == until for w in made.running):
                time.sleep(0.05)
            made.deadline = time.time()

        matrix = Matrix(content(methods, steps, start=expected))
        end_time, logs = time.time() + deadline, tmp_path / "logs"
        made = scheduling.Schedule(matrix, runs, command, end_time, parallel, 0.0, logs, memory)
        return made.go(), started, sorted(path.name for path in runs.iterdir())

    return schedule


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Has the machine say that so many GiB of its GPU's are free."""

    def says(free, total):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho {free * 1024}, {total * 1024}\n")
        (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    return says


def test_every_run_is_made_once_and_those_side_by_side_share_nothing(scheduled, tmp_path):
    names = ["a", "b", "c", "d"]
    outcome, started, left = scheduled(names)
    assert sorted(outcome.pop("made")) == started == names and outcome == {"failed": [], "discarded": []}
    runs = [line.split() for line in (tmp_path / "done").read_text().splitlines()]
    spans = [(float(start), float(end)) for start, end, *_ in runs]
    assert all(sum(first <= now <= last for first, last in spans) <= 2 for now, _ in spans)
    ports, caches = zip(*(run[2:] for run in runs), strict=True)
    assert len(set(ports)) == 4 and len(set(caches)) <= 2  # later ones have the caches of earlier ones
    for one, other in itertools.combinations(range(4), 2):
        if spans[one][0] < spans[other][1] and spans[other][0] < spans[one][1]:
            assert caches[one] != caches[other]
    # What is made is not made again
    outcome, started, left = scheduled([*names, "e"])
    assert outcome["made"] == started == ["e"] and left == [f"{name}.json" for name in [*names, "e"]]


def test_a_run_that_fails_is_tried_once_more_and_stops_nobody(scheduled):
    outcome, started, left = scheduled(["a", "once", "breaks"])
    assert sorted(outcome["made"]) == ["a", "once"] and outcome["failed"] == ["breaks"]
    assert sorted(started) == ["a", "breaks", "breaks", "once", "once"] and left == ["a.json", "once.json"]


def test_where_every_attempt_fails_the_next_ones_are_not_made(scheduled):
    outcome, started, _ = scheduled([f"breaks{index}" for index in range(9)], parallel=3)
    assert outcome["made"] == [] and len(started) < 9


@pytest.mark.parametrize(("name", "attempts"), [("a", 1), ("once", 2)])
def test_no_run_waits_for_another_and_what_is_unfinished_at_the_deadline_leaves_nothing(scheduled, name, attempts):
    """The first one never becomes ready, and the deadline waits for the other, which may need a second attempt."""
    outcome, started, left = scheduled(["slow", name], until=name)
    assert outcome == {"made": [name], "failed": [], "discarded": ["slow"]}
    assert started == ["slow"] + [name] * attempts and left == [f"{name}.json"]


@pytest.mark.parametrize(("memory", "at_a_time"), [(14.0, 2), (16.0, 1), (40.0, 1)])
def test_no_more_runs_are_side_by_side_than_may_come_to_fit_into_what_was_free(
    scheduled, gpu, tmp_path, memory, at_a_time
):
    gpu(30, 140)
    outcome, started, _ = scheduled(["a", "b", "c"], parallel=3, memory=memory)
    assert sorted(outcome["made"]) == started == ["a", "b", "c"]
    spans = [tuple(map(float, line.split()[:2])) for line in (tmp_path / "done").read_text().splitlines()]
    assert all(sum(first <= now <= last for first, last in spans) <= at_a_time for now, _ in spans)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_cannot_end_before_the_deadline_is_not_started(scheduled, tmp_path, earlier):
    """As the matrix says, or as a run of the same task took."""
    if earlier:
        (tmp_path / "runs").mkdir()
        settings, seconds = {"task": "t", "steps": 1, "microbatch": 1}, {"total": 100.0, "train": 60.0}
        made = {"settings": settings, "hardware": {"parallel": 1}, "seconds": seconds}
        (tmp_path / "runs" / "earlier.json").write_text(json.dumps(made))
    outcome, started, _ = scheduled(["a"], deadline=50.0, parallel=1, expected=1.0 if earlier else 100.0)
    assert outcome["made"] == [] and started == []


@pytest.mark.parametrize(
    ("training", "ending", "paces", "fits"),
    [
        (0, 0, [], True),  # 5e6 s beside one other: as long as alone
        (2, 0, [], False),  # 6e6 s
        (1, 2, [], True),  # those that end leave the machine to it
        (1, 0, [2.0, 1.0], True),  # the last one was as fast as expected
        (1, 0, [1.0, 2.0], False),
        (3, 0, [0.5, 0.6], True),  # all of this stretch were so much faster
        (3, 0, [1.0, 0.5], False),  # there are as many as there may be: the slowest counts
    ],
)
def test_towards_the_deadline_fewer_at_a_time_are_started(tmp_path, training, ending, paces, fits):
    """With four at a time, a run takes 8e6 s, and 5.5e6 are left."""
    from matrix import Matrix, Run
    from scheduling import ENDING, Schedule, Worker

    matrix = Matrix(content(["a"], step=2e6, alone=5e6))
    schedule = Schedule(matrix, tmp_path, lambda run: [], time.time() + 5.5e6, 4, 0.0, tmp_path)
    schedule.paces += paces
    for index in range(training + ending):
        run = Run(f"b{index}", "all", "m", {"task": "t", "steps": 1, "microbatch": 1})
        schedule.running.append(Worker(run, None, tmp_path / "log", time.time(), index))
        schedule.running[-1].marks |= {ENDING} if index >= training else set()
    assert bool(schedule._candidates()) == fits


def test_a_run_that_would_end_too_late_is_given_up_and_the_others_end(scheduled, tmp_path):
    """
    Of 100 steps 8 are made. Of 10, 10 and 200 s each, 920, 920 and 18,400 s are left, or 920, 920 and 6,747 s, as the
    last one becomes faster when the others have ended; the deadline is in 5,500. Nothing is started after that.
    """
    names = ["paced-10", "paced-10.0", "paced-200", "a"]

    def go_on():
        while "given up" not in (tmp_path / "said").read_text():
            time.sleep(0.05)
        (tmp_path / "go on").touch()

    (tmp_path / "said").touch()
    threading.Thread(target=go_on, daemon=True).start()
    with open(tmp_path / "said", "w") as said, contextlib.redirect_stdout(said):
        outcome, started, left = scheduled(names, parallel=3, steps=100, deadline=5500.0)
    assert sorted(outcome.pop("made")) == names[:2] and outcome == {"failed": [], "discarded": ["paced-200"]}
    assert started == names[:3] and left == ["paced-10.0.json", "paced-10.json"]


@pytest.fixture
def waiting(tmp_path, gpu):
    """A schedule of 100 GiB, with runs under way, and others, that may come to take so much."""
    from matrix import Matrix, Run
    from scheduling import Schedule, Worker

    def run(index, gib):
        return Run(f"{index}-{gib}", "all", "m", {"task": "t", "method": gib, "steps": 1})

    def made(under_way, candidates):
        gpu(100, 100)
        for gib in {*under_way, *candidates}:
            result = {"settings": run(0, gib).settings, "hardware": {"peak_gib": gib - 1.6}}
            (tmp_path / f"{gib}.json").write_text(json.dumps(result))
        schedule = Schedule(Matrix(content(["a"])), tmp_path, lambda run: [], 0.0, 9, 0.0, tmp_path)
        runs = [run(index, gib) for index, gib in enumerate([*under_way, *candidates])]
        schedule.running = [
            Worker(one, None, tmp_path, 0.0, index) for index, one in enumerate(runs[: len(under_way)])
        ]
        return schedule, runs[len(under_way) :]

    return made


@pytest.mark.parametrize(
    ("under_way", "candidates", "which"),
    [
        ([50, 20], [29, 10], 0),
        ([50, 20], [41, 10], 1),  # when the 50 have ended there is memory for the first one
        ([20, 50], [41, 10], None),  # when the 20 have ended there would not be
        ([50, 20], [31, 32, 29], 2),
        ([30, 30], [69, 30], None),  # or the first one would wait for ever
        ([30], [69, 30], 0),
        ([], [150, 10], 0),  # is tried, on a machine of its own
        ([10], [150, 10], None),
    ],
)
def test_a_run_may_overtake_one_that_there_is_no_memory_for_if_that_does_not_wait_the_longer(
    waiting, under_way, candidates, which
):
    schedule, runs = waiting(under_way, candidates)
    assert schedule._next_of(runs) == (None if which is None else runs[which])
    schedule.stagger, schedule.last_start = 1e6, time.time()
    assert schedule._next_of(runs) is None


def test_nobody_waits_for_those_that_were_not_there_when_it_began_to_wait(waiting):
    from scheduling import Worker

    draw = random.Random(0)
    overtaken = 0
    for _ in range(50):
        schedule, runs = waiting([], [draw.choice([10, 20, 30, 45, 70, 120]) for _ in range(12)])
        first, before = None, []
        while runs:
            if runs[0] is not first:
                first, before = runs[0], list(schedule.running)
            if run := schedule._next_of(runs):
                overtaken += run is not first
                schedule.running.append(Worker(run, None, None, 0.0, 0))
                runs.remove(run)
            else:  # one of them ends
                assert any(worker in schedule.running for worker in before)
                schedule.running.remove(draw.choice(schedule.running))
    assert overtaken > 50


def test_a_port_that_somebody_holds_or_was_promised_is_not_given():
    from scheduling import PORTS, free_port

    with socket.socket() as other:
        for held in PORTS:
            with contextlib.suppress(OSError):
                other.bind(("localhost", held))
                break
        other.listen()
        assert free_port({*PORTS} - {held, held + 1}) == held + 1
        for taken in (set(PORTS) - {held}, set(PORTS)):
            with pytest.raises(OSError, match="no port from 20000 to 29999 is free"):
                free_port(taken)


def test_runs_of_several_schedules_on_one_machine_share_its_memory(tmp_path, monkeypatch, gpu):
    from matrix import Matrix
    from scheduling import Schedule, worker_environment

    def gib(parallel):
        matrix, environment = Matrix(content(["a"])), worker_environment(parallel)
        return Schedule(matrix, tmp_path, lambda run: [], 0.0, parallel, 0.0, tmp_path, environment=environment).gib

    monkeypatch.setenv("PATH", str(tmp_path))
    assert gib(8) == float("inf")  # without a GPU
    gpu(120, 140)
    assert gib(8) == 120
    monkeypatch.setenv("LEARNING_PARALLEL", "8")
    assert (gib(6), gib(2)) == (105, 35)
    gpu(30, 140)  # the others were there before
    assert gib(2) == 30


def test_runs_of_several_schedules_on_one_machine_share_its_cores_and_say_so(tmp_path, monkeypatch):
    from matrix import Matrix
    from scheduling import Schedule, worker_environment

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("LEARNING_PARALLEL", "8")
    environment = worker_environment(2)
    assert (environment["LEARNING_PARALLEL"], environment["OMP_NUM_THREADS"]) == ("8", "2")
    # What runs take is known from others that shared the GPU's kernels, whoever started the service
    schedules = []
    for _ in range(2):
        schedules.append(Schedule(Matrix(content(["a"])), tmp_path, lambda *_: [], 0.0, 2, 0.0, tmp_path))
        monkeypatch.setenv("LEARNING_MPS", "1")
    assert [schedule.shared for schedule in schedules] == [False, True]
