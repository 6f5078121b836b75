"""`benchmarks/questions/task_room.py`: prompts as a trainer has them, and pass rates of completions that are known."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def task_room():
    import task_room

    return task_room


def answered(row, texts):
    """A row as `sample` leaves it, with these completions."""
    return {
        **{key: value for key, value in row.items() if key != "messages"},
        "question": row["messages"][-1]["content"],
        "texts": texts,
        "lengths": [10] * (len(texts) - 1) + [99],
        "cut": [False] * len(texts),
        "prompt_length": 20,
    }


@pytest.fixture
def gcd(task_room):
    """Rows of a small task, and their right answers."""
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    rows = list(task_room.reasoning_prompts(["gcd"], 3, 7, ["tags"]))[:3]
    task = task_room.examples().make_task("gcd", rows[0]["config"], rows[0]["seed"])
    return rows, [task[row["index"]]["answer"] for row in rows]


def test_an_answer_counts_where_it_is_right_and_in_its_tags(task_room, gcd):
    (first, second, third), right = gcd
    rows = [
        answered(first, [f"<answer>{right[0]}</answer>"] * 3 + ["<answer>none</answer>"] * 2),
        answered(second, [f"It is\n{right[1]}", *["<answer>none</answer>"] * 3, f"<answer>{right[1]}</answer>"]),
        answered(third, ["none"] * 5),
    ]
    task_room.reasoning_rewards(rows)
    (found,) = task_room.table({("gcd", "small", "tags"): rows})
    assert found["pass"] == 3 / 12 and found["anywhere"] == 4 / 12
    assert found["greedy"] == found["any of 4"] == found["differ"] == 1 / 3
    assert found["tokens"] == 10  # the greedy one is not counted
    assert 0.3 < found["commonest answer"] < 0.4  # 1


def test_another_problem_than_the_one_that_was_asked_is_refused(task_room, gcd):
    row = answered({**gcd[0][0], "seed": 8}, ["1"] * 5)
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        task_room.reasoning_rewards([row])


def test_functions_pass_by_their_tests(task_room):
    row = next(row for row in task_room.code_prompts(2) if row["size"] == "grammar1")
    problem = task_room.code_rows("grammar1", row["count"])[row["index"]]
    cases = "".join(f"    if (x,) == {argument}: return {result}\n" for argument, result in problem["tests"])
    right = f"```python\ndef f(x):\n{cases}```"
    rows = [answered(row, [right, "no function", "no function", right, right])]
    task_room.code_rewards(rows)
    (found,) = task_room.table({("code", "grammar1", "function"): rows})
    assert (found["pass"], found["greedy"], found["differ"]) == (0.5, 1, 1)
    assert found["commonest answer"] is None  # a function is right by its tests


def test_a_question_counts_once_for_the_commonest_answer(task_room, monkeypatch):
    problems = [{"question": f"{number % 4}? ", "answer": "1" if number % 4 else "2"} for number in range(50)]
    monkeypatch.setattr(task_room.examples(), "make_task", lambda *given: problems)
    expected = {"n": 4, "answers": 2, "commonest answer": 3 / 4, "which": "1"}
    assert task_room.commonest_answer("any", {}, seed=0, count=5) == expected
    fewer = {"n": 2, "commonest answer": 1 / 2, "which": "2"}  # the first of equals
    assert task_room.commonest_answer("any", {}, seed=0, count=2) == expected | fewer


def test_commonest_answers_need_no_model_and_show_a_shortcut(task_room, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    monkeypatch.setattr(sys, "argv", ["task_room.py", "commonest", "--tasks", "letter_counting", "--count", "500"])
    task_room.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "size", "n", "answers", "commonest", "answer", "which"]
    assert "matrix: letter_counting" in rows[0] + rows[1]  # the commonest first
    for row in rows[:2]:
        share, which = row.split()[-2:]
        assert (float(share), which) == (pytest.approx(0.68, abs=0.04), "1")


def test_prompts_are_encoded_as_the_chat_template_has_them(task_room):
    tokenizer = tiny.tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert task_room.encoded([{"messages": messages}], tokenizer) == [whole]


def test_sampling_needs_no_other_file_of_the_repository(tmp_path, task_room):
    alone = tmp_path / "task_room.py"
    alone.write_bytes(Path(task_room.__file__).read_bytes())
    absent = "import sys; sys.modules.update(dict.fromkeys(['reasoning_gym', 'isopo_trl', 'datasets', 'trl']));"
    subprocess.run([sys.executable, "-c", absent + "import task_room"], cwd=tmp_path, env={}, check=True)
