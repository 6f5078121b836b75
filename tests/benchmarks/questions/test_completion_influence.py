"""What `completion_influence.py` predicts and measures, on a tiny model, and when a planted reward counts as found."""

import pytest
import torch
from datasets import Dataset

from tests import tiny


@pytest.fixture(scope="module")
def script():
    import completion_influence

    return completion_influence


@pytest.fixture
def policy(script):
    torch.manual_seed(0)
    policy = script.Policy(tiny.model("qwen3").eval(), tiny.tokenizer(), 1)
    with torch.no_grad():
        for _, p in policy.trained:
            p.add_(0.1 * torch.randn_like(p))  # LoRA's B is zero at first
    return policy


def test_influences_are_those_of_autograd_and_a_short_step_does_what_they_say(script, policy):
    problems = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{n} + 1"}], "answer": f"#### {n + 1}"} for n in range(6)]
    )
    train, held_out = (policy.sample(problems.select(part), 4) for part in (range(3), range(3, 6)))
    for sample in (train, held_out):
        sample.rewards = torch.rand(3, 4)  # no answer is right
    whole = policy.model(held_out.batch.ids, attention_mask=held_out.batch.mask).logits[:, :-1].log_softmax(-1)
    whole = whole.gather(-1, held_out.batch.ids[:, 1:, None]).squeeze(-1) * held_out.batch.scored
    rows = torch.arange(12)
    torch.testing.assert_close(policy.log_probabilities(held_out, rows), whole.sum(1), rtol=1e-5, atol=1e-4)
    D = policy.held_out(held_out)
    found, measured = policy.influences(train, D), script.Measured(policy, held_out)
    for s in rows.tolist():
        V = policy.gradient(-train.advantages[s] * policy.log_probabilities(train, torch.tensor([s])).sum())
        expected = float(sum((v * d).sum() for v, d in zip(V, D, strict=True)))
        assert float(found[s]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    rate = 1e-3 / float(found.abs().max())
    s = int(found.abs().argmax())
    V = policy.gradient(-train.advantages[s] * policy.log_probabilities(train, torch.tensor([s])).sum())
    with script.moved(policy, V, rate):
        assert measured()[0] == pytest.approx(rate * float(found[s]), rel=0.1)
    assert measured() == (0.0, 0.0)


def test_planted_rewards_are_found_where_influence_is_that_of_the_right_reward(script):
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(40, 4, generator=generator) > 0.5).float()
    rewards[:20, 0], rewards[:20, 1], rewards[39] = 0, 1, 1.0  # the last teaches nothing
    sample = script.Sample(None, None, rewards)
    tables = script.planted(sample, sample.advantages.square())  # each completion helps
    for table in tables.values():
        assert len(table) == 10 and (table[:, 0] > 0.8).all() and (table[:, 1] == 1).all()
    none = script.planted(sample, -sample.advantages.square())
    assert (none["prompts"] == 0).all()
    assert script.area(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])) == 0.875
