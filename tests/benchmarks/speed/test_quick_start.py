"""The quick start's step as TRL has it and in this version: small, with a tiny model."""

from tests import tiny


def test_a_step_is_measured_both_ways(importable, tmp_path, capsys):
    import quick_start

    tiny.save(tmp_path / "model", "qwen3")
    sizes = ["--num_generations", "2", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    model = ["--model_name_or_path", str(tmp_path / "model"), "--dataset", "embedded", "--max_completion_length", "4"]
    where = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "true", "--bf16", "false"]
    quick_start.main(["--rounds", "1", "--sequences", "2", "4", *sizes, *model, *where])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [row for row in table if row[:1] == ["step,"]]
    assert [row[1] for row in steps] == ["2", "4"]
    for row in steps:
        before, after, ratio = map(float, row[3:6])
        assert before > 0 and after > 0 and ratio > 0
