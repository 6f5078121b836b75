"""Scripts find the repository, from wherever and under whatever name they are called."""

import os
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SCRIPTS = [".ci/run", "scripts/lint", "scripts/newest_trl", "scripts/quickstart", "scripts/test"]
# In place of every program that a script runs: says where it was run, and makes the environment that is asked for
PROGRAM = """#!/bin/sh
echo "Version at $(pwd -P)"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && : > "$3/bin/activate"; fi
"""


@pytest.fixture
def environment(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("python", "python3", "accelerate", "ruff", "mypy", "chromium"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(tmp_path), "CDPATH": str(tmp_path / "elsewhere")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_at_the_root_through_a_link_and_with_cdpath(script, environment, tmp_path):
    (tmp_path / "elsewhere" / "scripts").mkdir(parents=True)
    (tmp_path / "elsewhere" / ".ci").mkdir()
    (tmp_path / "a link").symlink_to(ROOT / script)
    for command, folder in [("./a link", tmp_path), (script, ROOT)]:
        done = subprocess.run([command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.splitlines()) == {f"Version at {ROOT.resolve()}"}
