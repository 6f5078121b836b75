"""
One copy of the weights for the trainer and vLLM: what it saves, and whether vLLM generates with those of each step.

A model in bf16 is trained by SGD with vLLM in the trainer's process, in one process with shared weights and in another
with copies, three optimizer steps each. The second step is taken back wholly, and `target_kl` tries each beforehand.
After every step vLLM answers a few prompts greedily. Then the process with copies is given the weights that the other
had after each of its steps, by TRL's own sending, and must have the same bits in every parameter of vLLM's, and
generate the same tokens with the same log-probabilities.

    python benchmarks/speed/shared_weights.py --model DIR --output shared_weights.json
    python benchmarks/speed/shared_weights.py --model DIR --shape 8b --limit-gib 80 --output shared_weights_8b.json

With `--shape` the model has random weights, and of DIR only the tokenizer is taken; there is one step, and no
comparison.

Seconds and GiB are printed as JSON: `sync_s`, of each time that vLLM got the weights of a step; `start` and
`training`, each with the peak of what PyTorch has allocated and reserved in that part, and what was allocated, and
taken of the whole GPU, at its end. What vLLM takes (`--vllm-gib`) is in it.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path


# Before anything is imported that reads them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from datasets import Dataset
from setting import SHAPES, base_model
from transformers import AutoTokenizer, TrainerCallback

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.integrations import vllm_weights
from isopo_trl.step_size.taken_back import WeightCopy, trained


GIB = 2**30
WAYS = ("shared", "copies")
TAKEN_BACK = 2  # number of the step that is
PROMPTS = 8
PROMPT = 150  # tokens: several blocks of vLLM's cache, which must not outlive a step
ANSWER = 32  # tokens, greedily
LOGGED = ("step_time", "loss", "grad_norm", "reward", "step/kl", "sampling/sampling_logp_difference/max")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model, or of a tokenizer with --shape")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, help="3, or 1 with --shape")
    parser.add_argument("--sequences", type=int, default=16, help="per optimizer step")
    parser.add_argument("--microbatch", type=int, help="4, or 1 with --shape")
    parser.add_argument("--completion", type=int, help="tokens: 128, or 512 with --shape")
    parser.add_argument("--vllm-gib", type=float, help="for vLLM; else that of the weights and 10")
    parser.add_argument("--limit-gib", type=float, help="of the GPU, for all that PyTorch allocates")
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--way", choices=[*WAYS, "make"], help=argparse.SUPPRESS)  # of one process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # what processes leave for each other
    options = parser.parse_args()
    whole = options.shape is not None
    for name, value in (("steps", 1 if whole else 3), ("microbatch", 1 if whole else 4)):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.completion is None:
        options.completion = 512 if whole else 128
    if options.sequences % options.microbatch or options.sequences % 8:
        parser.error("--sequences must be a multiple of 8, the size of a group, and of --microbatch")
    return options


# The parent: a process for each way


def main() -> None:
    options = parse()
    if options.way is not None:
        train(options)
        return
    folder = Path(tempfile.mkdtemp(prefix="shared_weights"))
    try:
        if options.shape is not None:
            run("make", folder).check_returncode()
        figures = {}
        for way in options.ways:
            done = run(way, folder)
            written = folder / f"{way}.json"
            figures[way] = json.loads(written.read_text()) if written.exists() else {"exit": done.returncode}
            if options.output is not None:  # also where the next process breaks off
                Path(options.output).write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1))
        if all("exit" in of_way for of_way in figures.values()):
            raise SystemExit(1)
    finally:
        shutil.rmtree(folder)


def run(way: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--way", way]
    return subprocess.run(command, check=False)


def make_model(options: argparse.Namespace) -> None:
    """Write a model of random weights, with the tokenizer that was given."""
    model = base_model(options.shape, "bfloat16")
    model.save_pretrained(options.folder / "model")
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.folder / "model")


# A process


def train(options: argparse.Namespace) -> None:
    if options.way == "make":
        make_model(options)
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.mem_get_info()[1]
        if options.limit_gib is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit_gib * GIB / total))
    else:
        prepare_cpu()
    model = str(options.folder / "model") if options.shape is not None else options.model
    began = time.perf_counter()
    trainer = make_trainer(model, options)
    figures = {"way": options.way, "start_s": time.perf_counter() - began, "start": memory()}
    figures["is_shared"] = trainer.shared_weights is not None
    figures["weights"] = round(sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / GIB, 3)
    watched = Watched(trainer, options)
    trainer.add_callback(watched)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if options.shape is None:
        watched.note("step0")
    began = time.perf_counter()
    trainer.train()
    figures.update(train_s=time.perf_counter() - began, training=memory(), sync_s=list(watched.seconds))
    if options.shape is None:
        bits = [watched.noted[f"step{number}"]["bits"] for number in range(options.steps + 1)]
        figures["vllm_has_moved"] = [one != other for one, other in pairwise(bits)]
        if options.way == "copies" and (options.folder / "noted.json").exists():
            figures["as_shared"] = compare(trainer, watched, options)
        elif options.way == "shared":
            (options.folder / "noted.json").write_text(json.dumps(watched.noted))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    figures["log"] = [{name: line[name] for name in LOGGED if name in line} for line in lines]
    (options.folder / f"{options.way}.json").write_text(json.dumps(figures, default=str))


def prepare_cpu() -> None:
    """vLLM on a CPU packs weights into an order of its own, unless told not to."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def make_trainer(model: str, options: argparse.Namespace):
    if options.way == "copies":
        vllm_weights.share = lambda trainer, vllm: None
    settings = {}
    if torch.cuda.is_available():
        files = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        wanted = options.vllm_gib * GIB if options.vllm_gib is not None else files + 10 * GIB
        settings["vllm_gpu_memory_utilization"] = wanted / torch.cuda.mem_get_info()[1]
    args = ISOPOConfig(
        output_dir=str(options.folder / options.way),
        rule="fisher",
        optim="sgd",
        target_kl=1e-3,
        bf16_updates="stochastic",
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        max_steps=options.steps,
        per_device_train_batch_size=options.microbatch,
        gradient_accumulation_steps=options.sequences // options.microbatch,
        num_generations=8,
        max_completion_length=options.completion,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=options.completion + 256,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **settings,
    )
    return ISOPOTrainer(
        model=model,
        reward_funcs=kinds_of_characters,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"What is {i} + {i}?" for i in range(64)]}),
    )


def kinds_of_characters(completions, **kwargs):
    return [len(set(text)) / 10 + len(text) / 1000 for text in completions]


def memory() -> dict[str, float]:
    """GiB."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found = {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "of_gpu": total - free,
    }
    return {name: round(bytes / GIB, 3) for name, bytes in found.items()}


class Watched(TrainerCallback):
    """
    Seconds of each sending, what vLLM has after each step and what it answers, the weights themselves where
    another process is to get them, and one step that is taken back.
    """

    def __init__(self, trainer, options):
        self.trainer, self.options = trainer, options
        self.seconds: list[float] = []
        self.noted: dict[str, dict] = {}
        self._copy = None
        self._send = trainer.vllm_generation.sync_weights
        trainer.vllm_generation.sync_weights = self.timed

    def timed(self):
        wait()
        began = time.perf_counter()
        self._send()
        wait()
        self.seconds.append(time.perf_counter() - began)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if self.options.shape is None and state.global_step + 1 == TAKEN_BACK:
            self._copy = WeightCopy(list(trained(optimizer)))
            self._copy.remember()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._copy is not None:
            self._copy.move(0.0)
            self._copy = None

    def on_step_end(self, args, state, control, **kwargs):
        if self.options.shape is None:
            self.note(f"step{state.global_step}")

    def note(self, name):
        self.trainer.vllm_generation.sync_weights()
        self.noted[name] = seen_by_vllm(self.trainer)
        if self.options.way == "shared":
            weights = {key: value.cpu() for key, value in self.trainer.model.state_dict().items()}
            torch.save(weights, self.options.folder / f"{name}.pt")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seen_by_vllm(trainer) -> dict:
    """Checksums of vLLM's parameters, and its greedy answers."""
    from vllm import SamplingParams

    llm = trainer.vllm_generation.llm
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    bits = {name: checksum(p) for name, p in model.named_parameters()}
    texts = [f"{i} times {i} is {i * i}. " * 40 for i in range(PROMPTS)]
    ids = trainer.processing_class(text=texts)["input_ids"]
    prompts = [{"prompt_token_ids": one[:PROMPT]} for one in ids]
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
    answers = [request.outputs[0] for request in llm.generate(prompts, sampling_params=greedy, use_tqdm=False)]
    tokens = [list(answer.token_ids) for answer in answers]
    logps = [
        [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        for answer in answers
    ]
    return {"bits": bits, "tokens": tokens, "logps": logps}


def checksum(values: torch.Tensor) -> str:
    numbers = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers, digest_size=16).hexdigest()


def compare(trainer, watched, options: argparse.Namespace) -> dict[str, dict[str, bool]]:
    """Whether vLLM, sent the weights of the process that shared them, has what that process' vLLM had."""
    found = {}
    for name, theirs in json.loads((options.folder / "noted.json").read_text()).items():
        weights = torch.load(options.folder / f"{name}.pt", mmap=True)
        trainer.model.load_state_dict(weights)
        trainer.vllm_generation.sync_weights()
        own = seen_by_vllm(trainer)
        found[name] = {what: own[what] == theirs[what] for what in ("bits", "tokens", "logps")}
    return found


if __name__ == "__main__":
    main()
