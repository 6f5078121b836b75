"""Rewards are given for functions that pass, however a completion has them."""

import pytest

from isopo_trl.coding import CodeReward, as_program, literal, rewards
from tests.coding.confinement import confines
from tests.coding.test_sandbox import PLENTY


HEAD = 'import math\n\ndef f(x: int) -> int:\n    """Add 1 to x."""\n'
TESTS = [["(1,)", "2"], ["(2,)", "3"]]
WHOLE = "def f(x):\n    return x + 1\n"


def test_a_program_is_a_whole_function_or_what_follows_the_head():
    body = "    y = x\n\n    return y + 1\n"
    for text in (body, f"```python\n{body}```", body + "print(f(1))\n", body + "def g():\n    pass", f"```\n{body}"):
        assert as_program(text, HEAD, "f").split() == (HEAD + body).split(), text
    for text in (WHOLE, f"Here:\n```python\n{WHOLE}```\nIt adds 1.", f"```\ndef f(x): pass\n```\n ```py\n{WHOLE} ```"):
        assert as_program(text, HEAD, "f").split() == ("import math\n" + WHOLE).split(), text
    begun = HEAD + "    return"
    assert as_program(" x + 1\n\nThat is it.", begun, "f") == begun + " x + 1\n"
    assert as_program("x + 1", begun, "f") == begun + "x + 1"
    assert as_program("return x", HEAD, "f") == HEAD  # which has no meaning in a function that is not indented


@confines
def test_completions_are_rewarded_one_by_one():
    texts = [WHOLE, "    return x + 1", "    return 2", "", "\0", "\ud800", "```\n" * 1000, "(" * 10**5, WHOLE]
    talks = [[{"role": "assistant", "content": text}] for text in texts]
    tests = [TESTS] * (len(texts) - 1) + [None]
    given = {"head": [HEAD] * len(texts), "function": ["f"] * len(texts), "tests": tests, "prompts": texts, "step": 1}
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None]
    reward = CodeReward(limits=PLENTY, processes=2)
    assert reward(texts, **given) == reward(talks, **given) == expected
    assert CodeReward(partial=True, limits=PLENTY)(texts, **given) == [1.0, 1.0, 0.5, *expected[3:]]
    empty = [[], [{"role": "assistant", "content": None}]]
    assert reward(empty, [HEAD] * 2, ["f"] * 2, [TESTS] * 2) == [0.0, 0.0]
    checks = ["def check(candidate):\n    assert candidate(1) == 2\n"] * 2
    assert reward([WHOLE, "    return 1"], [HEAD] * 2, ["f"] * 2, checks=checks) == [1.0, 0.0]


@confines
def test_a_dictionary_is_expected_as_the_documentation_writes_it():
    body = "    return {'b': 1, 'a': 2}"
    tests = [[literal((1,)), literal({"b": 1, "a": 2})]]
    assert CodeReward(limits=PLENTY)([body], [HEAD], ["f"], [tests]) == [1.0]
    with pytest.raises(TypeError, match="both as text"):
        CodeReward(limits=PLENTY)([body], [HEAD], ["f"], [[["(1,)", 2]]])


@confines
def test_as_many_run_at_a_time_as_there_are_cores_for_this_process(monkeypatch):
    monkeypatch.setattr(rewards.os, "sched_getaffinity", lambda process: {0, 3, 5})
    assert CodeReward().processes == 3 and CodeReward(processes=2).processes == 2
    monkeypatch.delattr(rewards.os, "sched_getaffinity")
    assert CodeReward().processes == rewards.os.cpu_count()


def test_no_process_is_no_number_of_processes():
    with pytest.raises(ValueError, match="processes=0"):
        CodeReward(processes=0)
