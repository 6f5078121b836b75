"""A run that is killed and resumed goes on with the numbers of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("resume_worker.py")


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


def steps(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.mark.parametrize("rule", ["fig4"])
def test_a_killed_run_resumes_with_the_same_numbers(rule, tmp_path):
    whole = start(tmp_path / "whole", tmp_path / "whole.log", rule)
    killed = start(tmp_path / "killed", tmp_path / "killed.log", rule)
    log = tmp_path / "killed.log"
    while not log.exists() or max(steps(log), default=0) < 5:  # two steps past the first checkpoint
        assert killed.poll() is None, killed.stdout.read()[-3000:]
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    finish(whole)
    assert not (tmp_path / "killed.log.pt").exists()
    finish(start(tmp_path / "killed", tmp_path / "resumed.log", rule, "resume"))

    expected, resumed = steps(tmp_path / "whole.log"), steps(tmp_path / "resumed.log")
    assert min(resumed) > 3 and max(resumed) == 8
    for step, figures in resumed.items():
        assert figures == pytest.approx(expected[step], rel=1e-6), step
    weights, again = (torch.load(tmp_path / f"{name}.log.pt") for name in ("whole", "resumed"))
    for name in weights:
        torch.testing.assert_close(again[name], weights[name])
