"""Validation while training: greedy accuracy and the KL divergence from the initial policy."""

import asyncio
import copy
import inspect
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.utils import is_matplotlib_available
from trl import GRPOTrainer
from trl.data_utils import is_conversational
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from .compare import STATE, draw
from .rewards import gsm8k_reward


logger = get_logger(__name__)

PICTURE = "validation.png"


class ValidationCallback(TrainerCallback):
    """
    Measures the policy before training, every `steps` optimizer steps, and at the end:

    - `validation/accuracy`: mean reward of one greedy completion of each prompt.
    - `validation/kl`: estimate of `KL(policy || initial policy)`, in nats a completion, at the training temperature.
    - `validation/length`: mean number of tokens of the greedy completions.

    They go to the trainer's log, and so to whatever `report_to` names; the curves are drawn to `validation.png` in the
    output folder, beside the log itself (`trainer_state.json`, which `isopo-compare` reads). Completions come from the
    trainer's own generation, vLLM included, and the random streams of training are left alone (but for vLLM's own).

    The KL divergence is that of completions sampled from the policy, `sum_t (exp(d_t) - 1 - d_t)` with `d_t = log
    pi_initial - log pi` at each of their tokens: never negative, zero at the start, and unbiased where nothing but the
    temperature (no `top_k`, `top_p` ...) shapes the sampling. The initial policy is a copy of the trained parameters
    (with LoRA, the adapter alone), kept in CPU memory and put in the model's place for one forward pass.

    Example:

    ```python
    >>> trainer = ISOPOTrainer(...)
    >>> trainer.add_callback(ValidationCallback(trainer, test_dataset, steps=20))
    >>> trainer.train()
    ```

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of any kind derived from TRL's `GRPOTrainer`.
        dataset (`Dataset`):
            Prompts in the column `prompt`, and what the reward function takes in others.
        reward_func (`Callable`, *optional*, defaults to [`~rewards.gsm8k_reward`]):
            What is averaged: a reward function as TRL calls it. Completions for which it returns `None` are left out.
        steps (`int`, *optional*, defaults to `50`):
            Optimizer steps between two validations.
        batch_size (`int`, *optional*):
            Prompts per device that are completed at once. Defaults to the size of training's own generations.
        kl_prompts (`int`, *optional*, defaults to `64`):
            Number of prompts, from the beginning, of which a completion is sampled for the KL divergence. With `0` it
            is not measured, and no copy is kept.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        dataset: Any,
        reward_func: Callable[..., list[float | None]] = gsm8k_reward,
        steps: int = 50,
        batch_size: int | None = None,
        kl_prompts: int = 64,
    ):
        if len(dataset) == 0 or "prompt" not in dataset.column_names:
            raise ValueError(
                f"The validation set has {len(dataset)} rows and the columns {dataset.column_names}: it needs at "
                "least one row and a column `prompt`."
            )
        if steps < 1 or kl_prompts < 0 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"steps={steps}, batch_size={batch_size} and kl_prompts={kl_prompts}: the first two must be at least "
                "1, the last at least 0."
            )
        if trainer.tools or trainer.rollout_func is not None or trainer.environment_factories is not None:
            raise ValueError(
                "ValidationCallback completes each prompt once, which is not what tools, environments or a "
                "`rollout_func` do: pass an `eval_dataset` to the trainer instead."
            )
        if trainer._is_vlm and kl_prompts:
            raise ValueError("The KL divergence of a vision-language model is not supported: set kl_prompts=0.")
        args: Any = trainer.args
        self.trainer: Any = trainer
        self.dataset = dataset
        self.reward_func = reward_func
        self.steps = steps
        self.batch_size = batch_size or args.per_device_train_batch_size * args.steps_per_generation
        self.kl_prompts = min(kl_prompts, len(dataset))
        # The greedy completions of this rank, by step, and what was logged of them
        self.completions: dict[int, list[str]] = {}
        self.history: list[dict[str, float]] = []
        # Where parameters are cut into shards, that happens in `train`
        self._sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        self._initial: InitialPolicy | None = None
        if self.kl_prompts and not self._sharded:
            self._initial = InitialPolicy(trainer)

    def on_train_begin(self, args, state, control, **kwargs):
        self.completions.clear()
        if self._sharded and self.kl_prompts and state.global_step == 0:
            self._initial = InitialPolicy(self.trainer)
        elif self._sharded and self.kl_prompts:
            logger.warning(
                "The KL divergence from the initial policy is not measured in this run: it resumes from a checkpoint, "
                "with sharded parameters, and the initial ones are not known."
            )
        self.validate()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            self.validate()

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step not in self.completions:
            self.validate()

    def validate(self) -> dict[str, float]:
        """Measure now, and log; on every rank."""
        trainer, step = self.trainer, self.trainer.state.global_step
        was_training = trainer.model.training
        trainer.model.eval()  # no dropout
        try:
            with self._own_random_stream(), torch.no_grad():
                figures = self._accuracy(step)
                if self._initial is not None:
                    figures["validation/kl"] = self._kl(self._initial)
        finally:
            trainer.model.train(was_training)
        self.history.append({"step": step, **figures})
        # GRPOTrainer's own `log` would take along the metrics that the step itself is about to log
        step_is_logged = trainer.control.should_log
        Trainer.log(trainer, dict(figures))
        trainer.control.should_log = step_is_logged
        if trainer.is_world_process_zero():
            os.makedirs(trainer.args.output_dir, exist_ok=True)
            trainer.state.save_to_json(os.path.join(trainer.args.output_dir, STATE))
            if is_matplotlib_available():
                name = type(trainer).__name__.removesuffix("Trainer")
                draw({name: trainer.state.log_history}, os.path.join(trainer.args.output_dir, PICTURE))
        return figures

    def _accuracy(self, step: int) -> dict[str, float]:
        texts, sums = [], torch.zeros(4, dtype=torch.float64)
        with self._decoding(greedy=True):
            for rows, real in self._batches(len(self.dataset)):
                _, completion_ids = self._complete(rows["prompt"])
                batch = self.trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
                completions: list[Any] = batch
                if is_conversational({"prompt": rows["prompt"][0]}):
                    completions = [[{"role": "assistant", "content": text}] for text in batch]
                rewards = self._rewards(rows, completions, completion_ids)
                for text, reward, ids, counts in zip(batch, rewards, completion_ids, real, strict=True):
                    if counts:
                        texts.append(text)
                        scored = reward is not None and not math.isnan(reward)
                        sums += torch.tensor([reward if scored else 0.0, scored, len(ids), 1.0], dtype=torch.float64)
        self.completions[step] = texts
        total, scored_count, length, count = self._over_ranks(sums)
        return {"validation/accuracy": total / max(scored_count, 1), "validation/length": length / count}

    def _rewards(
        self, rows: dict[str, list[Any]], completions: list[Any], completion_ids: list[list[int]]
    ) -> list[Any]:
        """The reward function called as TRL calls it, but for what it would log."""
        columns = {
            name: column for name, column in rows.items() if name not in ("prompt", "completion", "completion_ids")
        }
        rewards: Any = self.reward_func(
            prompts=rows["prompt"],
            completions=completions,
            completion_ids=completion_ids,
            trainer_state=self.trainer.state,
            log_extra=lambda *_: None,
            log_metric=lambda *_: None,
            **columns,
        )
        if inspect.iscoroutine(rewards):
            with ThreadPoolExecutor(1) as thread:  # in a notebook, this one has an event loop already
                return thread.submit(asyncio.run, rewards).result()
        return rewards

    def _kl(self, initial: "InitialPolicy") -> float:
        batches = []
        with self._decoding(greedy=False):
            for rows, real in self._batches(self.kl_prompts):
                batches.append((*self._complete(rows["prompt"]), real))
        now = [self._log_probabilities(*batch[:2]) for batch in batches]
        with initial.in_place_of(self.trainer):
            then = [self._log_probabilities(*batch[:2]) for batch in batches]
        sums = torch.zeros(2, dtype=torch.float64)
        for (*_, real), (logps, mask), (initial_logps, _) in zip(batches, now, then, strict=True):
            difference = (initial_logps - logps).cpu().double()
            kl = ((difference.exp() - 1 - difference) * mask.cpu()).sum(1)
            sums += torch.stack([kl[torch.tensor(real)].sum(), torch.tensor(float(sum(real)))])
        total, count = self._over_ranks(sums)
        return total / count

    def _complete(self, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts and of one completion of each."""
        prompt_ids, images, fields = self.trainer._tokenize_prompts(prompts)
        completion_ids, _ = self.trainer._generate_single_turn(prompt_ids, images, fields, 1)
        self.trainer.model.eval()  # continuous batching leaves it in training mode
        return prompt_ids, completion_ids

    def _log_probabilities(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each completion's tokens, `[B, C]`, and the mask of those that there are."""
        trainer, device = self.trainer, self.trainer.accelerator.device
        sides = ((prompt_ids, "left"), (completion_ids, "right"))
        ids, masks = zip(
            *(
                (
                    pad([torch.tensor(x) for x in rows], trainer._tokenizer.pad_token_id, padding_side=side),
                    pad([torch.ones(len(x), dtype=torch.long) for x in rows], 0, padding_side=side),
                )
                for rows, side in sides
            ),
            strict=True,
        )
        input_ids, attention_mask = torch.cat(ids, 1).to(device), torch.cat(masks, 1).to(device)
        with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, input_ids, attention_mask, ids[1].shape[1], trainer.args.per_device_train_batch_size
            )
        return logps, masks[1].to(device)

    def _batches(self, count: int) -> Iterator[tuple[dict[str, list[Any]], list[bool]]]:
        """
        This rank's share of the first `count` rows, in batches, and which of them are real: every rank makes the same
        number of batches of the same size, since generation is a collective operation.
        """
        accelerator = self.trainer.accelerator
        share = -(-count // accelerator.num_processes)
        places = range(accelerator.process_index * share, (accelerator.process_index + 1) * share)
        for start in range(0, share, self.batch_size):
            batch = places[start : start + self.batch_size]
            yield self.dataset[[min(place, count - 1) for place in batch]], [place < count for place in batch]

    def _over_ranks(self, sums: torch.Tensor) -> list[float]:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:  # on a device that may have no float64
            return sums.tolist()
        return accelerator.reduce(sums.to(accelerator.device), reduction="sum").tolist()

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        device = self.trainer.accelerator.device
        kind = device.type if device.type != "cpu" else "cuda"
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
            torch.manual_seed(self.trainer.args.seed + self.trainer.accelerator.process_index)
            yield

    @contextmanager
    def _decoding(self, greedy: bool) -> Iterator[None]:
        """Make the trainer's generation greedy, or leave it as in training but for its random stream."""
        trainer = self.trainer
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


class InitialPolicy:
    """A copy, in CPU memory, of a model's trained parameters (of this rank's part of them, where they are sharded)."""

    def __init__(self, trainer: Any):
        self.copies = {name: values.to("cpu", copy=True) for name, values in storages(trainer)}

    @contextmanager
    def in_place_of(self, trainer: Any) -> Iterator[None]:
        """The copies take the place of the model's parameters, which come back afterwards."""
        self._exchange(trainer)
        try:
            yield
        finally:
            self._exchange(trainer)

    def _exchange(self, trainer: Any) -> None:
        for name, theirs in storages(trainer):
            mine = self.copies[name]
            now = theirs.to("cpu", copy=True)
            theirs.copy_(mine)
            mine.copy_(now)


@torch.no_grad()
def storages(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the trained parameters, and the tensors that hold their values, or this rank's part of them."""
    model = trainer.model
    for module in model.modules():
        if isinstance(module, FSDPModule):  # some stay whole after a forward pass
            module.reshard()
    offload = getattr(getattr(trainer.model_wrapped, "optimizer", None), "parameter_offload", None)
    if offload is not None:  # DeepSpeed ZeRO-3: some are whole, some on their way
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()  # as TRL does after a generation
        coordinator.release_and_reset_all(offload.module)
    for name, p in model.named_parameters():
        if p.requires_grad:
            values: Any = p
            if hasattr(values, "ds_tensor"):  # DeepSpeed ZeRO-3, which keeps small parameters whole as well
                values = values.ds_tensor
            values = values.detach()
            yield name, values.to_local() if isinstance(values, DTensor) else values
