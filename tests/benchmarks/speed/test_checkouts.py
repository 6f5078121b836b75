"""Checkouts are timed in turns, and compared case by case with the first."""

import importlib
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


def test_checkouts_are_timed_in_turns_by_their_own_scripts(checkouts, tmp_path, monkeypatch, capsys):
    """Their scripts stand in for `step_time.py`, whose report of a real run they give, each its own seconds."""
    arguments = "--shape tiny --sequences 2 --length 16 --repeats 1 --rules none".split()
    monkeypatch.setattr("sys.argv", ["step_time.py", *arguments, "--output", str(tmp_path / "report.json")])
    importlib.import_module("step_time").main()
    report, folders = json.loads((tmp_path / "report.json").read_text()), [tmp_path / "one", tmp_path / "two"]
    for seconds, folder in zip((0.5, 0.25), folders, strict=True):
        report["cases"][0]["results"]["none"]["seconds"] = seconds
        script = folder / checkouts.SCRIPTS[0]
        script.parent.mkdir(parents=True)
        turn = f"open({str(tmp_path / 'turns')!r}, 'a').write('{seconds} ')"
        written = f"open(sys.argv[-1], 'w').write({json.dumps(report)!r})"
        script.write_text(f"import sys\nassert sys.argv[1:-2] == {arguments!r}\n{turn}\n{written}\n")
    monkeypatch.setattr(checkouts, "HEAVY", "")
    command = [
        "checkouts.py",
        *map(str, folders),
        "--rounds",
        "2",
        "--output",
        str(tmp_path / "out"),
        "--",
        *arguments,
    ]
    monkeypatch.setattr("sys.argv", command)
    capsys.readouterr()
    checkouts.main()
    assert (tmp_path / "turns").read_text().split() == ["0.5", "0.25", "0.25", "0.5"]
    rows = re.findall(r"^\| tiny, 2 x 16.* \| none \| .* \| (\S+) \| (\S+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("0.5", "1.000"), ("0.25", "0.500")]
    assert [len(of_checkout) for of_checkout in json.loads((tmp_path / "out").read_text()).values()] == [2, 2]


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
