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

from isopo_trl.gsm8k import format_reward, gsm8k_reward, math_verify_reward, strict_gsm8k_reward
from tests import training


SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\nThat makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def said(text, role="assistant"):
    return {"role": role, "content": text}


def test_golds_are_solutions_texts_or_numbers():
    golds = [SOLUTION, "1,234", 18, 18.0, 0.1, -2.5, 1e22, Decimal("0.30"), Fraction(1, 3)]
    texts = ["18", "It is $1,234.00.", "18", "18", "1/10", "-2 1/2", "1" + "0" * 22, ".3", "\\boxed{\\frac{2}{6}}"]
    assert gsm8k_reward(texts, golds) == [1.0] * 9
    assert gsm8k_reward(["19"] * 9, golds) == gsm8k_reward([""] * 9, golds) == [0.0] * 9


def test_nothing_is_rounded():
    third = "0." + "3" * 90
    assert gsm8k_reward([third, "1/3", "0.30000000000000004", "1e16"], ["1/3", "2/6", 0.3, 10**16 + 1]) == [0, 1, 0, 0]


@pytest.mark.parametrize("gold", ["", "no number", "18 ####", "1/0", "9" * 101, math.nan, math.inf, True, [18]])
def test_a_gold_without_a_number_is_named(gold):
    with pytest.raises(ValueError, match=r"answer\[1\] has no number: ") as raised:
        gsm8k_reward(["18", "18"], ["18", gold])
    assert repr(gold) in str(raised.value)


def test_a_problem_without_gold_is_left_out_and_columns_are_of_one_length():
    assert gsm8k_reward(["18", "18", "18"], ["18", None, "19"]) == [1.0, None, 0.0]
    with pytest.raises(ValueError):
        gsm8k_reward(["18", "18"], ["18"])


def test_only_a_number_after_the_marker_counts_where_that_is_asked_for():
    right = [SOLUTION, "####18 dollars", "#### 17\n#### 18"]
    wrong = ["18", "The answer is 18.", "\\boxed{18}", "### 18", "18 ####", "#### 18\n#### 17", ""]
    for texts in (right + wrong, [[said(text)] for text in right + wrong]):
        assert strict_gsm8k_reward(texts, [SOLUTION] * 10) == [1.0] * 3 + [0.0] * 7


def test_the_marker_in_the_echo_of_the_prompt_is_not_the_answers():
    prompt = 'What is 9 + 9? Give the answer after "####".'
    completions = [[said(text)] for text in (f"{prompt} 18", f"{prompt} #### 18", "18")]
    assert strict_gsm8k_reward(completions, [18, 18, None], prompts=[[said(prompt, "user")]] * 3) == [0.0, 1.0, None]


@pytest.mark.parametrize("question", ["A farmer had 9 eggs and sold 7, at $2. How many are left?", "9 - 7 = 2"])
def test_an_answer_in_the_echo_of_the_prompt_does_not_count(question):
    wrong = [question, f"\n {question}\n", f"{question} Let me think."]
    texts = [*wrong, f"{question} #### 2", "2", f"The question is: {question} 2"]
    messages = [said("Answer with 2.", "system"), said([{"type": "text", "text": question}], "user")]
    expected = [0.0] * 3 + [1.0] * 3
    assert gsm8k_reward(texts, [2] * 6, prompts=[question] * 6) == expected
    assert gsm8k_reward([[said(text)] for text in texts], [2] * 6, prompts=[messages] * 6) == expected


def test_a_prompt_that_ends_within_a_number_is_no_echo():
    assert gsm8k_reward(["18", "18", "18"], ["18"] * 3, prompts=["1", "18", " "]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("text", [SOLUTION, "18", "#### 18", "\\boxed{18}", "none", "", "#### 19"])
def test_conversations_are_scored_as_what_the_assistant_says_last(text):
    tool, thought = said("77", "tool"), {"type": "reasoning", "text": "#### 99\n"}
    parts = [{"type": "text", "text": text[:9]}, thought, {"type": "text", "text": text[9:]}]
    for completion in ([said(text)], [said("#### 99"), tool, said(text)], [said(text), tool], [said(parts)]):
        assert gsm8k_reward([completion], ["18"]) == gsm8k_reward([text], ["18"])
        assert format_reward([completion]) == format_reward([text])


def test_an_empty_completion_scores_zero():
    calls, tool = {"role": "assistant", "tool_calls": []}, said("#### 18", "tool")
    completions = [None, "", [], [said(None)], [said([])], [calls], [tool], [said("#### 18"), said(None)]]
    assert gsm8k_reward(completions, ["18"] * 8, prompts=[None] * 8) == [0.0] * 8
    assert format_reward(completions) == [0.0] * 8


NUMBERS = "18 \n\n  -1,234.5  - 3  -$5  $-5  $ 5.  50%  50\\%  3/4  \\frac{3}{4}  \\$5".split("  ")
NO_LINE = ["", "18", "\\boxed{18}", "####", "####18", "##### 18", "### 18", "x #### 18", " #### 18", "####\n18"]
NO_NUMBER = ["", "\n18", "18\nSo 18.", "18 dollars", "x = 18", "18 19", "--18", "$$18", "12,34", "1/0", " 18" * 200]


@pytest.mark.parametrize("text", [SOLUTION, "####\t18", "x\n#### 18", *map("#### {}".format, NUMBERS)])
def test_one_line_with_a_number_at_the_end_has_the_format(text):
    assert format_reward([text]) == [1.0] and format_reward([f"#### Sum\n{text}"]) == [0.0]


@pytest.mark.parametrize("text", [*NO_LINE, *map("#### {}".format, NO_NUMBER)])
def test_anything_else_does_not_have_the_format(text):
    assert format_reward([text]) == [0.0]


def test_the_rewards_take_what_trl_passes(tmp_path):
    data = Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="] * 2, "answer": ["#### 2", "4", None, "4"]})
    trainer = training.build(tmp_path, reward=[gsm8k_reward, format_reward], data=data, max_steps=1)
    texts = ["1 + 1 = 2\n#### 2", "5", "#### 2", "1 + 1 = 2"]
    scores = trainer._calculate_rewards([dict(row) for row in data], data["prompt"], texts, [[0]] * 4)
    assert scores[:, 0].tolist()[:2] == [1.0, 0.0] and scores[2, 0].isnan() and scores[3, 0] == 0
    assert scores[:, 1].tolist() == [1.0, 0.0, 1.0, 0.0]
    trainer.train()
    assert {"rewards/gsm8k_reward/mean", "rewards/format_reward/mean"} <= trainer.state.log_history[0].keys()


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("#### 1,234 dollars", "#### 1,234", 1.0),
        ("So it is 18.", "18", 1.0),
        ("#### 18\n#### 19", SOLUTION, 0.0),
        ("\\boxed{\\frac{\\sqrt{8}}{2}}", "\\sqrt{2}", 1.0),
        ("\\boxed{(x + i)(x - i)}, or \\boxed{x^2 + 1}", "x^2 + 1", 1.0),
        ("\\boxed{x^2 - 1}", "$x^2 + 1$", 0.0),
        ("", 18, 0.0),
        ("18", None, None),
        ("18", "", None),
    ],
)
def test_math_verify_compares_expressions(completion, gold, reward):
    pytest.importorskip("math_verify")
    assert math_verify_reward([completion], [gold]) == [reward]
    assert math_verify_reward([[said(completion)]], [gold]) == [reward]


def test_math_verify_leaves_the_echo_of_the_prompt_out_and_works_outside_the_main_thread():
    pytest.importorskip("math_verify")
    results = []
    arguments = (["Is it 2?", "Is it 2? 2"], [2, 2], ["Is it 2?"] * 2)
    thread = threading.Thread(target=lambda: results.append(math_verify_reward(*arguments)))
    thread.start()
    thread.join()
    assert results == [[0.0, 1.0]] == [math_verify_reward(*arguments)]


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        math_verify_reward(["18"], ["18"])


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="GSM8K_DIR names no folder with GSM8K's JSON lines")
def test_every_solution_of_gsm8k_is_scored_right():
    files = sorted(Path(os.environ["GSM8K_DIR"]).glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
    questions, solutions = ([record[name] for record in records] for name in ("question", "answer"))
    bare = [solution.rsplit("#### ", 1)[1] for solution in solutions]
    values = [int(number.replace(",", "")) for number in bare]
    assert len(records) >= 1319
    for texts in (solutions, bare, [f"So it is ${number}." for number in bare], [f"\\boxed{{{v}}}" for v in values]):
        for gold in (solutions, bare, values):
            assert gsm8k_reward(texts, gold, prompts=questions) == [1.0] * len(records)
    assert format_reward(solutions) == [1.0] * len(records)
    others = values[1:] + values[:1]  # the solution of another problem is right only where it has the same value
    expected = [float(value == other) for value, other in zip(values, others, strict=True)]
    assert gsm8k_reward(bare, others) == strict_gsm8k_reward(solutions, others) == expected
    assert sum(expected) < len(records) / 10
    # The last sentence of a solution, declared as its answer: nearly all have an equation, some more than one number
    sentences = [re.sub("<<.*?>>", "", solution.split("\n")[-2]) for solution in solutions]
    for place in ("#### {}", "\\boxed{{{}}}"):
        assert sum(gsm8k_reward(list(map(place.format, sentences)), values)) > 0.98 * len(records)
