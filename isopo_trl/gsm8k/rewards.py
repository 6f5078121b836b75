"""
Rewards for arithmetic problems in GSM8K's format, as functions that TRL's trainers call.

How an answer is read is told in [`~gsm8k.extract_answer`].
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any

from .answers import declared_answer, extract_answer, is_only_a_number


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
    where the right number stands in a box or at the end of the text. Arguments and result are the same.
    """
    cases = _cases(completions, answer, prompts)
    return _correctness((text if "####" in text else "", gold) for text, gold in cases)


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    1.0 where the completion ends in a line `#### <number>` and has no other `####`, 0.0 elsewhere.

    At least one blank stands before the number, which may be any that [`extract_answer`] reads, between a currency
    sign and a percent sign or full stop at most; nothing else is on the line, and only white space after it.
    Completions are given as in [`gsm8k_reward`].
    """
    return [float(_ends_in_answer(last_message(completion))) for completion in completions]


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
    return [
        None if gold is None else float(extract_answer(text) == _gold(gold, index))
        for index, (text, gold) in enumerate(cases)
    ]


def _expression(text: str) -> str:
    """What math-verify reads: in a box, an expression needs no dollar signs."""
    declared = declared_answer(text)
    if declared is None:
        return text
    return declared if "####" in text else f"\\boxed{{{declared}}}"


def _ends_in_answer(text: str) -> bool:
    before, marker, line = text.rstrip().rpartition("####")
    if not marker or "####" in before or before[-1:] not in ("", "\n") or line[:1] not in (" ", "\t"):
        return False
    return is_only_a_number(line)


def _cases(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None
) -> Iterator[tuple[str, Any]]:
    """What each completion itself says, and the gold answer."""
    for prompt, completion, gold in zip(prompts or [None] * len(completions), completions, answer, strict=True):
        yield _without_echo(last_message(completion), last_message(prompt, "user")), gold


def last_message(messages: str | Sequence[Mapping[str, Any]] | None, role: str = "assistant") -> str:
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


_gold_of_text = lru_cache(maxsize=1024)(extract_answer)  # the same for every completion of a group


def _gold(gold: Any, index: int) -> Fraction:
    """The value of a gold answer: text is read as a completion is, a float as it prints (0.1 is a tenth)."""
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
