"""The command line of the learning benchmark: its deadlines, what it hands to a worker, and what it says is made."""

import json
import time


def test_a_deadline_is_a_duration_or_the_next_such_time_of_day():
    from learning import end_time

    now = time.mktime((2026, 11, 15, 16, 30, 0, 0, 0, -1))
    assert end_time(90.0, None, now) == now + 90
    for clock, seconds in (("17:00", 1800), ("16:30:10", 10), ("16:00", 23.5 * 3600)):
        assert end_time(None, clock, now) == now + seconds


def test_the_command_line_of_a_worker_carries_the_settings():
    from learning import parse
    from matrix import Run
    from scheduling import worker_command

    folders = {"Qwen": "qwen", "Larger": "larger"}
    for task, name, model in (("gsm8k", "Qwen", "qwen"), ("gsm8k", "Larger", "larger"), ("sums", "Smol", None)):
        settings = {"task": task, "model": name, "rule": "fisher", "validate_at": [1, 2]}
        run = Run("fisher-seed0", "rates", "fisher", settings)
        command = worker_command("learning.py", {"data": "d", "results": "r"}, folders, run)
        options = vars(parse(command[2:]))
        assert json.loads(options.pop("settings")) == run.settings
        given = {"name": "fisher-seed0", "model": model, "data": "d", "results": "r"}
        assert options == {"command": "work", **given}


def test_status_says_what_is_made_and_what_waits(tmp_path, capsys):
    from learning import main

    (tmp_path / "start.json").write_text(json.dumps({"test": {"accuracy": 0.207}, "validations": []}))
    assert main(["status", "--results", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "test 20.7%" in output and "waits for the rates of rates" in output and "\n1 of " in output


def test_no_run_is_made_with_another_model_than_the_matrix_says(tmp_path, capsys):
    from learning import HERE, embedded_models, folders_of_models, main
    from matrix import Matrix
    from scheduling import Schedule

    matrix = Matrix.read(HERE / "matrix.yaml")
    small, large = (f"Qwen2.5-Coder-{size}B-Instruct" for size in (0.5, 1.5))
    folders = {name: tmp_path / str(size) for name, size in ((small, 896), (large, 1536), ("none", 576))}
    for folder in folders.values():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": int(folder.name)}))
    given = [str(folders[name]) for name in (large, small)]
    assert folders_of_models(matrix, given, smoke=False) == {large: given[0], small: given[1]}
    assert folders_of_models(matrix, given[1:], smoke=True) == {large: given[1], small: given[1]}

    def candidates(*models):
        end = time.time() + 1e7
        schedule = Schedule(matrix, tmp_path, lambda run: [], end, 4, 0.0, tmp_path, models=models)
        return {run.settings["model"] for run in schedule._candidates()}

    (smollm,) = embedded_models(matrix)
    assert [candidates(name) for name in (large, small, smollm)] == [{large}, {small}, {smollm}]
    for folder in (folders["none"], tmp_path / "nothing"):
        assert main(["run", "--model", str(folder), "--deadline", "0", "--results", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "576" in said and small in said and "nothing" in said
