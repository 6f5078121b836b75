"""What a run of the learning benchmark trains with, against what the matrix says of it."""

from dataclasses import fields
from pathlib import Path

from isopo_trl import ISOPOConfig


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
        dtype = "bfloat16" if run.group == "bf16" else "float32"
        assert args.model_init_kwargs == {"dtype": dtype}, run.name
    clipped = next(run.settings for run in runs if run.method == "grpo") | {"epsilon": 0.1}
    assert configuration(clipped, str(tmp_path)).epsilon == 0.1
