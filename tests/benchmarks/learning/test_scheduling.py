"""Runs side by side, with workers that take no time: what is started when, and what is left."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest


# Stands in for a run: notes when it started and ended, and does what its name asks for
WORKER = """
import json, os, pathlib, sys, time
name, folder, attempt = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
note = lambda what: open(folder / "events", "a").write(f"{what} {name} {time.time()}\\n")
note("start")
(folder / "ports").open("a").write(os.environ["MASTER_PORT"] + "\\n")
(folder / "caches").open("a").write(name + " " + os.environ["VLLM_CACHE_ROOT"] + "\\n")
if "slow" in name:
    (folder / "runs" / f"{name}.json.part").write_text("half")
    time.sleep(1e6)  # until it is killed
if "breaks" in name or ("once" in name and attempt == 1):
    sys.exit("Error in memory profiling")
time.sleep(0.3)
note("ready")
print("@ready", flush=True)
for step in range(1, 9 * ("paced" in name)):  # 8 of its steps, each of which took so many seconds
    print(f"@step {step} {step * float(name.rpartition('-')[2])}", flush=True)
while "paced" in name and not (folder / "go on").exists():
    time.sleep(0.05)
time.sleep(0.3)
note("end")
(folder / "runs" / f"{name}.json").write_text(json.dumps({"validations": [{"accuracy": 0.5}]}))
"""


@pytest.fixture
def scheduled(tmp_path):
    """Schedules runs of the given methods, and returns the outcome, which runs were started in which order, and what
    the workers wrote. Workers started one after the other write in any order: the machine decides who comes first."""
    from matrix import Matrix
    from scheduling import Schedule

    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def schedule(methods, deadline=1e6, parallel=2, stagger=0.0, steps=1, expected=1.0, until=None):
        started = []

        def command(run, attempt):
            started.append(run.name)
            if until == run.name:
                threading.Thread(target=end, daemon=True).start()
            return [sys.executable, str(script), run.name, str(tmp_path), str(attempt)]

        def end():
            """Time is up once the run is made and every slow one has begun, however long that took."""
            drafts = [tmp_path / "runs" / f"{name}.json.part" for name in methods if "slow" in name]
            while not all(draft.exists() for draft in drafts) or not ("slow" in until or is_made(until)):
                time.sleep(0.05)
            made.deadline = time.time()

        def is_made(name):
            return (tmp_path / "runs" / f"{name}.json").exists() and all(w.run.name != name for w in made.running)

        content = {
            "defaults": {"task": "t", "steps": steps, "completions": 1, "microbatch": 1},
            "tasks": {"t": {}},
            "expected": {"start": expected, "end": 0, "step": 0, "microbatch": 0, "alone": 0},
            "methods": {method: {} for method in methods},
            "groups": [{"group": "all", "over": {"method": methods}}],
        }
        last = time.time() + deadline
        folders = tmp_path / "runs", tmp_path / "logs"
        made = Schedule(Matrix(content), folders[0], command, last, parallel, stagger, folders[1])
        outcome = made.go()
        events = (tmp_path / "events").read_text().splitlines() if (tmp_path / "events").exists() else []
        return outcome, started, [tuple(line.split()) for line in events]

    return schedule


def most_at_a_time(events):
    running = most = 0
    for what, *_ in events:
        running += {"start": 1, "end": -1}.get(what, 0)
        most = max(most, running)
    return most


def test_every_run_is_made_once_and_never_more_than_allowed_at_a_time(scheduled, tmp_path):
    names = ["a", "b", "c", "d", "e"]
    outcome, started, events = scheduled(names, parallel=2)
    assert sorted(outcome["made"]) == names and not outcome["failed"] and not outcome["discarded"]
    assert started == names and sorted(name for what, name, _ in events if what == "start") == names
    assert most_at_a_time(events) <= 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"{name}.json" for name in names}


def test_no_run_waits_until_another_is_ready(scheduled):
    """The first one never becomes ready, and the deadline waits for the other."""
    outcome, started, _ = scheduled(["slow", "a"], parallel=2, until="a")
    assert outcome["made"] == ["a"] and outcome["discarded"] == ["slow"]
    assert started == ["slow", "a"]


def test_what_is_made_is_not_made_again(scheduled, tmp_path):
    scheduled(["a", "b"])
    outcome, started, _ = scheduled(["a", "b", "c"])
    assert outcome["made"] == started == ["c"]


def test_a_run_that_fails_is_tried_once_more(scheduled):
    outcome, started, _ = scheduled(["a", "once", "b"])
    assert sorted(outcome["made"]) == ["a", "b", "once"] and outcome["failed"] == []
    assert started.count("once") == 2


def test_a_run_that_always_fails_is_given_up_and_stops_nobody(scheduled):
    outcome, started, _ = scheduled(["breaks", "a", "b"])
    assert sorted(outcome["made"]) == ["a", "b"] and outcome["failed"] == ["breaks"]
    assert started.count("breaks") == 2


def test_what_is_unfinished_at_the_deadline_leaves_nothing_behind(scheduled, tmp_path):
    outcome, *_ = scheduled(["slow"], until="slow")
    assert outcome == {"made": [], "failed": [], "discarded": ["slow"]}
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_cannot_end_before_the_deadline_is_not_started(scheduled, tmp_path):
    outcome, started, _ = scheduled(["a"], deadline=5.0, expected=50.0)
    assert outcome["made"] == [] and started == []


def test_the_first_run_of_a_stretch_counts_on_what_earlier_runs_took(scheduled, tmp_path):
    """The matrix says 1 s; a run of the same task took 100 s, so that another does not fit into 50."""
    (tmp_path / "runs").mkdir()
    seconds = {"total": 100.0, "train": 60.0}
    settings = {"task": "t", "steps": 1, "microbatch": 1}
    earlier = {"settings": settings, "hardware": {"parallel": 1}, "seconds": seconds}
    (tmp_path / "runs" / "earlier.json").write_text(json.dumps(earlier))
    outcome, started, _ = scheduled(["a"], deadline=50.0, parallel=1)
    assert outcome["made"] == [] and started == []


@pytest.mark.parametrize(("paces", "fits"), [([], False), ([0.4], True), ([0.4, 0.9], False)])
def test_the_slowest_run_of_this_stretch_says_more_than_what_was_expected(tmp_path, paces, fits):
    from matrix import Matrix
    from scheduling import Schedule

    content = {
        "defaults": {"task": "t", "steps": 1, "completions": 1, "microbatch": 1},
        "tasks": {"t": {}},
        "expected": {"start": 1e7, "end": 0, "step": 0, "microbatch": 0, "alone": 0},
        "methods": {"a": {}},
        "groups": [{"group": "all", "over": {"method": ["a"]}}],
    }
    deadline = time.time() + 6e6
    schedule = Schedule(Matrix(content), tmp_path, lambda run, attempt: [], deadline, 1, 0.0, tmp_path)
    schedule.paces += paces
    assert bool(schedule._candidates()) == fits


@pytest.mark.parametrize(
    ("training", "ending", "paces", "fits"),
    [
        (0, 0, [], True),  # 5e6 s beside one other: as long as alone
        (1, 0, [], True),
        (2, 0, [], False),  # 6e6 s
        (1, 2, [], True),  # those that end leave the machine to it
        (1, 0, [2.0, 1.0], True),  # the last one was as fast as expected
        (1, 0, [1.0, 2.0], False),
        (3, 0, [1.0, 0.5], False),  # there are as many as there may be: the slowest counts
    ],
)
def test_towards_the_deadline_fewer_at_a_time_are_started(tmp_path, training, ending, paces, fits):
    """With four at a time, a run takes 8e6 s, and 5.5e6 are left."""
    from matrix import Matrix, Run
    from scheduling import ENDING, Schedule, Worker

    content = {
        "defaults": {"task": "t", "steps": 1, "completions": 1, "microbatch": 1},
        "tasks": {"t": {}},
        "expected": {"start": 0, "end": 0, "step": 2e6, "microbatch": 0, "alone": 5e6},
        "methods": {"a": {}},
        "groups": [{"group": "all", "over": {"method": ["a"]}}],
    }
    schedule = Schedule(Matrix(content), tmp_path, lambda run, attempt: [], time.time() + 5.5e6, 4, 0.0, tmp_path)
    schedule.paces += paces
    for index in range(training + ending):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        run = Run(f"b{index}", "all", "m", {"task": "t", "steps": 1, "microbatch": 1})
        schedule.running.append(Worker(run, process, tmp_path / "log", time.time(), 1, index))
        schedule.running[-1].marks |= {ENDING} if index >= training else set()
    assert bool(schedule._candidates()) == fits


def test_a_run_that_would_end_too_late_is_given_up_and_the_others_end(scheduled, tmp_path):
    """
    Of 100 steps 8 are made. Of 10, 10 and 200 s each, 920, 920 and 18,400 s are left, or 920, 920 and 6,747 s, as the
    last one becomes faster when the others have ended; the deadline is in 6,000. Nothing is started after that.
    """
    names = ["paced-10", "paced-10.0", "paced-200", "a"]

    def go_on():
        while "given up" not in (tmp_path / "said").read_text():
            time.sleep(0.05)
        (tmp_path / "go on").touch()

    (tmp_path / "said").touch()
    threading.Thread(target=go_on, daemon=True).start()
    with open(tmp_path / "said", "w") as said, contextlib.redirect_stdout(said):
        outcome, started, _ = scheduled(names, parallel=3, steps=100, deadline=6000.0)
    assert sorted(outcome["made"]) == ["paced-10", "paced-10.0"] and outcome["failed"] == []
    assert outcome["discarded"] == ["paced-200"] and started == names[:3]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"paced-10.json", "paced-10.0.json"}


@pytest.mark.parametrize(
    ("paces", "marks", "given_up"),
    [
        ([10, 200], {}, ["b"]),
        ([10, 100], {}, []),  # 9,200 s at its pace, but 5,060 once the first has ended
        ([10, 200], {1: "@ending"}, []),  # it has no more steps to make
        ([10, 200], {0: "@ending"}, []),  # no other run would have the time of it
        ([10, None], {}, []),  # nothing is known about it yet
    ],
)
def test_only_runs_that_cannot_end_in_time_are_given_up(tmp_path, paces, marks, given_up):
    from matrix import Matrix, Run
    from scheduling import Schedule, Worker

    content = {"expected": {"start": 0, "end": 0, "step": 0, "microbatch": 0, "alone": 0}, "groups": []}
    schedule = Schedule(Matrix(content), tmp_path, lambda run, attempt: [], time.time() + 6000, 2, 0.0, tmp_path)
    sleep = [sys.executable, "-c", "import time; time.sleep(1e6)"]
    workers = []
    for index, pace in enumerate(paces):
        run = Run("ab"[index], "all", "m", {"task": "t", "steps": 100, "microbatch": 1})
        process = subprocess.Popen(sleep, start_new_session=True)
        workers.append(Worker(run, process, tmp_path / "log", time.time(), 1, index))
        workers[-1].steps += [(step, step * pace) for step in range(1, 9)] if pace else []
        workers[-1].marks |= {marks[index]} if index in marks else set()
    schedule.running += workers
    try:
        schedule._give_up_the_late()
        assert schedule.given_up == given_up
        assert [worker.process.poll() is not None for worker in workers] == [False, bool(given_up)]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ([], []),
        ([5.0], [5.0]),
        ([6.0, 6.0], [6.0, 6.0]),
        ([40.0, 10.0], [25.0, 10.0]),
        ([9.0, 3.0, 6.0], [6.0, 3.0, 5.0]),
    ],
)
def test_runs_that_share_a_machine_become_faster_as_others_end(seconds, ends):
    from scheduling import shared_seconds

    assert shared_seconds(seconds) == pytest.approx(ends)


def test_where_every_attempt_fails_the_next_ones_are_not_made(scheduled):
    outcome, started, _ = scheduled([f"breaks{index}" for index in range(9)], parallel=3)
    assert outcome["made"] == [] and len(started) < 9


def test_the_multi_process_service_is_started_and_ended(tmp_path, monkeypatch):
    """A program of the same name stands in for NVIDIA's, which needs a GPU."""
    from scheduling import multi_process_service

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="--mps needs nvidia-cuda-mps-control"), multi_process_service():
        pass
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + ' ' "
        "+ (sys.argv[1] if sys.argv[1:] else sys.stdin.read().strip()) + '\\n')\n"
    )
    program.chmod(0o755)
    with multi_process_service() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder) and environment["LEARNING_MPS"] == "1"
        assert (tmp_path / "calls").read_text().split() == [folder, "-d"]
    assert (tmp_path / "calls").read_text().split() == [folder, "-d", folder, "quit"]


def test_runs_side_by_side_have_ports_of_their_own(scheduled, tmp_path):
    scheduled(["a", "b", "c"], parallel=3)
    ports = (tmp_path / "ports").read_text().split()
    assert len(set(ports)) == 3


def test_runs_side_by_side_have_caches_of_their_own_and_later_ones_those_of_earlier_ones(scheduled, tmp_path):
    scheduled(["slow", "a", "b", "c"], parallel=2, until="c")
    caches = dict(line.split() for line in (tmp_path / "caches").read_text().splitlines())
    assert caches["a"] == caches["b"] == caches["c"] != caches["slow"]


def test_a_port_that_somebody_holds_or_was_promised_is_not_given():
    from scheduling import PORTS, free_port

    ports: set[int] = set()
    for _ in range(50):
        ports.add(free_port(ports))
    assert len(ports) == 50 and ports <= set(PORTS)
    with socket.socket() as other:
        for held in PORTS:
            with contextlib.suppress(OSError):
                other.bind(("localhost", held))
                break
        other.listen()
        for taken in (set(PORTS) - {held}, set(PORTS)):
            with pytest.raises(OSError, match="no port from 20000 to 29999 is free"):
                free_port(taken)


def test_the_model_that_is_given_is_not_that_of_the_sums():
    from matrix import Run
    from scheduling import worker_command

    for task in ("gsm8k", "sums"):
        run = Run("fisher-seed0", "rates", "fisher", {"task": task})
        command = worker_command("learning.py", {"model": "qwen", "results": "r"}, run, 1)
        assert ("qwen" in command) == (task == "gsm8k")
