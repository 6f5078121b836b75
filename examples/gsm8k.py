"""
Train a language model on GSM8K with ISOPO, plain REINFORCE or GRPO, and see what came of it.

Without arguments it is the quick start, on any machine: a 135M model learns short sums in a few minutes, and neither
the Hub nor a GPU is needed.

    python examples/gsm8k.py

The real thing, on one GPU; with LoRA; and on several, in the same script:

    python examples/gsm8k.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k \
        --use_vllm --vllm_mode colocate
    python examples/gsm8k.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k --use_peft
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/gsm8k.py \
        --config examples/configs/fig4.yaml

It takes 500 steps unless `--max_steps` or `--num_train_epochs` says otherwise, and saves a checkpoint every 50;
`--resume_from_checkpoint true` goes on from the last one.

Arguments are those of `ISOPOConfig`, of TRL's `ModelConfig` and the ones below, on the command line or in a YAML file
(`--config`). `--trainer grpo` or `reinforce` trains the same way with another method; `isopo-compare` draws runs side
by side. The output folder gets the model and its card, `curves.png` and `trainer_state.json`.
"""

import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import embedded
from command_line import Parser
from example_run import (
    DEFAULTS,
    EMBEDDED,
    HUB_MODEL,
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
    look_up,
    one_voice,
    parsed,
    refuse,
    say,
)
from example_run import SMALL as SMALL_MODEL
from trl import GRPOConfig, ModelConfig, ScriptArguments

from isopo_trl import ISOPOConfig
from isopo_trl.gsm8k import as_prompts, format_reward, gsm8k_reward, load_gsm8k, strict_gsm8k_reward
from isopo_trl.gsm8k.data import INSTRUCTION


SCRIPT = "gsm8k.py"
HUB_DATASET = "openai/gsm8k"

# With the embedded model: minutes on two cores
SMALL = {
    **SMALL_MODEL,
    "max_completion_length": 12,  # "12 - 6 = 6" is 8
    "max_steps": 12,
    "format_weight": 0.0,
    "validation_steps": 6,
    "validation_size": 40,
    "kl_size": 16,
}


@dataclass
class GSM8KArguments(RunArguments, ScriptArguments):
    """
    Arguments of this script, beside those of every run ([`RunArguments`]).

    Args:
        dataset (`str`, *optional*): data set on the Hub, a folder with `train.jsonl` and `test.jsonl`, or one file, in
            GSM8K's columns `question` and `answer`; `"embedded"` for the problems that come with the example.
        strict (`bool`): whether an answer counts only after `####`, not in a box or as the text's last number.
        format_weight (`float`): weight of the reward for ending in `#### <number>`, beside 1 for the right number.
    """

    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Data set on the Hub, folder with train.jsonl and test.jsonl, one .jsonl file, or embedded."
        },
    )
    strict: bool = field(default=False, metadata={"help": "Whether an answer counts only after '####'."})
    format_weight: float = field(
        default=0.2, metadata={"help": "Weight of the reward for ending in '#### <number>', beside 1 for correctness."}
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.format_weight < math.inf:
            raise ValueError(f"--format_weight {self.format_weight} must be finite and not negative.")


# What to train on


def choose(model: str | None, dataset: str | None) -> tuple[str, str, str]:
    """
    Model and data set, `"embedded"` for those that come with the example, and the reason. What takes hours has to be
    asked for by name, whatever the machine could do.
    """
    if model and dataset:
        return model, dataset, "as given"
    if (model or dataset or EMBEDDED) == EMBEDDED:
        return EMBEDDED, EMBEDDED, "the quick start; --model_name_or_path and --dataset name others"
    given = "--model_name_or_path" if model else "--dataset"
    return model or HUB_MODEL, dataset or HUB_DATASET, f"{given} as given, the other one is the default"


def in_words(model: str, dataset: str) -> str:
    """What is trained, and on what."""
    model = embedded.MODEL if model == EMBEDDED else model
    return f"Model {model}, problems {embedded.PROBLEMS if dataset == EMBEDDED else dataset}"


def read_settings(arguments: list[str], kind: type[GSM8KArguments], **others: Any) -> dict[str, Any]:
    """
    What arguments say of a run, after saying which model and data set they mean, and why.

    Args:
        arguments (`list[str]`): of the command line.
        kind (`type`): class of the script's own arguments.
        others: defaults in place of those of every run.
    """
    parser = Parser((kind, ISOPOConfig, ModelConfig), may_be_empty=("instruction",), **DEFAULTS | others)
    given = {**others, **parser.given(arguments)}
    check(given)
    if given.get("dataset") and given.get("dataset_name"):
        raise ValueError("--dataset and --dataset_name are the same thing: leave one of them out.")
    if given.get("dataset_streaming") or given.get("ignore_bias_buffers"):
        raise ValueError("--dataset_streaming and --ignore_bias_buffers have no effect here: leave them out.")
    model, dataset, reason = choose(given.get("model_name_or_path"), given.get("dataset") or given.get("dataset_name"))
    say(f"{in_words(model, dataset)} ({reason}).")
    settings = completed(given, "gsm8k", SMALL if model == EMBEDDED else None)
    return {**settings, "dataset": dataset, "model_name_or_path": model}


def read_arguments(arguments: list[str]) -> tuple[GSM8KArguments, GRPOConfig, ModelConfig]:
    """All arguments of this script."""
    return parsed(GSM8KArguments, read_settings(arguments, GSM8KArguments))


def load(script_args: GSM8KArguments, args: GRPOConfig, model_args: ModelConfig):
    """Problems as prompts, to train on and to validate with, and the tokenizer."""
    chat, instruction, template = not script_args.plain_text, script_args.instruction, script_args.user_template
    if instruction is None and template is None:
        instruction = INSTRUCTION
    name = script_args.dataset
    if name == EMBEDDED:
        problems, held_out = embedded.sums("train"), embedded.sums("test")
        if script_args.instruction is None:  # nothing to explain, and a shorter prompt is a shorter wait
            instruction = ""
    else:
        if not os.path.exists(name):
            look_up(f"data set {name}")
        splits = (script_args.dataset_train_split, script_args.dataset_test_split)
        problems, held_out = load_gsm8k(name, script_args.dataset_config, *splits)
    tokenizer = load_model(args, model_args, chat)
    train, held_out = (as_prompts(rows, instruction, chat, template) for rows in (problems, held_out))
    check_prompt(train[0]["prompt"], tokenizer, args)
    return train, held_out, tokenizer


def correctness(script_args: GSM8KArguments):
    """The reward for the right number."""
    return strict_gsm8k_reward if script_args.strict else gsm8k_reward


def rewards(script_args: GSM8KArguments):
    """Reward functions and their weights."""
    if not script_args.format_weight:
        return [correctness(script_args)], [1.0]
    return [correctness(script_args), format_reward], [1.0, script_args.format_weight]


def main(arguments: list[str]) -> int:
    try:
        one_voice()
        script_args, args, model_args = read_arguments(arguments)
        resume = begin(args, model_args)
        train, held_out, tokenizer = load(script_args, args, model_args)
        trainer = build(script_args, args, model_args, train, tokenizer, *rewards(script_args))
        own_file = os.path.exists(script_args.dataset)
        if not own_file:  # which may not be for everybody to read
            trainer.card_prompt = held_out[0]["prompt"]
        progress, validation = follow(trainer, script_args, held_out, correctness(script_args), "right")
    except REFUSALS as error:
        return refuse(SCRIPT, str(error), error)
    dataset = None if own_file or script_args.dataset == EMBEDDED else script_args.dataset
    elsewhere = "leave out --strict or change --instruction"
    return carry_out(SCRIPT, trainer, progress, validation, resume, dataset, elsewhere)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
