"""What `graders.py` says: our reward agrees with the teacher, and the other graders are what they are."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def graders():
    import graders

    return graders


def test_our_reward_gives_the_teachers_verdict_wherever_it_is_not_debatable(graders):
    cases, grade = graders.cases(), graders.graders()["gsm8k_reward"]
    clear = [case for case in cases if "debatable" not in case]
    assert len(clear) >= 340 and len({(case["completion"], case["gold"]) for case in cases}) == len(cases)
    assert [case for case in clear if grade(case["completion"], case["gold"]) != case["correct"]] == []


def test_where_it_is_debatable_the_results_say_what_ours_does(graders):
    """So that a change of the reading shows up in the published table."""
    grade = graders.graders()["gsm8k_reward"]
    published = Path(graders.__file__).parents[1].joinpath("RESULTS.md").read_text(encoding="utf-8").splitlines()
    for case in graders.cases():
        if "debatable" in case:
            row = f"| {graders.cell(case['completion'])} | {case['gold']} | "
            differs = grade(case["completion"], case["gold"]) != case["correct"]
            assert any(line.startswith(row) for line in published) == differs, case


@pytest.mark.parametrize(
    ("name", "completion", "verdict"),
    [
        ("strict-match", "#### 72", True),
        ("strict-match", "#### 72.", True),
        ("strict-match", "#### 72\n#### 70", True),  # the first
        ("strict-match", "#### $72", False),
        ("strict-match", "#### 72.00", False),
        ("strict-match", "72", False),
        ("flexible-extract", "#### 72\nin 3 days", False),  # the last
        ("flexible-extract", "It is $72.", True),
        ("flexible-extract", "72\n\nQuestion: 1 + 1?\n2", True),
        ("flexible-extract", "none", False),
    ],
)
def test_the_other_graders_read_as_their_patterns_do(graders, name, completion, verdict):
    assert graders.graders()[f"lm-eval {name}"](completion, "72") is verdict


def test_the_tables_are_printed_with_and_without_math_verify(graders, monkeypatch, capsys):
    monkeypatch.setitem(graders.graders.__globals__, "graders", lambda: {"gsm8k_reward": lambda *_: False})
    monkeypatch.setattr("sys.argv", ["graders.py", "--all"])
    graders.main()
    output = capsys.readouterr().out
    assert "math-verify is not installed (pip install math-verify), and left out." in output
    assert "| `` #### 72 `` | 72 | yes | **no** |  |" in output
