"""
Stale data on a tiny model: reward, effective sample size and KL divergence with token weights, and without.

A two-layer model is pre-trained for a few seconds on a noisy format: after `4+3=` come digits that go on by 3 from the
one before, modulo 10, each right half of the time and random otherwise. The reward is the share of right digits, so
training has to take the noise out. Data is stale, or drawn by another policy, in four ways (`CASES`); the on-policy
reference takes as many optimizer steps, each on a generation of its own. Learning rate, seeds, batch and number of
optimizer steps are the same for all methods, and nothing is tuned for any of them.

The reward reported is that of fresh samples of the policy itself, at temperature 1. Effective sample size and
KL(policy || behaviour) are those of each step's tokens, taken in the same way for every method, TRL's GRPO included.
One token that the behaviour policy hardly ever draws can make up most of either; the mean of -log r, which is
KL(behaviour || policy), has no such tail and is given too.

    python benchmarks/questions/off_policy.py --plot benchmarks/questions/off_policy_cpu.png     # 10 to 20 minutes
    python benchmarks/questions/off_policy.py --draw benchmarks/RESULTS.md \
        --plot benchmarks/questions/off_policy_cpu.png                                       # the plot alone
    python benchmarks/questions/off_policy.py --seeds 2 --steps 32 --cases on-policy reuse --output off_policy.json
"""

import argparse
import copy
import functools
import json
import math
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from textwrap import fill

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.loss.sampler import noting_logps
from isopo_trl.token_weights import batch_figures, ratio_sums


sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("learning", "speed")]

from card import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, card  # noqa: E402
from setting import environment, import_pyplot  # noqa: E402


VOCABULARY = {token: index for index, token in enumerate(["<pad>", "</s>", "+", "=", *"0123456789"])}
ZERO, EOS = VOCABULARY["0"], VOCABULARY["</s>"]
PROMPTS = [f"{start}+{step}=" for start in range(10) for step in (1, 2, 3)]
LENGTH = 16  # digits of a completion
EVERY = 16  # optimizer steps between evaluations
BITS = 4  # of the weights of the rollouts' copy

REFERENCE = "on-policy"
# name: (title, settings of the configuration)
CASES = {
    REFERENCE: ("no reuse", {}),
    "reuse": ("every generation used for 8 steps\n(num_iterations=8)", {"num_iterations": 8}),
    "stale": ("generations of 16 steps' data\n(steps_per_generation=16)", {"steps_per_generation": 16}),
    "temperature": (
        "sampled at 1.2, trained at 1\n(and num_iterations=4)",
        {"generation_kwargs": {"temperature": 1.2}, "num_iterations": 4},
    ),
    "quantised": (f"sampled by a {BITS}-bit copy\n(and num_iterations=4)", {"num_iterations": 4}),
}
# name: settings of ISOPOConfig; None: TRL's GRPOTrainer
METHODS = {
    "plain": {"rule": "none", "token_weights": "none"},
    "GRPO (TRL)": None,
    "sampler": {"rule": "none", "token_weights": "sampler"},
    "P3O": {"rule": "none", "token_weights": "p3o"},
    "KPO": {"rule": "none", "token_weights": "kpo"},
    "KPO, epsilon 0.2": {"rule": "none", "token_weights": "kpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "P3O, fisher": {"rule": "fisher", "token_weights": "p3o", "regularization": 1.0},
    "KPO, fisher": {"rule": "fisher", "token_weights": "kpo", "regularization": 1.0},
}
FIGURES = ("ess", "kl", "reverse_kl")
COLORS = {"plain": LIGHT_GREY, "GRPO": GREY, "sampler": GREEN, "P3O": BLUE, "KPO": ORANGE}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5, help="runs of every method; each pre-trains its own model")
    parser.add_argument("--steps", type=int, default=96, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--plot", help="PNG file with one column per case")
    parser.add_argument("--draw", metavar="RESULTS.md", help="run nothing: draw the plot from the table of this file")
    return parser.parse_args()


# The task


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left", model_max_length=64
    )


def share_of_right(prompts, completions, **_) -> list[float]:
    """The share of digits that follow from the one before; what is missing is wrong."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        before, step = int(prompt[0]), int(prompt[2])
        right = 0
        for token in completion.replace(" ", "")[:LENGTH]:
            digit = int(token) if token.isdigit() else -10
            right += digit == (before + step) % 10
            before = digit
        rewards.append(right / LENGTH)
    return rewards


def noisy_texts(number: int) -> torch.Tensor:
    """Prompts and completions to pre-train on, `[number, 4 + LENGTH + 1]`."""
    digits, step = [torch.randint(10, (number,))], torch.randint(1, 4, (number,))
    for _ in range(LENGTH):
        right = torch.rand(number) < 0.5
        digits.append(torch.where(right, (digits[-1] + step) % 10, torch.randint(10, (number,))))
    plus, equals, end = (torch.full((number,), VOCABULARY[token]) for token in ("+", "=", "</s>"))
    first, *others = (column + ZERO for column in digits)
    return torch.stack([first, plus, step + ZERO, equals, *others, end], 1)


@functools.cache
def base_model(seed: int, steps: int = 300) -> torch.nn.Module:
    """The pre-trained model; trainers get copies."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(VOCABULARY),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY["<pad>"],
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        ids = noisy_texts(64)
        logits = model(input_ids=ids).logits[:, 3:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


@torch.no_grad()
def sample(model, prompts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts and of one completion each, at temperature 1."""
    inputs = tokenizer()(prompts, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=LENGTH + 1)
    prompt_ids = inputs["input_ids"].tolist()
    completions = [ids[len(prompt_ids[0]) :] for ids in output.tolist()]
    return prompt_ids, [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in completions]


def reward_of_policy(model, repeats: int = 4) -> float:
    """Mean reward of fresh samples; the run's random numbers stay as they are."""
    prompts = PROMPTS * repeats
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, completions = sample(model, prompts)
    return statistics.mean(share_of_right(prompts, tokenizer().batch_decode(completions, skip_special_tokens=True)))


def quantised_rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """A `rollout_func`: samples of a copy of the model whose matrices are rounded to `BITS` bits, row by row."""
    model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            unit = matrix.abs().amax(1, keepdim=True) / (2 ** (BITS - 1) - 1)
            matrix.copy_((matrix / unit).round() * unit)
    with noting_logps(model) as recorders:
        prompt_ids, completion_ids = sample(model, prompts)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": recorders[0].logps(completion_ids),
    }


# The runs


class Probe(GRPOTrainer):
    """Keeps the sampler's log-probabilities whatever the method, and takes the same figures of all of them."""

    _inputs = None

    def _generate_single_turn(self, *args, **kwargs):
        if getattr(self.args, "token_weights", "none") != "none":  # ISOPOTrainer records them itself
            return super()._generate_single_turn(*args, **kwargs)
        with noting_logps(self.accelerator.unwrap_model(self.model)) as recorders:
            completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
        return completion_ids, recorders[0].logps(completion_ids)

    def _compute_loss(self, model, inputs):
        self._inputs = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._inputs = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._inputs is not None:
            mask = self._inputs["completion_mask"]
            log_ratio = (logps.detach() - self._inputs["sampling_per_token_logps"]) * mask
            figures = batch_figures(ratio_sums(log_ratio, mask))
            figures["reverse_kl"] = -log_ratio.sum() / mask.sum()
            for name in FIGURES:
                self._metrics["train"][f"probe/{name}"].append(figures[name].item())
        return logps, *others


class ISOPOProbe(ISOPOTrainer, Probe):
    """ISOPOTrainer with the probe between it and GRPOTrainer."""


class Evaluation(TrainerCallback):
    """The policy's reward before every `EVERY`th step, and after the last."""

    def __init__(self):
        self.rewards: list[float] = []

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step % EVERY == 0:
            self.rewards.append(reward_of_policy(model))

    def on_train_end(self, args, state, control, model, **kwargs):
        self.rewards.append(reward_of_policy(model))


def train(case: str, method: str, seed: int, options: argparse.Namespace) -> dict:
    """One run: the reward at every evaluation, the figures of every step, and what stopped it, if anything did."""
    of_method = METHODS[method]
    kind, config = (Probe, GRPOConfig) if of_method is None else (ISOPOProbe, ISOPOConfig)
    model = copy.deepcopy(base_model(seed))
    args = config(
        output_dir="outputs/benchmarks",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        seed=seed,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=LENGTH + 1,
        gradient_checkpointing=False,
        **CASES[case][1],
        **({} if of_method is None else {"skip_zero_advantage": False, **of_method}),
    )
    trainer = kind(
        model,
        share_of_right,
        args,
        Dataset.from_dict({"prompt": PROMPTS * 100}),
        processing_class=tokenizer(),
        rollout_func=quantised_rollout if case == "quantised" else None,
    )
    trainer.remove_callback(PrinterCallback)
    evaluation = Evaluation()
    trainer.add_callback(evaluation)
    stopped = None
    try:
        trainer.train()
    except FloatingPointError as error:
        stopped = str(error)
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # sampling from logits that are not finite
            raise
        stopped = str(error)
    lines = [line for line in trainer.state.log_history if "probe/ess" in line]
    figures = {name: [line[f"probe/{name}"] for line in lines] for name in FIGURES}
    finite = stopped is None and all(x is not None and math.isfinite(x) for name in FIGURES for x in figures[name])
    return {"seed": seed, "reward": evaluation.rewards, **figures, "finite": finite, "stopped": stopped}


# Figures


def spread(values: list[float], digits: int = 2) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):6.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


HEADER = (
    f"{'':12} {'final reward':>21} {'ESS, worst':>21} {'ESS, median':>12} {'KL(pi||b), largest':>24} "
    f"{'median':>7} {'KL(b||pi), largest':>22} {'not finite':>10}"
)


def row(runs: list[dict]) -> str:
    """Median and range over seeds; the other two medians are over all steps of all seeds."""
    steps = {name: [x for run in runs for x in run[name] if x is not None] for name in FIGURES}
    worst = {
        "ess": [min(filter(None, run["ess"])) for run in runs],
        **{name: [max(x for x in run[name] if x is not None) for run in runs] for name in ("kl", "reverse_kl")},
    }
    return (
        f"{spread([run['reward'][-1] for run in runs]):>21} {spread(worst['ess'], 3):>21} "
        f"{statistics.median(steps['ess']):12.3f} {spread(worst['kl']):>24} {statistics.median(steps['kl']):7.3f} "
        f"{spread(worst['reverse_kl']):>22} {sum(not run['finite'] for run in runs):6} of {len(runs)}"
    )


PLOTTED = {"reward": "reward at the end", "kl": "largest KL of a step"}
TITLE = ("plain", "GRPO (TRL)", "P3O")  # methods that it names
# A figure of one method in one case: its median over seeds, the smallest and the largest
Spread = tuple[float, float, float]


def spreads(results: dict[str, dict[str, list[dict]]]) -> dict[str, dict[str, dict[str, Spread]]]:
    """What is plotted of the runs, by case and method."""

    def of(values: list[float]) -> Spread:
        return statistics.median(values), min(values), max(values)

    return {
        case: {
            method: {
                "reward": of([run["reward"][-1] for run in runs]),
                "kl": of([max(x for x in run["kl"] if x is not None) for run in runs]),
            }
            for method, runs in methods.items()
        }
        for case, methods in results.items()
        if case != REFERENCE
    }


def read_table(text: str) -> dict[str, dict[str, dict[str, Spread]]]:
    """The same from the table of RESULTS.md, which has the methods of each case in the order of `METHODS`."""
    number = r"([\d.]+) \(([\d.]+) - ([\d.]+)\)"
    row = rf"^\| (.*?) \| .*? \| {number} \| [\d.]+ \([^)]*\) \| [\d.]+ \| {number} \|"
    found: dict[str, dict[str, dict[str, Spread]]] = {}
    cases = (case for case in CASES if case != REFERENCE)
    for name, *numbers in re.findall(row, text.partition("### Learning from off-policy data")[2], re.MULTILINE):
        if name.strip():
            of_case, methods = found.setdefault(next(cases), {}), iter(METHODS)
        reward, kl = (tuple(map(float, part)) for part in (numbers[:3], numbers[3:]))
        of_case[next(methods)] = {"reward": reward, "kl": kl}
    return found


def plot(figures: dict[str, dict[str, dict[str, Spread]]], path: str) -> None:
    """A row of panels per case, one for the reward and one for the divergence, with a line per method."""
    heights = [len(methods) for methods in figures.values()]
    rewards = {name: [of_case[name]["reward"][0] for of_case in figures.values() if name in of_case] for name in TITLE}
    ranges = [f"{name} {min(of_all):.2f} to {max(of_all):.2f}" for name, of_all in rewards.items() if of_all]
    title = fill(f"Reward at the end: {', '.join(ranges)}", 46)
    with card(path, 0.9 + 0.155 * sum(heights) + 0.42 * len(figures), title) as figure:
        panels = figure.subplots(
            len(figures), len(PLOTTED), squeeze=False, sharex="col", sharey="row", height_ratios=heights
        )
        for row_of_panels, (case, methods) in zip(panels, figures.items(), strict=True):
            for panel, quantity in zip(row_of_panels, PLOTTED, strict=True):
                for place, (method, of_method) in enumerate(methods.items()):
                    middle, low, high = of_method[quantity]
                    color = COLORS[next(name for name in COLORS if method.startswith(name))]
                    panel.plot([low, high], [place, place], color=color, linewidth=2.5, alpha=0.35)
                    panel.plot(middle, place, "D" if "fisher" in method else "o", color=color)
                panel.set_yticks(range(len(methods)), methods)
                panel.grid(axis="x", alpha=0.3)
                panel.spines["left"].set_visible(False)
                panel.tick_params(axis="y", length=0)
            row_of_panels[0].set_ylim(len(methods) - 0.5, -0.5)
            row_of_panels[0].set_title(" ".join(CASES[case][0].split()), loc="left", x=-0.6)
        for panel, (quantity, words) in zip(panels[-1], PLOTTED.items(), strict=True):
            panel.set_xlabel(words)
            panel.set_xscale("log" if quantity == "kl" else "linear")


def main():
    options = parse()
    if options.plot:
        import_pyplot()
    if options.draw:
        with open(options.draw) as file:
            return plot(read_table(file.read()), options.plot)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    report = {"environment": environment(), "options": vars(options), "results": {}}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    begin = time.perf_counter()
    start = [reward_of_policy(base_model(seed)) for seed in range(options.seeds)]
    print(f"{options.steps} steps, {options.seeds} seeds: median (range); reward before training {spread(start)}")
    for case in options.cases:
        print(f"\n{case}: {' '.join(CASES[case][0].split())}\n{HEADER}")
        results = report["results"][case] = {}
        for method in ["plain"] if case == REFERENCE else options.methods:
            results[method] = [train(case, method, seed, options) for seed in range(options.seeds)]
            print(f"{method:12} {row(results[method])}", flush=True)
        if options.output:  # after every case, so that a run that is cut short leaves something
            with open(options.output, "w") as file:
                json.dump(report, file)
    print(f"\n{(time.perf_counter() - begin) / 60:.1f} minutes")
    if options.plot:
        plot(spreads(report["results"]), options.plot)


if __name__ == "__main__":
    main()
