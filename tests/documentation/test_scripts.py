"""Scripts find the repository, from wherever and under whatever name they are called."""

import os
import shutil
import subprocess
import tarfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
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
        said, _, next_command = done.stdout.partition("\n\n")
        assert set(said.splitlines()) - {"Starting examples/gsm8k.py"} == {f"Version at {ROOT.resolve()}"}
        assert bool(next_command) == (script == "scripts/quickstart")


# In place of `python`: has no package yet, and says what it is asked for, and with which GPU
NOTHING_THERE = """#!/bin/sh
case "$*" in *"pip show"*) exit 1 ;; esac
echo "$CUDA_VISIBLE_DEVICES: $*"
echo "$OMP_WAIT_POLICY $OMP_NUM_THREADS" > "$POLICY"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && : > "$3/bin/activate"; fi
"""


def test_the_quick_start_says_what_it_installs_and_what_to_do_next(environment, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    for name in ("python", "python3"):
        (tmp_path / "programs" / name).write_text(NOTHING_THERE)

    def run(*arguments, **variables):
        command = [str(tmp_path / "clone" / "scripts" / "quickstart"), *arguments]
        given = {**environment, "POLICY": str(tmp_path / "policy"), **variables}
        given = {name: value for name, value in given.items() if value is not None}
        done = subprocess.run(command, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run(VIRTUAL_ENV=None, CUDA_VISIBLE_DEVICES=None, OMP_NUM_THREADS=None, OMP_WAIT_POLICY=None)
    assert (tmp_path / "policy").read_text() == "PASSIVE \n"  # all cores, without fighting over them
    first, *rest = said.splitlines()
    assert first == ": -m venv .venv"
    for number, words in enumerate(("PyTorch", "isopo-trl", "SmolLM2")):
        assert rest[2 * number].startswith("Installing") and words in rest[2 * number]
        assert "-m pip install " in rest[2 * number + 1] and "-q" not in rest[2 * number + 1].split()
    assert rest[6:8] == ["Starting examples/gsm8k.py", "0: examples/gsm8k.py"]  # one process and one GPU
    assert said.endswith(
        "    . .venv/bin/activate\n"
        "    python examples/gsm8k.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k\n"
    )
    said = run(CUDA_VISIBLE_DEVICES="3,4")
    assert "3: examples/gsm8k.py\n" in said and "activate" not in said
    said = run("--rule", "npg", CUDA_VISIBLE_DEVICES="")
    assert said.endswith(": examples/gsm8k.py --rule npg\n")


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
