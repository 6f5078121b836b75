"""The rule that `docs/rules.md` registers from outside the package, against its formula on the oracle's gradients."""

import functools
import re
from pathlib import Path

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.rules import registry
from tests import oracle
from tests.gradients.test_oracle import backward, build, check, trainer_for


PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
RADIUS = 0.8  # for which some sequences are shortened and others are not
DECAY = 0.9

pytestmark = pytest.mark.usefixtures("float64_throughout")


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """What the page's first Python block defines; it is not registered any longer after the test."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {"__name__": "users_module"}
    exec(compile(block[1], PAGE.name, "exec"), names)
    return names


# The formula, in plain floats


def fisher_norms(V, samples):
    """`F_s` for `V` `[m, parameters]` and the gradients at sampled positions, `[n, parameters]`."""
    weight = samples.square().sum().item()
    return [(sum((g @ v).item() ** 2 for g in samples) / weight) ** 0.5 for v in V]


def multipliers(F, radius, history):
    """`min(1, radius rms(F) / F)`."""
    mean_square = sum(f * f for f in F) / len(F) if history is None else history["F^2"]
    return [min(1.0, radius * mean_square**0.5 / f) for f in F]


def coefficients(F, advantages, radius, scale, history):
    f = multipliers(F, radius, history)
    factor = 1.0
    if scale == "relative":  # E[F] / E[f F]
        pairs = list(zip(f, F, strict=True))
        factor = sum(F) / sum(x * y for x, y in pairs) if history is None else history["F"] / history["fF"]
    return [a * x * factor for a, x in zip(advantages.tolist(), f, strict=True)]


class Reference:
    """What the rule's gradients have to be, over microbatches and steps, with running means of its own."""

    def __init__(self, model, radius, scale):
        self.model, self.radius, self.scale = model, radius, scale
        self.histories, self.seen, self.multipliers = {}, {}, []

    def gradients(self, batch, weights, rows=None):
        """By parameter, with the metric taken at `rows`, or at all positions that are not padding."""
        if rows is None:
            rows = batch.attention_mask.reshape(-1).nonzero().squeeze(1)
        G = oracle.position_gradients(self.model, batch, weights)
        self.model.zero_grad()
        expected = {}
        for name, module in oracle.trained_modules(self.model).items():
            V = G[name].sum(1)
            F = fisher_norms(V, G[name].flatten(0, 1)[rows])
            history = self.histories.get(name)
            f = multipliers(F, self.radius, history)
            self.multipliers += f
            self.seen.setdefault(name, []).extend(zip(F, f, strict=True))
            c = torch.tensor(coefficients(F, batch.advantages, self.radius, self.scale, history), dtype=V.dtype)
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for p, gradient in zip(parameters, (c @ V).split([p.numel() for p in parameters]), strict=True):
                expected[p] = expected.get(p, 0) + gradient.view_as(p)
        return expected

    def step(self):
        for name, pairs in self.seen.items():
            F, fF = [F for F, _ in pairs], [f * F for F, f in pairs]
            now = {"F^2": sum(x * x for x in F) / len(F), "F": sum(F) / len(F), "fF": sum(fF) / len(F)}
            past = self.histories.get(name, now)
            self.histories[name] = {key: DECAY * past[key] + (1 - DECAY) * now[key] for key in now}
        self.seen = {}


def random_batch(seed):
    return oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100, seed=seed)


# The tests


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        pytest.param(False, "relative", id="full-relative"),
        pytest.param(True, "paper", id="lora-paper"),
        pytest.param(False, "paper", id="full-paper", marks=pytest.mark.slow),
        pytest.param(True, "relative", id="lora-relative", marks=pytest.mark.slow),
    ],
)
def test_gradient_is_the_definition_on_the_first_step_and_with_a_history(lora, scale):
    model = build("qwen3", lora)
    reference = Reference(model, RADIUS, scale)
    settings = {"radius": RADIUS, "scale": scale, "regularization_decay": DECAY, "fisher_samples": 10_000}
    isopo = ISOPO(model, "capped_fisher", **settings)
    for step in range(2):
        batches = [random_batch(10 * step + part) for part in range(2)]  # microbatches of the step
        expected = {}
        for batch in batches:
            share = reference.gradients(batch, oracle.token_weights(batch))
            expected = {p: expected.get(p, 0) + gradient for p, gradient in share.items()}
        for batch in batches:
            weights = oracle.token_weights(batch)
            with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
                logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
                logps = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
                (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()
        check(model, expected)
        isopo.step()
        reference.step()
        model.zero_grad()
    shortened = sum(f < 1 for f in reference.multipliers) / len(reference.multipliers)
    assert 0.2 < shortened < 0.8  # both branches of the formula took part


@pytest.mark.parametrize(
    ("lora", "rule", "scale"),
    [
        (False, "capped_fisher", "relative"),
        (True, "tight_fisher", "relative"),
        (True, "capped_fisher", "paper"),
        (False, "tight_fisher", "paper"),
    ],
)
def test_the_trainer_takes_it_by_its_name(lora, rule, scale, names, tmp_path):
    registry.register_rule("tight_fisher", names["CappedFisher"], radius=0.5)
    model = build("qwen3", lora)
    trainer = trainer_for(model, tmp_path, rule=rule, scale=scale, loss_type="grpo", fisher_scope="microbatch")
    assert type(trainer.isopo.rule) is names["CappedFisher"]
    reference = Reference(model, {"capped_fisher": 1.0, "tight_fisher": 0.5}[rule], scale)
    for step, accumulation in enumerate((2, 1)):  # a constant factor of the loss, which the running means must not see
        trainer.current_gradient_accumulation_steps = accumulation
        batch = random_batch(step)
        rows = backward(trainer, batch)
        assert len(rows) == 7
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        expected = reference.gradients(batch, oracle.token_weights(batch, "grpo"), rows)
        for name, p in model.named_parameters():
            p.grad = gradients.get(name)
        check(model, {p: gradient / accumulation for p, gradient in expected.items()})
        trainer.isopo.step()
        reference.step()
        model.zero_grad()


def test_the_kernels_leave_it_to_pytorch():
    model, batch = build("qwen3"), random_batch(0)
    x = torch.ones(batch.input_ids.numel(), 4)
    for rule, taken in (("capped_fisher", False), ("fisher", INTERPRET)):
        isopo = ISOPO(model, rule)
        assert isopo.begin(batch.advantages, attention_mask=batch.attention_mask).kernels_take(x) == taken
        isopo.detach()


def test_a_checkpoint_knows_it_again_by_its_settings():
    model = build("qwen3")
    saving = functools.partial(ISOPO, model, "capped_fisher")
    first = saving(radius=RADIUS)
    state = first.state_dict()
    first.detach()
    again = saving(radius=RADIUS)
    again.load_state_dict(state)
    again.detach()
    with pytest.raises(ValueError, match=r"radius=0\.8.* configured with .*radius=1\.0"):
        saving().load_state_dict(state)
