"""Small training runs: a trainer on a tiny model, what a run must leave behind, and a batch without generation."""

import math
import os
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import tiny


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "learning_rate": 0.01,
    "max_steps": 2,
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 6,
}


def build(
    folder: str | os.PathLike,
    model: str | torch.nn.Module = "qwen3",
    kind: type[GRPOTrainer] = ISOPOTrainer,
    *,
    reward: Any = tiny.reward,
    data: Dataset | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> GRPOTrainer:
    """
    A trainer of the given kind. `model` is a family of `tiny`, a path or an object; `options` go to the trainer,
    `settings` to its configuration.
    """
    config = ISOPOConfig if issubclass(kind, ISOPOTrainer) else GRPOConfig
    if isinstance(model, str) and model in tiny.FAMILIES:
        model = tiny.model(model)
    options = {"processing_class": tiny.tokenizer(), **(options or {})}
    data = tiny.prompts(6) if data is None else data
    return kind(model, reward, config(str(folder), **{**SETTINGS, **settings}), data, **options)


def train(trainer: GRPOTrainer, still: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """
    Trains, and checks what every run must leave behind: each trained parameter has moved and is finite, no other has
    changed, every log line has finite `isopo/` figures. Parameters with one of `still` in their name are not checked.

    Returns the log lines of the optimizer steps.
    """
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.isfinite(p).all(), f"{name} is not finite"
        if not any(part in name for part in still):
            moved = not torch.equal(p, before[name])
            assert moved == p.requires_grad, f"{name} {'moved' if moved else 'did not move'}"
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == trainer.state.global_step
    for line in lines:
        assert math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
        figures = {name: value for name, value in line.items() if name.startswith("isopo/")}
        assert "isopo/multiplier_mean" in figures and all(map(math.isfinite, figures.values())), figures
    return lines


def prepared(trainer: GRPOTrainer, accumulation: int = 1) -> GRPOTrainer:
    """The trainer as it is inside a step, so that `compute_loss` can be called on a batch of one's own."""
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.model.train()
    return trainer


def gradients(trainer: GRPOTrainer, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one microbatch."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    if isinstance(trainer, ISOPOTrainer):
        trainer.isopo.end()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def sampled_rows(microbatch: Any, prompts: int) -> torch.Tensor | None:
    """Rows `b * T + t` of TRL's batch, whose prompts have so many positions, that were sampled by the model's."""
    samples, (_, width) = microbatch.samples, microbatch.shape
    if samples is None:
        return None
    rows = samples.rows[~samples.absent]
    if microbatch.first_scored is None:
        return rows
    sequences, T = rows // width, prompts + microbatch.scored.shape[1]
    return sequences * T + rows % width + (prompts - 1 - microbatch.first_scored)[sequences]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm of the second."""
    assert one.keys() == other.keys()
    difference = sum((one[name] - other[name]).double().square().sum() for name in one)
    return (difference / sum(x.double().square().sum() for x in other.values())).sqrt().item()


def log_probabilities(
    model: PreTrainedModel, prompt_ids: list[int], completion_ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Of each token of one completion, `[C]`, from the logits of an unpadded forward pass."""
    ids = torch.tensor([prompt_ids + completion_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double() / temperature
    scored = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return scored[-len(completion_ids) :]
