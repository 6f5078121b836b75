"""A reward for functions that pass tests, as TRL's trainers call it."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..gsm8k.rewards import last_message
from .sandbox import Confined, Limits, passes, share_passed


# A block of code in Markdown; the last one may have been cut off
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class CodeReward:
    """
    1.0 where the function of a completion passes all tests of its problem, 0.0 elsewhere.

    Each completion runs in a process of its own, which can compute and nothing else; what it does there, its reward is
    all that comes of it. Building the reward fails on a machine where processes cannot be confined so.

    Args:
        partial (`bool`, *optional*, defaults to `False`): whether the reward is the share of tests that are passed,
            and not 1.0 for all and 0.0 for fewer. Checks written as code are passed as a whole.
        limits ([`~coding.Limits`], *optional*): what one completion may take.
        processes (`int`, *optional*): how many run at a time. Defaults to the number of processor cores
            that this process may use.
    """

    def __init__(self, partial: bool = False, limits: Limits | None = None, processes: int | None = None):
        if processes is not None and processes < 1:
            raise ValueError(f"processes={processes} must be at least 1.")
        self.__name__ = "code_reward"  # what TRL logs it under
        self.partial = partial
        self.limits = limits or Limits()
        self.processes = processes or cores()
        Confined("", "", self.limits).end()

    def __call__(
        self,
        completions: Sequence[Any],
        head: Sequence[str],
        function: Sequence[str],
        tests: Sequence[Sequence[Sequence[str]] | None] | None = None,
        checks: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Args:
            completions (`list[str]` or `list[list[dict]]`): texts, or messages, of which the last one of the assistant
                is read, as [`~coding.as_program`] does.
            head (`list[str]`): column of the dataset: the code that stands before the function's body.
            function (`list[str]`): column of the dataset: the function's name.
            tests (`list`, *optional*): column of the dataset: pairs of arguments and result, as
                [`~coding.literal`] writes them; text that is written by hand, such as `"[1, 2]"`, does as well.
            checks (`list`, *optional*): column of the dataset, in place of `tests`: code that defines
                `check(candidate)`, as HumanEval has it.
            **kwargs: what else TRL passes; not used.

        Returns:
            `list[float | None]`: one reward each; `None`, which TRL leaves out, where there is neither.
        """
        count = len(completions)
        columns = (completions, head, function, tests or [None] * count, checks or [None] * count)
        with ThreadPoolExecutor(self.processes) as pool:
            return list(pool.map(self._reward, *columns))

    def _reward(self, completion: Any, head: str, function: str, tests: Any, checks: str | None) -> float | None:
        if not (tests or checks):
            return None
        program = as_program(last_message(completion), head, function)
        if checks:
            return float(passes(program, function, head, checks, self.limits))
        return share_passed(program, function, tests, self.limits, self.partial)


def cores() -> int:
    """Number of processor cores that this process may use, which a container or a job can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_program(text: str, head: str, function: str) -> str:
    """
    The program that a completion stands for.

    That is the last of its blocks of code that defines `function`, or the whole text where it has no block and defines
    it, with what stands before the function in `head`. Else it is `head` and what follows it: the first block, or the
    text up to the first new line that is not indented.
    """
    defined = re.compile(rf"^(?:async )?def {re.escape(function)}\b", re.MULTILINE)
    blocks = BLOCK.findall(text)
    whole = [code for code in blocks or [text] if defined.search(code)]
    if whole:
        return defined.split(head)[0] + "\n" + whole[-1]
    body = blocks[0] if blocks else text
    new_line = "\n" * head.endswith("\n")
    return head + re.split(r"\n(?=\S)", new_line + body, maxsplit=1)[0]
