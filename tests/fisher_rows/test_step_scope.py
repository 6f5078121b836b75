"""
`fisher_scope="step"`: the Fisher metric of a step is that of the step before, however either is cut.

The oracle takes every sequence of a step alone and knows nothing of microbatches. Which positions were sampled it
finds by hashing in Python's own integers.
"""

import functools

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.geometry import reservoir
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build, check, trainer_for


pytestmark = pytest.mark.usefixtures("float64_throughout")

SEQUENCES, SAMPLES, STEPS = 8, 7, 4
CUTS = {"2 x 4": [4, 4], "8 x 1": [1] * 8, "ragged": [3, 1, 4]}


@functools.cache
def batch_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(1, 6, (2, SEQUENCES), generator=generator).tolist()
    return oracle.random_batch(*lengths, 100, seed=step)


def parts_of(batch, cut):
    """The batch in pieces, each with no more padding than it needs, as TRL would have it."""
    start = 0
    for size in cut:
        part = batch.part(slice(start, start + size))
        P, C = int(part.prompt_mask.sum(1).max()), max(int(part.completion_mask.sum(1).max()), 1)
        prompts, completions = slice(part.prompt_ids.shape[1] - P, None), slice(0, C)
        part.prompt_ids, part.prompt_mask = part.prompt_ids[:, prompts], part.prompt_mask[:, prompts]
        part.completion_ids = part.completion_ids[:, completions]
        part.completion_mask = part.completion_mask[:, completions]
        yield slice(start, start + size), part
        start += size


# The oracle


def mixed(x):
    """The finaliser of SplitMix64, on Python's integers."""
    x %= 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


GOLDEN = 0x9E3779B97F4A7C15


def content_key(tokens):
    return mixed(sum(mixed(mixed(token + 1) + (t + 1) * GOLDEN) for t, token in enumerate(tokens)))


def sampled_positions(batch, step, number, keys, seed=42):
    """Rows `b * T + t` of the `number` positions of the step with the smallest hashes."""
    salt = mixed(mixed(seed) + step * GOLDEN)
    T = batch.input_ids.shape[1]
    hashes = []
    for s in range(len(batch.advantages)):
        columns = batch.attention_mask[s].nonzero().squeeze(1).tolist()
        key = keys(s, batch.input_ids[s, columns].tolist()) % 2**64
        hashes += [
            (mixed(mixed(key ^ salt) + (t + 1) * GOLDEN) % 2**63, s * T + column) for t, column in enumerate(columns)
        ]
    return torch.tensor([row for _, row in sorted(hashes)[:number]])


def sequence_order(keys, step, seed=42):
    """Sequences by the hashes of their keys."""
    salt = mixed(mixed(seed) + step * GOLDEN)
    return sorted(range(len(keys)), key=lambda s: mixed(mixed(keys[s] ^ salt)) % 2**63)


WEIGHTS = functools.partial(oracle.token_weights, loss_type="dr_grpo", max_completion_length=8)


@functools.cache
def position_gradients(lora, step):
    batch = batch_of(step)
    return oracle.position_gradients(build("qwen3", lora), batch, WEIGHTS(batch))


def means_of_step(V, samples, rule, history):
    """What a step leaves behind if it is the first of its metric: nothing but itself."""
    F = ((samples @ V.T).square().sum(0) / samples.square().sum()).sqrt()
    N = V.norm(dim=1)
    # An embedding's samples may share no token with a sequence, and a sequence of two tokens has noise at queries
    alive = torch.tensor(
        [f * n > 0 for f, n in zip(*map(oracle.without_noise, (F.tolist(), N.tolist())), strict=True)]
    )
    squares = {"fisher^2": F**2, "norm^2": N**2, "relative^2": (F / N) ** 2}
    own = {name: x[alive].mean().item() for name, x in squares.items()}
    referred = own if history is None else history
    f = oracle.coefficients(V, samples, torch.ones(len(V)), rule, scale="paper", history={**referred, "fx": 1, "x": 1})
    return {**own, "fx": (f * F)[alive].mean().item(), "x": F[alive].mean().item()}


def expected_steps(model, gradients, batches, rule, keys, seed=42):
    """
    The expected gradients of each step, where the first two are not cut.

    Step 2 is the first that is measured with rows from before, so it goes by means of its own, as step 1 does.
    """
    expected, kept, means = [], None, None
    for step, (G, batch) in enumerate(zip(gradients, batches, strict=True)):
        rows = sampled_positions(batch, step, SAMPLES, keys, seed)
        own = {name: x.reshape(-1, x.shape[2])[rows] for name, x in G.items()}
        result = {}
        now = {}
        for name, module in oracle.trained_modules(model).items():
            V = G[name].sum(1)
            samples = own[name] if kept is None else kept[name]
            history = None if step < 2 else means[name]
            c = oracle.coefficients(V, samples, batch.advantages, rule, history=history)
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for p, flat in zip(parameters, (c @ V).split([p.numel() for p in parameters]), strict=True):
                result[p] = result.get(p, 0) + flat.view_as(p)
            now[name] = means_of_step(V, samples, rule, history)
            if history is not None:
                now[name] = {key: 0.9 * history[key] + 0.1 * new for key, new in now[name].items()}
        expected.append(result)
        means, kept = now, own
    return expected


# A loop of one's own


def log_likelihood(model, part, weights):
    return -(oracle.token_logps(model, part) * weights[:, : part.completion_ids.shape[1]]).sum()


def run_step(model, isopo, batch, cut, by_content=True, weights=None):
    model.zero_grad()
    weights = WEIGHTS(batch) if weights is None else weights
    for rows, part in parts_of(batch, cut):
        keys = reservoir.content_keys(part.input_ids, part.attention_mask) if by_content else None
        with isopo.microbatch(part.advantages, attention_mask=part.attention_mask, sequence_keys=keys):
            log_likelihood(model, part, weights[rows]).backward()
    isopo.step()


@functools.cache
def expectation(lora, rule, by_content=False):
    """The expected gradients of each step, by name."""
    model = build("qwen3", lora)
    gradients, batches = (
        [make(step) for step in range(STEPS)] for make in (functools.partial(position_gradients, lora), batch_of)
    )
    keys = (lambda s, tokens: content_key(tokens)) if by_content else (lambda s, tokens: s)
    names = {p: name for name, p in model.named_parameters()}
    steps = expected_steps(model, gradients, batches, rule, keys)
    return [{names[p]: gradient for p, gradient in step.items()} for step in steps]


def of(model, expected):
    return {p: expected[name] for name, p in model.named_parameters() if name in expected}


@pytest.mark.parametrize(
    ("rule", "lora", "cut"), [("fisher", False, "ragged"), ("fig4", False, "8 x 1"), ("npg", True, "2 x 4")]
)
def test_no_gradient_depends_on_how_the_step_is_cut(rule, lora, cut):
    model = build("qwen3", lora)
    isopo = ISOPO(model, rule, fisher_samples=SAMPLES, fisher_scope="step", seed=42)
    for step, expected in enumerate(expectation(lora, rule)):
        # Where the first two are not cut, all are as the definition says
        run_step(model, isopo, batch_of(step), CUTS[cut] if step > 1 else [SEQUENCES], by_content=False)
        check(model, of(model, expected))


@pytest.mark.parametrize(
    ("rule", "lora", "cut", "reentrant"), [("fig4", False, "2 x 4", None), ("npg", True, "8 x 1", True)]
)
def test_from_the_third_step_on_nothing_is_left_of_how_the_trainer_cut_the_first(rule, lora, cut, reentrant, tmp_path):
    """With TRL's fused head, and with gradient checkpointing; sequences are known by their tokens."""
    settings = {"fisher_scope": "step", "fisher_samples": SAMPLES, "loss_type": "dr_grpo", "seed": 42}
    trainer = trainer_for(build("qwen3", lora), tmp_path, rule=rule, **settings)
    if reentrant is not None:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trainer.current_gradient_accumulation_steps = len(CUTS[cut])
    for step in range(STEPS):
        trainer.model.zero_grad()
        for _, part in parts_of(batch_of(step), CUTS[cut]):
            trainer.compute_loss(trainer.model, part.for_trl()).backward()
            trainer.isopo.end()
        trainer.isopo.step()
    check(trainer.model, of(trainer.model, expectation(lora, rule, by_content=True)[-1]))


def test_sequences_that_are_trained_on_twice_are_not_measured_with_themselves(tmp_path):
    """Every second step is of the same sequences as the one before; each other's rows are as good as any."""
    settings = {"num_iterations": 2, "max_steps": 12, "learning_rate": 1e-6}
    lines = training.train(training.build(tmp_path, data=tiny.prompts(32), **settings))
    norms = torch.tensor([line["isopo/fisher_norm"] for line in lines[2:]]).view(-1, 2)
    again = (norms[:, 1] / norms[:, 0]).log().mean().exp()
    assert 2 / 3 < again < 1.5  # 2.3 with themselves


@pytest.mark.parametrize("by_tokens", [True, False], ids=["by tokens", "by key"])
def test_in_a_loop_of_ones_own_a_sequence_is_known_by_its_key_or_its_tokens(by_tokens):
    """A step of the sequences of the one before, of which all positions are kept."""
    batch, model, rule = batch_of(0), build("qwen3"), {"scale": "paper", "regularization": 0.0}
    isopo = ISOPO(model, "fisher", fisher_samples=200, fisher_scope="step", **rule)
    for cut in ([SEQUENCES], [3, 5]):
        run_step(model, isopo, batch, cut, by_content=not by_tokens)
    rows = batch.attention_mask.flatten().nonzero().squeeze(1)
    owners = rows // batch.input_ids.shape[1]
    rule |= {"own": owners.unsqueeze(1) == torch.arange(SEQUENCES)}
    check(model, oracle.expected_gradients(model, position_gradients(False, 0), batch, rows, "fisher", **rule))


def test_the_second_step_is_as_long_as_the_first(tmp_path):
    """Though the first is measured with the positions of its microbatch, which overlap with themselves."""
    lines = training.train(training.build(tmp_path, data=tiny.prompts(32), max_steps=6, learning_rate=1e-6))
    plain = training.train(
        training.build(tmp_path, data=tiny.prompts(32), max_steps=6, learning_rate=1e-6, rule="none")
    )
    lengths = torch.tensor([[line["grad_norm"] for line in of] for of in (lines, plain)])
    ratios = lengths[0] / lengths[1]
    assert (ratios[1] / ratios[0]).log().abs() < torch.tensor(1.5).log()  # 1.9 with means of the first
