r"""
Rewards for arithmetic problems in GSM8K's format, as functions that TRL's trainers call.

A text declares where its answer stands by `####` or `\boxed{}`; the last declaration counts, and `####` before boxes.
Without a number in that place there is no answer, whatever number stands elsewhere. A text that declares nothing
answers with its last number. Numbers are compared as fractions, without rounding, and the time to read one is linear
in the length of the text, whatever the text.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any


__all__ = ["extract_answer", "format_reward", "gsm8k_reward", "math_verify_reward", "strict_gsm8k_reward"]

MINUS = ("-", "−", "–")
CURRENCY = "$€£¥₹"
LONGEST_NUMBER = 100  # characters; Python refuses to read integers of more than 4300 digits
LONGEST_BOX = 1000
REACH = 256  # more than a number can take, written as \dfrac{...}{...}

_DECIMAL = r"""
    (?:
        (?: [1-9][0-9]{0,2} (?:,[0-9]{3})++ | [0-9]++ ) (?: \.[0-9]++ )?+    # 1,234.5
        | (?<![\w.]) \.[0-9]++                                               # .5
    )
    (?: [eE][-+]?[0-9]{1,2}+ )?+
"""
# A number, or else the whole run of digits and separators that is none ("12,34", "1.2.3", "1/2/3"), in which case no
# group is set: the parts of such a run are not numbers either. No quantifier over digits gives back what it has taken.
_NUMBER = re.compile(
    rf"""
    (?=[.0-9])
    (?:
        (?: ([0-9]++) [ ]{{1,2}}+ (?=[0-9]++/) )?+                           # the 2 of 2 1/2
        ({_DECIMAL})
        (?: [ ]?/[ ]? ({_DECIMAL}) )?+
        (?! [.,]?[0-9] | [ ]?/[ ]?-?[0-9] | [eE][-+]?[0-9] )
        | (?: (?<![\w.]) \. )?+ [0-9][0-9.,]*+ (?: (?: [ ]?/[ ]?-? | [eE][-+]? ) [0-9.,]++ )*+
    )
    """,
    re.VERBOSE,
)
_DIGIT = re.compile(r"[0-9]")
# In a reversed text: the last digit, and before it whatever can belong to its number, \frac included
_TAIL = re.compile(rf"[0-9][-−–+0-9.,/ {CURRENCY}eE\\{{}}!fracdt]{{0,{REACH - 1}}}")
_FRACTION = re.compile(r"\\[dt]?frac *(\{[-−– 0-9.,]*\}|[0-9]) *(\{[-−– 0-9.,]*\}|[0-9])")
_BEFORE_FRACTION = re.compile(r"(?<=[0-9]) *(?=\\[dt]?frac)")
_LEAD = re.compile(rf"[-−–]? ?[{CURRENCY}]? ?|[{CURRENCY}] ?[-−–] ?")


def extract_answer(text: str) -> Fraction | None:
    r"""
    The number that a text gives as its answer: on the line after the last `####`, else in the last `\boxed{}`, else
    the last one of the text.

    On that line (blank lines after `####` are skipped) and in the box it is the first number, so that units and
    remarks may follow. A `####` without a number on its line is no answer, nor is a box that has none or is not closed
    within 1000 characters: numbers elsewhere do not count then.

    Numbers may be written as `1234`, `1,234`, `0.5`, `.50`, `5.`, `1e5`, `3/4`, `30 / 5`, `2 1/2` or `\frac{3}{4}`
    (also `\dfrac` and `\tfrac`), with a minus (`-`, `−` or `–`), and beside a currency sign, a percent sign (`50%` is
    50) or words. A minus that a space separates from its number is a sign where the answer begins with it or after
    `=`, `:` or `(`; elsewhere it is a subtraction or the bullet of a list. What is not a number is not read in part
    either: runs such as `12,34`, `1.2.3` or `1/2/3`, exponents of more than two digits, `1/0`, numbers written with
    more than 100 characters, and digits other than 0 to 9.

    Args:
        text (`str`): the text, of any length.

    Returns:
        `Fraction`: the answer, or `None` where there is none.
    """
    number = _number(text)
    return None if number is None else Fraction(number)


def gsm8k_reward(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    1.0 where the completion's answer is the gold one, 0.0 elsewhere.

    Both are read by [`extract_answer`] and compared exactly. A completion that begins by repeating its prompt (of a
    conversation: the last message of the user) is read from where the repetition ends.

    Args:
        completions (`list[str]` or `list[list[dict]]`): texts, or messages, of which the last one of the assistant is
            read; its content may be text, a list of parts, or `None` for an empty one.
        answer (`list`): column of the dataset: GSM8K's whole solution (`"... #### 1,234"`), the number as text, or a
            number. `None` where the problem has no such answer.
        prompts (`list`, *optional*): texts or messages.
        **kwargs: what else TRL passes; not used.

    Returns:
        `list[float | None]`: one reward each; `None`, which TRL leaves out, where `answer` is `None`.
    """
    return _correctness(_cases(completions, answer, prompts))


def strict_gsm8k_reward(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    As [`gsm8k_reward`], but only a number after `####` is an answer: 0.0 for a completion that has no `####`, even
    where the right number stands in a box or at the end of the text.

    Args:
        completions, answer, prompts: as in [`gsm8k_reward`].
        **kwargs: what else TRL passes; not used.

    Returns:
        `list[float | None]`: one reward each; `None`, which TRL leaves out, where `answer` is `None`.
    """
    cases = _cases(completions, answer, prompts)
    return _correctness((text if "####" in text else "", gold) for text, gold in cases)


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    1.0 where the completion ends in a line `#### <number>` and has no other `####`, 0.0 elsewhere.

    At least one blank stands before the number, which may be any that [`extract_answer`] reads, between a currency
    sign and a percent sign or full stop at most; nothing else is on the line, and only white space after it.

    Args:
        completions (`list[str]` or `list[list[dict]]`): as in [`gsm8k_reward`].
        **kwargs: what else TRL passes; not used.

    Returns:
        `list[float]`: one reward each.
    """
    return [float(_ends_in_answer(_text(completion))) for completion in completions]


def math_verify_reward(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""
    1.0 where the package `math-verify` finds the completion's answer equal to the gold one, 0.0 elsewhere.

    For answers that are more than a number (`\sqrt{2}`, `x^2 + 1`, an interval), at hundreds of times the cost.
    math-verify is given the line after the last `####`, else the last box, else the whole completion; what it finds
    equal is up to it (it rounds numbers to six decimals, and 50% may be 0.5). Its time limits rest on a signal, which
    only the main thread receives: in any other thread there are none.

    Args:
        completions, prompts: as in [`gsm8k_reward`].
        answer (`list`): GSM8K's whole solution, an expression in LaTeX, or a number; `None` where there is none.
        **kwargs: what else TRL passes; not used.

    Returns:
        `list[float | None]`: one reward each; `None`, which TRL leaves out, where `answer` is `None` or math-verify
        cannot read it.
    """
    try:
        math_verify = import_module("math_verify")
    except ImportError as error:
        raise ImportError(
            "math_verify_reward needs the package math-verify: install it with `pip install math-verify`, or use "
            "gsm8k_reward, which needs no package."
        ) from error
    limit = 5 if threading.current_thread() is threading.main_thread() else None  # seconds
    rewards: list[float | None] = []
    for text, gold in _cases(completions, answer, prompts):
        gold_text = gold if "####" in str(gold) else f"\\boxed{{{gold}}}"
        wanted = [] if gold is None else math_verify.parse(_expression(gold_text), parsing_timeout=limit)
        if wanted:
            given = math_verify.parse(_expression(text), parsing_timeout=limit)
            rewards.append(float(math_verify.verify(wanted, given, timeout_seconds=limit)))
        else:
            rewards.append(None)
    return rewards


def _correctness(cases: Iterable[tuple[str, Any]]) -> list[float | None]:
    """1.0 where a text's answer is the gold one, 0.0 elsewhere; `None` where there is no gold one."""
    rewards: list[float | None] = []
    for text, gold in cases:
        if gold is None:
            rewards.append(None)
        else:
            rewards.append(1.0 if _number(text) == _gold(gold, len(rewards)) else 0.0)
    return rewards


def _number(text: str) -> int | Fraction | None:
    """As `extract_answer`; integers as they are, which are faster to compare."""
    declared = _declared(text)
    if declared is not None:
        digit = _DIGIT.search(declared)
        if digit is None:
            return None
        start = max(digit.start() - 20, 0)  # room for "-$\dfrac{"
        return _value(_NUMBER.search(_without_latex(declared[start : digit.start() + REACH])))
    tail = _TAIL.search(text[::-1])
    if tail is None:
        return None
    # A little more on either side: what a minus follows, and the brace that closes a fraction
    start, end = max(len(text) - tail.end() - 1, 0), len(text) - tail.start() + 4
    *_, last = _NUMBER.finditer(_without_latex(text[start:end]))
    return _value(last)


def _expression(text: str) -> str:
    """What math-verify reads; in a box, an expression needs no dollar signs."""
    line = _after_marker(text)
    if line is not None:
        return line
    box = _declared(text)
    return text if box is None else f"\\boxed{{{box}}}"


def _after_marker(text: str) -> str | None:
    """The first line with text on it after the last `####`; `None` without a `####`."""
    marker = text.rfind("####")
    return None if marker < 0 else text[marker + 4 :].lstrip().partition("\n")[0]


def _declared(text: str) -> str | None:
    """What stands in the place that the text declares as its answer's; `None` where it declares none."""
    line = _after_marker(text)
    if line is not None:
        return line
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return None
    box = text[start : start + LONGEST_BOX]
    end = box.find("}")
    while end >= 0 and box.count("{", 0, end) > box.count("}", 0, end):
        end = box.find("}", end + 1)
    return box[: max(end, 0)]


def _without_latex(text: str) -> str:
    """LaTeX's ways to write a number in plain text: `\\frac{3}{4}`, `1{,}234`, `1\\,234`, `\\$5`."""
    if "\\" not in text and "{" not in text:
        return text
    text = _FRACTION.sub(
        lambda match: "/".join(part.strip("{ }") for part in match.groups()), _BEFORE_FRACTION.sub(" ", text)
    )
    return text.replace("{,}", ",").replace("\\,", ",").replace("\\!", "").replace("\\$", "$")


def _value(match: re.Match[str] | None) -> int | Fraction | None:
    """The value of a match of `_NUMBER`."""
    if match is None or match.end() - match.start() > LONGEST_NUMBER:
        return None
    whole, number, denominator = match.groups()
    if number is None:
        return None
    value = _decimal(number)
    if denominator is not None:
        divisor = _decimal(denominator)
        if divisor == 0:
            return None
        value = Fraction(value) / divisor
    if whole is not None:
        if value >= 1:
            return None
        value += int(whole)
    return -value if _is_negative(match.string[: match.start()]) else value


def _decimal(text: str) -> int | Fraction:
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() else Fraction(digits)


def _is_negative(before: str) -> bool:
    """Whether the text before a number ends in a minus that is a sign, not a subtraction, a hyphen or a bullet."""
    lead = before.rstrip(" " + CURRENCY)
    if lead[-1:] not in MINUS:
        return False
    spaced = before.startswith(" ", len(lead))
    lead = lead[:-1]
    if not lead.strip(" " + CURRENCY):
        return True
    if spaced:
        return lead.rstrip(" ")[-1] in "=:("
    return not (lead[-1].isalnum() or lead[-1] in ")]}%")


def _ends_in_answer(text: str) -> bool:
    marker = text.rfind("####")
    if marker < 0 or text.find("####") != marker or text[marker - 1 : marker] not in ("", "\n"):
        return False
    if text[marker + 4 : marker + 5] not in (" ", "\t"):
        return False
    line = text[marker + 4 :].rstrip().lstrip(" \t")
    if len(line) > REACH:
        return False
    line = _without_latex(line)
    match = _NUMBER.search(line)
    if match is None or _value(match) is None:
        return False
    return bool(_LEAD.fullmatch(line, 0, match.start())) and line[match.end() :] in ("", ".", "%", "\\%")


def _cases(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None
) -> Iterator[tuple[str, Any]]:
    """What each completion itself says, and the gold answer."""
    for prompt, completion, gold in zip(prompts or [None] * len(completions), completions, answer, strict=True):
        yield _without_echo(_text(completion), _text(prompt, "user")), gold


def _text(messages: str | Sequence[Mapping[str, Any]] | None, role: str = "assistant") -> str:
    """A text as it is; of messages, the content of the last one with this role (or none)."""
    if isinstance(messages, str):
        return messages
    for message in reversed(messages or ()):
        if message.get("role", role) == role:
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return ""


def _without_echo(text: str, prompt: str) -> str:
    """The text without the prompt that it begins with, unless that ends within a word or number of the text."""
    prompt, stripped = prompt.strip(), text.lstrip()
    if not prompt or not stripped.startswith(prompt):
        return text
    rest = stripped[len(prompt) :]
    return text if prompt[-1].isalnum() and rest[:1].isalnum() else rest


_gold_of_text = lru_cache(maxsize=1024)(_number)  # the same for every completion of a group


def _gold(gold: Any, index: int) -> int | Fraction:
    """The value of a gold answer: text is read as a completion is, a float as it prints (0.1 is a tenth)."""
    value: int | Fraction | None
    try:
        value = _gold_of_text(gold) if isinstance(gold, str) else Fraction(str(gold))
    except ValueError:
        value = None
    if value is None:
        raise ValueError(
            f"answer[{index}] has no number: {gold!r}. Give GSM8K's solution with its line `#### <number>`, the "
            "number as text, or a number; None leaves a problem out."
        )
    return value
