"""
Train a language model on GSM8K with ISOPO, plain REINFORCE or GRPO, and see what came of it.

Without arguments it needs neither the Hub nor a GPU: a 135M model learns short sums in a few minutes.

    accelerate launch examples/gsm8k.py

The real thing, on one GPU; with LoRA; and on several, in the same script:

    accelerate launch examples/gsm8k.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k \
        --use_vllm --vllm_mode colocate
    accelerate launch examples/gsm8k.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k --use_peft
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/gsm8k.py \
        --config examples/configs/fig4.yaml

Arguments are those of `ISOPOConfig`, of TRL's `ModelConfig` and the ones below, on the command line or in a YAML file
(`--config`). `--trainer grpo` or `reinforce` trains the same way with another method; `isopo-compare` draws runs side
by side. The output folder gets the model and its card, `validation.png` and `trainer_state.json`.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from urllib.parse import urlparse

import embedded
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.gsm8k import as_prompts, format_reward, gsm8k_reward, load_gsm8k, strict_gsm8k_reward
from isopo_trl.gsm8k.data import INSTRUCTION, checked
from isopo_trl.validation import ValidationCallback


TRAINERS = ("isopo", "reinforce", "grpo")
NO_RESCALING = "none"  # the rule that makes ISOPO REINFORCE
EMBEDDED = "embedded"
HUB_MODEL, HUB_DATASET = "Qwen/Qwen3-0.6B", "openai/gsm8k"
OWN = {field.name for field in fields(ISOPOConfig)} - {field.name for field in fields(GRPOConfig)}
# Settings of a rule, which REINFORCE does without
OF_A_RULE = ("fisher_power", "norm_power", "relative_power", "regularization", "keep_small", "scale")

# Where nothing else is said
DEFAULTS = {
    "num_generations": 8,
    "max_completion_length": 512,
    "learning_rate": 2e-6,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "lora_target_modules": ["all-linear"],
}
# With the embedded model, on a CPU
SMALL = {
    "use_peft": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "per_device_train_batch_size": 24,
    "num_generations": 8,
    "max_completion_length": 16,
    "max_steps": 18,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "regularization": 0.1,
    "gradient_checkpointing": False,
    "format_weight": 0.0,
    "validation_steps": 9,
    "validation_size": 40,
}


@dataclass
class GSM8KArguments(ScriptArguments):
    """
    Arguments of this script.

    Args:
        trainer (`str`): `"isopo"`, `"reinforce"` (the same without rescaling) or `"grpo"` (TRL's own).
        dataset (`str`, *optional*): data set on the Hub, a folder with `train.jsonl` and `test.jsonl`, or one file, in
            GSM8K's columns `question` and `answer`; `"embedded"` for the problems that come with the example;
            `"reasoning_gym/gsm_symbolic"`, or another task of that package.
        instruction (`str`, *optional*): what the model is told before the question, as the system's message.
        user_template (`str`, *optional*): the user's message, with `{question}` where the question goes. Without an
            `instruction` beside it, there is no system message.
        plain_text (`bool`): prompts without a chat template, for base models.
        strict (`bool`): whether an answer counts only after `####`, not in a box or as the text's last number.
        format_weight (`float`): weight of the reward for ending in `#### <number>`, beside 1 for the right number.
        validation_steps (`int`): optimizer steps between two validations.
        validation_size (`int`): problems to validate with; 0 for no validation.
    """

    trainer: str = field(default="isopo", metadata={"help": "isopo, reinforce (no rescaling) or grpo (TRL's own)."})
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Data set on the Hub, folder with train.jsonl and test.jsonl, one .jsonl file, or embedded."
        },
    )
    instruction: str | None = field(
        default=None, metadata={"help": "What the model is told before the question, as the system's message."}
    )
    user_template: str | None = field(
        default=None,
        metadata={
            "help": "The user's message, with '{question}' where the question goes; then there is no system message "
            "unless --instruction gives one."
        },
    )
    plain_text: bool = field(default=False, metadata={"help": "Prompts without a chat template, for base models."})
    strict: bool = field(default=False, metadata={"help": "Whether an answer counts only after '####'."})
    format_weight: float = field(
        default=0.2, metadata={"help": "Weight of the reward for ending in '#### <number>', beside 1 for correctness."}
    )
    validation_steps: int = field(default=25, metadata={"help": "Optimizer steps between two validations."})
    validation_size: int = field(default=200, metadata={"help": "Problems to validate with; 0 for no validation."})


def say(text: str = "") -> None:
    if PartialState().is_main_process:
        print(text, flush=True)


# What to train on


def hub_is_reachable() -> bool:
    if HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(HUB_MODEL, timeout=3)
    except Exception:  # whatever it is, the Hub does not answer
        return False
    return True


def choose(model: str | None, dataset: str | None) -> tuple[str, str, str]:
    """Model and data set, `"embedded"` for those that come with the example, and the reason."""
    if model and dataset:
        return model, dataset, "as given"
    if model or dataset:
        given = "--model_name_or_path" if model else "--dataset"
        return model or HUB_MODEL, dataset or HUB_DATASET, f"{given} as given, the other one is the default"
    if not torch.cuda.is_available():
        return EMBEDDED, EMBEDDED, "nothing was asked for, and there is no GPU"
    reachable = [hub_is_reachable() if PartialState().is_main_process else None]
    if not broadcast_object_list(reachable)[0]:
        return EMBEDDED, EMBEDDED, "nothing was asked for, and the Hub cannot be reached"
    return HUB_MODEL, HUB_DATASET, "nothing was asked for, there is a GPU, and the Hub can be reached"


def given(arguments: list[str], *names: str) -> list[str | None]:
    """What the command line, or else the file after `--config`, says of these arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", *names):
        parser.add_argument(f"--{name}")
    found, _ = parser.parse_known_args(arguments)
    config = {}
    if found.config:
        try:
            with open(found.config) as file:
                config = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{found.config} is not valid YAML: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{found.config} is not a list of settings: it should have lines such as `rule: fisher`.")
    return [getattr(found, name) or config.get(name) for name in names]


def read_arguments(arguments: list[str]) -> tuple[GSM8KArguments, GRPOConfig, ModelConfig]:
    """All arguments, after saying which model and data set they mean, and why."""
    names = ("trainer", "rule", "model_name_or_path", "dataset", "dataset_name")
    trainer, rule, model, dataset, name = given(arguments, *names)
    if (trainer or TRAINERS[0]) not in TRAINERS:
        raise ValueError(f"--trainer {trainer} is unknown: choose one of {', '.join(TRAINERS)}.")
    model, dataset, reason = choose(model, dataset or name)
    say(f"Model {model}, problems {dataset}: {reason}.")

    config = GRPOConfig if trainer == "grpo" else ISOPOConfig
    parser = TrlParser((GSM8KArguments, config, ModelConfig))
    defaults = {**DEFAULTS, "output_dir": f"outputs/gsm8k-{trainer or TRAINERS[0]}"}
    if not torch.accelerator.is_available():
        defaults |= {"use_cpu": True, "bf16": False}
    if model == EMBEDDED:
        defaults |= SMALL
        if rule == NO_RESCALING:  # which has nothing to regularise
            del defaults["regularization"]
    parser.set_defaults_with_config(**defaults)
    *parsed, rest = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    unknown = [word for word in rest if word.startswith("--") and word[2:].split("=")[0] not in OWN]
    if unknown or (rest and trainer != "grpo"):
        raise ValueError(f"{' '.join(unknown or rest)} is not an argument of this script: see --help.")
    if rest:
        say(f"Not used by GRPO: {' '.join(rest)}.")
    script_args, args, model_args = parsed
    if script_args.dataset_streaming or script_args.ignore_bias_buffers:
        raise ValueError("--dataset_streaming and --ignore_bias_buffers have no effect here: leave them out.")
    script_args.dataset, model_args.model_name_or_path = dataset, model
    if trainer == "reinforce":
        args.rule = NO_RESCALING
        for name in OF_A_RULE:
            setattr(args, name, getattr(ISOPOConfig, name))
    return script_args, args, model_args


def check_machine(args: GRPOConfig) -> None:
    """Raise, before anything long starts, if the output cannot be written or vLLM is not there."""
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()
    except OSError as error:
        raise ValueError(
            f"--output_dir {args.output_dir} cannot be written to ({error.strerror}): choose another folder."
        ) from error
    if not args.use_vllm:
        return
    if args.vllm_mode == "server":
        host, port = args.vllm_server_host, args.vllm_server_port
        if args.vllm_server_base_url:
            address = urlparse(args.vllm_server_base_url)
            host, port = address.hostname, address.port
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            raise ValueError(
                f"No vLLM server answers at {host}:{port}: start one (see docs/distributed.md), or use "
                "--vllm_mode colocate."
            ) from error
    elif find_spec("vllm") is None:
        raise ValueError("--use_vllm needs the package vllm: pip install vllm, or leave --use_vllm out.")


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
    elif name.startswith(embedded.PREFIX):
        problems = checked(embedded.from_reasoning_gym(name, "train", 5000), name)
        held_out = checked(embedded.from_reasoning_gym(name, "test", 500), name)
    else:
        splits = (script_args.dataset_train_split, script_args.dataset_test_split)
        problems, held_out = load_gsm8k(name, script_args.dataset_config, *splits)
    if model_args.model_name_or_path == EMBEDDED:
        if args.use_cpu and PartialState().num_processes == 1:  # `accelerate launch` allows one thread
            torch.set_num_threads(os.cpu_count() or 1)
        with PartialState().local_main_process_first():
            model_args.model_name_or_path = embedded.model_path()
    name = model_args.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The model {name!r} is neither a folder nor could it be loaded from the Hub: {reason}"
        ) from error
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template: use an instruct model, or --plain_text for a base model.")
    prompts = [as_prompts(rows, instruction, chat, template) for rows in (problems, held_out)]
    return *prompts, tokenizer


def correctness(script_args: GSM8KArguments):
    """The reward for the right number."""
    return strict_gsm8k_reward if script_args.strict else gsm8k_reward


def build(script_args, args, model_args, train, tokenizer) -> GRPOTrainer:
    rewards, weights = [correctness(script_args)], [1.0]
    if script_args.format_weight:
        rewards.append(format_reward)
        weights.append(script_args.format_weight)
    args.reward_weights = args.reward_weights or weights
    settings = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = {**settings, **(args.model_init_kwargs or {})}
    return (GRPOTrainer if script_args.trainer == "grpo" else ISOPOTrainer)(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=train,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


# What is shown


class Progress(ProgressCallback):
    """The usual bar, and one short line per log in place of all metrics."""

    def __init__(self, correctness: str):
        super().__init__()
        self.correctness = correctness  # name of the reward for the right number

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        if "validation/accuracy" in logs:
            kl = f", KL from the start {logs['validation/kl']:.3f}" if "validation/kl" in logs else ""
            self.training_bar.write(
                f"step {state.global_step:4}  validation: {logs['validation/accuracy']:.1%} right{kl}"
            )
        elif "reward" in logs and "train_runtime" not in logs:
            right = logs.get(f"rewards/{self.correctness}/mean", float("nan"))
            self.training_bar.write(
                f"step {state.global_step:4}  reward {logs['reward']:6.3f}   right {right:6.1%}   "
                f"{logs['completions/mean_length']:5.0f} tokens   {logs['step_time']:6.1f} s"
            )


def report(trainer: GRPOTrainer, validation: ValidationCallback | None, seconds: float) -> None:
    """What happened: reward, accuracy, KL, time, and some completions before and after."""
    lines = [line for line in trainer.state.log_history if "reward" in line and "train_runtime" not in line]
    say(f"\n{trainer.state.global_step} steps in {seconds / 60:.1f} minutes.")
    if lines:
        part = max(1, len(lines) // 5)
        means = [sum(line["reward"] for line in piece) / part for piece in (lines[:part], lines[-part:])]
        times = sorted(line["step_time"] for line in lines)
        say(f"  training reward      {means[0]:.3f} -> {means[1]:.3f}   (first and last {part} of {len(lines)} logs)")
        say(f"  time per step        {times[len(times) // 2]:.1f} s (median)")
    if validation is not None and validation.history:
        first, last = validation.history[0], validation.history[-1]
        name = "validation/accuracy"
        count = len(validation.dataset)
        say(f"  validation accuracy  {first[name]:.1%} -> {last[name]:.1%}   ({count} problems, greedy)")
        if "validation/kl" in last:
            say(f"  KL from the start    {last['validation/kl']:.3f} nats per completion")
        before, after = (validation.completions[int(entry["step"])] for entry in (first, last))
        say("\nBefore and after, on problems that were not trained on:")
        for row, old, new in list(zip(validation.dataset, before, after, strict=False))[:3]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            say(f"  {prompt.splitlines()[-1]}\n    before: {old!r}\n    after:  {new!r}")
    if lines and validation is not None and find_spec("matplotlib") is not None:
        say(f"\nCurves: {validation.picture}")


def main(arguments: list[str]) -> int:
    try:
        script_args, args, model_args = read_arguments(arguments)
        check_machine(args)
        train, held_out, tokenizer = load(script_args, args, model_args)
        trainer = build(script_args, args, model_args, train, tokenizer)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        reward = correctness(script_args)
        trainer.add_callback(Progress(reward.__name__))
        validation = None
        if script_args.validation_size:
            held_out = held_out.select(range(min(script_args.validation_size, len(held_out))))
            validation = ValidationCallback(trainer, held_out, reward, script_args.validation_steps)
            trainer.add_callback(validation)
    except (ValueError, OSError, ImportError, torch.distributed.DistNetworkError) as error:
        print(f"gsm8k.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if isinstance(trainer, ISOPOTrainer):
        say(f"ISOPO, rule {args.rule!r}, on {len(trainer.isopo.coverage())} parameters.")

    start = time.monotonic()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    report(trainer, validation, time.monotonic() - start)
    trainer.save_state()
    trainer.save_model()
    local = script_args.dataset == EMBEDDED or script_args.dataset.startswith(embedded.PREFIX)
    dataset = None if local or os.path.exists(script_args.dataset) else script_args.dataset
    trainer.create_model_card(dataset_name=dataset)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    say(f"Model: {args.output_dir}")
    if hasattr(trainer, "end"):  # transformers 5.18 and later: trackers and process group
        trainer.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
