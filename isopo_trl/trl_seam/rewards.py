"""TRL's reward functions."""

from collections.abc import Callable
from typing import Any

import torch

from .required import require


is_async_callable = require("trl.trainer.utils.is_async_callable", "func")
get_callable_name = require("trl.trainer.utils.get_callable_name", "func")
require("trl.GRPOTrainer._calculate_rewards", "inputs", "prompts", "completions", "completion_ids_list")


def add_reward(trainer: Any, name: str, function: Callable[..., list[float]], weight: float) -> None:
    """Give the trainer one more reward function, as the last."""
    # New lists: TRL keeps the ones it was given
    trainer.reward_funcs = [*trainer.reward_funcs, function]
    trainer.reward_func_names = [*trainer.reward_func_names, name]
    trainer.reward_processing_classes = [*trainer.reward_processing_classes, None]
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.tensor([weight])])
