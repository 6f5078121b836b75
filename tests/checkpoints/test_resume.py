"""A run that is killed and resumed goes on with the numbers of one that was not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import resume_worker


ROOT = Path(__file__).parents[2]


def killed(*arguments):
    """A run in a process of its own, which ends as one does that is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, resume_worker.__file__, *map(str, arguments), "killed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def steps(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.mark.parametrize("rule", ["fig4"])
def test_a_killed_run_resumes_with_the_same_numbers(rule, tmp_path):
    killed(tmp_path / "killed", tmp_path / "killed.log", rule)
    resume_worker.main(tmp_path / "whole", tmp_path / "whole.log", rule)
    assert max(steps(tmp_path / "killed.log")) == 5 and not (tmp_path / "killed.log.pt").exists()
    resume_worker.main(tmp_path / "killed", tmp_path / "resumed.log", rule, "resumed")

    expected, resumed = steps(tmp_path / "whole.log"), steps(tmp_path / "resumed.log")
    assert min(resumed) > 3 and max(resumed) == 8
    for step, figures in resumed.items():
        assert figures == pytest.approx(expected[step], rel=1e-6), step
    weights, again = (torch.load(tmp_path / f"{name}.log.pt") for name in ("whole", "resumed"))
    for name in weights:
        torch.testing.assert_close(again[name], weights[name])
