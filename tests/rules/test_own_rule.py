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


def mean(values):
    return sum(values) / len(values)


class Reference:
    """The rule in plain floats, `c = A min(1, radius rms(F) / F)`, over steps, with running means of its own."""

    def __init__(self, model, radius, scale):
        self.model, self.radius, self.scale = model, radius, scale
        self.histories, self.multipliers = {}, []

    def gradients(self, batch, weights, rows):
        """By parameter, with the metric taken at `rows`; closes the step."""
        G = oracle.position_gradients(self.model, batch, weights)
        expected = {}
        for name, module in oracle.trained_modules(self.model).items():
            V, samples = G[name].sum(1), G[name].flatten(0, 1)[rows]
            weight = samples.square().sum().item()
            F = [(sum((g @ v).item() ** 2 for g in samples) / weight) ** 0.5 for v in V]
            past = self.histories.get(name)
            mean_square = mean([x * x for x in F]) if past is None else past["F^2"]
            f = [min(1.0, self.radius * mean_square**0.5 / x) for x in F]
            fF = mean([x * y for x, y in zip(f, F, strict=True)])
            now = {"F^2": mean([x * x for x in F]), "F": mean(F), "fF": fF}
            used = past or now
            factor = used["F"] / used["fF"] if self.scale == "relative" else 1.0
            self.histories[name] = {key: DECAY * used[key] + (1 - DECAY) * now[key] for key in now}
            self.multipliers += f
            c = batch.advantages * torch.tensor(f, dtype=V.dtype) * factor
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for p, gradient in zip(parameters, (c @ V).split([p.numel() for p in parameters]), strict=True):
                expected[p] = expected.get(p, 0) + gradient.view_as(p)
        return expected


@pytest.mark.parametrize(
    ("lora", "rule", "scale"), [(False, "tight_fisher", "relative"), (True, "capped_fisher", "paper")]
)
def test_the_trainer_takes_it_by_its_name_and_gives_the_gradient_of_its_formula(lora, rule, scale, names, tmp_path):
    """On the first step and with a history."""
    registry.register_rule("tight_fisher", names["CappedFisher"], radius=0.8)
    model = build("qwen3", lora)
    trainer = trainer_for(model, tmp_path, rule=rule, scale=scale, loss_type="grpo", fisher_scope="microbatch")
    assert type(trainer.isopo.rule) is names["CappedFisher"]
    reference = Reference(model, {"capped_fisher": 1.0, "tight_fisher": 0.8}[rule], scale)
    for step, accumulation in enumerate((2, 1)):  # a constant factor of the loss, which the running means must not see
        trainer.current_gradient_accumulation_steps = accumulation
        batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100, seed=step)
        rows = backward(trainer, batch)
        assert len(rows) == 7
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        expected = reference.gradients(batch, oracle.token_weights(batch, "grpo"), rows)
        for name, p in model.named_parameters():
            p.grad = gradients.get(name)
        check(model, {p: gradient / accumulation for p, gradient in expected.items()})
        trainer.isopo.step()
        model.zero_grad()
    assert 0.1 < mean([f < 1 for f in reference.multipliers]) < 0.9  # both branches of the formula took part


def test_the_kernels_find_its_statistics_and_leave_its_formula_to_pytorch():
    model, x = build("qwen3"), torch.ones(12, 4)
    for rule, taken in (("capped_fisher", False), ("fisher", INTERPRET)):
        isopo = ISOPO(model, rule)
        microbatch = isopo.begin(torch.ones(3), attention_mask=torch.ones(3, 4))
        assert microbatch.kernels_take(x) == taken and microbatch.kernels_measure(x) == INTERPRET
        isopo.detach()


def test_a_checkpoint_knows_it_again_by_its_settings():
    saving = functools.partial(ISOPO, build("qwen3"), "capped_fisher")
    first = saving(radius=0.8)
    state = first.state_dict()
    first.detach()
    again = saving(radius=0.8)
    again.load_state_dict(state)
    again.detach()
    with pytest.raises(ValueError, match=r"radius=0\.8.* configured with .*radius=1\.0"):
        saving().load_state_dict(state)
