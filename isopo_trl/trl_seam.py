"""
The seam to TRL: every name through which isopo_trl reaches into TRL where TRL promises nothing.

What is private is looked up with [`require`], which notes what is missing or has another signature; the end of this
file raises if anything was noted, so that a TRL that has changed is found at import, and not by a wrong gradient.
The methods that [`ISOPOTrainer`] overrides stand in `trainer.py`, as they must; their signatures are checked here.
"""

import importlib
import inspect
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple
from weakref import WeakSet

from packaging.specifiers import SpecifierSet
from packaging.version import Version


# Versions


# The minor release that is tested. setup.cfg repeats it, which tests/test_trl_seam.py holds it to
TRL_RANGE = ">=1.16,<1.17"
# Set by scripts/newest_trl: go on with a version out of the range. What is missing is an error all the same
ANY_VERSION = "ISOPO_ANY_TRL"
_INSTALL = f'install it with `pip install "trl{TRL_RANGE}"`'


def check_version(found: str | None) -> None:
    """Raise `ImportError` unless TRL's version `found` (`None`: not installed) is one that is supported."""
    if found is None:
        raise ImportError(f"isopo_trl needs TRL {TRL_RANGE}, but TRL is not installed: {_INSTALL}.")
    supported = Version(Version(found).base_version) in SpecifierSet(TRL_RANGE)
    if not supported and os.environ.get(ANY_VERSION, "0") in ("", "0"):
        raise ImportError(f"isopo_trl needs TRL {TRL_RANGE}, but found {found}: {_INSTALL}, or a newer isopo_trl.")


def _installed_version() -> str | None:
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


check_version(_installed_version())

import torch  # noqa: E402  # the wrong version should be told at once, and this takes seconds
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from .geometry.reservoir import content_keys  # noqa: E402


# Looking up


_missing: list[str] = []


def difference(path: str, *parameters: str, mentions: tuple[str, ...] = ()) -> str | None:
    """
    In what the object at a dotted `path` is not as expected, in words; `None` if it is.

    Args:
        path (`str`): of a module, class, function or method.
        parameters (`str`): names of the leading parameters of a function, without `self`.
        mentions (`tuple[str, ...]`): names of attributes and keys that the function's own code reads or sets.
    """
    found = _lookup(path)
    if found is None:
        return f"{path} does not exist"
    if parameters:
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if tuple(names[: len(parameters)]) != parameters:
            return f"{path} takes ({', '.join(names)}) instead of ({', '.join(parameters)}, ...)"
    if mentions:
        code = inspect.unwrap(found).__code__
        unknown = [name for name in mentions if name not in {*code.co_names, *code.co_consts}]
        if unknown:
            return f"{path} makes no use of {', '.join(unknown)}"
    return None


def require(path: str, *parameters: str, mentions: tuple[str, ...] = ()) -> Any:
    """The object at a dotted path; a [`difference`] from what is expected is an error at the end of this file."""
    problem = difference(path, *parameters, mentions=mentions)
    if problem is not None:
        _missing.append(problem)
    return _lookup(path)


def _lookup(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name, None)
        return found
    return None


# Functions


get_config_model_id = require("trl.trainer.utils.get_config_model_id", "config")
is_async_callable = require("trl.trainer.utils.is_async_callable", "func")
pad = require("trl.trainer.utils.pad", "tensors", "padding_value", "padding_side")
disable_gradient_checkpointing = require(
    "trl.models.utils.disable_gradient_checkpointing", "model", "gradient_checkpointing_kwargs"
)


# Attributes of the trainer


# Those that isopo_trl reads, sets, or borrows for the length of a call
_ATTRIBUTES = (
    "_entropy_bonus_enabled",
    "_metrics",
    "aux_loss_enabled",
    "beta",
    "entropy_coef",
    "epsilon_high",
    "epsilon_low",
    "loss_type",
    "mask_truncated_completions",
    "num_iterations",
    "off_policy_mask_threshold",
    "ref_model",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",
    "rollout_func",
    "router_aux_loss_coef",
    "temperature",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
    "use_vllm",
    "vllm_importance_sampling_correction",
)
require("trl.GRPOTrainer.__init__", "model", "reward_funcs", "args", mentions=_ATTRIBUTES)


def log(trainer: Any, mode: str, figures: dict[str, float]) -> None:
    """Add to what the next log line of `mode`, `"train"` or `"eval"`, is the mean of."""
    for name, value in figures.items():
        trainer._metrics[mode][name].append(value)


@contextmanager
def figures_apart(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Context in which TRL adds nothing to the log: its figures, a list of values per name, are returned instead."""
    figures: dict[str, list[float]] = defaultdict(list)
    with borrowed(trainer, _metrics={"train": figures, "eval": figures}):
        yield figures


def log_figures(trainer: Any, mode: str, figures: dict[str, list[float]]) -> None:
    """Add figures that were kept [apart][figures_apart] to the log after all."""
    for name, values in figures.items():
        trainer._metrics[mode][name].extend(values)


def add_reward(trainer: Any, name: str, function: Callable[..., list[float]], weight: float) -> None:
    """Give the trainer one more reward function, as the last."""
    # New lists: TRL keeps the ones it was given
    trainer.reward_funcs = [*trainer.reward_funcs, function]
    trainer.reward_func_names = [*trainer.reward_func_names, name]
    trainer.reward_processing_classes = [*trainer.reward_processing_classes, None]
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.tensor([weight])])


@contextmanager
def borrowed(owner: Any, **settings: Any) -> Iterator[None]:
    """Context in which attributes of `owner` (the trainer, or its `args`) have other values."""
    own = {name: getattr(owner, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


@contextmanager
def intercepted(trainer: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Context in which TRL's calls of a method go to `stand_in`, whose first argument is the method as it was."""
    method, before = getattr(trainer, name), trainer.__dict__.get(name)
    setattr(trainer, name, lambda *args, **kwargs: stand_in(method, *args, **kwargs))
    try:
        yield
    finally:
        delattr(trainer, name)
        if before is not None:
            setattr(trainer, name, before)


@contextmanager
def noted(trainer: Any, name: str, results: list[Any]) -> Iterator[None]:
    """Context in which `results` gets what TRL's calls of a method return."""

    def stand_in(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    with intercepted(trainer, name, stand_in):
        yield


# The batch


REFERENCE_LOGPS = "ref_per_token_logps"  # a batch's key of those under the reference model, `[B, C]`


class Batch(dict):
    """
    A copy of the batch that TRL's loss reads: `B` prompts padded on the left, and completions padded on the right to
    `C` tokens.
    """

    @property
    def advantages(self) -> torch.Tensor:
        """`[B]`, or what a subclass of TRL's trainer made of them."""
        return self["advantages"]

    @advantages.setter
    def advantages(self, advantages: torch.Tensor) -> None:
        self["advantages"] = advantages

    @property
    def completion_mask(self) -> torch.Tensor:
        """`[B, C]`, nonzero at tokens of the completions."""
        return self["completion_mask"]

    @property
    def attention_mask(self) -> torch.Tensor:
        """`[B, P + C]`, nonzero at all real positions."""
        return torch.cat([self["prompt_mask"], self["completion_mask"]], dim=1)

    @property
    def sampled_mask(self) -> torch.Tensor:
        """`[B, P + C]`, nonzero at positions of sequences that count: of others, no gradient is sampled."""
        return self._of_those_that_count(self.attention_mask)

    @property
    def keys_of_content(self) -> torch.Tensor:
        """`[B]`, by which a sequence is known, in whichever microbatch and on whichever rank it is."""
        return content_keys(torch.cat([self["prompt_ids"], self["completion_ids"]], dim=1), self.attention_mask)

    @property
    def scored(self) -> torch.Tensor:
        """`[B, C]`, nonzero at the tokens that the loss is made of: those of a completion that no tool wrote."""
        return self["completion_mask"] * self.get("tool_mask", 1)

    @property
    def counted(self) -> torch.Tensor:
        """`[B, C]`, nonzero at the scored tokens of sequences that count: others tell nothing of the batch."""
        return self._of_those_that_count(self.scored)

    @property
    def sampler_logps(self) -> torch.Tensor | None:
        """`[B, C]`, what tokens were drawn with, as far as the sampler has told; TRL's off-policy mask looks at it."""
        return self.get("sampling_per_token_logps")

    @sampler_logps.setter
    def sampler_logps(self, logps: torch.Tensor) -> None:
        self["sampling_per_token_logps"] = logps

    @property
    def old_logps(self) -> torch.Tensor | None:
        """`[B, C]`, what the policy would have drawn them with when they were generated, where TRL computed that."""
        return self.get("old_per_token_logps")

    @old_logps.setter
    def old_logps(self, logps: torch.Tensor | None) -> None:
        self.pop("old_per_token_logps", None)
        if logps is not None:
            self["old_per_token_logps"] = logps

    @property
    def loss_weights(self) -> torch.Tensor | float:
        """`[B]`, ours: multiply each sequence's part of the loss; 1 unless sequences were left out."""
        return self.get("loss_weights", 1.0)

    @loss_weights.setter
    def loss_weights(self, weights: torch.Tensor) -> None:
        self["loss_weights"] = weights

    def _of_those_that_count(self, mask: torch.Tensor) -> torch.Tensor:
        weights = self.loss_weights
        return mask * (weights != 0).unsqueeze(1).to(mask) if isinstance(weights, torch.Tensor) else mask

    def with_advantages(self, advantages: torch.Tensor) -> "Batch":
        """A copy with other advantages `[B]`."""
        return Batch(self, advantages=advantages)

    def rows(self, places: list[int]) -> "Batch":
        """The texts and images of some of the sequences."""

        def chosen(value: Any) -> Any:
            return value[places] if isinstance(value, torch.Tensor) else [value[place] for place in places]

        parts = {name: self[name] for name in (*_TEXT, "tool_mask", *_IMAGES) if self.get(name) is not None}
        parts = _images_by_sequence(parts)
        taken = {name: chosen(value) for name, value in parts.items()}
        if isinstance(taken.get("pixel_values"), list) and not any(taken["num_images"]):  # nothing to put together
            return Batch({name: value for name, value in taken.items() if name not in _IMAGES})
        return Batch(_images_together(taken))

    def set_weights(self, weights: torch.Tensor | None, ratios: torch.Tensor | None) -> None:
        """
        Say how TRL's loss weighs tokens. Without `ratios`, its own ratio to an old policy is 1.

        Args:
            weights (`torch.Tensor`, *optional*): `[B, C]` or `[B, 1]`, multiply a token's part of the loss.
            ratios (`torch.Tensor`, *optional*): `[B, C]`, logarithms of what TRL is to take for the ratio, and clip.
        """
        # TRL subtracts the old log-probabilities from the ratios
        self.old_logps = None if ratios is None else ratios.new_zeros(ratios.shape)
        if weights is not None:
            self["importance_sampling_ratio"] = weights


# The loss


require(
    "trl.GRPOTrainer._compute_loss",
    "model",
    "inputs",
    mentions=(
        *("_get_per_token_logps_and_entropies", "beta", "use_vllm", "vllm_importance_sampling_correction"),
        *("_entropy_bonus_enabled", "aux_loss_enabled", "entropy_coef", "use_adaptive_entropy", "policy_loss"),
        *("advantages", "prompt_mask", "completion_mask", "tool_mask"),
        *("importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps", REFERENCE_LOGPS),
    ),
)
require(
    "trl.GRPOTrainer._get_per_token_logps_and_entropies",
    *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"),
)
require("trl.GRPOTrainer.training_step", "model", "inputs", "num_items_in_batch")
require("trl.GRPOTrainer.compute_loss", "model", "inputs", "return_outputs", "num_items_in_batch")
# Between the last backward and the optimizer's step
require("trl.GRPOTrainer._get_grad_norm", "model", "grad_norm")
require("trl.GRPOTrainer._run_epoch", mentions=("_get_grad_norm",))
require("trl.GRPOTrainer.create_model_card", "model_name", "dataset_name", "tags")


def score(trainer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Log-probabilities `[B, C]` of completions, for the arguments of the trainer's own scoring pass."""
    logps, _, _ = trainer._get_per_token_logps_and_entropies(*args, **kwargs)
    return logps


# What TRL's loss hands from the batch to the model beside the text
_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
_TEXT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
require("trl.GRPOTrainer._compute_loss", mentions=(*_IMAGES, *_TEXT))
_split_images = require("trl.trainer.grpo_trainer.split_pixel_values_by_grid", "batch")
_images_together = require("trl.trainer.grpo_trainer.unsplit_pixel_values_by_grid", "batch")
# Where TRL reads how many rows of pixels belong to an image, or that there is one for each
_LAYOUT = ("image_grid_thw", "image_position_ids", "spatial_shapes", "num_tiles", "image_sizes")


def _images_by_sequence(batch: dict[str, Any]) -> dict[str, Any]:
    """
    A batch in which images are split by sequence. Those that are padded to a row per sequence (Idefics, SmolVLM) are
    that already: TRL tells them by the number of rows, which may by chance be that of all images.
    """
    pixels, counts = batch.get("pixel_values"), batch.get("num_images") or ()
    in_rows = isinstance(pixels, torch.Tensor) and pixels.ndim == 5 and len(pixels) == len(counts)
    return batch if in_rows and all(batch.get(name) is None for name in _LAYOUT) else _split_images(batch)


def _has_images(batch: Batch) -> bool:
    return any(batch.get(name) is not None for name in _IMAGES)


def scored_together(trainer: Any, batches: list[Batch]) -> list[Batch]:
    """The sequences of all batches in one, with no more padding than needed; batches with images as they are."""
    if not batches or any(map(_has_images, batches)):
        return batches
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in (*_TEXT, "tool_mask")}
    for batch in batches:
        for name, real in (("prompt", batch["prompt_mask"].bool()), ("completion", batch["completion_mask"].bool())):
            rows[f"{name}_ids"] += [ids[kept] for ids, kept in zip(batch[f"{name}_ids"], real, strict=True)]
            rows[f"{name}_mask"] += [kept.new_ones(int(kept.sum()), dtype=torch.long) for kept in real]
        own = batch.scored.new_ones(batch.scored.shape) if batch.get("tool_mask") is None else batch["tool_mask"]
        rows["tool_mask"] += [mask[kept] for mask, kept in zip(own, batch["completion_mask"].bool(), strict=True)]
    text = {
        name: pad(
            values,
            padding_value=pad_token_id(trainer) if name.endswith("ids") else 0,
            padding_side="left" if name.startswith("prompt") else "right",
        )
        for name, values in rows.items()
    }
    if not text["completion_ids"].size(1):  # nothing but empty completions: the model wants a position to score
        text = {name: text[name] if "prompt" in name else _one_column(text[name]) for name in text}
    return [Batch(text)]


def _one_column(values: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(values.size(0), 1)


def batch_logps(trainer: Any, batch: Batch) -> torch.Tensor:
    """Log-probabilities `[B, C]` of a batch's completions, by the pass that TRL's loss makes."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    images = {name: batch.get(name) for name in _IMAGES}
    return score(trainer, trainer.model, ids, batch.attention_mask, batch.completion_mask.size(1), **images)


def base_model(trainer: Any) -> torch.nn.Module:
    """The model itself, without wrappers and adapters. Takes a while: accelerate looks at every module."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def distribution_size(model: Any, batch: Batch) -> int:
    """Elements of [`log_distributions`] at all positions of completions; 0 where there are none to be had."""
    if _has_images(batch) or not takes_positions(model):
        return 0
    return batch.completion_mask.numel() * model.config.get_text_config().vocab_size


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether the model can be asked for the logits at given positions alone; some can but for those at the end."""
    parameter = inspect.signature(model.forward).parameters.get("logits_to_keep")
    return parameter is not None and "Tensor" in str(parameter.annotation)


def most_positions(model: Any) -> float:
    """Width of a batch up to which all models of the family have a place for every position, padding included."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # MPT has the other
    numbers = [number for number in (getattr(config, name, None) for name in names) if number is not None]
    return min(numbers, default=math.inf) - 2  # some begin to count at 2


def distribution_inputs(batch: Batch, columns: torch.Tensor, width: int = 0) -> tuple[torch.Tensor, ...]:
    """
    What [`log_distributions`] takes for some positions of a batch's completions: token ids and attention mask, padded
    on the right to at least `width`, and where the logits are.
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    width = max(width, ids.size(1))
    ids, mask = (torch.nn.functional.pad(x, (0, width - x.size(1))) for x in (ids, batch.attention_mask))
    # A token is drawn from the logits at the one before it; from the end, since adapters may put others in front
    return ids, mask, columns + batch["prompt_ids"].size(1) - 1 - width


def log_distributions(trainer: Any, ids: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """
    Logits `[B, len(kept), V]` of a pass without gradient, divided by the temperature: but for their normalisation, the
    logarithms of the distributions that the tokens there are drawn from.
    """
    with trainer.accelerator.autocast():
        output = trainer.model(input_ids=ids, attention_mask=mask, logits_to_keep=kept, use_cache=False)
    return output.logits if trainer.temperature == 1 else output.logits.div_(trainer.temperature)


@contextmanager
def scoring_passes(trainer: Any, noted: Callable[..., None]) -> Iterator[None]:
    """Context in which `noted(logps, model, *args, **kwargs)` is told of every scoring pass."""

    def stand_in(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(model, *args, **kwargs)
        noted(output[0], model, *args, **kwargs)
        return output

    with intercepted(trainer, "_get_per_token_logps_and_entropies", stand_in):
        yield


class Outputs(NamedTuple):
    """What the loss's forward pass returns, with gradient: `[B, C]`, `[B, C]` and a scalar."""

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None


# Settings that add terms without an advantage, as they are without
_NO_TERMS = {
    "beta": 0.0,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "aux_loss_enabled": False,
}


class LossInput:
    """
    The log-probabilities, or log-ratios, that a loss is computed of.

    Attributes:
        with_graph (`torch.Tensor`): `[B, C]`, as the forward pass has made them.
        leaf (`torch.Tensor`): `[B, C]`, the same numbers without their graph, which is what the loss gets: autograd,
            when asked for a derivative, goes over all of the graph before it begins, and the model's is long.
        aux_loss (`torch.Tensor`, *optional*): scalar, the load-balancing loss likewise, where there is one.
    """

    with_graph: torch.Tensor
    leaf: torch.Tensor
    aux_loss: torch.Tensor | None

    def cut(self, outputs: Outputs) -> Outputs:
        """The outputs with the leaves in them."""
        self.with_graph, aux_loss = outputs.logps, outputs.aux_loss
        self.leaf = outputs.logps.detach().requires_grad_(torch.is_grad_enabled())
        self.aux_loss = None if aux_loss is None else aux_loss.detach().requires_grad_(aux_loss.requires_grad)
        return outputs._replace(logps=self.leaf, aux_loss=self.aux_loss)


@contextmanager
def weighed_loss(
    trainer: Any,
    batch: Batch,
    weigh: Callable[[Outputs], tuple[torch.Tensor | None, torch.Tensor | None] | None],
    balances: bool = False,
) -> Iterator[LossInput]:
    """
    Context for TRL's `_compute_loss` of the batch, in which the loss is that of the policy, without the terms that
    carry no advantage, and tokens are weighed. The first call makes the forward pass; others get what it returned.
    The loss's gradient ends at the leaves of what the context yields.

    Args:
        weigh (`Callable`): gets what the loss's forward pass returned, and returns the weights and the ratios of
            [`Batch.set_weights`]; `None` leaves the batch as it is.
        balances (`bool`): whether the load-balancing loss, which is a leaf of its own, stays in the loss.
    """
    with ExitStack() as loans:
        wanted = {"compute_aux_loss": trainer.aux_loss_enabled}  # for the terms, from the same pass
        seen: list[Any] = []
        given = LossInput()

        def stand_in(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not seen:
                outputs = Outputs(*forward(*args, **{**kwargs, **wanted}))
                weighed = weigh(outputs)
                seen.append(given.cut(outputs if weighed is None else weighed_outputs(outputs, *weighed)))
            return seen[0]

        def weighed_outputs(outputs: Outputs, weights: torch.Tensor | None, ratios: torch.Tensor | None) -> Outputs:
            batch.set_weights(weights, ratios)
            if weights is not None:  # TRL multiplies by weights where it thinks that they are vLLM's
                loans.enter_context(borrowed(trainer, use_vllm=True, vllm_importance_sampling_correction=True))
            return outputs if ratios is None else outputs._replace(logps=ratios)

        own_loss = {**_NO_TERMS, "use_vllm": False, "vllm_importance_sampling_correction": False}
        if balances:
            del own_loss["aux_loss_enabled"]
        loans.enter_context(borrowed(trainer, **own_loss))
        loans.enter_context(intercepted(trainer, "_get_per_token_logps_and_entropies", stand_in))
        yield given


@contextmanager
def unequal_ranks(trainer: Any) -> Iterator[None]:
    """
    Context for TRL's `_compute_loss` of microbatches that differ in size from rank to rank: of the figures that it
    gathers, one number per sequence, the missing ones are NaN, which TRL leaves out.
    """
    accelerator = trainer.accelerator

    def stand_in(gather: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
        return gather(accelerator.pad_across_processes(tensor, pad_index=torch.nan) if tensor.ndim else tensor)

    with intercepted(accelerator, "gather", stand_in):
        yield


@contextmanager
def figures_of_policy(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Context, inside [`weighed_loss`], in which TRL tells `policy_loss` among its figures, which are kept apart."""
    with borrowed(trainer, _entropy_bonus_enabled=True), figures_apart(trainer) as figures:
        yield figures


@contextmanager
def terms_of_loss(trainer: Any, outputs: Outputs) -> Iterator[dict[str, list[float]]]:
    """
    Context for TRL's `_compute_loss` of a batch whose advantages are 0: what remains are the terms without an
    advantage, of what the forward pass of the policy's loss has returned. TRL's figures are kept apart.
    """
    others: dict[str, Any] = {"use_vllm": False, "vllm_importance_sampling_correction": False}
    if trainer.args.kl_in_reward:
        others["beta"] = 0.0
    again = intercepted(trainer, "_get_per_token_logps_and_entropies", lambda *args, **kwargs: outputs)
    with borrowed(trainer, **others), again, figures_apart(trainer) as figures:
        yield figures


# Generation


require(
    "trl.GRPOTrainer._generate_and_score_completions",
    "inputs",
    mentions=(
        *("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies", "beta", "ref_model", "use_adapter"),
        *("gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
        *("use_vllm", "vllm_importance_sampling_correction", "old_per_token_logps", "sampling_per_token_logps"),
    ),
)
require("trl.GRPOTrainer._generate", "prompts", mentions=("rollout_func", "_generate_single_turn"))
require("trl.GRPOTrainer._generate_single_turn", "prompt_ids", "images", "multimodal_fields", "num_generations")
require("trl.GRPOTrainer._calculate_rewards", "inputs", "prompts", "completions", "completion_ids_list")


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
def generation(
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
        every = args.steps_per_generation * trainer.num_iterations  # microbatches for which a generation serves
        aligned.enter_context(borrowed(args, gradient_accumulation_steps=every))
        loans.enter_context(borrowed(trainer, vllm_importance_sampling_correction=False))

        def stand_in(generate: Callable[..., Any], prompts: list[Any]) -> Any:
            output = generate(prompts)
            if len(output) != len(Generated._fields):
                raise RuntimeError(
                    f"TRL's `_generate` returned {len(output)} values instead of {len(Generated._fields)}: {_INSTALL}."
                )
            if generated(Generated(*output)):
                aligned.close()
            return output

        loans.enter_context(intercepted(trainer, "_generate", stand_in))
        if single_turn is not None:
            loans.enter_context(intercepted(trainer, "_generate_single_turn", single_turn))
        yield


# Microbatches of a generation


_SHUFFLE = "shuffle_sequence_dict"  # by which TRL mixes the sequences of a generation before it cuts them up
_grpo_trainer = require("trl.trainer.grpo_trainer")
_shuffle = require(f"trl.trainer.grpo_trainer.{_SHUFFLE}", "seq_dict")
require("trl.GRPOTrainer._prepare_inputs", "generation_batch", mentions=(_SHUFFLE, "split_tensor_dict"))


@contextmanager
def shuffled_by_group(size: int) -> Iterator[None]:
    """
    Context for TRL's `_prepare_inputs`, in which the sequences of a generation are shuffled by groups: `size` that
    follow each other, the completions of one prompt, stay side by side. As much is drawn from the random stream as
    without.
    """

    def stand_in(batch: dict[str, Any]) -> dict[str, Any]:
        count = len(next(value for value in batch.values() if value is not None))
        if count % size:
            raise RuntimeError(
                f"A generation has {count} sequences on this rank, which is no multiple of num_generations={size}: "
                "set group_microbatches=False, or let every rank have whole groups."
            )
        order = side_by_side(_shuffle({"order": list(range(count))})["order"], size)
        return {name: _in_order(value, order) for name, value in batch.items()}

    with borrowed(_grpo_trainer, **{_SHUFFLE: stand_in}):
        yield


def side_by_side(order: list[int], size: int) -> list[int]:
    """
    An order of sequences in which those of a group, `size` numbers that follow each other, are moved up to its first.
    All orders of the groups are as likely as each other if the sequences' are.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for number in order:
        groups[number // size].append(number)
    return [number for group in groups.values() for number in group]


def _in_order(value: Any, order: list[int]) -> Any:
    """What a batch holds per sequence, tensors and lists, in another order; the rest as it is."""
    if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value
    return value[torch.tensor(order)] if isinstance(value, torch.Tensor) else [value[number] for number in order]


def coming_batches(trainer: Any, count: int) -> list[dict[str, Any]]:
    """The next `count` microbatches on this rank, or as many as there are up to the end of the generation."""
    place = trainer._step % trainer.args.steps_per_generation
    return trainer._buffered_inputs[place : place + count]


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Microbatches of one generation as one batch, in which images are split by sequence: for [`rows_of`]."""
    # Split as a whole, as by TRL: a microbatch alone does not tell how its images are laid out
    return _images_by_sequence({name: _one_after_the_other([batch[name] for batch in batches]) for name in batches[0]})


def rows_of(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """A microbatch of some rows of a batch that was [`joined`]."""
    return _images_together({name: _in_order(value, rows) for name, value in batch.items()})


def _one_after_the_other(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    per_sequence = isinstance(values[0], torch.Tensor) and values[0].ndim > 0
    return torch.cat(values) if per_sequence else values[0]  # else it is the generation's


# Resuming


require("trl.GRPOTrainer._prepare_inputs", mentions=("_buffered_inputs", "_step", "steps_per_generation"))
require("trl.GRPOTrainer.training_step", mentions=("_step",))
require("trl.GRPOTrainer._get_train_sampler", "dataset")
require("trl.GRPOTrainer._load_from_checkpoint", mentions=("_issue_warnings_after_load",))
require("trl.GRPOTrainer._load_best_model", mentions=("_issue_warnings_after_load",))


def progress(trainer: Any) -> int:
    """Number of microbatches that the trainer has gone through: decides when to generate."""
    return trainer._step


def generated_batches(trainer: Any) -> list[dict[str, Any]] | None:
    """The microbatches of the last generation on this rank, if there was one."""
    return trainer._buffered_inputs


def set_progress(trainer: Any, microbatches: int, batches: list[dict[str, Any]] | None) -> None:
    """Put the trainer after so many microbatches; without `batches` it generates first of all."""
    trainer._step, trainer._buffered_inputs = microbatches, batches


def is_reference(trainer: Any, model: Any) -> bool:
    """Whether a scoring pass of `model`, made now, is one of the reference model's."""
    if trainer.ref_model is not None:
        return model is trainer.ref_model
    # One model for both: TRL turns the adapter off, which leaves the base model, or exchanges an adapter that was
    # trained before for a copy of its initial state, under the name "ref"
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.accelerator.unwrap_model(model) is not policy:
        return False
    tuner = next((module for module in policy.modules() if isinstance(module, BaseTunerLayer)), None)
    if tuner is None:  # virtual tokens, which the base model's own forward leaves out
        copied = "ref" in policy.peft_config
        return policy.active_adapter == "ref" if copied else policy.forward == policy.base_model.forward
    return "ref" in tuner.active_adapters if "ref" in policy.peft_config else tuner.disable_adapters


# Validation


get_callable_name = require("trl.trainer.utils.get_callable_name", "func")
is_conversational = require("trl.data_utils.is_conversational", "example")
require("trl.GRPOTrainer._tokenize_prompts", "prompts")
require("trl.GRPOTrainer.__init__", mentions=("_is_vlm", "_tokenizer", "generation_config", "generation_kwargs"))
require("trl.generation.vllm_generation.VLLMGeneration.__init__", mentions=("generation_kwargs",))


def is_vision_model(trainer: Any) -> bool:
    """Whether the trainer's model is a vision-language model."""
    return trainer._is_vlm


def pad_token_id(trainer: Any) -> int:
    """What the trainer's tokenizer pads with."""
    return trainer._tokenizer.pad_token_id


def complete(trainer: Any, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts (texts or messages), and of one completion of each."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, 1)
    return prompt_ids, completion_ids


# The LM head


# TRL's loss multiplies by the head's weight inside this autograd function and never calls the module
_PLACE = "_ChunkedLogProbFunction"  # where TRL's model forward looks it up, in trl.trainer.utils
_HEAD_ARGUMENTS = ("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size")
HEAD_WEIGHT = _HEAD_ARGUMENTS.index("weight") - 1  # among the arguments of `apply`

ChunkedLogProbFunction = require("trl.kernels.ChunkedLogProbFunction")
require("trl.kernels.ChunkedLogProbFunction.forward", *_HEAD_ARGUMENTS)
require(f"trl.trainer.utils.{_PLACE}")
gathered_head = require("trl.trainer.utils.maybe_gather_lm_head_ctx")
head_uses_triton = require("trl.kernels.chunked_logprob._use_triton", "device")
_BLOCK_SIZE = require("trl.kernels.chunked_logprob._BLOCK_SIZE")
_backward_tile = require(
    "trl.kernels.chunked_logprob._backward_tile",
    *("tile", "tile_stride", "targets", "log_z", "entropy", "grad_logprobs", "grad_entropy", "vocab_start", "n_cols"),
    *("logit_scale", "softcap", "inv_t", "HAS_SOFTCAP", "HAS_LOGPROB_GRAD", "HAS_ENTROPY_GRAD", "BLOCK_SIZE"),
)
_backward_kernel = require("trl.kernels.chunked_logprob._backward_kernel")  # takes the same, as pointers


class _HeadDispatcher:
    """
    Stands, for good, in the place where TRL looks up its chunked log-probabilities. Each call goes to the LM head that
    owns the weight, if one does whose microbatch is under way, and else to TRL's own function.
    """

    def __init__(self) -> None:
        self.heads: WeakSet[Any] = WeakSet()

    def apply(self, *args: Any) -> Any:
        weight = _parameter_behind(args[HEAD_WEIGHT])
        for head in self.heads:
            if head.module.weight is weight and head.microbatch is not None:
                return head.chunked_logps(*args)
        return ChunkedLogProbFunction.apply(*args)


def _parameter_behind(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that `weight` is, or that it was gathered from: FSDP2's shards arrive here as a whole."""
    node: Any = weight.grad_fn
    while node is not None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable if isinstance(variable, DTensor) else weight
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return weight


_dispatcher = _HeadDispatcher()


def add_head(head: Any) -> None:
    """Let `head`, a layer with `module`, `microbatch` and `chunked_logps`, take the calls with its weight."""
    _dispatcher.heads.add(head)


def remove_head(head: Any) -> None:
    """Leave calls with the weight of `head` to TRL again."""
    _dispatcher.heads.discard(head)


def logits_gradient_tile(
    tile: torch.Tensor,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    grad: torch.Tensor | None,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    start: int,
    settings: dict[str, Any],
) -> torch.Tensor:
    """
    TRL's own step from logits `[rows, width]` to their gradient, in place, by its kernel where it has one: for the
    gradient of the log-probabilities, and for the entropies and their gradient; `[rows]` each.
    """
    rows, width = tile.shape
    block = _BLOCK_SIZE
    function: Callable = _backward_tile
    if head_uses_triton(tile.device):
        function = _backward_kernel[(rows, -(-width // block))]
    # What is not there has its place filled, and is not read
    entropy, grad_entropy = (log_z, log_z) if of_entropy is None else of_entropy
    grad_logps = log_z if grad is None else grad
    arguments = (tile, tile.stride(0), targets, log_z, entropy, grad_logps, grad_entropy, start, width)
    has = {"HAS_LOGPROB_GRAD": grad is not None, "HAS_ENTROPY_GRAD": of_entropy is not None}
    function(*arguments, **has, BLOCK_SIZE=block, **settings)
    return tile


# What was found


if _missing:
    raise ImportError(
        f"TRL {_installed_version()} is not as isopo_trl needs it: {'; '.join(_missing)}. It needs TRL {TRL_RANGE}: "
        f"{_INSTALL}, or a newer isopo_trl."
    )

importlib.import_module("trl.trainer.utils").__dict__[_PLACE] = _dispatcher
