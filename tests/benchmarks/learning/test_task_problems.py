"""What the tasks of the learning benchmark train on and are measured by."""

from pathlib import Path

import pytest
import yaml


MATRIX = Path(__file__).parents[3] / "benchmarks" / "learning" / "matrix.yaml"
SMALL = {"held_back": 4, "test": 6, "train_size": 10}


@pytest.fixture(scope="module")
def task_problems(importable):
    import task_problems

    return task_problems


@pytest.fixture
def of_task(task_problems, monkeypatch):
    """Few problems of a task of the matrix."""
    monkeypatch.syspath_prepend(str(MATRIX.parents[2] / "examples"))
    content = yaml.safe_load(MATRIX.read_text())

    def make(task, **changed):
        return task_problems.problems(content["defaults"] | content["tasks"][task] | {"task": task} | changed, None)

    return make


def tasks(kind):
    content = yaml.safe_load(MATRIX.read_text())
    return [name for name, settings in content["tasks"].items() if settings.get("kind") == kind]


def messages(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def columns_of(rows):
    return {name: rows[name] for name in rows.column_names if name != "prompt"}


def questions(rows):
    return [prompt[-1]["content"] for prompt in rows["prompt"]]


def assert_sizes(found):
    sizes = [len(rows) for rows in (found.held_back, found.tests, found.train)]
    assert sizes == list(SMALL.values())
    every = [question for rows in found[:3] for question in questions(rows)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("task", tasks("reasoning"))
def test_reasoning_is_asked_and_scored_as_in_the_example(task, of_task):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    import reasoning_tasks as example

    settings = yaml.safe_load(MATRIX.read_text())["tasks"][task]
    found = of_task(task, **SMALL)
    assert_sizes(found)
    by_task = example.settings_by_task(settings["tasks"], settings.get("task_config"))
    made = example.Problems(by_task, 0, SMALL["train_size"], SMALL["held_back"] + SMALL["test"])
    rows = columns_of(found.tests)
    assert set(rows) == {"task", "instance"}
    answers = [made.instances[number]["answer"] for number in rows["instance"]]
    assert questions(found.tests)[0].strip() == made.instances[rows["instance"][0]]["question"].strip()
    assert found.tests["prompt"][0][0]["content"] == example.INSTRUCTIONS[settings["answer"]]
    marked = [
        f"So <answer>{answer}</answer>" if settings["answer"] == "tags" else f"So\n{answer}" for answer in answers
    ]
    assert found.right(completions=messages(*marked), **rows) == [1.0] * len(answers)
    assert found.reward(completions=messages(*marked), **rows) == [1.0] * len(answers)
    assert found.right(completions=messages(*["none of it"] * len(answers)), **rows) == [0.0] * len(answers)


def test_a_part_of_a_score_is_trained_with_and_not_counted_as_right(of_task):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    task = {"tasks": ["gcd"], "task_config": {"min_value": 2, "max_value": 60}, "answer": "tags"}
    found = of_task(tasks("reasoning")[0], **SMALL, **task)
    rows = columns_of(found.tests)
    half = "<answer>1 2 3 4 5 6 7 8 9</answer>"  # has the right digit in it
    rewards = found.reward(completions=messages(*[half] * len(found.tests)), **rows)
    assert any(0 < reward < 1 for reward in rewards)
    assert found.right(completions=messages(*[half] * len(found.tests)), **rows) == [0.0] * len(found.tests)


def test_of_tasks_with_few_problems_the_shares_are_kept(of_task):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    few = {"tasks": ["coin_flip"], "task_config": {"max_trials": 6}}  # 33 of them
    found = of_task(tasks("reasoning")[0], **{**SMALL, "held_back": 20, "test": 30, **few})
    assert len(found.held_back) < len(found.tests) < 7 and len(found.held_back)


@pytest.mark.parametrize("task", tasks("code"))
def test_functions_are_those_of_the_grammar_and_pass_by_their_tests(task, of_task):
    found = of_task(task, **SMALL)
    assert_sizes(found)
    rows = columns_of(found.tests)
    argument = [head.partition("(")[2].partition(":")[0] for head in rows["head"]]
    right = [
        f"```python\ndef f({name}):\n"
        + "".join(f"    if ({name},) == {given}: return {result}\n" for given, result in tests)
        + "```"
        for name, tests in zip(argument, rows["tests"], strict=True)
    ]
    assert found.right(completions=messages(*right), **rows) == [1.0] * len(right)
    assert found.right(completions=messages(*["nothing"] * len(right)), **rows) == [0.0] * len(right)


def test_a_task_without_problems_to_train_on_is_refused(of_task):
    with pytest.raises(ValueError, match="0 problems to train on"):
        of_task("sums", held_back=1000)
