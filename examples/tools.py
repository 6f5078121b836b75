"""
Train a language model to call a tool, with ISOPO: a calculator, for products of two three-digit numbers.

Without arguments it runs on any machine, without the Hub or a GPU, in minutes:

    python examples/tools.py

The small model, SmolLM2-135M-Instruct, knows neither tools nor such products. So it is shown a few worked problems
first, as supervised training: in one half of them the calculator is called, in the other the answer is said at once.
It then does either, and ISOPO has a choice to make: the reward pays for the right number, whatever way it was found.

A model that knows tools is shown nothing:

    python examples/tools.py --model_name_or_path Qwen/Qwen3-0.6B --use_vllm --vllm_mode colocate

Arguments are those of `ISOPOConfig`, of TRL's `ModelConfig` and the ones below, on the command line or in a YAML file
(`--config`). Beside TRL's own figures of tools, `calls/tried` is the share of completions that write a call, and
`calls/valid` of those that get a number from it.
"""

import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import embedded
import example_run
import torch
from calculator import calculator
from command_line import Parser
from datasets import Dataset
from peft import get_peft_model
from preflight import check_machine, check_model, checkpoint
from transformers import AutoModelForCausalLM
from trl import ModelConfig, TrlParser, get_peft_config

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.gsm8k import gsm8k_reward
from isopo_trl.validation import ProgressTable, ValidationCallback


# SmolLM2's own template has no tools. As TRL needs it, earlier messages read the same whatever follows them
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {%- set function = tool.function %}
        {{- function.name + '(' + function.parameters.properties | join(', ') + '): ' + function.description + '\\n' }}
    {%- endfor %}
    {{- 'Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>{"name": ' + call.function.name | tojson }}
                {{- ', "arguments": ' + call.function.arguments | tojson + '}</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# The other way round: messages out of what the model has written
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*",
            "close_pattern": r"\s*</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}

SMALL = {
    **example_run.SMALL,
    "per_device_train_batch_size": 8,
    "max_completion_length": 64,
    "max_steps": 12,
    "validation_steps": 12,
    "validation_size": 10,
    "shown_steps": 12,
}


@dataclass
class ToolsArguments:
    """
    Arguments of this script.

    Args:
        shown_steps (`int`): supervised steps on worked problems before training; 12 for the small model.
        validation_steps (`int`): optimizer steps between two validations.
        validation_size (`int`): problems to validate with; 0 for no validation.
    """

    shown_steps: int = field(
        default=0, metadata={"help": "Supervised steps on worked problems before training; 12 for the small model."}
    )
    validation_steps: int = field(default=25, metadata={"help": "Optimizer steps between two validations."})
    validation_size: int = field(default=100, metadata={"help": "Problems to validate with; 0 for no validation."})

    def __post_init__(self):
        if self.shown_steps < 0 or self.validation_steps < 1 or not 0 <= self.validation_size <= HELD_OUT:
            raise ValueError(
                f"--shown_steps {self.shown_steps} must be at least 0, --validation_steps {self.validation_steps} at "
                f"least 1, and --validation_size {self.validation_size} between 0 (for no validation) and {HELD_OUT}."
            )


# What is learned


HELD_OUT = 200


def products(split: str) -> Dataset:
    """Products of two three-digit numbers, each once: `split` is `"train"` or `"test"`, which are disjoint."""
    numbers = random.Random(0).sample(range(900 * 900), 2000)
    pairs = [(100 + number // 900, 100 + number % 900) for number in numbers]
    chosen = {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:]}[split]
    rows = [(f"What is {a} * {b}?", str(a * b), f"{a} * {b}") for a, b in chosen]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": question}], "answer": answer, "expression": expression}
            for question, answer, expression in rows
        ]
    )


def right_number(completions, answer, log_metric, **kwargs) -> list[float | None]:
    """1.0 where the last message of the assistant has the right number. Logs how many completions call."""
    count = len(completions)
    log_metric("calls/tried", sum(map(tries, completions)) / count)
    log_metric("calls/valid", sum(map(gets_a_number, completions)) / count)
    return gsm8k_reward(completions, answer)


def tries(completion: list[dict[str, Any]]) -> bool:
    """Whether the model writes a call, well-formed or not."""
    return any(message.get("tool_calls") or "<tool_call>" in message["content"] for message in completion)


def gets_a_number(completion: list[dict[str, Any]]) -> bool:
    """Whether the calculator has answered, and not with an error."""
    return any(message["role"] == "tool" and "error" not in message["content"] for message in completion)


# What is shown before


def worked(row: dict[str, Any], calls: bool) -> list[dict[str, Any]]:
    """A problem with its solution, by the calculator or at once."""
    answer = {"role": "assistant", "content": row["answer"]}
    if not calls:
        return [*row["prompt"], answer]
    function = {"name": calculator.__name__, "arguments": {"expression": row["expression"]}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [*row["prompt"], call, {"role": "tool", "name": calculator.__name__, "content": row["answer"]}, answer]


def show(model: torch.nn.Module, tokenizer: Any, problems: Dataset, steps: int, size: int = 6) -> None:
    """Supervised steps of `size` worked problems each, by AdamW; the loss is of what the assistant says."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    model.train()
    for step in range(steps):
        rows = [problems[(step * size + number) % len(problems)] for number in range(size)]
        batch = tokenizer.apply_chat_template(
            [worked(row, calls=number % 2 == 0) for number, row in enumerate(rows)],
            tools=[calculator],
            return_dict=True,
            return_assistant_tokens_mask=True,
            padding=True,
        )
        ids, mask, said = (torch.tensor(batch[name]) for name in ("input_ids", "attention_mask", "assistant_masks"))
        ids, mask, said = (x.to(model.device) for x in (ids, mask, said))
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(said == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        example_run.say(f"shown {step + 1:4}  loss {loss.item():.3f}")


# A run


def read_arguments(arguments: list[str]) -> tuple[ToolsArguments, ISOPOConfig, ModelConfig]:
    parser = Parser((ToolsArguments, ISOPOConfig, ModelConfig), **example_run.DEFAULTS)
    given = parser.given(arguments)
    defaults = {**example_run.DEFAULTS, "output_dir": "outputs/tools", **example_run.for_this_device(given)}
    name = given.setdefault("model_name_or_path", example_run.EMBEDDED)
    if name == example_run.EMBEDDED:
        defaults |= {**SMALL, "save_strategy": "no"}
    else:
        defaults |= example_run.BOUNDED | (example_run.OF_ADAPTERS if given.get("use_peft") else {})
    return TrlParser((ToolsArguments, ISOPOConfig, ModelConfig)).parse_dict({**defaults, **given})


def load(args: ISOPOConfig, model_args: ModelConfig) -> tuple[torch.nn.Module, Any]:
    """Model and tokenizer; the embedded one gets its templates."""
    is_embedded = model_args.model_name_or_path == example_run.EMBEDDED
    if is_embedded:
        model_args.model_name_or_path = embedded.model_path()
    name = model_args.model_name_or_path
    check_model(name, args.trust_remote_code, saved=not model_args.use_peft)
    tokenizer = example_run.load_tokenizer(name, model_args.model_revision, args.trust_remote_code)
    if is_embedded:
        tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=model_args.dtype,
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )
    adapter = get_peft_config(model_args)
    return model if adapter is None else get_peft_model(model, adapter), tokenizer


def build(script_args: ToolsArguments, args: ISOPOConfig, model: torch.nn.Module, tokenizer: Any) -> ISOPOTrainer:
    trainer = ISOPOTrainer(
        model=model,
        reward_funcs=right_number,
        args=args,
        train_dataset=products("train"),
        processing_class=tokenizer,
        tools=[calculator],
    )
    trainer.add_callback(ProgressTable(trainer, {"calls": "calls/tried", "valid": "calls/valid"}))
    if script_args.validation_size:
        held_out = products("test").select(range(script_args.validation_size))
        trainer.add_callback(
            ValidationCallback(trainer, held_out, gsm8k_reward, script_args.validation_steps, kl_prompts=0)
        )
    return trainer


def main(arguments: list[str]) -> int:
    try:
        example_run.one_voice()
        script_args, args, model_args = read_arguments(arguments)
        example_run.use_all_cores(args)
        check_machine(args)
        resume = checkpoint(args)
        model, tokenizer = load(args, model_args)
        if script_args.shown_steps and not resume:
            torch.manual_seed(args.seed)
            show(model, tokenizer, products("train"), script_args.shown_steps)
        trainer = build(script_args, args, model, tokenizer)
    except example_run.REFUSALS as error:
        print(f"tools.py: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    start = time.monotonic()
    trainer.train(resume_from_checkpoint=resume)
    example_run.say(f"\n{trainer.state.global_step} steps in {(time.monotonic() - start) / 60:.1f} minutes.")
    if trainer.is_world_process_zero():
        example_run.say(example_run.curves(trainer))
    trainer.save_state()
    trainer.save_model()
    example_run.say(f"Model: {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
