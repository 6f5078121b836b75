"""
`fisher_scope="step"`: the Fisher metric of a step is that of the step before, however either is cut.

The oracle takes every sequence of a step alone and knows nothing of microbatches. Which positions were sampled it
finds by hashing in Python's own integers.
"""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.geometry import reservoir
from tests import oracle, tiny


TOLERANCE = 1e-9
SAMPLES = 7
STEPS = 3
CUTS = {"1 x 16": [16], "2 x 8": [8, 8], "4 x 4": [4] * 4, "16 x 1": [1] * 16, "ragged": [3, 1, 7, 5]}
RULES = ["fisher", "npg", "fig4"]


@pytest.fixture(autouse=True)
def everything_in_float64(monkeypatch):
    in_float64(monkeypatch)


def in_float64(monkeypatch):
    """Models and TRL's fused head go to float32 in places, whatever the model is in; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):  # both names are in use
        monkeypatch.setattr(torch, name, torch.float64)


def build(lora=False, family="qwen3"):
    model = tiny.model(family, dtype=torch.float64)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@functools.cache
def batch_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(1, 6, (2, 16), generator=generator).tolist()
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
    return oracle.position_gradients(build(lora), batch, WEIGHTS(batch))


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
    The expected gradients of each step, where the first is not cut.

    Step 2 goes by the means of step 1, which were measured with its own samples; those of step 2 take their place.
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
            c = oracle.coefficients(V, samples, batch.advantages, rule, history=None if means is None else means[name])
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for p, flat in zip(parameters, (c @ V).split([p.numel() for p in parameters]), strict=True):
                result[p] = result.get(p, 0) + flat.view_as(p)
            if step < 2:
                now[name] = means_of_step(V, samples, rule, None)
            else:
                new = means_of_step(V, samples, rule, means[name])
                now[name] = {key: 0.9 * means[name][key] + 0.1 * new[key] for key in new}
        expected.append(result)
        means, kept = now, own
    return expected


def check(model, expected):
    error, name = oracle.worst_error(model, expected)
    assert error < TOLERANCE, f"{name}: {error}"


# A loop of one's own


def log_likelihood(model, part, weights):
    logits = model(part.input_ids, attention_mask=part.attention_mask).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, part.input_ids[:, 1:, None]).squeeze(-1)
    C = part.completion_ids.shape[1]
    return -(logps[:, -C:] * weights[:, :C]).sum()


def run_step(model, isopo, batch, cut, by_content=True, weights=None):
    model.zero_grad()
    weights = WEIGHTS(batch) if weights is None else weights
    for rows, part in parts_of(batch, cut):
        keys = reservoir.content_keys(part.input_ids, part.attention_mask) if by_content else None
        with isopo.microbatch(part.advantages, attention_mask=part.attention_mask, sequence_keys=keys):
            log_likelihood(model, part, weights[rows]).backward()
    isopo.step()


def number_and_content(kind):
    return (lambda s, tokens: s) if kind == "number" else (lambda s, tokens: content_key(tokens))


@functools.cache
def expectation(lora, rule, kind="number", seed=42):
    model = build(lora)
    gradients = [position_gradients(lora, step) for step in range(STEPS)]
    batches = [batch_of(step) for step in range(STEPS)]
    steps = expected_steps(model, gradients, batches, rule, number_and_content(kind), seed)
    names = {p: name for name, p in model.named_parameters()}
    return [{names[p]: gradient for p, gradient in step.items()} for step in steps]


def of(model, expected):
    return {p: expected[name] for name, p in model.named_parameters() if name in expected}


QUICK = [("fisher", False, "4 x 4"), ("fig4", False, "16 x 1"), ("fig4", False, "2 x 8"), ("npg", True, "ragged")]
WIDE = [
    pytest.param(rule, lora, cut, marks=[] if (rule, lora, cut) in QUICK else pytest.mark.slow)
    for rule in RULES
    for lora in (False, True)
    for cut in CUTS
]


@pytest.mark.parametrize("rule,lora,cut", WIDE)
def test_no_gradient_depends_on_how_the_step_is_cut(rule, lora, cut):
    model = build(lora)
    isopo = ISOPO(model, rule, fisher_samples=SAMPLES, fisher_scope="step", seed=42)
    for step, expected in enumerate(expectation(lora, rule)):
        # Where the first is not cut, all are as the definition says
        run_step(model, isopo, batch_of(step), CUTS[cut] if step else [16], by_content=False)
        check(model, of(model, expected))


@pytest.mark.parametrize("cut", ["4 x 4", pytest.param("16 x 1", marks=pytest.mark.slow)])
def test_from_the_third_step_on_nothing_is_left_of_how_the_first_was_cut(cut):
    model = build()
    isopo = ISOPO(model, "fig4", fisher_samples=SAMPLES, fisher_scope="step", seed=42)
    for step in range(STEPS):
        run_step(model, isopo, batch_of(step), CUTS[cut])
    check(model, of(model, expectation(False, "fig4", "content")[-1]))


# The trainer, with TRL's fused head


def trainer_for(model, tmp_path, **settings):
    settings = {"gradient_checkpointing": False, "bf16": False, "loss_type": "dr_grpo", "seed": 42, **settings}
    args = ISOPOConfig(
        str(tmp_path),
        fisher_scope="step",
        fisher_samples=SAMPLES,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        **settings,
    )
    trainer = ISOPOTrainer(model, tiny.reward, args, tiny.prompts(4), processing_class=tiny.tokenizer())
    trainer.model.train()
    return trainer


def trainer_step(trainer, batch, cut):
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = len(cut)
    for _, part in parts_of(batch, cut):
        trainer.compute_loss(trainer.model, part.for_trl()).backward()
        trainer.isopo.end()
    trainer.isopo.step()


@pytest.mark.parametrize(
    "rule,lora,cut,checkpointing",
    [
        ("fig4", False, "4 x 4", False),
        ("npg", True, "2 x 8", True),
        pytest.param("fisher", False, "4 x 4", None, marks=pytest.mark.slow),
        pytest.param("fig4", False, "16 x 1", None, marks=pytest.mark.slow),
        pytest.param("npg", False, "4 x 4", True, marks=pytest.mark.slow),
        pytest.param("fisher", True, "2 x 8", False, marks=pytest.mark.slow),
    ],
)
def test_the_trainers_gradients_do_not_depend_on_the_cut_either(rule, lora, cut, checkpointing, tmp_path):
    model = build(lora)
    settings = {}
    if checkpointing is not None:
        settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    trainer = trainer_for(model, tmp_path, rule=rule, **settings)
    if checkpointing is not None:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if not lora:
            trainer.model.enable_input_require_grads()
    for step in range(STEPS):
        trainer_step(trainer, batch_of(step), CUTS[cut])
    check(model, of(model, expectation(lora, rule, "content")[-1]))
