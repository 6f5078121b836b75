"""Scripts find the repository, from wherever and under whatever name they are called."""

import os
import subprocess
import tarfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
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


def test_of_trls_tests_only_those_of_grpo_are_taken(tmp_path):
    loader = SourceFileLoader("trl_tests", str(ROOT / "scripts" / "trl_tests"))
    script = module_from_spec(spec_from_loader("trl_tests", loader))
    loader.exec_module(script)
    checkout = tmp_path / "trl-1.0"
    for folder in ("tests", "tests/experimental", "other"):
        (checkout / folder).mkdir(parents=True)
        for name in ("__init__.py", "conftest.py", "test_grpo_trainer.py", "testing_utils.py"):
            (checkout / folder / name).write_text(folder)
    with tarfile.open(tmp_path / "trl.tar.gz", "w:gz") as archive:
        archive.add(checkout, "trl-1.0")
    for number, source in enumerate((checkout, tmp_path / "trl.tar.gz")):
        taken = tmp_path / str(number)
        script.fetch(str(source), taken)
        found = {path.name: path.read_text() for path in taken.iterdir()}
        # What sets their tests up would run whatever a stranger's branch put there
        assert found == dict.fromkeys(["__init__.py", "test_grpo_trainer.py", "testing_utils.py"], "tests")
    assert len(script.made_data("trl-internal-testing/zen", "standard_prompt_only", "train")) >= 12
