"""
`gsm8k_reward` and other graders of GSM8K against the verdicts of a teacher, on the answers of `graded_answers.jsonl`.

Each line of that file is a completion, the gold answer, and whether a teacher who sees only these two would call it
correct. The verdicts were written down before any grader was run; where teachers may differ, `debatable` says why.

The other graders are those of EleutherAI's lm-evaluation-harness (lm_eval/tasks/gsm8k/gsm8k.yaml, version 3.0), stated
below, and the package math-verify, where it is installed, given the whole completion.

    python benchmarks/questions/graders.py             # what each grader gets wrong, in figures, and all of ours
    python benchmarks/questions/graders.py --all       # every answer that any of them gets wrong
"""

import argparse
import json
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isopo_trl.gsm8k import gsm8k_reward, strict_gsm8k_reward


CASES = Path(__file__).with_name("graded_answers.jsonl")
STOPS = ("Question:", "</s>", "<|im_end|>")  # where lm-eval ends a generation
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # removed from answer and gold before they are compared as text

Grader = Callable[[str, str], bool]


def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def lm_eval(pattern: str, place: int) -> Grader:
    """The answer is the first (0) or last (-1) match of a pattern, and compared as text."""

    def grade(completion: str, gold: str) -> bool:
        for stop in STOPS:
            completion = completion.partition(stop)[0]
        matches = [next(filter(None, match.groups())) for match in re.finditer(pattern, completion)]
        answer = matches[place].strip() if matches else "[invalid]"
        return bare(answer) == bare(f"#### {gold}")

    def bare(text: str) -> str:
        for ignored in IGNORED:
            text = re.sub(ignored, "", text)
        return text.lower()

    return grade


def ours(reward: Callable[..., list[float | None]]) -> Grader:
    return lambda completion, gold: reward([completion], [gold]) == [1.0]


def graders() -> dict[str, Grader]:
    found = {
        "gsm8k_reward": ours(gsm8k_reward),
        "strict_gsm8k_reward": ours(strict_gsm8k_reward),
        "lm-eval strict-match": lm_eval(r"#### (\-?[0-9\.\,]+)", 0),
        "lm-eval flexible-extract": lm_eval(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    }
    try:
        math_verify = import_module("math_verify")
    except ImportError:
        return found
    found[f"math-verify {version('math-verify')}"] = lambda completion, gold: bool(
        math_verify.verify(math_verify.parse(gold), math_verify.parse(completion))
    )
    return found


def cell(text: str) -> str:
    """A text as code in a table of Markdown; what cannot be seen is written as in Python."""
    seen = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return f"`` {seen.replace('|', chr(92) + '|')} ``" if seen else "(empty)"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every answer that any grader gets wrong")
    options = parser.parse_args()
    answers, columns = cases(), graders()
    verdicts = {name: [grade(case["completion"], case["gold"]) for case in answers] for name, grade in columns.items()}
    clear = [number for number, case in enumerate(answers) if "debatable" not in case]
    debatable = [number for number, case in enumerate(answers) if "debatable" in case]
    print(f"{len(answers)} answers, {len(debatable)} of them debatable.")
    if len(columns) < 5:
        print("math-verify is not installed (pip install math-verify), and left out.")
    rows = []
    for name, verdict in verdicts.items():
        false_right = [number for number in clear if verdict[number] and not answers[number]["correct"]]
        false_wrong = [number for number in clear if answers[number]["correct"] and not verdict[number]]
        differ = [number for number in debatable if verdict[number] != answers[number]["correct"]]
        agreed = len(clear) - len(false_right) - len(false_wrong)
        rows.append(
            [name, f"{agreed} of {len(clear)}", *(str(len(part)) for part in (false_right, false_wrong, differ))]
        )
    print("\n" + table(["", "agrees", "wrong called right", "right called wrong", "differs where debatable"], rows))
    shown = list(columns) if options.all else ["gsm8k_reward"]
    rows = []
    for number, case in enumerate(answers):
        marks = ["yes" if verdicts[name][number] else "no" for name in shown]
        teacher = "yes" if case["correct"] else "no"
        if set(marks) != {teacher}:
            marks = [mark if mark == teacher else f"**{mark}**" for mark in marks]
            rows.append([cell(case["completion"]), case["gold"], teacher, *marks, case.get("debatable", "")])
    print(f"\nWhere {'any grader' if options.all else 'gsm8k_reward'} and the teacher differ:\n")
    print(table(["completion", "gold", "teacher", *shown, "why it is debatable"], rows))


if __name__ == "__main__":
    main()
