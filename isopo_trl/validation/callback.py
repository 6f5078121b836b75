"""Validation while training: greedy accuracy and the KL divergence from the initial policy."""

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.utils import is_matplotlib_available
from trl import GRPOTrainer

from ..gsm8k import gsm8k_reward
from ..rewards.functions import rewards as numbers_of
from ..trl_seam.generation import Generated, generate_completions, is_vision_model
from ..trl_seam.rewards import get_callable_name
from .completions import decoding, log_probabilities, own_tokens
from .curves import PICTURE, STATE, draw
from .initial_policy import InitialPolicy, kl_estimates
from .progress import hides_bars


logger = get_logger(__name__)


class ValidationCallback(TrainerCallback):
    """
    Measures the policy before training, every `steps` optimizer steps, and at the end:

    - `validation/accuracy`: mean reward of one greedy completion per prompt, of those that the reward function scores;
      not logged where it scores none.
    - `validation/kl`: estimate of `KL(policy || initial policy)`, in nats per completion, at the training temperature.
    - `validation/length`: mean number of tokens of the greedy completions; what tools wrote does not count.

    They go to the trainer's log, after what the step itself has logged, and so to whatever `report_to` names; the
    curves are drawn to `curves.png` in the output folder, beside the log itself (`trainer_state.json`, which
    `isopo-compare` reads), then and when training ends. Completions come from the trainer's own generation, with its
    tools, environments and vLLM, and the random streams of training are left alone (but for vLLM's own). On a
    terminal a bar counts them, unless `disable_tqdm` is set. Where the files cannot be written, on a full disk for
    example, that is said once and training goes on.

    The KL divergence is that of completions sampled from the policy, `sum_t (exp(d_t) - 1 - d_t)` with `d_t = log
    pi_initial - log pi` at each of their tokens: never negative, zero at the start, and unbiased where nothing but the
    temperature (no `top_k`, `top_p` ...) shapes the sampling. The initial policy is a copy of the trained parameters
    (with LoRA, the adapter alone), kept in CPU memory and put in the model's place for one forward pass. As long as no
    parameter has moved, the divergence is zero, and nothing is sampled to find that out.

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
        reward_func (`Callable`, *optional*, defaults to [`~gsm8k.gsm8k_reward`]):
            What is averaged: a reward function as TRL calls it, with `environments` where the trainer has them.
            Completions for which it returns `None` are left out.
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
        if reward_func is gsm8k_reward and "answer" not in dataset.column_names:
            raise ValueError(
                f"The validation set has the columns {dataset.column_names}, and `gsm8k_reward`, which scores it "
                "where no `reward_func` is given, needs a column `answer`: give the function that scores these "
                "completions."
            )
        if steps < 1 or kl_prompts < 0 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"steps={steps}, batch_size={batch_size} and kl_prompts={kl_prompts}: the first two must be at least "
                "1, the last at least 0."
            )
        if trainer.rollout_func is not None:
            raise ValueError(
                "ValidationCallback completes prompts greedily, which nobody can tell a `rollout_func` to do: pass an "
                "`eval_dataset` to the trainer instead."
            )
        if is_vision_model(trainer) and kl_prompts:
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
        self._write_failed = False
        self._due = False  # once the step that has just ended is logged
        # Where parameters are cut into shards, that happens in `train`
        self._sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        self._initial: InitialPolicy | None = None
        if self.kl_prompts and not self._sharded:
            self._initial = InitialPolicy(trainer)

    @property
    def picture(self) -> str:
        """Where the curves are drawn, if matplotlib is installed."""
        return os.path.join(self.trainer.args.output_dir, PICTURE)

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
        if state.global_step % self.steps:
            return
        if control.should_log:  # the step's own figures come first
            self._due = True
        else:
            self.validate()

    def on_log(self, args, state, control, **kwargs):
        if self._due:
            self.validate()

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step not in self.completions:
            self.validate()
        else:
            self._write_curves()

    def validate(self) -> dict[str, float]:
        """Measure now, and log; on every rank."""
        self._due = False
        trainer, step = self.trainer, self.trainer.state.global_step
        was_training = trainer.model.training
        trainer.model.eval()  # no dropout
        try:
            with self._own_random_stream(), torch.no_grad():
                differs = self._initial is not None and self._initial.differs_from(trainer)
                moved = self._initial is not None and self._over_ranks(torch.tensor([float(differs)]))[0] > 0
                with self._bar(len(self.dataset) + self.kl_prompts * moved) as bar:
                    figures = self._accuracy(step, bar)
                    if self._initial is not None:
                        figures["validation/kl"] = self._kl(self._initial, bar) if moved else 0.0
        finally:
            trainer.model.train(was_training)
        self.history.append({"step": step, **figures})
        # GRPOTrainer's own `log` would take along the metrics that the step itself is about to log
        step_is_logged = trainer.control.should_log
        Trainer.log(trainer, dict(figures))
        trainer.control.should_log = step_is_logged
        self._write_curves()
        return figures

    def _write_curves(self) -> None:
        """Write the log so far, and its picture, to the output folder."""
        if not self.trainer.is_world_process_zero():
            return
        folder, state = self.trainer.args.output_dir, self.trainer.state
        try:
            os.makedirs(folder, exist_ok=True)
            state.save_to_json(os.path.join(folder, STATE))
            if is_matplotlib_available():
                draw({type(self.trainer).__name__.removesuffix("Trainer"): state.log_history}, self.picture)
        except OSError as error:  # a full disk, say: what was measured stays in the log of the trainer
            if not self._write_failed:
                logger.warning(
                    f"The curves of the validation could not be written to {folder}: {error}. Training goes on, and "
                    "they are written when that is possible again; this is said once."
                )
            self._write_failed = True

    def _bar(self, total: int) -> tqdm:
        """Of completions, on all ranks together; gone when it is full."""
        hidden = hides_bars(self.trainer.args) or not self.trainer.is_world_process_zero()
        return tqdm(total=total, desc="validation", unit="completion", leave=False, dynamic_ncols=True, disable=hidden)

    def _advance(self, bar: tqdm, real: list[bool]) -> None:
        ranks = self.trainer.accelerator.num_processes
        bar.update(min(sum(real) * ranks, bar.total - bar.n))

    def _accuracy(self, step: int, bar: tqdm) -> dict[str, float]:
        texts, sums = [], torch.zeros(4, dtype=torch.float64)
        with decoding(self.trainer, greedy=True):
            for rows, real in self._batches(len(self.dataset)):
                generated = self._complete(rows)
                ids = generated.completion_ids
                batch = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
                rewards = self._rewards(rows, generated.completions, ids)
                self._advance(bar, real)
                for text, reward, own, counts in zip(batch, rewards, own_tokens(generated), real, strict=True):
                    if counts:
                        texts.append(text)
                        scored = reward is not None and not math.isnan(reward)
                        sums += torch.tensor([reward if scored else 0.0, scored, sum(own), 1.0], dtype=torch.float64)
        self.completions[step] = texts
        total, scored_count, length, count = self._over_ranks(sums)
        figures = {"validation/length": length / count}
        if scored_count:
            return {"validation/accuracy": total / scored_count, **figures}
        logger.warning(
            f"The reward function {get_callable_name(self.reward_func)!r} returned None for each of the "
            f"{int(count)} validation prompts, so validation/accuracy is not logged: does the data have the columns "
            "that it reads?"
        )
        return figures

    def _rewards(
        self, rows: dict[str, list[Any]], completions: list[Any], completion_ids: list[list[int]]
    ) -> list[Any]:
        """The reward function called as TRL calls it, but for what it would log."""
        columns = {
            name: column for name, column in rows.items() if name not in ("prompt", "completion", "completion_ids")
        }
        if self.trainer.environments is not None:
            columns["environments"] = self.trainer.environments
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
                rewards = thread.submit(asyncio.run, rewards).result()
        return numbers_of(rewards, get_callable_name(self.reward_func))

    def _kl(self, initial: InitialPolicy, bar: tqdm) -> float:
        batches = []
        with decoding(self.trainer, greedy=False):
            for rows, real in self._batches(self.kl_prompts):
                batches.append((self._complete(rows), real))
                self._advance(bar, real)
        now = [log_probabilities(self.trainer, generated) for generated, _ in batches]
        with initial.in_place_of(self.trainer):
            then = [log_probabilities(self.trainer, generated) for generated, _ in batches]
        sums = torch.zeros(2, dtype=torch.float64)
        for (_, real), (logps, mask), (initial_logps, _) in zip(batches, now, then, strict=True):
            kl = kl_estimates(logps, initial_logps, mask)
            sums += torch.stack([kl[torch.tensor(real)].sum(), torch.tensor(float(sum(real)))])
        total, count = self._over_ranks(sums)
        return total / count

    def _complete(self, rows: dict[str, list[Any]]) -> Generated:
        """One completion of each row of the data."""
        each = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        generated = generate_completions(self.trainer, each)
        self.trainer.model.eval()  # continuous batching leaves it in training mode
        return generated

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
