"""What `graders.py` says: our reward agrees with the teacher, and the other graders are what they are."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def graders():
    import graders

    return graders


def test_our_reward_gives_the_teachers_verdict_and_the_results_say_where_not(graders):
    """Wherever it is not debatable; elsewhere a change of the reading shows up in the published table."""
    cases, grade = graders.cases(), graders.graders()["gsm8k_reward"]
    published = Path(graders.__file__).parents[1].joinpath("RESULTS.md").read_text(encoding="utf-8").splitlines()
    assert sum("debatable" not in case for case in cases) >= 340
    assert len({(case["completion"], case["gold"]) for case in cases}) == len(cases)
    for case in cases:
        differs = grade(case["completion"], case["gold"]) != case["correct"]
        row = f"| {graders.cell(case['completion'])} | {case['gold']} | "
        assert differs == ("debatable" in case and any(line.startswith(row) for line in published)), case


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # The first number behind ####, or the last number of all; in both cases as text
        ("strict-match", ("#### 72", "#### 72.", "#### 72\n#### 70"), ("#### $72", "#### 72.00", "72")),
        ("flexible-extract", ("It is $72.", "72\n\nQuestion: 1 + 1?\n2"), ("#### 72\nin 3 days", "none")),
    ],
)
def test_the_other_graders_read_as_their_patterns_do(graders, name, right, wrong):
    grade = graders.graders()[f"lm-eval {name}"]
    assert all(grade(text, "72") for text in right) and not any(grade(text, "72") for text in wrong)
