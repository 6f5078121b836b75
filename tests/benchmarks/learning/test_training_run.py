"""What a run of the learning benchmark trains with, against what the matrix says of it."""

from dataclasses import fields
from pathlib import Path

import pytest

from isopo_trl import ISOPOConfig


FOLDER = Path(__file__).parents[3] / "benchmarks" / "learning"


@pytest.fixture(scope="module")
def runs():
    from matrix import Matrix, Run, read_results

    found = Matrix.read(FOLDER / "matrix.yaml").runs(read_results(FOLDER / "runs"))
    return [run for run in found if isinstance(run, Run) and run.settings["steps"]]


def test_every_run_of_the_matrix_is_configured_as_it_says(runs, tmp_path):
    from training_run import configuration

    by_name = {field.name for field in fields(ISOPOConfig)} - {"steps_per_generation"}
    # Hold for all runs, and mean nothing to GRPO
    defaults = {"skip_zero_advantage", "fisher_scope"}
    assert {run.settings["trainer"] for run in runs} == {"grpo", "isopo"}
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


@pytest.mark.parametrize("method", ["grpo", "fisher"])
def test_a_range_for_ratios_is_for_both_trainers(runs, method, tmp_path):
    from training_run import configuration

    settings = next(run.settings for run in runs if run.method == method)
    assert configuration({**settings, "epsilon": 0.1}, str(tmp_path)).epsilon == 0.1
