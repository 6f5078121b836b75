"""
Whole steps at random against the definition: families, rules and their settings, batches with sequences that are
empty, twins or without an advantage, steps cut in any way, data seen again, and losses whose constant changes.

`ISOPO_SEARCH_CASES=2000 pytest -m "slow or not slow" tests/gradients/test_random_search.py` tries as many;
`ISOPO_SEARCH_SEED` draws others. The oracle follows the documentation (docs/rules.md) and shares nothing with the
package but the draw of positions from a microbatch.
"""

import functools
import os
import random
import re

import pytest
import torch

from isopo_trl import ISOPO
from tests import oracle
from tests.fisher_rows.test_step_scope import WEIGHTS, content_key, log_likelihood, parts_of, sampled_positions
from tests.gradients.test_oracle import build, check


pytestmark = pytest.mark.usefixtures("float64_throughout")

CASES = int(os.environ.get("ISOPO_SEARCH_CASES", "100"))
SEED = int(os.environ.get("ISOPO_SEARCH_SEED", "0"))
SEQUENCES, BATCHES = 5, 6
QUICK = (15, 16, 20, 31, 50)  # without a seed: each rule once, both scales and scopes, LoRA, `keep_small`, no lambda


@functools.cache
def batch_of(number):
    """Some batches have a twin, a sequence without a completion, one without an advantage, or one long prompt."""
    source = random.Random(f"batch {number}")
    prompts = [source.randint(1, 5) for _ in range(SEQUENCES)]
    completions = [source.randint(1, 6) for _ in range(SEQUENCES)]
    if number % 3 == 1:
        completions[1] = 0
    if number % 4 == 2:
        prompts[2] = 12
    batch = oracle.random_batch(prompts, completions, 100, seed=number)
    if number % 2:
        batch.advantages[3] = 0
    if number % 3 == 2:
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
            getattr(batch, name)[4] = getattr(batch, name)[0]
    return batch


@functools.cache
def gradients_of(family, lora, number):
    batch = batch_of(number)
    return oracle.position_gradients(build(family, lora), batch, WEIGHTS(batch))


@functools.cache
def keys_of(number):
    batch = batch_of(number)
    return [
        content_key(ids[mask.bool()].tolist()) for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]


def drawn(number):
    """The model, the rule's settings, those of ISOPO, and for each step its batch, its cut and the loss's constant."""
    source = random.Random(f"{SEED} {number}")
    family, lora = source.choice(["llama", "qwen2", "qwen3", "gemma3", "phi3"]), source.random() < 0.3
    rule = source.choice(["fisher", "npg", "fig4", "euclidean", "interacting", "none"])
    settings = {}
    if rule != "none":
        settings["scale"] = source.choice(["relative", "relative", "paper"])
        settings["regularization"] = source.choice([0.01, 0.1, 1.0, 30.0] + [0.0] * (rule != "interacting"))
        if rule not in ("interacting", "none") and settings["regularization"] > 0:
            settings["keep_small"] = source.random() < 0.3
    general = {"regularization_decay": source.choice([0.0, 0.5, 0.9]), "seed": source.randint(0, 99)}
    if rule in ("fisher", "npg", "fig4"):
        general["fisher_samples"] = source.choice([1, 3, 7, 20, 500])
        general["fisher_scope"] = source.choice(["microbatch", "step", "step"])
    steps = []
    for _ in range(source.randint(2, 5)):
        again = bool(steps) and source.random() < 0.3
        batch = steps[-1][0] if again else source.randrange(BATCHES)
        sizes = []
        while sum(sizes) < SEQUENCES:
            sizes.append(min(source.choice([1, 1, 2, 3, 5]), SEQUENCES - sum(sizes)))
        steps.append((batch, sizes, source.choice([1.0, 1.0, 0.5, 1 / 3])))
    return (family, lora), (rule, settings), general, steps, source.random() < 0.5


class Layer:
    """What the definition knows of one use of parameters from step to step: its means, and the rows that are kept."""

    def __init__(self, name, rule, settings, decay):
        self.rule, self.settings, self.decay = rule, settings, decay
        self.means, self.of_rows, self.rows = None, False, None
        # From a step on in which nobody knows what a norm is (docs/inside.md): what went into it was rounding
        self.is_noise = False
        # A first token attends to itself alone
        self._may_be_noise = re.search("[qk]_(proj|norm)", name) is not None

    @property
    def looks_at(self):
        p, q, r = (0, 1, 0) if self.rule == "interacting" else oracle.EXPONENTS[self.rule]
        return bool(p or r), bool(q or r)

    def coefficients(self, V, samples, A, history, scale, own=None):
        settings = {name: x for name, x in self.settings.items() if name != "scale"}
        if self.rule == "none":
            return A
        return oracle.coefficients(V, samples, A, self.rule, scale=scale, history=history, own=own, **settings)

    def step(self, microbatches, keys):
        """`sum_s c_s V_s` of each microbatch, given as `V`, `A`, the samples of its own, and its sequences."""
        by_rows = self.rows is not None
        history = self.means if by_rows == self.of_rows else None
        scale = self.settings.get("scale", "relative")
        total, seen = 0, []
        largest = max(V.square().sum(1).max() for V, _, _, _ in microbatches)
        for V, A, samples, numbers in microbatches:
            own = None
            if by_rows:
                samples, names = self.rows
                own = torch.tensor([[name == keys[s] for s in numbers] for name in names]).view(len(names), -1)
            if self._may_be_noise:
                # All samples of a sequence, or, before there is any history, all that a microbatch has
                alone = history is None and V.square().sum() < 1e-24 * largest
                known = [rows for rows in oracle.others(V, samples, own) if len(rows)]
                few = self.looks_at[0] and any(rows.square().sum() < 1e-24 * largest for rows in known)
                self.is_noise |= self.rule != "none" and bool(alone or few)
            total = total + self.coefficients(V, samples, A, history, scale, own) @ V
            seen.append((V, samples, own))
        if self.rule != "none":
            self.learn(seen, history, by_rows)
        return total

    def learn(self, seen, history, by_rows):
        overlap, norm = self.looks_at
        terms, noise, values = [], 0, []
        for V, samples, own in seen:
            N = [v.norm().item() for v in V]
            F = oracle.fisher_norms(V, samples, own) if overlap else [1.0] * len(V)
            past = history or {}
            F_, N_ = oracle.without_noise(F, past.get("fisher^2")), oracle.without_noise(N, past.get("norm^2"))
            F_, N_ = F_ if overlap else F, N_ if norm else N
            counted = [f > 0 and (n > 0 or not norm) for f, n in zip(F_, N_, strict=True)]
            there = [f > 0 and (n > 0 or not norm) for f, n in zip(F, N, strict=True)]
            noise += sum(a and not b for a, b in zip(there, counted, strict=True))
            values.append((V, samples, own, F, N, counted))
            terms += [(f, n) for f, n, alive in zip(F, N, counted, strict=True) if alive]
        if not terms:
            self.means = None if noise else self.means
            return
        new = {
            "fisher^2": sum(f * f for f, _ in terms) / len(terms) * overlap,
            "norm^2": sum(n * n for _, n in terms) / len(terms) * norm,
            "relative^2": sum((f / n) ** 2 for f, n in terms) / len(terms) if overlap and norm else 0.0,
        }
        x, fx = [], []
        for V, samples, own, F, N, counted in values:
            x += [f if overlap else n for f, n, alive in zip(F, N, counted, strict=True) if alive]
            if self.rule != "interacting":
                # In the first step of a metric, by the means of the step
                referred = {**new, "fx": 1.0, "x": 1.0} if by_rows != self.of_rows else history
                raw = self.coefficients(V, samples, torch.ones(len(V), dtype=V.dtype), referred, "paper", own).tolist()
                each = zip(raw, F if overlap else N, counted, strict=True)
                fx += [f * value for f, value, alive in each if alive]
        new |= {"x": sum(x) / len(x), "fx": sum(fx) / len(x) if fx else 0.0}
        decay = 0.0 if history is None else self.decay
        self.means = {key: decay * (history or new)[key] + (1 - decay) * new[key] for key in new}
        self.of_rows = by_rows


@pytest.mark.parametrize(
    "number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(max(CASES, QUICK[-1] + 1))]
)
def test_every_step_is_that_of_the_definition(number):
    (family, lora), (rule, settings), general, steps, by_content = drawn(number)
    print(family, lora, rule, settings, general, steps, by_content)  # shown where it fails
    model = build(family, lora)
    isopo = ISOPO(model, rule, **settings, **general)
    modules = oracle.trained_modules(model)
    decay = general["regularization_decay"]
    layers = {name: Layer(name, rule, settings, decay) for name in gradients_of(family, lora, 0)}
    degree = -2 if rule == "interacting" else sum(oracle.EXPONENTS[rule][:2])
    degree = 0 if settings.get("keep_small") else degree  # in units of the mean
    for step, (which, sizes, constant) in enumerate(steps):
        batch, G, keys = batch_of(which), gradients_of(family, lora, which), keys_of(which)
        T, pieces = batch.input_ids.shape[1], []
        model.zero_grad()
        for rows, part in parts_of(batch, sizes):
            numbers = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys[rows]])
            known = {"sequence_keys": numbers} if by_content else {}
            mask = part.attention_mask
            with isopo.microbatch(part.advantages, attention_mask=mask, loss_scale=constant, **known) as microbatch:
                (log_likelihood(model, part, WEIGHTS(batch)[rows]) * constant).backward()
            sampled = None
            if microbatch.samples is not None:
                own = microbatch.samples.rows[~microbatch.samples.absent]
                sampled = placed(own, mask, batch, range(SEQUENCES)[rows])
            pieces.append((rows, sampled))
        isopo.step()
        expected = {}
        for name, layer in layers.items():
            flat = G[name].reshape(-1, G[name].shape[2])
            V = G[name].sum(1)
            none, everyone = flat[:0], range(SEQUENCES)
            given = [
                (V[rows], batch.advantages[rows].double(), none if at is None else flat[at], everyone[rows])
                for rows, at in pieces
            ]
            gradient = layer.step(given, keys)
            if settings.get("scale") == "paper":
                gradient = gradient * constant**degree
            parameters = oracle.trained(modules[name])
            split = (gradient * constant).split([p.numel() for p in parameters])
            for p, own in zip(parameters, split, strict=True):
                expected[p] = expected.get(p, 0) + own.view_as(p)
            if general.get("fisher_scope") == "step":
                order = (lambda s, tokens: content_key(tokens)) if by_content else (lambda s, tokens: s)
                at = sampled_positions(batch, step, general["fisher_samples"], order, general["seed"])
                layer.rows = flat[at], [keys[row // T] for row in at.tolist()]
        unknown = {p for name, layer in layers.items() if layer.is_noise for p in oracle.trained(modules[name])}
        for p in unknown:
            assert torch.isfinite(p.grad).all()
            p.grad = expected[p]
        check(model, expected, 1e-7)


def placed(own, mask, batch, numbers):
    """Rows `b * T + t` of the whole batch of the `own` ones of a part of it, which has less padding."""
    width, T = mask.shape[1], batch.input_ids.shape[1]
    result = []
    for row in own.tolist():
        s, column = divmod(row, width)
        place = int(mask[s, : column + 1].sum()) - 1  # among the real positions
        columns = batch.attention_mask[numbers[s]].nonzero().squeeze(1)
        result.append(numbers[s] * T + int(columns[place]))
    return torch.tensor(result, dtype=torch.long)
