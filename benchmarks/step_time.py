"""
Time and memory of one training step's forward, loss and backward: TRL's GRPO against each ISOPO rule.

All are built on copies of one randomly initialised model and fed the same synthetic batch; runs are interleaved, and
the figures are medians and ratios to GRPO within one run.

    python benchmarks/step_time.py                                            # a small model, for CPUs
    python benchmarks/step_time.py --shape 0.6b --sequences 8 --length 1024   # for one GPU
"""

import argparse
import copy
import gc
import json
import statistics
import time

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer


# hidden, intermediate, layers, heads, key-value heads, vocabulary: Qwen3's shapes
SHAPES = {
    "tiny": (256, 768, 4, 4, 2, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 151936),
    "8b-6layers": (4096, 12288, 6, 32, 8, 151936),
}
RULES = ("none", "fisher", "npg", "fig4", "euclidean", "interacting")


def tokenizer():
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def build(options, dtype):
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[options.shape]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if hidden > 256 else 64,
        vocab_size=vocabulary,
        tie_word_embeddings=options.shape == "0.6b",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(dtype)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear"))
    return model


def batch(options, vocabulary, device):
    m, half = options.sequences, options.length // 2
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (m, 2 * half), generator=generator).to(device)
    lengths = torch.randint(half // 2, half + 1, (m,), generator=generator).to(device)
    mask = (torch.arange(half, device=device) < lengths[:, None]).long()
    return {
        "prompt_ids": ids[:, :half],
        "prompt_mask": torch.ones_like(mask),
        "completion_ids": ids[:, half:],
        "completion_mask": mask,
        "advantages": torch.randn(m, generator=generator).to(device),
        "num_items_in_batch": mask.sum(),
    }


def trainer_for(name, model, options, device):
    settings = {
        "output_dir": "outputs/step_time",
        "per_device_train_batch_size": options.sequences,
        "num_generations": options.sequences,
        "generation_batch_size": options.sequences,
        "max_completion_length": options.length // 2,
        "gradient_checkpointing": options.checkpointing,
        "use_cpu": device == "cpu",
        "bf16": False,  # the model itself is in bf16
        "report_to": [],
    }
    if name == "grpo":
        args, kind = GRPOConfig(**settings), GRPOTrainer
    else:
        args, kind = ISOPOConfig(**settings, rule=name, fisher_samples=options.samples), ISOPOTrainer
    data = Dataset.from_dict({"prompt": ["a"] * options.sequences})
    reward = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    trainer = kind(model, reward, args, data, processing_class=tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    if options.checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.model.enable_input_require_grads()
    return trainer


def step(trainer, inputs):
    trainer.compute_loss(trainer.model, inputs).backward()
    if isinstance(trainer, ISOPOTrainer):
        trainer.isopo.end()
        trainer.isopo.step()
    trainer.model.zero_grad()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 for full weights")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["none", "fisher", "fig4", "interacting"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(options, torch.bfloat16 if device == "cuda" else torch.float32)
    trainers = {}
    for name in ("grpo", *options.rules):
        trainers[name] = trainer_for(name, copy.deepcopy(model), options, device)
        trainers[name].model.to(device)
    inputs = batch(options, SHAPES[options.shape][-1], device)

    peaks, times = {}, {name: [] for name in trainers}
    for name, trainer in trainers.items():  # warm-up, and memory beyond what all the models hold
        step(trainer, inputs)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(trainer, inputs)
            weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
            peaks[name] = torch.cuda.max_memory_allocated() - before + weights
        step(trainer, inputs)
    for _ in range(options.repeats):
        for name, trainer in trainers.items():
            synchronize(device)
            start = time.perf_counter()
            step(trainer, inputs)
            synchronize(device)
            times[name].append(time.perf_counter() - start)

    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{hardware}, torch {torch.__version__}, {vars(options)}")
    print(f"{'':12} {'ms':>9} {'spread':>7} {'ratio':>6} {'GiB':>7} {'ratio':>6}")
    results = {}
    for name, values in times.items():
        median = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, times["grpo"], strict=True))
        spread = (max(values) - min(values)) / median
        memory = peaks.get(name)
        results[name] = {"seconds": median, "spread": spread, "ratio": ratio, "peak_bytes": memory}
        tail = f"{memory / 2**30:7.2f} {memory / peaks['grpo']:6.3f}" if memory else ""
        print(f"{name:12} {1e3 * median:9.1f} {spread:7.2f} {ratio:6.3f} {tail}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"hardware": hardware, "options": vars(options), "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
