"""TRL's batch: its keys, its images, and how a generation is cut into microbatches."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset, DatasetDict

from ..geometry.reservoir import content_keys
from .loans import borrowed
from .required import require


REFERENCE_LOGPS = "ref_per_token_logps"  # a batch's key of those under the reference model, `[B, C]`
# What TRL's loss hands from the batch to the model beside the text
IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
TEXT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
require("trl.GRPOTrainer._compute_loss", mentions=(*IMAGES, *TEXT))
_split_images = require("trl.trainer.grpo_trainer.split_pixel_values_by_grid", "batch")
_images_together = require("trl.trainer.grpo_trainer.unsplit_pixel_values_by_grid", "batch")
# Where TRL reads how many rows of pixels belong to an image, or that there is one for each
_LAYOUT = ("image_grid_thw", "image_position_ids", "spatial_shapes", "num_tiles", "image_sizes")
pad = require("trl.trainer.utils.pad", "tensors", "padding_value", "padding_side")


def verify_prompts(data: Any, name: str) -> None:
    """Raise where a data set, the trainer's argument `name`, says which columns it has, and none is the prompt's."""
    if isinstance(data, dict) and not isinstance(data, DatasetDict):
        for part, each in data.items():
            verify_prompts(each, f"{name}[{part!r}]")
    columns = getattr(data, "column_names", None)  # none of a stream that has not begun
    if not isinstance(columns, list) or "prompt" in columns:
        return
    if isinstance(data, Dataset) and data.format["type"] == "custom":  # a transform may make it of other columns
        return
    raise ValueError(
        f"{name} has no column 'prompt', of which completions are made; it has {', '.join(columns) or 'none at all'}: "
        f"rename the one with the prompts ({name}.rename_column('question', 'prompt')), or make one with `map`."
    )


def verify_number(data: Any, args: Any, group: Any) -> None:
    """Raise where a data set has fewer prompts than one generation takes: TRL leaves an incomplete one out."""
    number, needed = len(data), args.generation_batch_size // group
    if number >= needed:
        return
    raise ValueError(
        f"train_dataset has {number or 'no'} prompt{'s' * (number != 1)}, and one generation takes {needed} "
        f"({args.generation_batch_size} completions, num_generations={group} of each prompt), so that not a single "
        f"step would be made: give at least {needed}, or make a generation smaller, by lower "
        "gradient_accumulation_steps (steps_per_generation, generation_batch_size), a lower "
        "per_device_train_batch_size, or fewer processes."
    )


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
    def input_ids(self) -> torch.Tensor:
        """`[B, P + C]`, tokens of prompts and completions."""
        return torch.cat([self["prompt_ids"], self["completion_ids"]], dim=1)

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
        return content_keys(self.input_ids, self.attention_mask)

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
        parts = {name: self[name] for name in (*TEXT, "tool_mask", *IMAGES) if self.get(name) is not None}
        parts = _images_by_sequence(parts)
        taken = {name: _in_order(value, places) for name, value in parts.items()}
        if isinstance(taken.get("pixel_values"), list) and not any(taken["num_images"]):  # nothing to put together
            return Batch({name: value for name, value in taken.items() if name not in IMAGES})
        return Batch(_images_together(taken))

    @property
    def has_weights(self) -> bool:
        """Whether tokens' parts of the loss are multiplied by weights."""
        return "importance_sampling_ratio" in self

    def weighed(
        self,
        weights: torch.Tensor | None = None,
        *,
        old_logps: torch.Tensor | None = None,
        sampler_logps: torch.Tensor | None = None,
    ) -> "Batch":
        """
        A copy that says how TRL's loss weighs tokens.

        Args:
            weights (`torch.Tensor`, *optional*): `[B, C]` or `[B, 1]`, multiply a token's part of the loss.
            old_logps (`torch.Tensor`, *optional*): `[B, C]`, of the old policy to which TRL takes the ratio; without
                them the ratio is 1.
            sampler_logps (`torch.Tensor`, *optional*): `[B, C]`, what the off-policy mask compares with.
        """
        batch = Batch(self)
        batch.old_logps = old_logps
        if weights is not None:
            batch["importance_sampling_ratio"] = weights
        if sampler_logps is not None:
            batch["sampling_per_token_logps"] = sampler_logps
        return batch


def _images_by_sequence(batch: dict[str, Any]) -> dict[str, Any]:
    """
    A batch in which images are split by sequence. Images that are padded to a row per sequence (Idefics, SmolVLM) are
    that already: TRL tells them by the number of rows, which may by chance be that of all images.
    """
    pixels, counts = batch.get("pixel_values"), batch.get("num_images") or ()
    in_rows = isinstance(pixels, torch.Tensor) and pixels.ndim == 5 and len(pixels) == len(counts)
    return batch if in_rows and all(batch.get(name) is None for name in _LAYOUT) else _split_images(batch)


def has_images(batch: Batch) -> bool:
    return any(batch.get(name) is not None for name in IMAGES)


def together(batches: list[Batch], padding: int) -> list[Batch]:
    """The sequences of all batches in one, with no more padding than needed; batches with images as they are."""
    if not batches or any(map(has_images, batches)):
        return batches
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in (*TEXT, "tool_mask")}
    for batch in batches:
        for name, real in (("prompt", batch["prompt_mask"].bool()), ("completion", batch["completion_mask"].bool())):
            rows[f"{name}_ids"] += [ids[there] for ids, there in zip(batch[f"{name}_ids"], real, strict=True)]
            rows[f"{name}_mask"] += [there.new_ones(int(there.sum()), dtype=torch.long) for there in real]
        own = batch.scored.new_ones(batch.scored.shape) if batch.get("tool_mask") is None else batch["tool_mask"]
        rows["tool_mask"] += [mask[there] for mask, there in zip(own, batch["completion_mask"].bool(), strict=True)]
    text = {
        name: pad(
            values,
            padding_value=padding if name.endswith("ids") else 0,
            padding_side="left" if name.startswith("prompt") else "right",
        )
        for name, values in rows.items()
    }
    if not text["completion_ids"].size(1):  # nothing but empty completions: the model wants a position to score
        text |= {name: x.new_zeros(x.size(0), 1) for name, x in text.items() if "prompt" not in name}
    return [Batch(text)]


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


def joined_batches(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Microbatches of one generation as one batch, in which images are split by sequence: for [`rows_of_batch`]."""
    # Split as a whole, as by TRL: a microbatch alone does not tell how its images are laid out
    return _images_by_sequence({name: _one_after_the_other([batch[name] for batch in batches]) for name in batches[0]})


def rows_of_batch(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """A microbatch of some rows of a batch that was [`joined_batches`]."""
    return _images_together({name: _in_order(value, rows) for name, value in batch.items()})


def _one_after_the_other(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    per_sequence = isinstance(values[0], torch.Tensor) and values[0].ndim > 0
    return torch.cat(values) if per_sequence else values[0]  # else it is the generation's


def pad_token_id(trainer: Any) -> int:
    """What the trainer's tokenizer pads with."""
    return trainer._tokenizer.pad_token_id
