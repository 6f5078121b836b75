"""One run of `learning.py`: trains with a public trainer and leaves one JSON file."""

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as grpo_module
from optimizers import muon_and_adamw
from peft import LoraConfig
from scheduling import ENDING, READY, STEP
from task_problems import Problems, Reward, problems
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.gsm8k import format_reward
from isopo_trl.step_size import completion_length
from isopo_trl.validation import ValidationCallback


# Settings of a run that are ISOPOConfig's, handed on by name
OF_ISOPO = (
    *("rule", "regularization", "token_weights", "fisher_samples", "fisher_scope", "scale", "target_kl"),
    *("step_kl_share", "skip_zero_advantage", "bf16_updates", "spring_decay"),
)
# Sequences up to which nothing is recomputed
SMALL_MICROBATCH = 4
# What the first half of a resumed run leaves to the second one, beside the checkpoint
FIRST_HALF = "first_half.json"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "vllm", "datasets")


def configuration(settings: dict[str, Any], folder: str) -> GRPOConfig:
    """Arguments of TRL's or ISOPO's trainer."""
    completions, microbatch = settings["completions"], settings["microbatch"]
    if completions % microbatch or completions % settings["generations"]:
        raise ValueError(
            f"completions={completions} must be a multiple of microbatch={microbatch} and of "
            f"generations={settings['generations']}."
        )
    accumulation = completions // microbatch
    cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * settings["steps_per_generation"],
        "num_generations": settings["generations"],
        "max_completion_length": settings["max_tokens"],
        "max_steps": max(1, settings["steps"]),
        "learning_rate": settings.get("learning_rate", 1e-6),
        "lr_scheduler_type": "constant",
        "reward_weights": [1.0, settings["format_weight"]] if settings["format_weight"] else [1.0],
        # The same gradients with it and without; small microbatches have room for what it saves
        "gradient_checkpointing": settings["task"] != "sums" and microbatch > SMALL_MICROBATCH,
        "bf16": cuda and settings["task"] != "sums",  # sums are small, and the same on a CPU
        "use_cpu": not cuda,
        "seed": settings.get("seed", 0),
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": settings.get("weights", "float32")},
    }
    if settings["vllm"]:
        # A share of memory that must be free at the start; what is taken is less, see `spare_vllm`
        arguments |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.07}
        arguments |= {"vllm_max_model_length": 1024}
    if settings["optimizer"] == "sgd":
        arguments["optim"] = "sgd"
    if "momentum" in settings:
        arguments["optim_args"] = f"momentum={settings['momentum']}"
    for name in ("epsilon", "use_liger_kernel"):
        if name in settings:
            arguments[name] = settings[name]
    if settings["trainer"] == "grpo":
        return GRPOConfig(**arguments)
    of_isopo = {name: settings[name] for name in OF_ISOPO if settings.get(name) is not None}
    # Unless the matrix asks for it: earlier runs are from before it was the trainer's default
    return ISOPOConfig(**arguments, **{"skip_zero_advantage": False, **of_isopo})


def spare_vllm(gib: float) -> None:
    """
    Give colocated vLLM a cache of this size, instead of what it finds free, and no texts to write, which nobody reads:
    TRL takes the tokens.

    Measuring what is free takes for granted that no other process changes what it holds, which several runs on one GPU
    do. TRL has no setting for it.
    """
    import trl.generation.vllm_generation as generation

    generation.LLM = functools.partial(generation.LLM, kv_cache_memory_bytes=int(gib * 2**30))
    generation.SamplingParams = functools.partial(generation.SamplingParams, detokenize=False)


def multiply_automatic_targets(times: float) -> None:
    """
    Make `target_kl="auto"` so many times what it is. There is no setting for nats per completion but `"auto"` itself,
    and a number is in nats per token, which are others as completions grow longer or shorter.
    """
    completion_length.AUTO *= times
    completion_length.AUTO_PLAIN *= times


class Recorded:
    """
    Before a trainer among the bases: notes the prompts of each optimizer step, as `prompts[step]`.

    With `group_size`, completions of one prompt stay together when a generation is cut into microbatches, in groups of
    that size, instead of being shuffled one by one.
    """

    group_size: int | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        self.prompts: dict[int, list[bytes]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch):
        with shuffled_by(self.group_size):
            inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            # TRL's microbatch, whatever becomes of sequences without an advantage
            whole = self._buffered_inputs[self._step % self.args.steps_per_generation]  # type: ignore[attr-defined]
            for ids, mask in zip(whole["prompt_ids"].tolist(), whole["prompt_mask"].tolist(), strict=True):
                real = [token for token, kept in zip(ids, mask, strict=True) if kept]
                self.prompts[self.state.global_step].append(json.dumps(real).encode())  # type: ignore[attr-defined]
        return inputs

    def prompt_hashes(self, steps: int = 1) -> list[str]:
        """Of so many optimizer steps at a time, a hash of their prompts, whatever the order among these."""
        parts: dict[int, list[bytes]] = defaultdict(list)
        for step in sorted(self.prompts):
            parts[step // steps] += self.prompts[step]
        return [hashlib.sha256(b"\n".join(sorted(rows))).hexdigest()[:12] for rows in parts.values()]


@contextmanager
def shuffled_by(group_size: int | None) -> Iterator[None]:
    """TRL's shuffle of a generation moves whole groups of this size; unchanged if None."""
    if group_size is None:
        yield
        return
    kept = grpo_module.shuffle_sequence_dict
    grpo_module.shuffle_sequence_dict = functools.partial(shuffle_groups, size=group_size)
    try:
        yield
    finally:
        grpo_module.shuffle_sequence_dict = kept


def shuffle_groups(rows: dict[str, Any], size: int) -> dict[str, Any]:
    """Sequences along the first dimension of every entry, in groups of `size` that stay together."""
    count = len(next(value for value in rows.values() if value is not None))
    order = torch.arange(count).view(-1, size)[torch.randperm(count // size)].flatten()

    def permuted(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[place] for place in order]

    return {name: permuted(value) for name, value in rows.items()}


class Validation(ValidationCallback):
    """At given steps only, with its duration, and not before training: the start is a run of its own."""

    def __init__(self, *args: Any, at: list[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.at = at
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.at:
            self.validate()

    def on_train_end(self, args, state, control, **kwargs):
        pass

    def validate(self) -> dict[str, float]:
        start = time.perf_counter()
        figures = super().validate()
        taken = time.perf_counter() - start
        self.seconds += taken
        self.history[-1]["seconds"] = taken
        say(f"step {self.trainer.state.global_step}: {figures} in {taken:.1f} s")
        return figures


class Clock(TrainerCallback):
    """
    At each step's end, seconds of training, validation not counted, and memory in use; says how far the run is.

    With `before`, the seconds of a first half, the time goes on from there. With `stop_at`, a checkpoint is written
    after that step, and training ends.
    """

    def __init__(self, validation: Validation, before: float = 0.0, stop_at: int | None = None):
        self.validation, self.before, self.stop_at = validation, before, stop_at
        self.seconds: list[float] = []
        self.memory: dict[str, list[float]] = defaultdict(list)

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(self.before + time.perf_counter() - self.begin - self.validation.seconds)
        for name, value in memory().items():
            self.memory[name].append(value)
        say(f"{STEP} {state.global_step} {self.seconds[-1]:.2f}")
        if state.global_step == 1:
            say(READY)
        if state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True
        if state.global_step == state.max_steps:
            say(ENDING)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            names = ("reward", "completions/mean_length", "grad_norm", "step_time")
            say(f"step {state.global_step}: " + ", ".join(f"{name} {logs.get(name, math.nan):.4g}" for name in names))


def memory() -> dict[str, float]:
    """GiB of the GPU, as PyTorch counts them, and of the host that this process holds."""
    # The second number of statm: pages in memory
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    found = {"memory/host": pages * resource.getpagesize() / 2**30}
    if torch.cuda.is_available():
        found["memory/allocated"] = torch.cuda.memory_allocated() / 2**30
        found["memory/reserved"] = torch.cuda.memory_reserved() / 2**30
    return found


def say(text: str) -> None:
    print(text, flush=True)


def work(name: str, settings: dict[str, Any], model: str | None, data: str | None, results: Path) -> None:
    """Train, measure, and leave `results/name.json`."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        folder, first = Path(made), None
        if settings.get("resume_at"):
            if settings["resume_at"] % settings["steps_per_generation"]:
                raise ValueError(f"resume_at={settings['resume_at']} must be at the end of a generation.")
            if "folder" in settings:  # this process is the first half of another one's run
                folder = Path(settings["folder"])
            else:
                # In a process of its own, so that nothing of it is left for the second half
                run_first_half(settings | {"folder": made})
                first = json.loads((folder / FIRST_HALF).read_text())
        result = trained(settings, model, data, folder, first)
    result = {"name": name, **result}
    result["seconds"]["total"] = significant(time.perf_counter() - begin)
    if "folder" in settings:
        (folder / FIRST_HALF).write_text(json.dumps(result))
        return
    draft = results / f"{name}.json.part"
    draft.write_text(json.dumps(result, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    draft.rename(results / f"{name}.json")


def run_first_half(settings: dict[str, Any]) -> None:
    """This process's command line again, with other settings."""
    arguments = list(sys.argv)
    arguments[arguments.index("--settings") + 1] = json.dumps(settings)
    subprocess.run([sys.executable, *arguments], check=True)


def trained(
    settings: dict[str, Any], model: str | None, data: str | None, folder: Path, first: dict[str, Any] | None
) -> dict[str, Any]:
    """What a run leaves behind: of its `first` half, if it has one, as well."""
    begin = time.perf_counter()
    found = problems(settings, data)
    if settings["task"] == "sums" and model is None:
        import embedded

        model = embedded.model_path()
    if settings["vllm"]:
        spare_vllm(settings["kv_cache_gib"])
    multiply_automatic_targets(settings.get("auto_times", 1))
    trainer = build(settings, str(model), found, str(folder))
    batch_size = len(found.tests) if settings["vllm"] else None
    validation = Validation(
        trainer,
        found.held_back,
        found.right,
        at=settings["validate_at"],
        batch_size=batch_size,
        kl_prompts=settings["kl_prompts"] if settings["steps"] else 0,
    )
    is_first = "folder" in settings
    before = first["seconds"] if first else {}
    clock = Clock(validation, before.get("train", 0.0), settings["resume_at"] if is_first else None)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.add_callback(validation)
    # vLLM seeds every run alike, and methods may have drawn different numbers so far
    set_seed(settings.get("seed", 0))
    started = time.perf_counter() - begin
    if settings["steps"]:
        trainer.train(resume_from_checkpoint=bool(first))
    else:
        say(READY)
        validation.validate()
    tests: dict[str, Any] = {}
    for key, rows in {} if is_first else {"test": found.tests, **found.others}.items():
        final = Validation(trainer, rows, found.right, at=[], batch_size=batch_size, kl_prompts=0)
        final.validate()
        tests[key] = (final, rows)
    steps = columns(trainer.state.log_history, clock.seconds) | {
        name: [significant(value) for value in values] for name, values in clock.memory.items()
    }
    result = {
        "settings": settings,
        "model": fingerprint(str(model)),
        "validations": [
            rounded({key.removeprefix("validation/"): value for key, value in entry.items()})
            for entry in validation.history
        ],
        "held_back": len(found.held_back),
        **{key: test_figures(final, rows, found.right) for key, (final, rows) in tests.items()},
        "steps": steps,
        # Which of a generation's completions a step takes is drawn after sampling them, so it may differ where
        # transformers generates
        "prompts": trainer.prompt_hashes(),
        "prompts_of_generations": trainer.prompt_hashes(settings["steps_per_generation"]),
        "seconds": rounded(
            {
                "start": started,
                "train": clock.seconds[-1] if clock.seconds else 0.0,
                "validation": validation.seconds + before.get("validation", 0.0),
                "test": sum(final.seconds for final, _ in tests.values()),
            }
        ),
        **environment(),
    }
    return joined(first, result) if first else result


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """A resumed run: the trainer's log is whole, since its checkpoint has it; the rest is of one half each."""
    half = len(first["steps"]["seconds"])
    steps = {
        name: first["steps"][name] + values if name == "seconds" or name.startswith("memory/") else values
        for name, values in second["steps"].items()
    }
    both = {name: first[name] + second[name] for name in ("validations", "prompts", "prompts_of_generations")}
    of_first = {"steps": half, "peak_gib": first["hardware"]["peak_gib"], "seconds": first["seconds"]}
    return {**second, **both, "steps": steps, "first_half": of_first}


def build(settings: dict[str, Any], model: str, found: Problems, folder: str) -> Any:
    """The trainer of a run."""
    # Some versions of cuDNN make gradients of NaN at some lengths (docs/faq.md)
    torch.backends.cuda.enable_cudnn_sdp(False)
    args = configuration(settings, folder)
    kind = GRPOTrainer if settings["trainer"] == "grpo" else ISOPOTrainer
    recorded: Any = type(kind.__name__, (Recorded, kind), {})
    recorded.group_size = settings["generations"] if settings["grouped"] else None
    others: dict[str, Any] = {}
    if settings["lora"]:
        rank = settings["lora"]
        others["peft_config"] = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    policy: Any = model
    if settings["optimizer"] == "muon":
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if torch.cuda.is_available():
            policy.to("cuda")
        args.model_init_kwargs = None
        others["optimizers"] = (muon_and_adamw(policy, args.learning_rate), None)
    return recorded(
        model=policy,
        reward_funcs=[found.reward, format_reward] if settings["format_weight"] else [found.reward],
        args=args,
        train_dataset=found.train,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        **others,
    )


# What is left behind


def test_figures(final: Validation, tests, reward: Reward) -> dict[str, Any]:
    """Accuracy on the test problems, and which were right: a bit per problem, in hexadecimal, the first one first."""
    (texts,) = final.completions.values()
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: tests[name] for name in tests.column_names if name != "prompt"}
    right = [reward == 1 for reward in reward(completions=completions, **columns)]
    figures = final.history[-1]
    return {
        "accuracy": sum(right) / len(right),
        "count": len(right),
        "length": significant(figures["validation/length"]),
        "right": f"{int(''.join('01'[bit] for bit in right), 2):0{-(-len(right) // 4)}x}",
    }


def columns(history: list[dict[str, Any]], seconds: list[float]) -> dict[str, list[float | None]]:
    """
    The log of training, one list per figure with an entry per optimizer step; `None` where a step has no such figure,
    as the reward, which is logged once per generation.
    """
    lines = [line for line in history if "grad_norm" in line and "train_runtime" not in line]
    names = sorted({name for line in lines for name in line} - {"epoch", "step"})
    table = {name: [significant(line.get(name)) for line in lines] for name in names}
    return {"step": [line["step"] for line in lines], "seconds": [significant(s) for s in seconds], **table}


def significant(value: Any, digits: int = 5) -> float | None:
    if value is None or not math.isfinite(float(value)):
        return None
    return float(f"{float(value):.{digits}g}")


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: significant(value) if isinstance(value, float) else value for name, value in figures.items()}


def fingerprint(model: str) -> str:
    """Hash of the beginning of the model's weights, by which results of different days are known to start alike."""
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(file.read(2**26))
    return digest.hexdigest()[:12]


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, as far as they can be known here."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "versions": versions,
        "commit": os.environ.get("LEARNING_COMMIT"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "cores": os.cpu_count(),
            "parallel": int(os.environ.get("LEARNING_PARALLEL", "1")),
            "shared_kernels": os.environ.get("LEARNING_MPS") == "1",
            "peak_gib": significant(torch.cuda.max_memory_reserved() / 2**30) if cuda else None,
        },
    }


def main(arguments: Any) -> None:
    work(arguments.name, json.loads(arguments.settings), arguments.model, arguments.data, Path(arguments.results))
    sys.stdout.flush()
    os._exit(0)  # vLLM takes its time to leave, with memory that the next run waits for
