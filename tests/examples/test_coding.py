"""`examples/coding.py`: a run from beginning to end, and one sentence for what cannot work."""

import json
import re
import sys
from pathlib import Path

import pytest

from isopo_trl.coding import CodeReward
from tests import tiny
from tests.coding.confinement import REASON, confines


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def coding():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import coding

        yield coding
    finally:
        sys.path.remove(str(EXAMPLES))


@confines
def test_a_run_trains_on_functions_and_validates_with_others(coding, tmp_path, capfd, monkeypatch):
    seen = []
    scored = CodeReward.__call__

    def score(self, completions, **columns):
        seen.append(set(columns["head"]))
        return scored(self, completions, **columns)

    monkeypatch.setattr(CodeReward, "__call__", score)
    arguments = [
        f"--model_name_or_path={tiny.save(tmp_path / 'model', 'qwen3')}",
        f"--output_dir={tmp_path / 'out'}",
        *("--plain_text=true", "--expression=true", "--examples=0", "--train_size=6", "--max_steps=1"),
        *("--per_device_train_batch_size=4", "--num_generations=2", "--max_completion_length=4"),
        *("--validation_size=2", "--kl_size=0", "--processes=2", "--save_strategy=no"),
    ]
    assert coding.main(arguments) == 0
    assert {"model.safetensors", "README.md", "trainer_state.json"} <= {f.name for f in (tmp_path / "out").iterdir()}
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 1]
    assert any("rewards/code_reward/mean" in line for line in log)
    validated, trained, _ = seen
    assert len(validated) == 2 and trained and not validated & trained
    assert all(head.endswith("return") for head in validated | trained)
    assert "functions in Python" in capfd.readouterr().out


@confines
def test_a_run_that_would_make_no_step_is_refused(coding, tmp_path, capfd):
    sizes = ["--per_device_train_batch_size=4", "--num_generations=2", "--train_size=1", "--validation_size=0"]
    model = f"--model_name_or_path={tiny.save(tmp_path / 'model', 'qwen3')}"
    for trainer in ("isopo", "grpo"):
        plain = ["--plain_text=true", f"--trainer={trainer}", f"--output_dir={tmp_path / 'out'}"]
        capfd.readouterr()
        assert coding.main([model, *sizes, *plain]) == 2
        (said,) = capfd.readouterr().err.splitlines()
        assert re.match("coding.py: --train_size 1 is too few: .* one generation takes 2 .*: give at least 2", said)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--expression=true", "--plain_text=false"], "--expression needs --plain_text"),
        (["--validation=mbpp"], "--validation mbpp is unknown"),
        (["--train_size=0"], "--train_size 0 must be at least 1"),
        (["--train_size=-3"], "--train_size -3 must be at least 1"),
        (["--difficulty=0"], "--difficulty 0 must be at least 1"),
        (["--processor_seconds=0"], "--processor_seconds 0 must be at least 1"),
        (["--examples=10"], "--examples 10 must be from 0 to 9"),
        pytest.param(["--train_size=100000"], "Only .* problems of difficulty 1", marks=confines),
        pytest.param([], "not run here", marks=pytest.mark.skipif(not REASON, reason="completions can be confined")),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(coding, tmp_path, capfd, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert coding.main(arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith("coding.py: ") and len(said.splitlines()) == 1
    assert re.search(words, said), said
