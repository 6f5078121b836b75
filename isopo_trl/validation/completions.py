"""
What validation asks of a trainer of TRL's: completions, greedy or sampled as in training, and their log-probabilities.

Every private name of TRL that validation uses stands in this file.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad


def takes_images(trainer: Any) -> bool:
    """Whether the trainer's model is a vision-language model."""
    return trainer._is_vlm


def complete(trainer: Any, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts (texts or messages), and of one completion of each."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, 1)
    trainer.model.eval()  # continuous batching leaves it in training mode
    return prompt_ids, completion_ids


def log_probabilities(
    trainer: Any, prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the completions' tokens at the training temperature, and the mask of tokens, `[B, C]`."""
    device, padding = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    ids, masks = [], []
    for rows, side in ((prompt_ids, "left"), (completion_ids, "right")):
        ids.append(pad([torch.tensor(row) for row in rows], padding, padding_side=side))
        masks.append(pad([torch.ones(len(row), dtype=torch.long) for row in rows], 0, padding_side=side))
    input_ids, attention_mask = torch.cat(ids, 1).to(device), torch.cat(masks, 1).to(device)
    with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, input_ids, attention_mask, ids[1].shape[1], trainer.args.per_device_train_batch_size
        )
    return logps, masks[1].to(device)


@contextmanager
def decoding(trainer: Any, greedy: bool) -> Iterator[None]:
    """Make the trainer's generation greedy, or leave it as in training but for vLLM's random stream."""
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        kept = engine.generation_kwargs
        changed = {"temperature": 0.0} if greedy else {"seed": trainer.args.seed}
        engine.generation_kwargs = {**(kept or {}), **changed}
        try:
            yield
        finally:
            engine.generation_kwargs = kept
        return
    kept = (trainer.generation_config, trainer.generation_kwargs)
    if greedy:
        settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        trainer.generation_config = copy.deepcopy(trainer.generation_config)
        trainer.generation_config.update(**settings)
        trainer.generation_kwargs = {**trainer.generation_kwargs, **settings}
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = kept
