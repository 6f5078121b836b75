"""
Whole training runs at random: settings that are drawn together are refused with words, or train two steps, each with
the gradient of the definition.

`ISOPO_SEARCH_CASES=1000 pytest -m "slow or not slow" tests/gradients/test_random_training.py` tries as many;
`ISOPO_SEARCH_SEED` draws others. The definition starts from the microbatches that TRL has made. Of the package it
takes which sequences are run together, and which positions are sampled in a microbatch.
"""

import contextlib
import dataclasses
import functools
import math
import os
import random

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests import oracle, tiny, training
from tests.fisher_rows.test_step_scope import content_key, sampled_positions
from tests.gradients.test_combinations import terms_by_hand
from tests.gradients.test_oracle import build, check
from tests.gradients.test_random_search import Layer, placed
from tests.token_weights.definition import definition, effective_sample_size, forward
from tests.token_weights.test_ratio_loss import LOSSES, objective


CASES = int(os.environ.get("ISOPO_SEARCH_CASES", "60"))
SEED = int(os.environ.get("ISOPO_SEARCH_SEED", "0"))
EOS = tiny.IDS["eos_token_id"]


def sparse_reward(completions, **_):
    """Zero or one: in some groups all are the same."""
    return [float(len(text) > 0 and ord(text[0]) % 3 == 0) for text in completions]


def drawn(number):
    """What the model is, its rewards, and the settings."""
    source = random.Random(f"{SEED} {number}")
    choice = source.choice

    def sometimes(probability, **settings):
        return settings if source.random() < probability else {}

    made = {"family": choice(["llama", "qwen2", "qwen3", "gemma3"]), "lora": source.random() < 0.4}
    made["tie"] = None if made["lora"] else choice([None, True, False])
    made["half"] = source.random() < 0.08  # of which no more is asked than that its numbers are numbers
    rule = choice(["fisher", "fisher", "npg", "fig4", "euclidean", "interacting", "none"])
    settings = {"rule": rule, "seed": source.randint(0, 99)}
    if rule != "none":
        settings |= sometimes(0.3, scale="paper") | sometimes(0.4, regularization=choice([0.01, 0.3, 2.0]))
        settings |= sometimes(0.3, regularization_decay=choice([0.0, 0.5]))
    if rule in ("fisher", "npg", "fig4"):
        settings |= {"fisher_samples": choice([5, 20, 64])} | sometimes(0.4, fisher_scope="microbatch")
    kind = choice(["none", "none", "sampler", "p3o", "kpo", "ratio", "ratio"])
    if kind == "ratio":
        settings |= LOSSES[choice(list(LOSSES))]
    else:
        settings["loss_type"] = choice(["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
        if kind == "sampler":
            settings |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
        settings |= {"token_weights": kind} if kind != "none" or source.random() < 0.5 else {}
    group, size = choice([2, 3]), choice([1, 2, 3, 4, 6])
    settings |= {"num_generations": group, "per_device_train_batch_size": size}
    settings |= {"gradient_accumulation_steps": choice([1, 1, 2, 3]), "max_completion_length": choice([3, 5])}
    settings |= sometimes(0.5, steps_per_generation=choice([1, 2, 3, 4, 6])) | sometimes(0.3, num_iterations=2)
    if size % group == 0:
        settings |= sometimes(0.4, group_microbatches=True)
    settings |= sometimes(0.5, skip_zero_advantage=source.random() < 0.5) | sometimes(0.2, beta=0.3)
    settings |= sometimes(0.2, mask_truncated_completions=True) | sometimes(0.5, max_grad_norm=choice([0.0, 0.1]))
    settings |= sometimes(0.4, scale_rewards=choice(["none", "batch"])) | sometimes(0.3, target_kl=0.01)
    settings |= (
        sometimes(0.2, temperature=0.7) | sometimes(0.15, top_k=10) | sometimes(0.3, gradient_checkpointing=False)
    )
    return made, choice([tiny.reward, sparse_reward]), settings


class Definition(TrainerCallback):
    """Compares the gradient before each of the optimizer's steps with what it is to be."""

    def __init__(self, trainer, plain, settings):
        self.trainer, self.plain, self.settings = trainer, plain, settings
        self.given, self.passes, self.compared = [], [], 0
        self.sampled_steps, self.generated_at, self.is_noise = 0, 0, False
        modules = oracle.trained_modules(plain)
        self.modules, self.layers = modules, {}
        args = trainer.args
        self.formula = {name: settings[name] for name in ("scale", "regularization") if name in settings}
        self.make = lambda name: Layer(name, args.rule, self.formula, args.regularization_decay)

    # What TRL has made, and what goes through the model

    def microbatch(self, batch):
        self.given.append((batch, self.trainer.state.global_step == self.generated_at))

    def passed(self, inputs):
        if inputs:
            current = self.trainer.isopo.current
            width = inputs["prompt_ids"].shape[1]
            self.passes.append((inputs, None if current is None else training.sampled_rows(current, width)))

    # By hand

    def batches(self):
        """TRL's microbatches as the definition has them, and by what the loss multiplies their tokens."""
        args, result = self.trainer.args, []
        sizes = [[batch[f"{name}_ids"].shape[1] for batch, _ in self.given] for name in ("prompt", "completion")]
        P, C = map(max, sizes)

        def wide(x, width, left=False, fill=0):
            missing = width - x.shape[1]
            return torch.nn.functional.pad(x, (missing, 0) if left else (0, missing), value=fill)

        for batch, fresh in self.given:
            ids = [wide(batch[f"prompt_{x}"], P, left=True) for x in ("ids", "mask")]
            ids += [wide(batch[f"completion_{x}"], C) for x in ("ids", "mask")]
            own = oracle.Batch(*(x.long() for x in ids), batch["advantages"].double())
            known = batch.get("sampling_per_token_logps")
            by_policy = fresh and args.top_k == 0
            nothing = torch.full(own.completion_ids.shape, math.nan, dtype=torch.float64)
            sampler = nothing if by_policy or known is None else wide(known.double(), C)
            own.extra |= {"sampling_per_token_logps": sampler, "is_fresh": torch.tensor(fresh)}
            if "ref_per_token_logps" in batch:
                own.extra["ref_per_token_logps"] = wide(batch["ref_per_token_logps"].double(), C)
            loss_type = {"sapo": "grpo"}.get(args.loss_type, args.loss_type)
            accumulation = args.gradient_accumulation_steps
            if loss_type in ("dapo", "cispo", "vespo"):
                share = args.steps_per_generation / (batch["num_items_in_batch"].clamp(min=1) * accumulation)
                n = own.completion_mask * share.double()
            else:
                n = oracle.token_weights(own, loss_type, accumulation, args.max_completion_length)
            result.append((own, n))
        return result

    def weighted(self, batches):
        """What tokens are multiplied by in `V_s` and in the pull, and the advantages."""
        args, weights, pulls, advantages, seen = self.trainer.args, [], [], [], []
        for batch, n in batches:
            logps = forward(self.plain, batch, args.temperature)[0]
            # Log-ratios are cut at 10, but for the sampler's correction, which has bounds of its own
            sampler = batch.extra["sampling_per_token_logps"]
            cut = logps - (logps - sampler).clamp(-10, 10)
            batch.extra["sampling_per_token_logps"] = sampler if args.token_weights == "sampler" else cut
            seen.append((logps, batch))
            A, pull = batch.advantages, None
            if not batch.completion_mask.any():  # all were truncated
                weights.append(torch.zeros_like(n))
                pulls.append(weights[-1])
                advantages.append(A)
                continue
            takes_ratio = args.loss_type in ("cispo", "sapo", "vespo") or "epsilon" in self.settings
            if takes_ratio:
                leaf, sign = logps.clone().requires_grad_(), torch.where(A < 0, -1.0, 1.0).double()
                # All of it may be clipped
                total = objective(leaf, batch, n, sign, self.settings) + 0 * leaf.sum()
                (w,) = torch.autograd.grad(total, leaf)
                A = A.abs()
            else:
                ess = (
                    effective_sample_size(*map(list, zip(*seen, strict=True))) if args.token_weights == "p3o" else None
                )
                expected = definition(logps, batch, n, args.token_weights, ess)
                w, pull, A = expected.weights, expected.pull, expected.advantages
            batch.extra["sampling_per_token_logps"] = cut
            weights.append(w)
            pulls.append(torch.zeros_like(w) if pull is None else pull)
            advantages.append(A)
        return torch.cat(weights), torch.cat(pulls), torch.cat(advantages)

    def unscaled(self, batches, whole, pulls):
        """Gradients of what no rule rescales, by name."""
        args, plain = self.trainer.args, self.plain
        total = {p: torch.zeros_like(p) for p in plain.parameters() if p.requires_grad}
        if pulls.any():
            plain.zero_grad()
            C = whole.completion_ids.shape[1]
            logits = plain(whole.input_ids, attention_mask=whole.attention_mask, use_cache=False).logits
            p = (logits[:, :-1][:, -C:] / args.temperature).log_softmax(-1)
            logps = p.gather(-1, whole.completion_ids[..., None]).squeeze(-1)
            (-(pulls * logps)[whole.completion_mask.bool()].sum()).backward()
            total = {p: x + (0 if p.grad is None else p.grad) for p, x in total.items()}
        for batch, n in batches if args.beta else ():
            by_sequence = args.importance_sampling_level == "sequence"
            terms = {"beta": args.beta, "entropy_coef": 0.0}
            # The ratio is to an older policy: 1 for the step's own generation, as in TRL, whatever its tokens were
            # truncated by (`sampler` is the truncated one)
            sampler = batch.extra["sampling_per_token_logps"].masked_fill(batch.extra["is_fresh"], math.nan)
            batch = dataclasses.replace(batch, extra={**batch.extra, "sampling_per_token_logps": sampler})
            _, found = terms_by_hand(
                plain, batch, n, by_sequence, args.use_bias_correction_kl, terms, args.temperature
            )
            total = {p: x + found[p] for p, x in total.items()}
        plain.zero_grad()
        return total

    def parts(self, whole):
        """Which sequences are in each pass, and what was sampled there."""
        skipping = self.trainer.skipping is not None
        names = [
            (tuple(ids[mask.bool()].tolist()), A.item())
            for ids, mask, A in zip(whole.input_ids, whole.attention_mask, whole.advantages, strict=True)
        ]
        left, result = list(range(len(names))), []
        for inputs, rows in self.passes:
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            numbers = []
            for row in range(len(ids)):
                weight = inputs["loss_weights"][row] if "loss_weights" in inputs else 1.0
                name = tuple(ids[row][mask[row].bool()].tolist()), float(inputs["advantages"][row])
                numbers.append(next((s for s in left if names[s] == name), None) if weight else None)
                if weight:
                    left.remove(numbers[-1])
            at = None if rows is None else placed(rows, mask, whole, numbers)
            result.append(([s for s in numbers if s is not None], at))  # what fills in has no part in anything
        # None is lost but those that have no part in the step
        assert skipping or not left
        assert not any(names[s][1] for s in left)
        return result

    def expected(self):
        args, plain = self.trainer.args, self.plain
        batches = self.batches()
        fields = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        whole = oracle.Batch(*(torch.cat([getattr(batch, name) for batch, _ in batches]) for name in fields))
        weights, pulls, advantages = self.weighted(batches)
        total = self.unscaled(batches, whole, pulls)
        parts = self.parts(whole)
        constant = 1 / args.gradient_accumulation_steps
        G = oracle.position_gradients(plain, whole, weights / constant, args.temperature)
        keys = [
            content_key(ids[m.bool()].tolist()) for ids, m in zip(whole.input_ids, whole.attention_mask, strict=True)
        ]
        T = whole.input_ids.shape[1]
        degree = -2 if args.rule == "interacting" else sum(oracle.EXPONENTS[args.rule][:2])
        kept = sorted(s for numbers, _ in parts for s in numbers)
        by_step = self.trainer.isopo.fisher_scope == "step"
        if by_step and kept:
            rows = sampled_positions(
                whole.part(kept), self.sampled_steps, args.fisher_samples, lambda s, x: content_key(x), args.seed
            )
            rows = torch.tensor([kept[row // T] * T + row % T for row in rows.tolist()], dtype=torch.long)
        for name, module in self.modules.items():
            V, flat = G[name].sum(1), G[name].reshape(-1, G[name].shape[2])
            layer = self.layers.setdefault(name, self.make(name))
            given = [
                (V[numbers], advantages[numbers], flat[:0] if at is None else flat[at], numbers)
                for numbers, at in parts
                if numbers
            ]
            gradient = layer.step(given, keys) if given else torch.zeros_like(V[0])
            if self.formula.get("scale") == "paper":
                gradient = gradient * constant**degree
            of = oracle.trained(module)
            for p, own in zip(of, (gradient * constant).split([p.numel() for p in of]), strict=True):
                total[p] = total[p] + own.view_as(p)
        if by_step and kept:  # of zeros, where none of these has a gradient
            self.sampled_steps += 1
            for name, layer in self.layers.items():
                layer.rows = G[name].reshape(-1, G[name].shape[2])[rows], [keys[row // T] for row in rows.tolist()]
        return total

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        trainer = self.trainer
        policy = dict(trainer.model.named_parameters())
        with torch.no_grad():
            for name, p in self.plain.named_parameters():
                p.copy_(policy[name])
        expected = self.expected()
        norm = torch.stack([x.norm() for x in expected.values()]).norm()
        is_noise = {name for name, layer in self.layers.items() if layer.is_noise}
        unknown = {p for name in is_noise for p in oracle.trained(self.modules[name])}
        if args.max_grad_norm > 0 and not unknown:
            factor = min(1.0, args.max_grad_norm / (norm.item() + 1e-6))
            expected = {p: x * factor for p, x in expected.items()}
        for name, p in self.plain.named_parameters():
            if p.requires_grad:
                own = policy[name].grad
                assert torch.isfinite(own).all(), name
                p.grad = expected[p] if p in unknown else own.detach().clone()
        if not (unknown and args.max_grad_norm > 0):
            check_but_for_rounding(self.plain, expected)
            self.compared += norm.item() > 1e-10
        self.plain.zero_grad()
        self.given, self.passes = [], []


def check_but_for_rounding(model, expected):
    """A gradient that is nothing beside the others', or beside 1, is rounding."""
    size = max(1e-3, *(x.norm() for x in expected.values()))
    for p, x in expected.items():
        if x.norm() <= 1e-10 * size and p.grad.norm() <= 1e-10 * size:
            p.grad = x
    check(model, expected, 1e-6)


@functools.cache
def reference_model(family, tie, folder):
    return tiny.save(folder / f"{family} {tie}", family, tie=tie, dtype=torch.float64)


def made_model(made):
    model = build(made["family"], made["lora"], made["tie"])
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 8  # completions of different lengths
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("random")


def run(number, folder, monkeypatch):
    """How it ended: refused, or trained with so many steps compared."""
    made, reward, settings = drawn(number)
    print(made, reward.__name__, settings)  # shown where it fails
    model, plain = made_model(made), made_model(made)
    if made["half"]:
        model, settings = model.bfloat16(), {**settings, "bf16": True}
    if settings.get("beta") and not made["lora"]:
        model.config._name_or_path = reference_model(made["family"], made["tie"], folder)
    try:
        trainer = training.build(
            folder, model, reward=reward, data=tiny.prompts(48), max_steps=2, **{"temperature": 1.0, **settings}
        )
    except ValueError as error:
        assert len(str(error)) > 30
        return f"refused: {error}"
    definition = Definition(trainer, plain, settings)
    if made["half"]:
        trainer.train()
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
        return "trained in bf16"
    trainer.add_callback(definition)
    prepare, generate = GRPOTrainer._prepare_inputs, GRPOTrainer._generate_and_score_completions

    def prepared(self, *args):
        batch = prepare(self, *args)
        definition.microbatch(batch)
        return batch

    def generated(self, *args):
        definition.generated_at = self.state.global_step
        return generate(self, *args)

    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", prepared)
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", generated)
    loss = trainer._compute_loss

    def passed(model, inputs):
        result = loss(model, inputs)
        definition.passed(inputs)
        return result

    trainer._compute_loss = passed
    trainer.train()
    monkeypatch.undo()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trainer.state.global_step == 2
    return f"trained: {definition.compared}"


@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, CASES))])
def test_settings_are_refused_or_every_step_is_that_of_the_definition(number, folder, monkeypatch):
    with contextlib.nullcontext() if drawn(number)[0]["half"] else oracle.float64_throughout():
        run(number, folder, monkeypatch)
