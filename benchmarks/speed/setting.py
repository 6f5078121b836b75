"""What the benchmarks share: a random model, a synthetic batch, the trainers, and how their steps are measured."""

import argparse
import copy
import functools
import gc
import math
import statistics
import time
from collections import defaultdict
from contextlib import nullcontext

import liger_kernels
import torch
import transformers
import trl
from datasets import Dataset
from hook_recipe import RecipeTrainer
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.integrations.autograd_thread import calling_thread
from isopo_trl.layers import layer as isopo_layer


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# hidden, intermediate (of an expert, in a mixture), layers, heads, key-value heads, vocabulary: Qwen3's shapes, and
# that of Qwen2.5-0.5B
SHAPES = {
    "thin": (64, 192, 28, 2, 1, 1000),
    "tiny": (256, 768, 4, 4, 2, 4096),
    "tiny-moe": (256, 128, 2, 4, 2, 4096),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "0.6b": (1024, 3072, 28, 16, 8, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 151936),
    "4b": (2560, 9728, 36, 32, 8, 151936),
    "8b": (4096, 12288, 36, 32, 8, 151936),
    "14b": (5120, 17408, 40, 40, 8, 151936),
    "8b-6layers": (4096, 12288, 6, 32, 8, 151936),
    "30b-a3b-6layers": (2048, 768, 6, 32, 4, 151936),
}
TIED = ("0.6b", "1.7b", "4b")  # with one weight for embedding and head, whatever number of layers is named behind
MIXTURES = ("tiny-moe", "30b-a3b-6layers")
RULES = ("none", "fisher", "npg", "fig4", "euclidean", "interacting", "spring")
TOKEN_WEIGHTS = ("sampler", "p3o", "kpo")
STEP = "@step"  # behind a rule's name: with the rows of the step before
LIGER = ":liger"  # behind the name of GRPO or a rule: with Liger's kernels in the model
COMPILED = ":compiled"  # the same: by `torch.compile`
CALLING = ":calling"  # behind GRPO's name: the backward in the thread that asks for it, as ISOPO has it
DEVICES = ":devices"  # behind a rule's name: in that which PyTorch keeps for the device, as GRPO has it
WARM_UP = 3


# Command line


def add_case_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--sequences", type=int, default=8, help="per microbatch")
    parser.add_argument("--length", type=int, default=256, help="positions, half of them prompt")
    parser.add_argument("--samples", type=int, default=64, help="fisher_samples of ISOPO")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 for full weights")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--experts", type=int, default=128, help="of a mixture; 8 of them for each position")
    parser.add_argument("--aux", action="store_true", help="with the load-balancing loss of a mixture, TRL's default")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if DEVICE == "cuda" else "float32",
        help="of the weights; on a GPU, autocast to bfloat16 is on in either case",
    )


def add_variant_options(parser: argparse.ArgumentParser, rules: list[str]) -> None:
    choices = [*RULES, *(f"{rule}+{weights}" for rule in RULES for weights in TOKEN_WEIGHTS)]
    choices += [f"{rule}{STEP}" for rule in RULES]
    choices += [f"{name}{way}" for name in ("grpo", *RULES) for way in (LIGER, COMPILED)]
    choices += [f"grpo{CALLING}", *(f"{rule}{DEVICES}" for rule in RULES)]
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=choices,
        default=rules,
        metavar="RULE",
        help=f"RULE, RULE+TOKEN_WEIGHTS, RULE{STEP} for fisher_scope='step'; grpo or RULE with {LIGER} or {COMPILED}; "
        f"grpo{CALLING} and RULE{DEVICES}, whose backward runs in the other's thread",
    )
    parser.add_argument("--recipe", action="store_true", help="also the published recipe (hook_recipe.py)")


def variant_names(case: argparse.Namespace) -> list[str]:
    if case.recipe and case.checkpointing:
        raise SystemExit("The hook recipe does not work with gradient checkpointing: leave one of the two out.")
    names = ["grpo", *(["recipe"] if case.recipe else []), *case.rules]
    refuse_without_liger(names)
    return names


def refuse_without_liger(names: list[str]) -> None:
    asked = [name for name in names if name.endswith(LIGER)]
    if asked and not liger_kernels.is_installed():
        raise SystemExit(f"{', '.join(asked)} needs liger-kernel: pip install liger-kernel, or leave it out.")


# What is measured


@functools.cache
def base_model(shape: str, dtype: str, experts: int = 128, device: str = DEVICE) -> torch.nn.Module:
    """A randomly initialised model; trainers get copies."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    mixture = shape in MIXTURES
    of_mixture = {"moe_intermediate_size": intermediate, "num_experts": experts, "num_experts_per_tok": 8}
    config = (Qwen3MoeConfig if mixture else Qwen3Config)(
        **(of_mixture if mixture else {}),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if hidden >= 1024 else 64,
        vocab_size=vocabulary,
        tie_word_embeddings=shape.startswith(TIED),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if mixture:  # the fastest of transformers' own
        model.set_experts_implementation("grouped_mm")
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def random_batch(case: argparse.Namespace, sequences: int) -> dict[str, torch.Tensor]:
    """Full prompts in the first half; completions of random lengths between half and all of the second."""
    half = case.length // 2
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, SHAPES[case.shape][-1], (sequences, 2 * half), generator=generator)
    lengths = torch.randint(half // 2, half + 1, (sequences,), generator=generator)
    mask = (torch.arange(half) < lengths[:, None]).long()
    batch = {
        "prompt_ids": ids[:, :half],
        "prompt_mask": torch.ones_like(mask),
        "completion_ids": ids[:, half:],
        "completion_mask": mask,
        "advantages": torch.randn(sequences, generator=generator),
        "num_items_in_batch": mask.sum(),
        # About what a random model gives, so that ratios are of order one, and not one
        "sampling_per_token_logps": torch.randn(mask.shape, generator=generator) / 10
        - math.log(SHAPES[case.shape][-1]),
    }
    return {name: value.to(DEVICE) for name, value in batch.items()}


def no_reward(completions, **_):
    return [0.0] * len(completions)


def make_trainer(name, case, reward=no_reward, prompts=2, rollout_func=None, model=None, **settings) -> GRPOTrainer:
    """
    The trainer called `name` ("grpo", "recipe", `rule+skip`, or as `--rules` takes it) on a `model`, or without one on
    a copy of the random one.
    """
    if name.endswith(LIGER):
        settings["use_liger_kernel"] = True
    name = name.removesuffix(LIGER).removesuffix(COMPILED).removesuffix(CALLING).removesuffix(DEVICES)
    kind, config = {"grpo": (GRPOTrainer, GRPOConfig), "recipe": (RecipeTrainer, GRPOConfig)}.get(
        name, (ISOPOTrainer, ISOPOConfig)
    )
    if kind is ISOPOTrainer:
        rule, _, token_weights = name.removesuffix(STEP).partition("+")
        settings["skip_zero_advantage"] = token_weights == "skip"
        if token_weights == "skip":
            token_weights = ""
        settings.update(rule=rule, fisher_samples=case.samples, token_weights=token_weights or "none")
        settings["fisher_scope"] = "step" if name.endswith(STEP) else "microbatch"
        if rule not in ("interacting", "spring", "proma") and case.shape not in MIXTURES:
            settings["regularization"] = 0  # as in the figures before the default was another
    if case.shape in MIXTURES and not case.aux:
        settings["router_aux_loss_coef"] = 0.0
    args = config(
        output_dir="outputs/benchmarks",
        gradient_checkpointing=case.checkpointing,
        use_cpu=DEVICE == "cpu",
        bf16=DEVICE == "cuda",
        report_to=[],
        **settings,
    )
    return kind(
        copy.deepcopy(base_model(case.shape, case.dtype, case.experts)) if model is None else model,
        reward,
        args,
        Dataset.from_dict({"prompt": ["a"] * prompts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=case.lora, target_modules="all-linear") if case.lora else None,
        rollout_func=rollout_func,
    )


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """
    The model as `torch_compile=True` has it. ISOPO refuses that: with its layers, the decoder's blocks are compiled
    around them.
    """
    layers = [module for module in model.modules() if "_isopo_layer" in module.__dict__]
    if not layers:
        return torch.compile(model)
    forward = torch.compiler.disable(isopo_layer._forward)
    for module in layers:
        module.forward = functools.partial(forward, module)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile()
    return model


class Variant:
    """A trainer whose `step` is forward, loss and backward of one microbatch, as inside `train()`."""

    def __init__(self, name: str, case: argparse.Namespace):
        # The sizes are placeholders: `step` is handed its batch
        self.trainer = trainer = make_trainer(name, case, per_device_train_batch_size=2, num_generations=2)
        trainer.current_gradient_accumulation_steps = 1
        ours = isinstance(trainer, ISOPOTrainer) and not name.endswith(DEVICES)
        self.in_calling_thread = ours or name.endswith(CALLING)
        if case.checkpointing:
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        self.kernels = liger_kernels.LigerKernels(trainer) if trainer.args.use_liger_kernel else nullcontext()
        self.model = trainer.accelerator.prepare_model(trainer.model)
        if name.endswith(COMPILED):
            self.model = compiled(self.model)
        self.model.train()

    def step(self, inputs: dict[str, torch.Tensor]) -> None:
        with self.kernels, calling_thread(self.in_calling_thread):
            self._step(inputs)

    def _step(self, inputs: dict[str, torch.Tensor]) -> None:
        trainer = self.trainer
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self.model, inputs)
        trainer.accelerator.backward(loss)
        if isinstance(trainer, ISOPOTrainer):
            trainer.isopo.end()
            trainer._log_step(trainer.isopo.step())
        elif isinstance(trainer, RecipeTrainer):
            trainer.finish()
        self.model.zero_grad()


# Measuring


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class PeakMemory:
    """
    Context in which the peak of GPU memory is taken: `bytes` is the peak above what was allocated before, plus the
    weights of `model`, so that other models in memory do not count. `None` on CPUs.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.bytes: int | None = None

    def __enter__(self):
        if DEVICE == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        if DEVICE == "cuda":
            weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
            self.bytes = torch.cuda.max_memory_allocated() - self.before + weights


def measure(variants: dict[str, Variant], inputs: dict[str, torch.Tensor], repeats: int) -> dict[str, dict]:
    """Figures of each variant; every round runs each of them once, beginning with another one each time."""
    peaks, times = {}, {name: [] for name in variants}
    for name, variant in variants.items():
        for _ in range(WARM_UP):
            with PeakMemory(variant.model) as peak:
                variant.step(inputs)
        peaks[name] = peak.bytes
    names = list(variants)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            synchronize()
            start = time.perf_counter()
            variants[name].step(inputs)
            synchronize()
            times[name].append(time.perf_counter() - start)
    return summary(times, peaks)


def profiles(variants: dict[str, Variant], inputs: dict[str, torch.Tensor], most: int = 0) -> dict[str, dict]:
    """
    Of one step of each variant (GPUs only): the sum of the kernels' times, their number, and how long Python took to
    launch them all. Where the last is longer than the first, the step is bound by the CPU. `most` kernels that take
    the longest are named, with their milliseconds and their number.
    """
    figures = {}
    for name, variant in variants.items():
        synchronize()
        start = time.perf_counter()
        variant.step(inputs)
        host = time.perf_counter() - start
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            variant.step(inputs)
            synchronize()
        kernels = defaultdict(list)
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA:
                kernels[event.name].append(event.device_time)
        seconds = 1e-6 * sum(map(sum, kernels.values()))
        launches = sum(map(len, kernels.values()))
        longest = sorted(kernels, key=lambda kernel: -sum(kernels[kernel]))[:most]
        figures[name] = {
            "gpu_seconds": seconds,
            "launches": launches,
            "host_seconds": host,
            "kernels": {kernel: [1e-3 * sum(kernels[kernel]), len(kernels[kernel])] for kernel in longest},
        }
    return figures


def summary(times: dict[str, list[float]], peaks: dict[str, int | None], base: str = "grpo") -> dict[str, dict]:
    """Medians, spreads (largest minus smallest, over the median) and ratios to another, round by round."""
    figures = {}
    for name, values in times.items():
        median = statistics.median(values)
        ratios = [value / other for value, other in zip(values, times[base], strict=True)]
        figures[name] = {
            "seconds": median,
            "spread": (max(values) - min(values)) / median,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "peak_bytes": peaks[name],
            "memory_ratio": peaks[name] / peaks[base] if peaks[name] else None,
            "times": values,
        }
    return figures


HEADER = f"{'ms':>9} {'spread':>6} {'ratio':>6} {'(range)':>13} {'GiB':>7} {'ratio':>6}"


def row(figures: dict) -> str:
    """One variant's figures under `HEADER`."""
    low, high = figures["ratio_range"]
    text = f"{1e3 * figures['seconds']:9.1f} {figures['spread']:6.2f} {figures['ratio']:6.3f} ({low:5.2f}-{high:5.2f})"
    if figures["peak_bytes"] is None:
        return f"{text} {'-':>7} {'-':>6}"
    return f"{text} {figures['peak_bytes'] / 2**30:7.2f} {figures['memory_ratio']:6.3f}"


def environment() -> dict[str, str]:
    return {
        "hardware": torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }


def import_pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib, or leave --plot out.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def release() -> None:
    """Give back the memory of trainers that are no longer referenced."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
