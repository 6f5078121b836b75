r"""
SimpleTIR ([ltzheng/SimpleTIR](https://github.com/ltzheng/SimpleTIR)): a completion with a void turn, one with neither
an answer nor a closed code block, weighs nothing, in all its tokens. Its reward stays in the group's mean. Groups
whose rewards have a deviation below 1e-3 weigh nothing, either.

As in that code, an answer is `\boxed{`, and a code block stands between lines of three backticks, the first of which
may say `py` or `python`. A turn is what the model wrote before a tool, or nobody, answered. A call of one of TRL's
tools is to a turn what a code block is there.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..settings.ranges import GIVE_AT_LEAST_0
from .transform import Generation, Transform, register


CODE_BLOCK = re.compile(r"```(?:py|python)?\n.*?\n```", re.DOTALL)


@register("simpletir")
class SimpleTIR(Transform):
    """Advantages, but 0 for completions with a void turn. Logs their share."""

    title = "SimpleTIR"
    credit = "Completions with void turns were left out, as in [SimpleTIR](https://github.com/ltzheng/SimpleTIR)."
    stage = "selection"
    settings = ("simpletir_answer", "simpletir_deviation")
    _meaning = "is the deviation of a group's rewards below which it is dropped"
    ranges = {"simpletir_deviation": (GIVE_AT_LEAST_0, _meaning)}

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield (
            not _is_pattern(args.simpletir_answer),
            f"simpletir_answer={args.simpletir_answer!r} is a regular expression by which an answer is known: give "
            "one that Python's `re` takes, and that is not empty.",
        )
        yield from super().refusals(args)

    def apply(self, generation: Generation) -> torch.Tensor:
        answer = re.compile(self.args.simpletir_answer)
        void = generation.rollout.which(lambda completion: has_void_turn(completion, answer))
        generation.figures["void_fraction"] = void.double().mean().item()
        advantages = generation.advantages.masked_fill(void, 0)
        for places in generation.places():
            rewards = generation.rewards[places]
            if len(places) and (len(places) == 1 or rewards.std() < self.args.simpletir_deviation):
                advantages[places] = 0
        return advantages


def has_void_turn(completion: str | list[dict[str, Any]], answer: re.Pattern) -> bool:
    """Whether a turn of a completion, a text or messages, has neither an answer nor a closed code block, or call."""
    turns: list[Any] = [completion]
    if not isinstance(completion, str):
        written = [message for message in completion if message.get("role") == "assistant"]
        turns = [_text(message.get("content")) for message in written if not message.get("tool_calls")]
    return any(not answer.search(turn) and not CODE_BLOCK.search(turn) for turn in turns)


def _text(content: Any) -> str:
    """What a message says: a text, or parts of which some are texts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _is_pattern(text: str) -> bool:
    try:
        return bool(text) and re.compile(text) is not None
    except re.error:
        return False
