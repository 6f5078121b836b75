"""`examples/reasoning_tasks.py`: problems of reasoning-gym, its scores as rewards, one sentence for what is wrong."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny


pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")

EXAMPLES = Path(__file__).parents[2] / "examples"
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import reasoning_tasks

        yield reasoning_tasks
    finally:
        sys.path.remove(str(EXAMPLES))


def refused(script, capsys, *arguments) -> str:
    """The one line that is printed."""
    assert script.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("reasoning_tasks.py: ")
    return line


# The arguments


def test_without_arguments_small_tasks_are_learned_by_the_embedded_model(script, capsys):
    script_args, args, model_args = script.read_arguments([])
    assert model_args.model_name_or_path == "embedded" and model_args.use_peft and args.max_steps < 50
    assert script_args.tasks == list(script.TASKS) and script_args.task_config == script.TASKS
    assert "tasks chain_sum, gcd, lcm of reasoning-gym" in capsys.readouterr().out
    assert args.output_dir == "outputs/reasoning_tasks-isopo"
    script_args, args, _ = script.read_arguments(["--model_name_or_path=some/model", "--trainer=reinforce"])
    assert (script_args.answer, script_args.plain_text, args.max_steps, args.rule) == ("tags", False, 500, "none")


def test_settings_of_tasks_are_given_for_one_or_by_name(script, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("tasks: [gcd, chain_sum]\ntask_config:\n  gcd: {max_value: 9}\n")
    for words, expected in (
        (["--tasks", "gcd", '--task_config={"max_value": 9}'], {"gcd": {"max_value": 9}}),
        (["--tasks", "gcd", '--task_config={"gcd": {"max_value": 9}}'], {"gcd": {"max_value": 9}}),
        (["--tasks", "gcd", "chain_sum"], {"gcd": {}, "chain_sum": {}}),
        (["--config", str(config)], {"gcd": {"max_value": 9}, "chain_sum": {}}),
    ):
        script_args, *_ = script.read_arguments(words)
        assert script_args.task_config == expected


def test_the_configuration_for_a_larger_model_can_be_used(script):
    path = EXAMPLES / "configs" / "reasoning_tasks.yaml"
    off = ["--use_vllm=false", "--bf16=false", "--use_cpu=true"]
    script_args, args, model_args = script.read_arguments(["--config", str(path), *off])
    problems = script.Problems(script_args.task_config, script_args.task_seed, 8, 4)
    assert set(problems.counts) == set(script_args.tasks) and script_args.answer == "tags"
    assert model_args.model_name_or_path == "Qwen/Qwen3-0.6B" and args.rule == "fisher"


def test_what_cannot_work_gives_one_sentence(script, capsys, monkeypatch):
    for words, said in (
        (["--tasks", "chain_sun"], "reasoning-gym has no such task (did you mean chain_sum or"),
        (["--tasks", "zzzz"], "choose among ab, acre"),
        (["--tasks", "composite"], "has no such task"),
        (["--tasks", "gcd", "gcd"], "a task is there twice"),
        (['--task_config={"max_value": 9}'], "--task_config without --tasks"),
        (["--tasks", "gcd", "--task_config={"], "is not valid JSON"),
        (["--tasks", "gcd", "--task_config=[1]"], "is not a JSON object"),
        (["--tasks", "gcd", "lcm", '--task_config={"max_value": 9}'], "none of the tasks"),
        (["--tasks", "gcd", "lcm", '--task_config={"gcb": {}}'], "(did you mean gcd?): with several"),
        (["--tasks", "gcd", "lcm", '--task_config={"gcd": 9}'], "not an object of its settings"),
        (
            ["--tasks", "gcd", '--task_config={"max_valu": 9}'],
            "(did you mean max_value or min_value?): its settings are",
        ),
        (["--tasks", "gcd", '--task_config={"seed": 9}'], "has no setting 'seed'"),
        (["--tasks", "gcd", '--task_config={"max_value": 0}'], "gcd does not take"),
        (["--tasks", "gcd", '--task_config={"max_value": "a"}'], "; its settings are min_numbers=2"),
        (["--answer", "nowhere"], "choose one of tags, first_line"),
        (["--train_size=0"], "--train_size 0 must be at least 1"),
        (["--validation_steps=0"], "--validation_steps 0 must be at least 1"),
        (["--dataset=openai/gsm8k"], "--dataset is not an argument"),
    ):
        assert said in refused(script, capsys, *words), words
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install reasoning-gym" in refused(script, capsys)


# The problems


def test_problems_are_mixed_the_same_for_a_seed_and_none_is_in_both_sets(script):
    tasks = {"chain_sum": EASY, "count_bits": {"min_n": 1, "max_n": 10}}
    problems = script.Problems(tasks, 0, train=60, held_out=20)
    assert problems.counts == {"chain_sum": (30, 10), "count_bits": (8, 2)}  # count_bits has 10 problems in all
    train, held_out = problems.train["question"], problems.held_out["question"]
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out) == 12 and len(train) == 60
    assert problems.train["task"][:4] == ["chain_sum", "count_bits"] * 2  # in equal shares
    assert len(set(train)) == 38
    for row in [*problems.train, *problems.held_out]:
        instance = problems.instances[row["instance"]]
        assert instance["question"].strip() == row["question"]
        assert problems.score(instance["answer"], row["task"], row["instance"]) == 1
    again, other = (script.Problems(tasks, seed, train=60, held_out=20) for seed in (0, 1))
    assert again.train["question"] == train and other.train["question"] != train
    # More to train on leaves those to validate with as they are
    of_sums = [row["question"] for row in problems.held_out if row["task"] == "chain_sum"]
    assert script.Problems({"chain_sum": EASY}, 0, 90, 10).held_out["question"] == of_sums


def test_tasks_that_make_a_table_of_all_their_problems_can_be_used(script):
    tasks = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
    problems = script.Problems({task: {} for task in tasks}, 0, train=8, held_out=4)
    assert problems.counts == {task: (2, 1) for task in tasks}
    for row in problems.train:
        answer = problems.instances[row["instance"]]["answer"]
        assert problems.score(answer, row["task"], row["instance"]) == 1


def test_a_task_ends_where_its_table_does(script):
    problems = script.make_task("list_functions", {}, 0, 2600)
    assert len(problems) == 10_400 and len(script.make_task("word_ladder", {}, 0, 6000)) == 6000
    table = [{"question": f"{number} + 1"} for number in range(3)]
    assert list(script.different_instances(table, "sums")) == table
    with pytest.raises(
        ValueError, match="^word_ladder does not make 20001 .* smaller --train_size or --validation_size"
    ):
        script.make_task("word_ladder", {}, 0, 20_001)


def test_a_task_without_enough_problems_is_refused(script):
    with pytest.raises(ValueError, match="count_bits has 1 different problems .* at least 2 are needed"):
        script.Problems({"count_bits": {"min_n": 5, "max_n": 5}}, 0, 10, 10)


def test_several_processes_need_the_same_problems(script, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    args = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="start the run with the environment variable PYTHONHASHSEED=0"):
        script.load(None, args, None)


# The rewards


def test_an_answer_stands_where_the_argument_says(script):
    text = "\n Let me see. \n<answer>4</answer> or rather\n<answer> 5 </answer>\n"
    found = {name: read(text) for name, read in script.ANSWERS.items()}
    assert found == {
        "tags": "5",
        "first_line": "Let me see.",
        "last_line": "<answer> 5 </answer>",
        "last_number": "5",
        "whole_text": text.strip(),
    }
    assert [read(" \n") for read in script.ANSWERS.values()] == [None] * 5
    assert set(script.INSTRUCTIONS) == set(script.ANSWERS)


def test_the_score_is_the_reward(script):
    problems = script.Problems({"chain_sum": EASY, "gcd": {}}, 0, 4, 2)
    rows = problems.train[:4]
    reward = script.scores(problems, script.first_line)
    gold = [problems.instances[number]["answer"] for number in rows["instance"]]
    right, wordy, empty = gold, [f"{answer} it is\n0" for answer in gold], [""] * 4
    logged = {}
    columns = {"task": rows["task"], "instance": rows["instance"], "prompts": rows["question"]}
    assert reward(completions=right, log_metric=logged.__setitem__, **columns) == [1.0] * 4
    assert logged == {"score/chain_sum": 1.0, "score/gcd": 1.0}
    # reasoning-gym gives part of the score to an answer that contains the right one
    expected = [len(answer) / len(f"{answer} it is") for answer in gold]
    assert reward(completions=wordy, **columns) == pytest.approx(expected)
    messages = [[{"role": "assistant", "content": text}] for text in wordy]
    assert reward(completions=messages, **columns) == pytest.approx(expected)
    assert reward(completions=empty, **columns) == [0.0] * 4


def test_a_score_out_of_range_is_an_error_and_an_answer_that_cannot_be_scored_is_worth_nothing(
    script, monkeypatch, capsys
):
    problems = script.Problems({"gcd": {}}, 0, 4, 2)
    for score in (1.5, -0.1, math.nan, None, "1"):
        monkeypatch.setattr(problems.tasks["gcd"], "score_answer", lambda answer, entry, score=score: score)
        with pytest.raises(ValueError, match=re.escape(f"scores '7' in gcd with {score!r}: a number from 0 to 1")):
            problems.score("7", "gcd", 0)

    def fails(answer, entry):
        raise TypeError("not this one")

    monkeypatch.setattr(problems.tasks["gcd"], "score_answer", fails)
    assert [problems.score("7", "gcd", 0) for _ in range(2)] == [0.0, 0.0]
    assert capsys.readouterr().out.count("not this one") == 1


# A run


def test_a_run_that_would_make_no_step_is_refused(script, tmp_path, capsys):
    sizes = ["--per_device_train_batch_size=4", "--num_generations=2", "--train_size=1", "--validation_size=0"]
    model = tiny.save(tmp_path / "model", "qwen3")
    arguments = [f"--model_name_or_path={model}", *sizes, f"--output_dir={tmp_path / 'out'}", "--tasks", "gcd"]
    for trainer in ("isopo", "grpo"):
        assert script.main([*arguments, f"--trainer={trainer}"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "reasoning_tasks.py: --train_size 1 is too few: train_dataset has 1 prompt, and one " in said


def test_a_run_leaves_a_model_and_says_what_became_of_each_task(script, tmp_path, capfd):
    model = tiny.save(tmp_path / "model", "qwen3")
    config = json.dumps({"chain_sum": EASY})
    sizes = ["--max_steps=1", "--per_device_train_batch_size=4", "--num_generations=2", "--max_completion_length=4"]
    data = ["--tasks", "chain_sum", "gcd", "--task_config", config, "--train_size=8", "--validation_size=4"]
    output = tmp_path / "out"
    arguments = [f"--model_name_or_path={model}", *data, *sizes, f"--output_dir={output}", "--answer=whole_text"]
    assert script.main(arguments) == 0
    printed = capfd.readouterr()
    assert "chain_sum: 4 problems to train on, and 2 others to validate with." in printed.out
    assert re.search(r"\n  chain_sum  0\.\d\d -> 0\.\d\d   \d -> \d of 2\n  gcd  ", printed.out)
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 1]
    (step,) = [line for line in log if "rewards/task_score/mean" in line]
    assert {"score/chain_sum", "score/gcd"} & set(step)
    assert {"model.safetensors", "README.md"} <= {path.name for path in output.iterdir()}
