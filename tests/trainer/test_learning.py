"""It learns: a tiny model finds a toy reward within seconds."""

import pytest
import torch

from tests import tiny, training


def share_of_a(completions, **_):
    """The fraction of the completion that is the letter a."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def rewards(folder, **settings):
    trainer = training.build(
        folder,
        reward=share_of_a,
        data=tiny.prompts(8),
        **{
            "max_steps": 20,
            "learning_rate": 0.03,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 8,
            "gradient_checkpointing": False,
            **settings,
        },
    )
    trainer.train()
    return torch.tensor([line["reward"] for line in trainer.state.log_history if "reward" in line])


@pytest.mark.parametrize("rule", ["fisher", pytest.param("interacting", marks=pytest.mark.slow)])
def test_reward_rises(rule, tmp_path):
    reward = rewards(tmp_path, rule=rule, seed=1)
    first, last = reward[:5].mean().item(), reward[-5:].mean().item()
    assert first < 0.1 and last > 0.5, reward
