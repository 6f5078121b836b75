"""What a run of the learning benchmark trains with, against what the matrix says of it."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from isopo_trl import ISOPOConfig
from isopo_trl.step_size import completion_length
from tests import tiny


PLAIN = ("plain", "plain_targets", "plain_momentum", "rates_sgd", "long", "larger")
FOLDER = Path(__file__).parents[3] / "benchmarks" / "learning"


def test_every_run_of_the_matrix_is_configured_as_it_says(importable, tmp_path):
    from matrix import Matrix, Run, read_results
    from training_run import configuration

    found = Matrix.read(FOLDER / "matrix.yaml").runs(read_results(FOLDER / "runs"))
    runs = [run for run in found if isinstance(run, Run) and run.settings["steps"]]
    by_name = {field.name for field in fields(ISOPOConfig)} - {"steps_per_generation"}
    # Hold for all runs, and mean nothing to GRPO
    defaults = {"skip_zero_advantage", "fisher_scope"}
    # Muon's steps are given to the trainer, whatever the configuration says
    optimizers = {"adamw": ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False).optim, "sgd": "sgd"}
    assert {run.settings["trainer"] for run in runs} == {"grpo", "isopo"}
    assert {run.settings["optimizer"] for run in runs} == {*optimizers, "muon"}
    of_groups = {group: [run for run in runs if run.group == group] for group in (*PLAIN, "bf16")}
    for group, own in of_groups.items():
        assert own and {run.settings["optimizer"] for run in own} == {"sgd"}, group
    assert {run.settings["bf16_updates"] for run in of_groups["bf16"]} == {"stochastic", "exact", None}
    for run in runs:
        settings = run.settings
        args = configuration(settings, str(tmp_path))
        microbatches = settings["completions"] // settings["microbatch"]
        assert {
            "steps": args.max_steps,
            "generations": args.num_generations,
            "max_tokens": args.max_completion_length,
            "microbatch": args.per_device_train_batch_size,
            "completions": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            "steps_per_generation": args.steps_per_generation / microbatches,
        }.items() <= settings.items(), run.name
        for name in by_name & set(settings) - (defaults if settings["trainer"] == "grpo" else set()):
            assert getattr(args, name) == settings[name], (run.name, name)
        assert args.optim == optimizers.get(settings["optimizer"], args.optim), run.name
        momentum = "momentum=0.9" if run.group == "plain_momentum" else None
        assert args.optim_args == momentum, run.name
        dtype = "bfloat16" if "bf16_updates" in settings else "float32"
        assert args.model_init_kwargs == {"dtype": dtype}, run.name
    clipped = next(run.settings for run in runs if run.method == "grpo") | {"epsilon": 0.1}
    assert configuration(clipped, str(tmp_path)).epsilon == 0.1


@pytest.fixture
def run(importable, tmp_path, monkeypatch):
    """Make a run with a tiny model, and return its file: a resumed one, too, whose first half is made right here."""
    import matrix
    import training_run

    rows = tiny.conversational_prompts(12)
    splits = [rows.select(range(*ends)) for ends in ((0, 8), (8, 10), (10, 12))]
    found = training_run.Problems(*splits, tiny.reward, tiny.reward)
    monkeypatch.setattr(training_run, "problems", lambda settings, data: found)
    for name in ("AUTO", "AUTO_PLAIN"):  # which a run changes for the rest of its process
        monkeypatch.setattr(completion_length, name, getattr(completion_length, name))
    model = tiny.save(tmp_path / "model", "qwen3")
    base = matrix.Matrix.read(FOLDER / "matrix.yaml", smoke=True)
    (entry, *_) = (entry for entry in base.entries if entry.group == "resumed")

    def make(name, **changed):
        results = tmp_path / name
        results.mkdir()
        settings = base.run(entry).settings | {"steps": 4, "validate_at": [2, 4], "max_tokens": 6} | changed
        settings = {key: value for key, value in settings.items() if value is not None}

        def first_half(of_half):
            training_run.work(name, of_half, model, None, results)

        monkeypatch.setattr(training_run, "run_first_half", first_half)
        training_run.work(name, settings, model, None, results)
        assert [path.name for path in results.iterdir()] == [f"{name}.json"]
        return json.loads((results / f"{name}.json").read_text())

    return make


def test_a_resumed_run_is_the_run_that_was_not_broken_off(run):
    whole, resumed = run("whole", resume_at=None), run("resumed", resume_at=2)
    assert resumed["first_half"]["steps"] == 2 and "first_half" not in whole
    assert any(whole["steps"]["grad_norm"]) and resumed["steps"]["step"] == [1, 2, 3, 4]
    for name in ("prompts", "prompts_of_generations", "test", "held_back", "model"):
        assert resumed[name] == whole[name], name
    for name in ("reward", "grad_norm", "learning_rate", "step/kl", "completions/mean_length"):
        assert resumed["steps"][name] == pytest.approx(whole["steps"][name], rel=1e-4), name
    for one, other in zip(resumed["validations"], whole["validations"], strict=True):
        one, other = ({key: figures[key] for key in ("step", "accuracy", "length", "kl")} for figures in (one, other))
        assert one == pytest.approx(other, rel=1e-3)
    seconds, memory = (resumed["steps"][name] for name in ("seconds", "memory/host"))
    assert len(memory) == 4 and min(memory) > 0 and seconds == sorted(seconds)
    assert seconds[2] > resumed["first_half"]["seconds"]["train"]


def test_vllm_takes_a_cache_of_the_size_that_the_matrix_says(run, monkeypatch):
    import training_run

    class Built(Exception):
        pass

    def build(*_):
        raise Built

    sizes = []
    monkeypatch.setattr(training_run, "spare_vllm", sizes.append)
    monkeypatch.setattr(training_run, "build", build)
    with pytest.raises(Built):
        run("cached", resume_at=None, vllm=True, kv_cache_gib=3)
    assert sizes == [3]


def test_a_run_is_resumed_after_a_whole_generation_alone(run):
    with pytest.raises(ValueError, match="end of a generation"):
        run("broken", resume_at=1, steps_per_generation=2)


def test_a_multiple_of_the_automatic_target_makes_steps_of_that_many_times_the_length(run):
    usual = completion_length.AUTO_PLAIN
    steps = run("longer", resume_at=None, auto_times=4)["steps"]
    assert completion_length.AUTO_PLAIN == 4 * usual
    # A step of the right length is found in the first step, to within 10 %
    lengths = [kl for kl in steps["step/kl_per_completion"] if kl]
    assert lengths and lengths[0] == pytest.approx(4 * usual, rel=0.15)


def test_the_first_half_has_this_process_s_command_line_with_its_own_settings(importable, tmp_path, monkeypatch):
    import training_run

    said = tmp_path / "said"
    script = tmp_path / "script.py"
    script.write_text(f"import json, sys\nopen({str(said)!r}, 'w').write(json.dumps(sys.argv[1:]))\n")
    monkeypatch.setattr(sys, "argv", [str(script), "work", "--name", "a", "--settings", "{}", "--model", "m"])
    training_run.run_first_half({"folder": "there"})
    assert json.loads(said.read_text()) == ["work", "--name", "a", "--settings", '{"folder": "there"}', "--model", "m"]
