"""Rewards are given for right answers, in texts and conversations, with golds of every kind."""

import json
import math
import os
import re
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from datasets import Dataset

from isopo_trl.gsm8k import format_reward, gsm8k_reward, math_verify_reward, rewards, strict_gsm8k_reward
from tests import training


SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\nThat makes 9 * 2 = $<<9*2=18>>18.\n#### 18"

GOLDS = [
    (SOLUTION, "18"),
    ("#### 1,234", "1234"),
    ("1,234", "It is $1,234.00."),
    (18, "18"),
    (18.0, "18"),
    (0.1, "1/10"),
    (-2.5, "#### -2 1/2"),
    (1e22, "1" + "0" * 22),
    (Decimal("0.30"), ".3"),
    (Fraction(1, 3), "\\boxed{\\frac{2}{6}}"),
]


@pytest.mark.parametrize(("gold", "completion"), GOLDS)
def test_golds_are_solutions_texts_or_numbers(gold, completion):
    assert gsm8k_reward([completion, "19", ""], [gold] * 3) == [1.0, 0.0, 0.0]


def test_nothing_is_rounded():
    third = "0." + "3" * 90
    assert gsm8k_reward([third, "1/3", "0.30000000000000004", "1e16"], ["1/3", "2/6", 0.3, 10**16 + 1]) == [0, 1, 0, 0]


@pytest.mark.parametrize("gold", ["", "no number", "18 ####", "1/0", "9" * 101, math.nan, math.inf, True, [18]])
def test_a_gold_without_a_number_is_named(gold):
    with pytest.raises(ValueError, match=r"answer\[1\] has no number: ") as raised:
        gsm8k_reward(["18", "18"], ["18", gold])
    assert repr(gold) in str(raised.value)


def test_a_problem_without_gold_is_left_out():
    assert gsm8k_reward(["18", "18", "18"], ["18", None, "19"]) == [1.0, None, 0.0]


STRICT = [
    (SOLUTION, 1.0),
    ("#### 18", 1.0),
    ("####18 dollars", 1.0),
    ("#### 17\n#### 18", 1.0),
    ("18", 0.0),
    ("The answer is 18.", 0.0),
    ("\\boxed{18}", 0.0),
    ("### 18", 0.0),
    ("18 ####", 0.0),
    ("#### 18\n#### 17", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("completion", "reward"), STRICT)
def test_only_a_number_after_the_marker_counts_where_that_is_asked_for(completion, reward):
    assert strict_gsm8k_reward([completion], [SOLUTION]) == [reward]
    assert strict_gsm8k_reward([[{"role": "assistant", "content": completion}]], [18]) == [reward]


def test_the_marker_in_the_echo_of_the_prompt_is_not_the_answers():
    prompt = 'What is 9 + 9? Give the answer after "####".'
    prompts = [[{"role": "user", "content": prompt}]] * 3
    completions = [[{"role": "assistant", "content": text}] for text in (f"{prompt} 18", f"{prompt} #### 18", "18")]
    assert strict_gsm8k_reward(completions, [18, 18, None], prompts=prompts) == [0.0, 1.0, None]


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(ValueError):
        gsm8k_reward(["18", "18"], ["18"])


QUESTION = "A farmer has 9 eggs and sells 7 at $2 each. How many are left?"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (QUESTION, 0.0),
        (f"\n {QUESTION}\n", 0.0),
        (f"{QUESTION} Let me think.", 0.0),
        (f"{QUESTION} #### 2", 1.0),
        (f"{QUESTION}2", 1.0),
        ("2", 1.0),
        (f"The question is: {QUESTION} 2", 1.0),
    ],
)
def test_an_answer_in_the_echo_of_the_prompt_does_not_count(completion, reward):
    question = "How many are left of 9 when 7 are sold at $2"  # the last number of the prompt is the answer
    for prompt, text in ((QUESTION, completion), (question, completion.replace(QUESTION, question))):
        if text == f"{question}2":
            continue  # $22: no echo, but another number
        assert gsm8k_reward([text], [2], prompts=[prompt]) == [reward]
        system = {"role": "system", "content": "Answer with 2."}
        user = {"role": "user", "content": [{"type": "text", "text": prompt}]}
        answer = {"role": "assistant", "content": text}
        assert gsm8k_reward([[answer]], [2], prompts=[[system, user]]) == [reward]


def test_a_prompt_that_ends_within_a_number_is_no_echo():
    assert gsm8k_reward(["18", "18", "18"], ["18"] * 3, prompts=["1", "18", " "]) == [1.0, 0.0, 1.0]


def conversations(text):
    """The text as the last word of the assistant, in the ways that messages can hold it."""
    other = {"role": "assistant", "content": "#### 99"}
    tool = {"role": "tool", "content": "77"}
    thought = {"type": "reasoning", "text": "#### 99\n"}
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, thought, {"type": "text", "text": text[half:]}]
    yield [{"content": text}]
    yield [{"role": "assistant", "content": text}]
    yield [other, tool, {"role": "assistant", "content": text}]
    yield [{"role": "assistant", "content": text}, tool]
    yield [{"role": "assistant", "content": parts}]


@pytest.mark.parametrize("text", [SOLUTION, "18", "#### 18", "\\boxed{18}", "none", "", "#### 19"])
def test_conversations_are_scored_as_their_text(text):
    for completion in conversations(text):
        assert gsm8k_reward([completion], ["18"]) == gsm8k_reward([text], ["18"])
        assert format_reward([completion]) == format_reward([text])


@pytest.mark.parametrize(
    "completion",
    [
        None,
        "",
        [],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": []}],
        [{"role": "assistant", "content": []}],
        [{"role": "tool", "content": "#### 18"}],
        [{"role": "assistant", "content": "#### 18"}, {"role": "assistant", "content": None}],
    ],
)
def test_an_empty_completion_scores_zero(completion):
    assert gsm8k_reward([completion], ["18"], prompts=[None]) == [0.0]
    assert format_reward([completion]) == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        SOLUTION,
        "#### 18",
        "#### 18 \n\n",
        "####\t18",
        "x\n#### -1,234.5",
        "#### - 3",
        "#### -$5",
        "#### $-5",
        "#### $ 5.",
        "#### 50%",
        "#### 50\\%",
        "#### 3/4",
        "#### \\frac{3}{4}",
        "#### \\$5",
    ],
)
def test_one_line_with_a_number_at_the_end_has_the_format(text):
    assert format_reward([text]) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "18",
        "\\boxed{18}",
        "####",
        "#### ",
        "####18",
        "##### 18",
        "### 18",
        "x #### 18",
        " #### 18",
        "#### \n18",
        "####\n18",
        "#### 18\nSo 18.",
        "#### 18 dollars",
        "#### x = 18",
        "#### 18 19",
        "#### --18",
        "#### $$18",
        "#### 18\n#### 18",
        "#### Sum\n#### 18",
        "#### 12,34",
        "#### 1/0",
        "#### " + "9" * 101,
        "#### " + " 18" * 200,
    ],
)
def test_anything_else_does_not_have_the_format(text):
    assert format_reward([text]) == [0.0]


def test_the_rewards_take_what_trl_passes(tmp_path):
    data = Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="] * 2, "answer": ["#### 2", "4", None, "4"]})
    trainer = training.build(tmp_path, reward=[gsm8k_reward, format_reward], data=data, max_steps=1)
    inputs = [dict(data[i]) for i in (0, 1, 2, 3)]
    texts = ["1 + 1 = 2\n#### 2", "5", "#### 2", "1 + 1 = 2"]
    scores = trainer._calculate_rewards(inputs, data["prompt"], texts, [[0]] * 4)
    assert scores[:, 0].tolist()[:2] == [1.0, 0.0] and scores[2, 0].isnan() and scores[3, 0] == 0
    assert scores[:, 1].tolist() == [1.0, 0.0, 1.0, 0.0]
    trainer.train()
    assert {"rewards/gsm8k_reward/mean", "rewards/format_reward/mean"} <= trainer.state.log_history[0].keys()


class TestMathVerify:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        ("completion", "gold", "reward"),
        [
            (SOLUTION, SOLUTION, 1.0),
            ("#### 1,234 dollars", "#### 1,234", 1.0),
            ("It is \\boxed{18}.", 18, 1.0),
            ("So it is 18.", "18", 1.0),
            ("#### 19", SOLUTION, 0.0),
            ("#### 18\n#### 19", SOLUTION, 0.0),
            ("\\boxed{\\frac{\\sqrt{8}}{2}}", "\\sqrt{2}", 1.0),
            ("\\boxed{1 + x^2}, or \\boxed{(x + i)(x - i)}, or \\boxed{x^2 + 1}", "x^2 + 1", 1.0),
            ("\\boxed{x^2 - 1}", "$x^2 + 1$", 0.0),
            ("\\boxed{\\frac{1}{3}}", "\\boxed{\\frac{2}{6}}", 1.0),
            ("", "18", 0.0),
            ("\\boxed{18", "18", 0.0),
            ("18", None, None),
            ("18", "", None),
        ],
    )
    def test_expressions_are_compared(self, completion, gold, reward):
        assert math_verify_reward([completion], [gold]) == [reward]
        assert math_verify_reward([[{"role": "assistant", "content": completion}]], [gold]) == [reward]

    def test_an_answer_in_the_echo_of_the_prompt_does_not_count(self):
        assert math_verify_reward(["Is it 2?", "Is it 2? 2"], [2, 2], prompts=["Is it 2?"] * 2) == [0.0, 1.0]

    def test_it_works_outside_the_main_thread(self):
        results = []
        thread = threading.Thread(target=lambda: results.append(math_verify_reward([SOLUTION, "17"], [SOLUTION] * 2)))
        thread.start()
        thread.join()
        assert results == [[1.0, 0.0]]


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        math_verify_reward(["18"], ["18"])


def test_only_what_is_meant_for_users_is_public():
    assert rewards.__all__ == [
        "format_reward",
        "gsm8k_reward",
        "math_verify_reward",
        "strict_gsm8k_reward",
    ]


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="GSM8K_DIR names no folder with GSM8K's JSON lines")
def test_every_solution_of_gsm8k_is_scored_right():
    files = sorted(Path(os.environ["GSM8K_DIR"]).glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
    solutions = [record["answer"] for record in records]
    questions = [record["question"] for record in records]
    bare = [solution.rsplit("#### ", 1)[1] for solution in solutions]
    values = [int(number.replace(",", "")) for number in bare]
    assert len(records) >= 1319
    for texts in (solutions, bare, [f"So it is ${number}." for number in bare], [f"\\boxed{{{v}}}" for v in values]):
        for gold in (solutions, bare, values):
            assert gsm8k_reward(texts, gold, prompts=questions) == [1.0] * len(records)
    assert format_reward(solutions) == [1.0] * len(records)
    for shift in (1, 7):  # the solution of another problem is right only where it has the same value
        others = values[shift:] + values[:shift]
        expected = [float(value == other) for value, other in zip(values, others, strict=True)]
        assert gsm8k_reward(solutions, others) == gsm8k_reward(bare, others) == expected
        assert strict_gsm8k_reward(solutions, others) == expected
        assert sum(expected) < len(records) / 10
    # The last sentence of a solution, declared as its answer: nearly all have an equation, some more than one number
    sentences = [re.sub("<<.*?>>", "", solution.split("\n")[-2]) for solution in solutions]
    for place in ("#### {}", "\\boxed{{{}}}"):
        assert sum(gsm8k_reward(list(map(place.format, sentences)), values)) > 0.98 * len(records)
