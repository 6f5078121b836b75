r"""
Does `A_s <V_s, D>` say what a step along a completion does to held-out problems, and does it find bad rewards?

    python benchmarks/questions/completion_influence.py                      # SmolLM2-135M from PyPI on sums, on a CPU

The sums and the model of the examples, with LoRA at the last blocks, after a few steps of supervised training on sums
and their answers, so that some completions are right. `D` is the gradient of the expected reward of held-out problems,
with its sign turned, from sampled completions and rewards centred in their group. The influence of each completion of
other problems comes from `ISOPO.influences`.

Real steps: the weights are moved along `-A_s V_s` of a single completion, `V_s` by autograd alone, and the expected
reward is measured before and after, with held-out completions that stay as they are and are weighted by how much more
likely they have become: those that `D` is of, and as many that were drawn anew. A step of size 1 is a completion's
share of a plain step of 0.05 nats per completion; larger ones tell how far first order reaches.

Planted rewards: one prompt in ten is rewarded for wrong answers. Which one is drawn is turned round, so that each is
planted once. Of the completions rewarded so, the share in the lowest tenth of influence is what is found: 10 % by
chance. Completions without an advantage are left out.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fisher_norm import Batch, decoder_blocks, padded, prompt_ids, sampled, stepped
from metric_scope import rank_correlation
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import embedded  # noqa: E402

from isopo_trl import ISOPO  # noqa: E402
from isopo_trl.gsm8k import as_prompts, gsm8k_reward  # noqa: E402


TOKENS = 12
ROWS = 40  # sequences of a pass
NATS = 0.05  # per completion, of a whole step
SIZES = (1, 10, 100)
TENTHS = 10
SHOWN = 10


@dataclass
class Sample:
    """
    Args:
        batch: completions, those of a prompt one after the other.
        hidden: `[m, T, d]`, what the blocks without an adapter make of them.
        rewards: `[prompts, generations]`.
    """

    batch: Batch
    hidden: torch.Tensor
    rewards: torch.Tensor

    @property
    def advantages(self) -> torch.Tensor:
        """`[m]`, the rewards without their group's mean."""
        return (self.rewards - self.rewards.mean(1, keepdim=True)).flatten()

    @property
    def unbiased(self) -> float:
        """By what a mean of advantages times gradients is multiplied: each reward is a part of its group's mean."""
        generations = self.rewards.shape[1]
        return generations / (generations - 1)

    def passes(self) -> list[torch.Tensor]:
        return list(torch.arange(len(self.hidden)).split(ROWS))


class Policy:
    """
    A model whose last blocks have adapters; what the others make of a sample is computed once.

    Args:
        model: a causal language model.
        layers: number of blocks with adapters.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, layers: int):
        self.tokenizer = tokenizer
        blocks, prefix = decoder_blocks(model)
        self.cut = len(blocks) - layers
        numbers = "|".join(str(number) for number in range(self.cut, len(blocks)))
        config = LoraConfig(r=16, lora_alpha=32, target_modules=rf".*layers\.({numbers})\..*_proj")
        self.model: Any = get_peft_model(model, config)  # type: ignore[arg-type]
        self.blocks, _ = decoder_blocks(self.model)
        self.trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def sample(self, problems: Any, generations: int) -> Sample:
        """Completions of problems, and their rewards."""
        batch = sampled(self.model, self.tokenizer, problems["prompt"], generations, TOKENS)
        answers = [answer for answer in problems["answer"] for _ in range(generations)]
        rewards = gsm8k_reward([[{"role": "assistant", "content": text}] for text in self.texts(batch)], answers)
        return Sample(batch, self.below(batch), torch.tensor(rewards).view(-1, generations))

    def below(self, batch: Batch) -> torch.Tensor:
        """What the blocks without an adapter make of a batch."""
        hidden: list[torch.Tensor] = []
        note = self.blocks[self.cut - 1].register_forward_hook(lambda module, args, output: hidden.append(output))
        with torch.no_grad():
            for rows in torch.arange(len(batch.ids)).split(ROWS):
                self.model(batch.ids[rows], attention_mask=batch.mask[rows], use_cache=False, logits_to_keep=1)
        note.remove()
        return torch.cat(hidden)

    def texts(self, batch: Batch) -> list[str]:
        rows = zip(batch.ids.tolist(), batch.prompts, batch.lengths, strict=True)
        return [self.tokenizer.decode(row[start:end], skip_special_tokens=True) for row, start, end in rows]

    def log_probabilities(self, sample: Sample, rows: torch.Tensor) -> torch.Tensor:
        """Of whole completions, `[rows]`."""
        batch = sample.batch
        kept = batch.ids.shape[1] - min(batch.prompts) + 1
        for block in self.blocks[: self.cut]:
            block.forward = lambda *args, **kwargs: sample.hidden[rows]
        try:
            logits = self.model(
                batch.ids[rows], attention_mask=batch.mask[rows], use_cache=False, logits_to_keep=kept
            ).logits[:, :-1]
        finally:
            for block in self.blocks[: self.cut]:
                del block.forward
        chosen = batch.ids[rows, 1 - kept :, None]
        logps = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        return (logps * batch.scored[rows, 1 - kept :]).sum(1)

    def gradient(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, [p for _, p in self.trained]))

    def held_out(self, sample: Sample) -> list[torch.Tensor]:
        """`D`: the gradient of the expected reward with its sign turned."""
        total = [torch.zeros_like(p) for _, p in self.trained]
        weights = sample.advantages * sample.unbiased / len(sample.hidden)
        for rows in sample.passes():
            found = self.gradient(-(weights[rows] * self.log_probabilities(sample, rows)).sum())
            torch._foreach_add_(total, found)
        return total

    def influences(self, sample: Sample, D: list[torch.Tensor]) -> torch.Tensor:
        """`A_s <V_s, D>` `[m]`, by the package."""
        isopo = ISOPO(self.model, "none")
        isopo.hold({name: x for (name, _), x in zip(self.trained, D, strict=True)})
        found = []
        try:
            for rows in sample.passes():
                with isopo.microbatch(sample.advantages[rows], attention_mask=sample.batch.mask[rows]):
                    (-self.log_probabilities(sample, rows).sum()).backward()
                found.append(isopo.influences())
        finally:
            isopo.detach()
            self.model.zero_grad()
        return torch.cat(found)

    def warm_up(self, problems: Any, steps: int, rows: int) -> list[float]:
        """Mean log-probabilities of the right answers in a few steps of supervised training on them."""
        optimizer = torch.optim.AdamW([p for _, p in self.trained], lr=2e-3)
        found = []
        for step in range(steps):
            chosen = problems.select(range(step * rows, (step + 1) * rows))
            asked = [prompt_ids(self.tokenizer, prompt)[0].tolist() for prompt in chosen["prompt"]]
            answers = [self.tokenizer(answer.splitlines()[0]).input_ids for answer in chosen["answer"]]
            end = [self.tokenizer.eos_token_id]
            texts = [prompt + answer + end for prompt, answer in zip(asked, answers, strict=True)]
            batch = padded(texts, [len(prompt) for prompt in asked])
            sample = Sample(batch, self.below(batch), torch.zeros(rows, 1))
            logps = self.log_probabilities(sample, torch.arange(rows))
            optimizer.zero_grad()
            (-logps.mean()).backward()
            optimizer.step()
            found.append(logps.mean().item())
        optimizer.zero_grad()
        return found


# Real steps


class Measured:
    """Expected reward and divergence of the policy as it is now, by fixed completions of an earlier one."""

    def __init__(self, policy: Policy, sample: Sample):
        self.policy, self.sample = policy, sample
        # Completions of which there are several are scored once
        _, self.place = torch.unique(sample.batch.ids, dim=0, return_inverse=True)
        first = torch.full((int(self.place.max()) + 1,), len(self.place))
        self.rows = first.scatter_reduce(0, self.place, torch.arange(len(self.place)), "amin")
        self.before = self._now()
        self.weights = sample.advantages.double() * sample.unbiased / len(sample.hidden)

    @torch.no_grad()
    def _now(self) -> torch.Tensor:
        parts = [self.policy.log_probabilities(self.sample, rows) for rows in self.rows.split(ROWS)]
        return torch.cat(parts).double()[self.place]

    def __call__(self) -> tuple[float, float]:
        """Change of the expected reward, and nats per completion."""
        ratio = (self._now() - self.before).exp()
        return float(self.weights @ (ratio - 1)), float((ratio - 1 - ratio.log()).mean())


def rate_of_a_step(policy: Policy, sample: Sample, measured: Measured) -> float:
    """Of a plain step along the mean of `A_s V_s` over a sample, so that its divergence is `NATS`."""
    weights = sample.advantages / len(sample.hidden)
    total = [torch.zeros_like(p) for _, p in policy.trained]
    for rows in sample.passes():
        torch._foreach_add_(total, policy.gradient(-(weights[rows] * policy.log_probabilities(sample, rows)).sum()))
    rate = NATS / float(sum(x.square().sum() for x in total).sqrt())  # type: ignore[union-attr]
    for _ in range(5):
        with moved(policy, total, rate):
            _, nats = measured()
        rate *= min(10.0, max(0.1, (NATS / max(nats, 1e-12)) ** 0.5))
    return rate


@contextmanager
def moved(policy: Policy, gradient: list[torch.Tensor], rate: float) -> Iterator[None]:
    """The weights after a plain step, and as they were."""
    with stepped([p for _, p in policy.trained], gradient, -rate):
        yield


def real_steps(
    policy: Policy, train: Sample, predicted: torch.Tensor, chosen: torch.Tensor, rate: float, sets: list[Measured]
) -> Iterator[tuple[int, list[list[float]], list[float]]]:
    """For each size of step: the real change on each set, one per chosen completion, and the first one's nats."""
    for size in SIZES:
        changes: list[list[float]] = [[] for _ in sets]
        nats = []
        for s in chosen.tolist():
            row = torch.tensor([s])
            V = policy.gradient(-train.advantages[s] * policy.log_probabilities(train, row).sum())
            with moved(policy, V, size * rate / len(train.hidden)):
                for found, measured in zip(changes, sets, strict=True):
                    change, divergence = measured()
                    found.append(change)
                    if found is changes[0]:
                        nats.append(divergence)
        yield size, changes, nats


# Planted rewards


def area(low: torch.Tensor, high: torch.Tensor) -> float:
    """The probability that one of `low` is below one of `high`, which is the area under the ROC curve."""
    pairs = high.unsqueeze(0) - low.unsqueeze(1)
    return float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())


def found(scores: torch.Tensor, planted: torch.Tensor) -> tuple[float, float]:
    """Share of `planted` among the lowest tenth of `scores`, and the area under the ROC curve."""
    lowest = scores.argsort()[: round(len(scores) / TENTHS)]
    return float(planted[lowest].sum() / planted.sum()), area(scores[planted], scores[~planted])


def planted(sample: Sample, influences: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Of completions and of prompts (the sum over theirs), `found` with each tenth of the prompts planted in turn,
    `[tenths, 2]`. Rewarded for wrong answers, a completion has the opposite advantage, and influence.
    """
    by_prompt = influences.view(sample.rewards.shape)
    teaches = sample.advantages.view_as(by_prompt).any(1)
    by_prompt, advantages = by_prompt[teaches], sample.advantages.view_as(by_prompt)[teaches]
    order = torch.randperm(len(by_prompt), generator=torch.Generator().manual_seed(0))
    result: dict[str, list[tuple[float, float]]] = {"completions": [], "prompts": []}
    for tenth in order.tensor_split(TENTHS):
        bad = torch.zeros(len(by_prompt), dtype=torch.bool)
        bad[tenth] = True
        scores = torch.where(bad.unsqueeze(1), -by_prompt, by_prompt)
        counts = advantages != 0
        result["completions"].append(found(scores[counts], bad.unsqueeze(1).expand_as(scores)[counts]))
        result["prompts"].append(found(scores.sum(1), bad))
    return {name: torch.tensor(rows) for name, rows in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of an instruct model; SmolLM2-135M from PyPI if not given")
    parser.add_argument("--layers", type=int, default=2, help="number of last blocks with adapters")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of supervised training before")
    parser.add_argument("--prompts", type=int, default=30, help="whose completions are asked what they teach")
    parser.add_argument("--generations", type=int, default=8, help="completions of each")
    parser.add_argument("--held-out", type=int, default=32, help="held-out problems, with 4 completions in each draw")
    parser.add_argument("--steps", type=int, default=24, help="completions along which real steps are made")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    set_seed(options.seed)
    path = options.model or embedded.model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = Policy(model, AutoTokenizer.from_pretrained(path), options.layers)
    problems, held_out = (as_prompts(embedded.sums(split), "") for split in ("train", "test"))
    found_before = policy.warm_up(problems, options.warm_up, rows=min(20, len(problems) // (options.warm_up + 2)))
    print("right answers before, in nats: " + " ".join(f"{value:.1f}" for value in found_before), flush=True)

    train = policy.sample(problems.select(range(len(problems) - options.prompts, len(problems))), options.generations)
    draws = [policy.sample(held_out.select(range(options.held_out)), 4) for _ in range(2)]
    teaching = (train.advantages != 0).nonzero().flatten()
    print(
        f"{len(train.hidden)} completions, {train.rewards.mean():.0%} right, {len(teaching)} with an advantage; "
        f"{len(draws[0].hidden)} held-out completions in each draw, {draws[0].rewards.mean():.0%} and "
        f"{draws[1].rewards.mean():.0%} right",
        flush=True,
    )
    directions = [policy.held_out(draw) for draw in draws]
    influences = torch.stack([policy.influences(train, D) for D in directions])
    between = rank_correlation(influences[0, teaching], influences[1, teaching])
    both = influences.mean(0)
    print(f"influence by the one draw and by the other: rank correlation {between:.2f}")
    print(f"positive, by both draws together: {(both[teaching] > 0).double().mean():.0%} of those with an advantage")
    texts, order = policy.texts(train.batch), both.argsort(descending=True).tolist()
    for s in order[:SHOWN] + order[-SHOWN:]:
        prompt = problems[len(problems) - options.prompts + s // options.generations]["prompt"][-1]["content"]
        reward, advantage = train.rewards.flatten()[s], train.advantages[s]
        print(f"{both[s]:+.3f}  advantage {advantage:+.3f}  reward {reward:.0f}  {prompt} -> {texts[s]!r}", flush=True)

    print("\nPlanted rewards: share found in the lowest tenth, and area under the ROC curve, mean over ten plantings")
    for name, scores in (("one draw", influences[0]), ("both draws", both)):
        for unit, table in planted(train, scores).items():
            (share, auc), (least, _), (most, _) = table.mean(0), table.amin(0), table.amax(0)
            print(f"D of {name}, {unit}: {share:.0%} ({least:.0%} to {most:.0%}), area {auc:.2f}", flush=True)

    sets = [Measured(policy, draw) for draw in draws]
    rate = rate_of_a_step(policy, train, sets[0])
    order = torch.randperm(len(teaching), generator=torch.Generator().manual_seed(options.seed))
    chosen = teaching[order[: options.steps]]
    predicted = influences[0, chosen].double() * rate / len(train.hidden)
    print(f"\nReal steps along {len(chosen)} completions; rate of a step of {NATS} nats per completion: {rate:.3g}")
    for size, changes, nats in real_steps(policy, train, predicted, chosen, rate, sets):
        same, other = (torch.tensor(found, dtype=torch.float64) for found in changes)
        ratio = (same / (size * predicted)).median()
        print(
            f"size {size}: {sum(nats) / len(nats):.1e} nats; rank correlation {rank_correlation(predicted, same):.3f} "
            f"on the completions that D is of, {rank_correlation(predicted, other):.3f} on others; median of real "
            f"over predicted {ratio:.3f}",
            flush=True,
        )
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes by the clock, {time.process_time() / 60:.1f} of CPU time")


if __name__ == "__main__":
    main()
