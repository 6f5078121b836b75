"""
Gradients that are zero in exact arithmetic and rounding noise in floating point, found by random models and batches.

A position that attends to itself alone (a sequence of one scored position), or to positions that are all the same (one
token over and over, without position embeddings), has no gradient at `q`, `k` and their norms; attention kernels
return some units of rounding. Reference is the oracle, in float64, with attention that is written out and gives zeros.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle, tiny


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mistral", "phi3"]
# Where rows hold several sequences, the mask that is given is the only one: no sliding windows
PACKED = ["llama", "qwen2", "qwen3"]
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting"]
# Of the largest coefficient of a layer, and of its means: far above what each type loses, far below what noise does
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 0.5}
STEPS = 2


@dataclass
class Case:
    """A model, a rule and a few steps of microbatches, each a list of sequences (prompt, completion) of tokens."""

    family: str
    dtype: torch.dtype
    attention: str
    packed: bool
    loss_scale: float
    rule: str
    settings: dict
    steps: list
    seed: int


def random_case(seed, dtype):
    choose = random.Random(seed)
    packed = choose.random() < 0.25
    family = choose.choice(PACKED if packed else FAMILIES)
    rule = choose.choice(RULES)
    settings = {"scale": choose.choice(["relative", "paper"])}
    if choose.random() < 0.5 or rule == "interacting":
        settings["regularization"] = choose.choice([1e-4, 0.1, 1.0])
        settings |= {"keep_small": choose.random() < 0.5} if rule != "interacting" else {}
    else:
        settings["regularization"] = 0.0

    def sequence(kind):
        prompt, completion = choose.randint(1, 5), choose.randint(2, 5)
        if kind == "one position":
            prompt = completion = 1
        # All different, but for one that is all the same
        tokens = choose.sample(range(9, 100), prompt + completion)
        if kind == "one token":
            tokens = tokens[:1] * len(tokens)
        return tokens[:prompt], tokens[prompt:]

    # In bf16 rounded weights of attention make positions differ that were the same, by more than small gradients do
    kinds = ["one position", "any", "any"] + ["one token"] * (dtype != torch.bfloat16)

    def microbatch():
        sequences = [sequence("any"), *(sequence(choose.choice(kinds)) for _ in range(choose.randint(1, 3)))]
        choose.shuffle(sequences)
        return sequences

    steps = [[microbatch(), microbatch()] for _ in range(STEPS)]
    if choose.random() < 0.5:  # nothing but noise in a microbatch, which only the history can tell
        steps[1][1] = [sequence("one position") for _ in range(choose.randint(1, 2))]
    attention = choose.choice(["sdpa", "sdpa", "eager"])
    return Case(family, dtype, attention, packed, choose.choice([1.0, 0.25]), rule, settings, steps, seed)


def padded(sequences, seed):
    """The sequences as a batch, with advantages."""
    P, C = (max(len(sequence[part]) for sequence in sequences) for part in (0, 1))
    ids = torch.zeros(len(sequences), P + C, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for s, (prompt, completion) in enumerate(sequences):
        ids[s, P - len(prompt) : P + len(completion)] = torch.tensor(prompt + completion)
        mask[s, P - len(prompt) : P + len(completion)] = 1
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    return oracle.Batch(ids[:, :P], mask[:, :P], ids[:, P:], mask[:, P:], advantages)


# By the package


def model_of(case, dtype, attention):
    model = tiny.model(case.family, dtype=case.dtype, seed=case.seed).to(dtype)
    if attention == "eager" and case.family == "gemma2":
        attention = "capped_attention"  # eager, in float64 where the model is
    elif case.family == "gemma2":
        attention = "eager"  # its soft cap has no fused attention
    model.set_attn_implementation(attention)
    return model


def backward(isopo, model, batch, case):
    """One microbatch, padded or packed two sequences to a row."""
    weights = case.loss_scale * oracle.token_weights(batch)
    P, T = batch.prompt_ids.shape[1], batch.input_ids.shape[1]
    if not case.packed:
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask, loss_scale=case.loss_scale):
            logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            score(logits, batch.input_ids, torch.cat([torch.zeros(len(weights), P), weights], 1)).backward()
        return
    columns = [mask.nonzero().squeeze(1).tolist() for mask in batch.attention_mask]
    rows = [[(s, t) for s in pair if s < len(columns) for t in columns[s]] for pair in two_by_two(len(columns))]
    T = max(map(len, rows))

    def laid_out(value, fill):
        dtype = torch.float64 if isinstance(fill, float) else torch.long
        return torch.tensor([[value(s, t) for s, t in row] + [fill] * (T - len(row)) for row in rows], dtype=dtype)

    ids = laid_out(lambda s, t: batch.input_ids[s, t].item(), 0)
    sequence_ids = laid_out(lambda s, t: s, -1)
    weights = laid_out(lambda s, t: weights[s, t - P].item() if t >= P else 0.0, 0.0)
    apart = (sequence_ids.unsqueeze(2) != sequence_ids.unsqueeze(1)) | ~torch.ones(T, T).tril().bool()
    mask = torch.zeros(len(rows), 1, T, T, dtype=case.dtype)
    mask = mask.masked_fill(apart.unsqueeze(1), torch.finfo(case.dtype).min)
    with isopo.microbatch(batch.advantages, sequence_ids=sequence_ids, loss_scale=case.loss_scale):
        positions = laid_out(lambda s, t: t, 0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        score(logits, ids, weights).backward()


def two_by_two(count):
    return [(s, s + 1) for s in range(0, count, 2)]


def score(logits, ids, weights):
    """The loss: `weights` `[B, T]` of each token's log-probability."""
    logps = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logps * weights[:, 1:].to(logps.dtype)).sum()


def by_the_package(case):
    """Per step and microbatch: coefficients and which sequences count, by layer's name; and the means after it."""
    model = model_of(case, case.dtype, case.attention)
    isopo = ISOPO(model, case.rule, fisher_samples=10_000, seed=case.seed, **case.settings)
    names = [layer.name for layer in isopo.layers]
    needs = isopo.rule.needs
    result = []
    for step, microbatches in enumerate(case.steps):
        seen = []
        for part, sequences in enumerate(microbatches):
            backward(isopo, model, padded(sequences, 10 * step + part), case)
            c, F, N, _, noise = isopo._last[0].table.unbind(1)
            counted = noise == 0
            for needed, x in ((needs.overlap, F), (needs.norm or needs.ntk, N)):
                counted = counted & (x > 0) if needed else counted
            seen.append((dict(zip(names, c, strict=True)), dict(zip(names, counted.tolist(), strict=True))))
        figures = isopo.step()
        assert figures["broken_sequences"] == 0
        means = {
            name: dict(zip(EXPECTATIONS, mean.tolist(), strict=True)) if known else None
            for name, mean, known in zip(names, isopo._running.mean, isopo._running.known, strict=True)
        }
        result.append((seen, means))
    return result


# By the definition


def by_the_oracle(case):
    """The same, in float64; in place of one coefficient those that are right: `[candidates, m]`."""
    model = model_of(case, torch.float64, "eager")
    means = dict.fromkeys(oracle.trained_modules(model))
    result = []
    for step, microbatches in enumerate(case.steps):
        seen, entries = [], {name: [] for name in means}
        for part, sequences in enumerate(microbatches):
            batch = padded(sequences, 10 * step + part)
            G = oracle.position_gradients(model, batch, oracle.token_weights(batch))
            real = batch.attention_mask.reshape(-1).bool()
            c, counted = {}, {}
            for name, gradients in G.items():
                V, samples = gradients.sum(1), gradients.reshape(-1, gradients.shape[-1])[real]
                c[name], counted[name], new = at_a_layer(V, samples, batch.advantages, case, means[name])
                entries[name] += new
            seen.append((c, counted))
        means = {name: updated(means[name], entries[name]) for name in means}
        result.append((seen, means))
    return result


def at_a_layer(V, samples, advantages, case, history):
    """Coefficients, which sequences count, and the means' terms of those that do."""
    settings = case.settings
    keep_small = settings.get("keep_small", False)
    exponents = (0, 0, 0) if case.rule == "interacting" else oracle.EXPONENTS[case.rule]
    fisher, norm = bool(exponents[0] or exponents[2]), bool(exponents[1] or exponents[2] or case.rule == "interacting")
    weight = samples.square().sum().item()
    F = [((samples @ v).square().sum().item() / weight) ** 0.5 if weight else 0.0 for v in V]
    past = {"fisher^2": None, "norm^2": None} if history is None else history
    F = oracle.without_noise(F, past["fisher^2"])
    N = oracle.without_noise([v.norm().item() for v in V], past["norm^2"])
    counted = [(f > 0 or not fisher) and (n > 0 or not norm) for f, n in zip(F, N, strict=True)]
    # What stays of a zero gradient is not to be seen: no noise of the reference's own
    V = torch.where(torch.tensor(N).unsqueeze(1) > 0, V, 0)
    # The loss carries its constant to the power that the rule's formula has, see `degree`
    degree = -2 if case.rule == "interacting" else 0 if keep_small else exponents[0] + exponents[1]
    factor = case.loss_scale**degree if settings["scale"] == "paper" else 1.0
    c = [oracle.coefficients(V, samples, advantages, case.rule, history=history, **settings) * factor]
    if history is not None:
        # Where every sample is noise F is 0, in exact arithmetic it is not known: a zero gradient may have either
        c.append(oracle.coefficients(0 * V, torch.ones_like(V), advantages, case.rule, history=history, **settings))
        c[-1] *= factor
    ones = torch.ones(len(V), dtype=torch.float64)
    f = oracle.coefficients(V, samples, ones, case.rule, history=history, **{**settings, "scale": "paper"}).tolist()
    terms = []
    for s, (x, y) in enumerate(zip(F, N, strict=True)):
        if counted[s]:
            relative = x / y if fisher and norm else 0.0
            x, y = x * fisher, y * norm
            size = x if fisher else y
            fx = 0.0 if case.rule == "interacting" else f[s] * size
            terms.append({"fisher^2": x * x, "norm^2": y * y, "relative^2": relative**2, "fx": fx, "x": size})
    return torch.stack(c), counted, terms


def updated(past, terms):
    if not terms:
        return past
    now = {name: sum(entry[name] for entry in terms) / len(terms) for name in EXPECTATIONS}
    return now if past is None else {name: 0.9 * past[name] + 0.1 * now[name] for name in EXPECTATIONS}


# The comparison


def check(case):
    with oracle.float64_throughout():
        expected = by_the_oracle(case)
        given = by_the_package(case) if case.dtype == torch.float64 else None
    given = given or by_the_package(case)
    noise = 0
    for step in range(STEPS):
        for part, (one, other) in enumerate(zip(given[step][0], expected[step][0], strict=True)):
            for name, counted in other[1].items():
                where = (case, step, part, name)
                assert one[1][name] == counted, where
                noise += len(counted) - sum(counted)
                check_coefficients(one[0][name], other[0][name], counted, case.dtype, where)
        for name, means in expected[step][1].items():
            check_means(given[step][1][name], means, case, (case, step, name))
    return noise


def check_coefficients(c, candidates, counted, dtype, where):
    for s in range(len(c)):
        right = candidates[:1, s] if counted[s] else candidates[:, s]
        error = (c[s] - right).abs().min()
        assert error <= TOLERANCE[dtype] * candidates.abs().max(), (where, s, c, candidates)


def check_means(given, expected, case, where):
    assert (given is None) == (expected is None), where
    for name in EXPECTATIONS if given is not None else ():
        assert given[name] == pytest.approx(expected[name], rel=TOLERANCE[case.dtype]), (where, name)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Padded and packed, with and without regularisation, in each a microbatch of nothing but noise, or noise beside others
FIXED = [*((62, dtype) for dtype in DTYPES), (72, torch.float32)]


@pytest.mark.parametrize(("seed", "dtype"), FIXED, ids=str)
def test_gradients_that_are_zero_but_for_rounding_count_nowhere(seed, dtype):
    assert check(random_case(seed, dtype)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_zero_but_for_rounding_count_nowhere_in_any_random_model(dtype):
    for seed in range(100, 200):
        check(random_case(seed, dtype))


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("rule", ["fig4", "interacting"])
def test_a_small_gradient_is_exact_beside_large_ones_and_noise(rule):
    """Token weights of 1, a thousandth, a millionth and less, and a sequence without a gradient at `q` and `k`."""
    sizes = torch.tensor([1.0, 1e-3, 1e-6, 1e-9, 1.0], dtype=torch.float64).unsqueeze(1)
    batch = oracle.random_batch([3, 2, 4, 3, 1], [4, 5, 3, 4, 1], 100, seed=3)
    weights = sizes * oracle.token_weights(batch)
    model = tiny.model("qwen3", dtype=torch.float64)
    model.set_attn_implementation("eager")
    G = oracle.position_gradients(model, batch, weights)
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    settings = {"regularization": 1.0 if rule == "interacting" else 0.0}
    isopo = ISOPO(model, rule, fisher_samples=10_000, **settings)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        P = batch.prompt_ids.shape[1]
        score(logits, batch.input_ids, torch.cat([torch.zeros(5, P), weights], 1)).backward()
    error, name = oracle.worst_error(model, oracle.expected_gradients(model, G, batch, None, rule, **settings))
    assert error < 1e-9, name
