"""
What it could save to compute a prompt once for all completions of its group: by counting, on real prompts.

    python benchmarks/questions/shared_prompts.py --data gsm8k --model Qwen3-0.6B

`--data` is a folder with GSM8K's `train.jsonl`, `--model` a folder with the tokenizer and configuration of an instruct
model, `--completions` the mean lengths of completions to count with. Nothing is run on a device.

Arithmetic is counted as products with weights, two operations each: at a prompt's position those of the decoder, at a
completion's those of the LM head as well, which scores completions alone; a backward pass is twice a forward pass.
Attention between positions is left out: at these lengths it is a few percent. With a rule, the backward pass cannot be
shared: the cotangents at a prompt's positions differ from completion to completion, and a sequence's norms are made of
its own.
"""

import argparse
import json
import os
import statistics
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer

from isopo_trl.gsm8k import as_prompts
from isopo_trl.gsm8k.data import read_problems


class Shares(NamedTuple):
    """What is repeated, as shares of the whole: of the positions, and of the update's arithmetic."""

    positions: float
    arithmetic: float  # forward and backward, which plain policy gradient could share
    with_a_rule: float  # the forward pass alone


def shares(prompt: float, completion: float, group: int, head: float) -> Shares:
    """
    Args:
        prompt, completion (`float`): mean lengths, in tokens.
        group (`int`): completions per prompt.
        head (`float`): weights of the LM head, in units of the decoder's.
    """
    repeated = (group - 1) / group * prompt
    arithmetic = repeated / (prompt + completion * (1 + head))
    return Shares(repeated / (prompt + completion), arithmetic, arithmetic / 3)


def head_to_decoder(config: AutoConfig) -> float:
    """The LM head's weights over those of all decoder layers, for a dense model of Llama's form."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * size * (heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.vocab_size * hidden / (config.num_hidden_layers * layer)


def prompt_lengths(data: str, model: str) -> list[int]:
    """Tokens of each prompt, as training sees it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = as_prompts(read_problems(os.path.join(data, "train.jsonl")))["prompt"]
    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.jsonl")
    parser.add_argument("--model", required=True, help="folder with the tokenizer and configuration of a model")
    parser.add_argument("--completions", type=float, nargs="+", default=[150, 265, 320], help="mean lengths")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt (num_generations)")
    parser.add_argument("--update", type=float, default=0.5, help="share of a step's time that is the update's")
    parser.add_argument("--output", help="write the figures as JSON")
    options = parser.parse_args()

    lengths = prompt_lengths(options.data, options.model)
    mean, head = statistics.mean(lengths), head_to_decoder(AutoConfig.from_pretrained(options.model))
    print(f"{len(lengths)} prompts of {mean:.0f} tokens ({min(lengths)} - {max(lengths)}), groups of {options.group},")
    print(f"an LM head of {head:.2f} of the decoder's weights\n")
    print("| completion | repeated positions | update, `none` | update, a rule | step, `none` | step, a rule |")
    print("|---|---|---|---|---|---|")
    table = {}
    for completion in options.completions:
        share = shares(mean, completion, options.group, head)
        of_step = [options.update * x for x in share[1:]]
        print(f"| {completion:.0f} | " + " | ".join(f"{x:.3f}" for x in (*share, *of_step)) + " |")
        table[completion] = share._asdict()
    if options.output:
        figures = {"prompt": mean, "group": options.group, "head": head, "completions": table}
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
