"""The command line of the learning benchmark: its deadlines, what it hands to a worker, and what it says is made."""

import json
import time


def test_a_deadline_is_a_duration_or_the_next_such_time_of_day():
    from learning import end_time

    now = time.mktime((2026, 11, 15, 16, 30, 0, 0, 0, -1))
    assert end_time(90.0, None, now) == now + 90
    for clock, seconds in (("17:00", 1800), ("16:30:10", 10), ("16:00", 23.5 * 3600)):
        assert end_time(None, clock, now) == now + seconds


def test_the_command_line_of_a_worker_carries_the_settings():
    from learning import parse
    from matrix import Run
    from scheduling import worker_command

    for task, model in (("gsm8k", "qwen"), ("sums", None)):  # the sums have a model of their own
        run = Run("fisher-seed0", "rates", "fisher", {"task": task, "rule": "fisher", "validate_at": [1, 2]})
        command = worker_command("learning.py", {"model": "qwen", "data": "d", "results": "r"}, run, 2)
        options = vars(parse(command[2:]))
        assert json.loads(options.pop("settings")) == run.settings
        given = {"name": "fisher-seed0", "model": model, "data": "d", "results": "r", "attempt": 2}
        assert options == {"command": "work", **given}


def test_status_says_what_is_made_and_what_waits(tmp_path, capsys):
    from learning import main

    (tmp_path / "start.json").write_text(json.dumps({"test": {"accuracy": 0.207}, "validations": []}))
    assert main(["status", "--results", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "test 20.7%" in output and "waits for the rates of rates" in output and "\n1 of " in output
