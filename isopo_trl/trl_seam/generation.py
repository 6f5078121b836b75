"""TRL's generation: the pass that is not made for an old policy, and how far a run has got."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin
from trl import GRPOTrainer

from .loans import borrowed, intercepted
from .log import figures_apart
from .required import INSTALL, require


require(
    "trl.GRPOTrainer._generate_and_score_completions",
    "inputs",
    mentions=(
        *("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies", "beta", "ref_model", "use_adapter"),
        *("gradient_accumulation_steps", "steps_per_generation", "num_iterations", "environment_factories"),
        *("use_vllm", "vllm_importance_sampling_correction", "old_per_token_logps", "sampling_per_token_logps"),
    ),
)
require("trl.GRPOTrainer._generate", "prompts", mentions=("rollout_func", "_generate_single_turn"))
require("trl.GRPOTrainer._generate_single_turn", "prompt_ids", "images", "multimodal_fields", "num_generations")
require("trl.GRPOTrainer._prepare_inputs", mentions=("_buffered_inputs", "_step", "steps_per_generation"))
require("trl.GRPOTrainer._generate", mentions=("num_generations", "num_generations_eval", "_tool_call_loop"))
require("trl.GRPOTrainer.__init__", mentions=("_is_vlm", "_tokenizer", "generation_config", "generation_kwargs"))
require("trl.generation.vllm_generation.VLLMGeneration.__init__", mentions=("generation_kwargs",))


class Generated(NamedTuple):
    """What TRL's `_generate` returns: lists with one entry per completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logps: list[list[float]] | None
    extra_fields: dict[str, Any]
    images: list[Any] | None
    tool_images: list[Any]


@contextmanager
def without_old_policy(
    trainer: Any,
    *,
    single_turn: Callable[..., Any] | None,
    generated: Callable[[Generated], bool],
) -> Iterator[None]:
    """
    Context for TRL's `_generate_and_score_completions`, in which no pass is made for an old policy.

    Args:
        single_turn (`Callable`, *optional*): stands in for `_generate_single_turn`, and gets it as its first argument.
        generated (`Callable`): called with what was generated, before it is scored; returns whether the old policy's
            log-probabilities are wanted after all. TRL then computes them if data will be used for more than one
            optimizer step.
    """
    args = trainer.args
    with ExitStack() as loans:
        # TRL computes them where one of these two settings says that it needs them
        aligned = loans.enter_context(ExitStack())
        aligned.enter_context(borrowed(args, gradient_accumulation_steps=Progress(trainer).per_generation))
        loans.enter_context(borrowed(trainer, vllm_importance_sampling_correction=False))

        def stand_in(generate: Callable[..., Any], prompts: list[Any]) -> Any:
            output = generate(prompts)
            if len(output) != len(Generated._fields):
                raise RuntimeError(
                    f"TRL's `_generate` returned {len(output)} values instead of {len(Generated._fields)}: {INSTALL}."
                )
            if generated(Generated(*output)):
                aligned.close()
            return output

        loans.enter_context(intercepted(trainer, "_generate", stand_in))
        if single_turn is not None:
            loans.enter_context(intercepted(trainer, "_generate_single_turn", single_turn))
        yield


class Progress:
    """How far a trainer has got with its generations."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def microbatches(self) -> int:
        """Number of microbatches that the trainer has gone through: decides when to generate."""
        return self._trainer._step

    @property
    def batches(self) -> list[dict[str, Any]] | None:
        """The microbatches of the last generation on this rank, if there was one."""
        return self._trainer._buffered_inputs

    @property
    def per_generation(self) -> int:
        """Number of microbatches for which a generation serves."""
        return self._trainer.args.steps_per_generation * self._trainer.num_iterations

    @property
    def is_inside_generation(self) -> bool:
        """Whether the completions that were generated last are to be used again."""
        return self.microbatches % self.per_generation != 0

    def coming(self, count: int) -> list[dict[str, Any]]:
        """The next `count` microbatches on this rank, or as many as there are up to the end of the generation."""
        place = self.microbatches % self._trainer.args.steps_per_generation
        assert self.batches is not None
        return self.batches[place : place + count]

    def set(self, microbatches: int, batches: list[dict[str, Any]] | None) -> None:
        """Put the trainer after so many microbatches; without `batches` it generates first of all."""
        self._trainer._step, self._trainer._buffered_inputs = microbatches, batches

    def end_generation(self) -> None:
        """Generate before the next microbatch."""
        self.set(self.microbatches, None)


@contextmanager
def prompts_read_once(trainer: Any, policy: Any) -> Iterator[None]:
    """
    Context in which transformers' generation on a CPU begins with the keys and values of the prompts, read once for
    all completions of a prompt. TRL hands it each prompt as often as it has completions, and all are read.

    Args:
        trainer (`GRPOTrainer`): the trainer.
        policy (`nn.Module`): its model, without what distributed training puts around it, that drops nothing at
            random.
    """
    args, base = trainer.args, policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    # Settings of one's own may be about the cache, and ranks with other prompts than this one may have to wait for it.
    # Under autocast the whole model's forward pass is in another precision than that of its body
    accelerator = trainer.accelerator
    alone = accelerator.distributed_type == DistributedType.NO and accelerator.mixed_precision == "no"
    usual = args.generation_kwargs is None and args.cache_implementation is None
    if not (alone and usual and _keeps_keys_and_values(policy, base)):
        yield
        return

    def stand_in(generate: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.keys() == {"input_ids", "attention_mask", "generation_config"}:
            kwargs["past_key_values"] = _of_prompts(base, kwargs["input_ids"], kwargs["attention_mask"])
        return generate(**kwargs)

    with intercepted(policy, "generate", stand_in):
        yield


def _keeps_keys_and_values(policy: Any, base: Any) -> bool:
    """Whether all that a model on a CPU keeps of tokens read are keys and values of each, in each layer."""
    if base.device.type != "cpu" or getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
        return False
    own = type(base).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own or base.config.is_encoder_decoder or not base._supports_default_dynamic_cache():
        return False
    taken = inspect.signature(base.base_model.forward).parameters
    layers = DynamicCache(config=base.config).layers
    return "position_ids" in taken and bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _of_prompts(base: Any, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache | None:
    """
    The keys and values of all but the last token of prompts, `[B, P]`, with which generation goes on as if it had read
    them itself; `None` where no prompt follows itself.
    """
    known, numbers = torch.stack([ids, mask]).unique_consecutive(dim=1, return_inverse=True)
    if known.size(1) == len(ids) or ids.size(1) == 1:
        return None
    ids, mask = known[..., :-1]
    cache = DynamicCache(config=base.config)
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)  # as transformers' generation counts them
    with torch.no_grad():
        base.base_model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(numbers)
    return cache


def samples_at_temperature(args: Any) -> bool:
    """Whether generation is asked for samples at the temperature of the loss, and for nothing else."""
    others: dict[str, Any] = dict(args.generation_kwargs or {})
    same = others.pop("temperature", args.temperature) == args.temperature and not others
    return same and (args.top_p, args.top_k, args.min_p, args.repetition_penalty) == (1.0, 0, None, 1.0)


def is_vision_model(trainer: Any) -> bool:
    """Whether the trainer's model is a vision-language model."""
    return trainer._is_vlm


class _GenerationMade(Exception):
    """Ends TRL's `_generate_and_score_completions`, of which nothing but the completions is wanted."""

    def __init__(self, generated: Generated):
        self.generated = generated


def generate_completions(trainer: Any, rows: list[dict[str, Any]]) -> Generated:
    """
    One completion for each row of a data set, with the tools and environments of the trainer. Nothing is scored, nor
    logged.
    """

    def stand_in(generate: Callable[..., Any], prompts: list[Any]) -> Any:
        raise _GenerationMade(Generated(*generate(prompts)))

    one_each = {"num_generations": 1, "num_generations_eval": 1}
    with figures_apart(trainer), borrowed(trainer, **one_each), intercepted(trainer, "_generate", stand_in):
        try:
            GRPOTrainer._generate_and_score_completions(trainer, rows)
        except _GenerationMade as made:
            return made.generated
    raise RuntimeError(f"TRL's `_generate_and_score_completions` has generated nothing by `_generate`: {INSTALL}.")
