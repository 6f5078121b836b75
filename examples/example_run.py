"""
A training run as the scripts of this folder have it: the arguments that they share, the trainer, what is shown, and
what is left behind.

A script has its own of the rest: a data set as prompts, rewards, and the sizes of its run with the embedded model. Its
`main` reads from top to bottom what is done: arguments (`completed`, `parsed`), machine and model (`begin`,
`load_model`), trainer (`build`, `follow`), and the run (`carry_out`).
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import datasets
import embedded
import huggingface_hub
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import get_int_from_env, is_peft_model
from jinja2 import TemplateError
from preflight import check_machine, check_model, checkpoint, device, in_short, precision
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.settings.ranges import verify_ranges
from isopo_trl.trl_seam.batch import verify_number
from isopo_trl.validation import ProgressTable, ValidationCallback, draw
from isopo_trl.validation.curves import PICTURE, in_text


TRAINERS = ("isopo", "reinforce", "grpo")
NO_RESCALING = "none"  # the rule that makes ISOPO REINFORCE
EMBEDDED = "embedded"
HUB_MODEL = "Qwen/Qwen3-0.6B"
OWN = {field.name for field in fields(ISOPOConfig)} - {field.name for field in fields(GRPOConfig)}
# Rules and their settings, which REINFORCE does without
OF_A_RULE = (
    "rule",
    "fisher_power",
    "norm_power",
    "relative_power",
    "regularization",
    "regularization_decay",
    "spring_decay",
    "proma_strength",
    "proma_bound",
    "keep_small",
    "fisher_samples",
    "scale",
)

# What is wrong with the arguments or the machine is said in these, until training begins
REFUSALS = (ValueError, OSError, ImportError, RuntimeError)

# Where nothing else is said
DEFAULTS = {
    "num_generations": 8,
    "max_completion_length": 512,
    "learning_rate": 2e-6,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "lora_target_modules": ["all-linear"],
}
# Adapters need a higher one than full weights (docs/runs.md, "LoRA: learning rates")
OF_ADAPTERS = {"learning_rate": 5e-5}
# Plain gradient steps find their rate by the length that a step is to have, from the first one on
OF_SGD = {"learning_rate": ISOPOConfig.learning_rate, "lr_scheduler_type": "constant", "warmup_steps": 0}
# With any other model than the embedded one: a run that ends, and that may be broken off
BOUNDED = {"max_steps": 500, "save_strategy": "steps", "save_steps": 50, "save_total_limit": 2}
# With the embedded model: minutes on two cores. A backward pass ends at the lowest layer with an adapter, and drawing
# dropout, which a CPU does on one core, would take a fifth of a step
SMALL = {
    "use_peft": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "lora_target_modules": [r".*layers\.2\d\..*_proj"],  # the last 10 of 30
    "per_device_train_batch_size": 24,
    "num_generations": 8,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}


@dataclass
class RunArguments:
    """
    Arguments that scripts share.

    Args:
        trainer (`str`): `"isopo"`, `"reinforce"` (the same without rescaling) or `"grpo"` (TRL's own).
        instruction (`str`, *optional*): what the model is told before the question, as the system's message.
        user_template (`str`, *optional*): the user's message, with `{question}` where the question goes. Without an
            `instruction` beside it, there is no system message.
        plain_text (`bool`): prompts without a chat template, for base models.
        validation_steps (`int`): optimizer steps between two validations.
        validation_size (`int`): problems to validate with; 0 for no validation.
        kl_size (`int`): problems, of these, with which the KL divergence from the start is measured; 0 for none.
    """

    trainer: str = field(default="isopo", metadata={"help": "isopo, reinforce (no rescaling) or grpo (TRL's own)."})
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
    validation_steps: int = field(default=25, metadata={"help": "Optimizer steps between two validations."})
    validation_size: int = field(default=200, metadata={"help": "Problems to validate with; 0 for no validation."})
    kl_size: int = field(
        default=64,
        metadata={"help": "Problems, of these, to measure the KL divergence from the start with; 0 for none."},
    )

    def __post_init__(self):
        if self.validation_steps < 1 or self.validation_size < 0 or self.kl_size < 0:
            raise ValueError(
                f"--validation_steps {self.validation_steps} must be at least 1, --validation_size "
                f"{self.validation_size} and --kl_size {self.kl_size} at least 0 (for no validation)."
            )


def rank(local: bool = False) -> int:
    """Of this process, among all or on its machine. `PartialState` knows it on CPUs only once there is a config."""
    names = ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"]
    return get_int_from_env(names if local else ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"], 0)


def say(text: str = "") -> None:
    if rank() == 0:
        print(text, flush=True)


def one_voice() -> None:
    """Let the bars of libraries be those of one rank, since the others load the same, and of a terminal."""
    if rank(local=True) or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def use_all_cores(args: GRPOConfig) -> None:
    """One process on a CPU may have all of it, of which `accelerate launch` gives it one thread."""
    if args.use_cpu and PartialState().num_processes == 1 and "ACCELERATE_DYNAMO_MODE" in os.environ:
        torch.set_num_threads(os.cpu_count() or 1)


def look_up(what: str) -> None:
    """Say, before it takes its time, what is asked of the Hub."""
    say(f"Looking up the {what} on the Hub (up to a minute, if it does not answer).")


# The arguments


def check(given: dict[str, Any]) -> None:
    """Raise where arguments would be misunderstood, or come to nothing."""
    trainer = given.get("trainer", TRAINERS[0])
    weights = given.get("reward_weights") or []
    refusals = [
        (trainer not in TRAINERS, f"--trainer {trainer} is unknown: choose one of {', '.join(TRAINERS)}."),
        (given.get("max_steps") == 0, "--max_steps 0 would be no limit: give it a positive value, or leave it out."),
        (given.get("remove_unused_columns"), "--remove_unused_columns would remove the answers: leave it out."),
        (given.get("eval_on_start"), "--eval_on_start has no effect here: --validation_steps does that."),
        (
            not all(map(math.isfinite, [given.get("beta", 0.0), *weights])),
            "--beta and --reward_weights must be finite numbers.",
        ),
    ]
    for wrong, message in refusals:
        if wrong:
            raise ValueError(message)


def for_this_device(given: dict[str, Any]) -> dict[str, Any]:
    """The precision that the device has; a GPU without bf16 is told of, unless the arguments know."""
    settings, in_words = precision(*device())
    if settings.keys() == {"bf16"} and not {"bf16", "use_cpu"} & given.keys():
        say(in_words)
    return settings


def completed(given: dict[str, Any], output: str, small: dict[str, Any] | None) -> dict[str, Any]:
    """
    What was given, with a default for the rest and without what the method does not use, which is said.

    Args:
        given (`dict`): arguments by name, as [`Parser.given`] returns them.
        output (`str`): what the output folder is named after, with the method.
        small (`dict`, *optional*): the script's defaults with the embedded model; `None` for another model.
    """
    given = dict(given)
    trainer = given.get("trainer", TRAINERS[0])
    defaults = {**DEFAULTS, "output_dir": f"outputs/{output}-{trainer}"}
    defaults |= for_this_device(given)
    if small is not None:
        defaults |= small
    else:
        defaults |= BOUNDED | (OF_ADAPTERS if given.get("use_peft") else {})
        if "num_train_epochs" in given:
            del defaults["max_steps"]
    if given.get("optim") == "sgd" and trainer != "grpo":
        # So that a step's length is told by six of the small ones' sequences
        defaults |= OF_SGD | ({} if small is None else {"step_kl_share": 0.25})
    idle = {"isopo": (), "reinforce": OF_A_RULE, "grpo": OWN}[trainer]
    unused = [f"--{name} {given.pop(name)}" for name in list(given) if name in idle]
    if unused:
        say(f"Not used by {trainer.upper()}: {' '.join(unused)}.")
    if trainer == "reinforce":
        given["rule"] = NO_RESCALING
    if trainer == "grpo" and given.get("epsilon", 0) is None:  # ISOPO's way to say that nothing is clipped
        del given["epsilon"]
    return {**defaults, **given}


def parsed(script_type: type, settings: dict[str, Any]) -> tuple[Any, GRPOConfig, ModelConfig]:
    """The script's own arguments, those of the trainer and those of the model."""
    verify_ranges(settings)
    config = GRPOConfig if settings.get("trainer") == "grpo" else ISOPOConfig
    return TrlParser((script_type, config, ModelConfig)).parse_dict(settings)


# The model


def begin(args: GRPOConfig, model_args: ModelConfig) -> str | bool | None:
    """See that the machine and the model can do what the arguments ask; returns where the run goes on from."""
    use_all_cores(args)
    if args.push_to_hub:
        say("Asking the Hub who you are, for --push_to_hub.")
    check_machine(args)
    resume = checkpoint(args)
    check_model(model_args.model_name_or_path, args.trust_remote_code, saved=not model_args.use_peft)
    return resume


def load_model(args: GRPOConfig, model_args: ModelConfig, chat: bool):
    """The tokenizer of the model, which is expanded first where it is the embedded one."""
    if model_args.model_name_or_path == EMBEDDED:
        if not embedded.model_folder().is_dir():
            say(f"Expanding {embedded.MODEL} into {embedded.model_folder()}: 0.5 GB, once.")
        with PartialState().local_main_process_first():
            model_args.model_name_or_path = embedded.model_path()
    name = model_args.model_name_or_path
    tokenizer = load_tokenizer(name, model_args.model_revision, args.trust_remote_code)
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template: use an instruct model, or --plain_text for a base model.")
    return tokenizer


def check_prompt(prompt: str | list[dict[str, str]], tokenizer, args: GRPOConfig) -> None:
    """Raise if the tokenizer's chat template does not take a prompt of messages."""
    if isinstance(prompt, str):
        return
    try:
        tokenizer.apply_chat_template(prompt, tokenize=False, **(args.chat_template_kwargs or {}))
    except TemplateError as error:  # such as one for a system message, which some models do not know
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path} does not take these prompts: {in_short(error)}. With "
            "--user_template and without --instruction there is no system message."
        ) from error


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool):
    """The tokenizer of a model whose configuration can be read as well."""
    local = os.path.isdir(name)
    if not local:
        look_up(f"model {name}")
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **where)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **where)
    except Exception as error:  # of many kinds, where a file is damaged
        kind = "is a folder, but could not be loaded"
        if not local:
            kind = "is neither a folder nor could it be loaded from the Hub"
        raise ValueError(f"The model {name!r} {kind}: {in_short(error)}") from error
    if not config.architectures:
        raise ValueError(f"The configuration of {name} names no architecture: add it to config.json.")
    if not tokenizer("1 + 1").input_ids:
        raise ValueError(f"{name} has no tokenizer, or an empty one: look for tokenizer.json.")
    return tokenizer


# The trainer


def build(
    script_args: RunArguments,
    args: GRPOConfig,
    model_args: ModelConfig,
    train,
    tokenizer,
    rewards,
    weights,
    model=None,
    kind: type[GRPOTrainer] | None = None,
) -> GRPOTrainer:
    """
    The trainer of the method that was asked for, or of this `kind`, and of the model that was named, or of this one;
    `--reward_weights` take precedence over the script's.
    """
    try:
        verify_number(train, args, args.num_generations)  # TRL's own trainer would make no step, and say nothing
    except ValueError as error:
        size = getattr(script_args, "train_size", None)
        raise ValueError(str(error) if size is None else f"--train_size {size} is too few: {error}") from error
    args.reward_weights = args.reward_weights or weights
    settings = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    given = args.model_init_kwargs or {}
    args.model_init_kwargs = {**settings, **given} if model is None else None
    try:
        return (kind or (GRPOTrainer if script_args.trainer == "grpo" else ISOPOTrainer))(
            model=model_args.model_name_or_path if model is None else model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args) if model is None else None,
            peft_config=get_peft_config(model_args) if model is None else None,
        )
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {model_args.model_name_or_path} are damaged ({error}): download or save them again."
        ) from error
    except TypeError as error:
        if not given:
            raise
        raise ValueError(f"--model_init_kwargs {json.dumps(given)} cannot be used: {error}") from error


def follow(
    trainer: GRPOTrainer, script_args: RunArguments, held_out, reward: Callable[..., list[float | None]], meaning: str
) -> tuple["Progress", ValidationCallback | None]:
    """What shows the run as it goes, and what validates it, both added to the trainer."""
    progress = Progress(trainer, reward.__name__, meaning)
    trainer.add_callback(progress)
    if not script_args.validation_size:
        return progress, None
    held_out = held_out.select(range(min(script_args.validation_size, len(held_out))))
    validation = ValidationCallback(
        trainer, held_out, reward, script_args.validation_steps, kl_prompts=script_args.kl_size
    )
    trainer.add_callback(validation)
    return progress, validation


def carry_out(
    script: str,
    trainer: GRPOTrainer,
    progress: "Progress",
    validation: ValidationCallback | None,
    resume: str | bool | None,
    dataset: str | None = None,
    elsewhere: str = "change --instruction",
) -> int:
    """
    Train, and leave behind the report, the model and its card; the exit code.

    Args:
        script (`str`): name of the script.
        trainer, progress, validation: as [`build`] and [`follow`] return them.
        resume (`str` or `bool`, *optional*): as [`begin`] returns it.
        dataset (`str`, *optional*): name of the data set on the Hub, for the card.
        elsewhere (`str`): what to try where no answer is found in a completion.
    """
    say(plan(trainer, validation, resume))
    start = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        if progress.begun or not (resume or isinstance(error, REFUSALS)):
            raise
        reason = str(error) if isinstance(error, REFUSALS) else in_short(error)
        reason = f"Training cannot go on from {trainer.args.resume_from_checkpoint}: {reason}" if resume else reason
        return refuse(script, reason, error)
    report(trainer, validation, time.monotonic() - start, progress, elsewhere)
    trainer.save_state()
    trainer.save_model()
    trainer.create_model_card(dataset_name=dataset)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    say(f"Model: {trainer.args.output_dir}")
    if hasattr(trainer, "end"):  # transformers 5.18 and later: trackers and process group
        trainer.end()
    return 0


# What is shown


class Progress(ProgressTable):
    """The table of a run, with the reward that is validated beside the total where there are others."""

    def __init__(self, trainer: GRPOTrainer, reward: str, meaning: str = "right"):
        super().__init__(trainer, {meaning: f"rewards/{reward}/mean"} if len(trainer.reward_funcs) > 1 else None)
        self.reward = reward  # name of the one that is validated
        self.begun = False  # whether training has, on this rank

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.begun = True


def plan(trainer: GRPOTrainer, validation: ValidationCallback | None, resume: str | bool | None) -> str:
    """What is about to be done, in a few lines."""
    args = trainer.args
    weights = "an adapter" if is_peft_model(trainer.model) else "all weights"
    method = f"ISOPO with the rule {args.rule!r}" if isinstance(trainer, ISOPOTrainer) else "GRPO"
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs in steps"
    count = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    lines = [
        f"Training {weights} by {method}: {length} of {count} completions, {args.num_generations} per problem, each "
        f"of at most {args.max_completion_length} tokens."
    ]
    if validation is not None:
        lines.append(
            f"Validation with {len(validation.dataset)} problems that are not trained on: before the first step, "
            f"every {validation.steps} steps, and after the last."
        )
        if validation.kl_prompts:
            lines.append("Drift is the KL divergence from the start, in nats per completion.")
    if args.save_strategy == "steps":
        lines.append(
            f"Checkpoints are saved to {args.output_dir} every {args.save_steps:g} steps; --resume_from_checkpoint "
            "true goes on from the last one."
        )
    if resume:
        lines.append(f"This run goes on from {'the last checkpoint there' if resume is True else resume}.")
    return "\n".join(lines)


def hint(lines: list[dict[str, Any]], reward: str, elsewhere: str) -> str:
    """What to try where the rewards of a run had nothing to teach; empty where they had."""
    if not lines or any(line.get("frac_reward_zero_std", 0.0) < 1 for line in lines):
        return ""
    if any(line.get(f"rewards/{reward}/mean") for line in lines):
        return (
            "In every step, all completions of a problem had the same reward, so that there was nothing to learn "
            "from. If all are right, harder problems are needed; else try more of them (--num_generations) or a "
            "higher --temperature."
        )
    return (
        "No completion was right in any step, so that there was nothing to learn from. Look at some "
        "(--log_completions shows them): if they are cut off, raise --max_completion_length; if the answer stands "
        f"elsewhere, {elsewhere}; else begin with easier problems or a larger model."
    )


def report(
    trainer: GRPOTrainer,
    validation: ValidationCallback | None,
    seconds: float,
    progress: "Progress",
    elsewhere: str,
) -> None:
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
    if advice := hint(lines, progress.reward, elsewhere):
        say(f"\n{advice}")
    if lines and rank() == 0:
        say(f"\n{curves(trainer)}")


def curves(trainer: GRPOTrainer) -> str:
    """Where the curves of the run have been drawn; the curves themselves, in text, where that cannot be done."""
    log, picture = trainer.state.log_history, os.path.join(trainer.args.output_dir, PICTURE)
    try:
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        draw({type(trainer).__name__.removesuffix("Trainer"): log}, picture)
    except (ImportError, OSError):  # no matplotlib, or a full disk
        return f"Curves, from the first value to the last:\n{in_text(log)}"
    return f"Curves: {picture}"


def refuse(script: str, text: str, error: Exception) -> int:
    """Say what cannot work: once per machine, where it is sure to be the same for all of its ranks."""
    sentence = f"{script}: {' '.join(text.split())}"
    if rank(local=True) == 0 or not isinstance(error, ValueError):
        print(sentence, file=sys.stderr, flush=True)
    last_word = os.environ.get("TORCHELASTIC_ERROR_FILE")  # which the launcher of several processes ends with
    if last_word:
        with open(last_word, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    return 2
