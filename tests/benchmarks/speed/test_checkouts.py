"""Checkouts are timed in turns, and compared case by case with the first."""

import json
import re
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkouts(importable):
    import checkouts

    return checkouts


def test_a_checkout_is_compared_with_itself_in_turns(checkouts, tmp_path, monkeypatch, capsys):
    file = tmp_path / "reports.json"
    arguments = "--shape tiny --sequences 2 --length 16 --repeats 1 --rules none".split()
    again = f"{ROOT}/benchmarks/.."
    command = ["checkouts.py", str(ROOT), again, "--rounds", "1", "--output", str(file), "--", *arguments]
    monkeypatch.setattr("sys.argv", command)
    checkouts.main()
    reports = json.loads(file.read_text())
    (first,), (second,) = reports[str(ROOT)], reports[again]
    seconds = [report["cases"][0]["results"]["none"]["seconds"] for report in (first, second)]
    rows = re.findall(r"^\| tiny, 2 x 16.* \| none \| .* \| (\S+) \| (\S+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [(f"{value:.6g}", f"{value / seconds[0]:.3f}") for value in seconds]


def test_what_is_no_checkout_is_refused_before_anything_runs(checkouts, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["checkouts.py", str(ROOT), str(tmp_path)])
    monkeypatch.setattr(checkouts, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=f"{tmp_path} is no checkout of this project"):
        checkouts.main()


def test_a_run_that_fails_is_said_and_the_others_are_ended(checkouts, tmp_path, monkeypatch):
    script = tmp_path / checkouts.SCRIPTS[0]
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(checkouts, "HEAVY", "")
    started = []

    class Popen(checkouts.subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(checkouts.subprocess, "Popen", Popen)
    monkeypatch.setattr(sys, "argv", ["checkouts.py", str(tmp_path), "--rounds", "2"])
    with pytest.raises(SystemExit, match=f"The run of {tmp_path} failed: 3"):
        checkouts.main()
    assert [process.wait() is not None for process in started] == [True, True]
