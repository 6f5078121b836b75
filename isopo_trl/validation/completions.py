"""How a trainer completes prompts in a validation, and the log-probabilities of completions."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..trl_seam.batch import pad, pad_token_id
from ..trl_seam.generation import Generated
from ..trl_seam.loans import borrowed
from ..trl_seam.scoring import Scoring


def own_tokens(generated: Generated) -> list[list[int]]:
    """For each token of each completion, 1 where the model has written it, 0 where a tool or the environment has."""
    return generated.tool_mask or [[1] * len(ids) for ids in generated.completion_ids]


def log_probabilities(trainer: Any, generated: Generated) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of the completions' tokens at the training temperature, and which are the model's own, `[B, C]`.
    """
    device, padding = trainer.accelerator.device, pad_token_id(trainer)
    ids, masks = [], []
    for rows, side in ((generated.prompt_ids, "left"), (generated.completion_ids, "right")):
        ids.append(pad([torch.tensor(row) for row in rows], padding, padding_side=side))
        masks.append(pad([torch.ones(len(row), dtype=torch.long) for row in rows], 0, padding_side=side))
    input_ids, attention_mask = torch.cat(ids, 1).to(device), torch.cat(masks, 1).to(device)
    logps = Scoring(trainer).score_without_gradient(
        input_ids, attention_mask, ids[1].shape[1], trainer.args.per_device_train_batch_size
    )
    own = pad([torch.tensor(row) for row in own_tokens(generated)], 0, padding_side="right")
    return logps, own.to(device)


def decoding(trainer: Any, greedy: bool) -> AbstractContextManager[None]:
    """Context in which the trainer's generation is greedy, or as in training but for vLLM's random stream."""
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        changed = {"temperature": 0.0} if greedy else {"seed": trainer.args.seed}
        return borrowed(engine, generation_kwargs={**(engine.generation_kwargs or {}), **changed})
    if not greedy:
        return nullcontext()
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    config = copy.deepcopy(trainer.generation_config)
    config.update(**settings)
    kwargs = {**trainer.generation_kwargs, **settings}
    return borrowed(trainer, generation_config=config, generation_kwargs=kwargs)
