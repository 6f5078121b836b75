"""The command line of the learning benchmark: its deadlines, what it hands to a worker, and what it says is made."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


SCRIPT = Path(__file__).parents[3] / "benchmarks" / "learning" / "learning.py"


def test_a_deadline_is_a_duration_or_the_next_such_time_of_day():
    from learning import end_time

    now = time.mktime((2026, 11, 15, 16, 30, 0, 0, 0, -1))
    assert end_time(90.0, None, now) == now + 90
    assert end_time(None, "17:00", now) == now + 1800
    assert end_time(None, "16:30:10", now) == now + 10
    assert end_time(None, "16:00", now) == now + 23.5 * 3600


def test_the_command_line_of_a_worker_carries_the_settings():
    from learning import parse
    from matrix import Run
    from scheduling import worker_command

    run = Run("fisher-seed0", "rates", "fisher", {"task": "gsm8k", "rule": "fisher", "validate_at": [1, 2]})
    command = worker_command("learning.py", {"model": None, "data": "d", "results": "r"}, run, 2)
    options = parse(command[2:])
    assert (options.command, options.name, options.data, options.results, options.attempt) == (
        "work",
        "fisher-seed0",
        "d",
        "r",
        2,
    )
    assert json.loads(options.settings) == run.settings and options.model is None


def test_status_says_what_is_made_and_what_waits(tmp_path):
    (tmp_path / "start.json").write_text(json.dumps({"test": {"accuracy": 0.207}, "validations": []}))
    command = [sys.executable, str(SCRIPT), "status", "--results", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert "test 20.7%" in output and "waits for the rates of rates" in output and "1 of " in output
