"""The transforms of a run, one after another."""

from typing import Any

import torch

from ..trl_seam.batch import Batch
from .normalisation import normalised
from .transform import STAGES, Generation, Transform, named


class Chain:
    """The transforms that the settings name."""

    def __init__(self, args: Any):
        self._args = args
        self.transforms: list[Transform] = [transform(args) for transform in named(args.advantage_transform)]

    def __bool__(self) -> bool:
        return bool(self.transforms)

    @property
    def selecting(self) -> list[str]:
        """The names of the transforms that leave sequences out."""
        return [transform.name for transform in self.transforms if transform.stage == STAGES[-1]]

    @property
    def needs_behaviour(self) -> bool:
        """Whether a transform asks what tokens were drawn with."""
        return any(transform.needs_behaviour for transform in self.transforms)

    @property
    def credit(self) -> str:
        """Sentences for the model card."""
        return " ".join(transform.credit for transform in self.transforms if transform.credit)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of all transforms."""
        return tuple(name for transform in self.transforms for name in transform.settings)

    def warnings(self) -> list[str]:
        """What the user should know before training."""
        if not (self.selecting and self._args.group_microbatches):
            return []
        return [
            f"advantage_transform={','.join(self.selecting)!r} leaves completions out of the loss, and "
            "group_microbatches=True computes a group whole if one of its completions is in it, so that no time is "
            "saved on the others: set group_microbatches=False, unless token_weights need it."
        ]

    def refuse(self, turns: list[str], is_sharded: bool, needing_all: list[str]) -> None:
        """
        Raise where the settings leave a transform without a meaning.

        Args:
            turns (`list[str]`): what makes several turns of a completion.
            is_sharded (`bool`): whether the LM head is whole on no rank.
            needing_all (`list[str]`): settings with which no sequence can be left out.
        """
        for transform in self.transforms:
            if turns and transform.needs_one_turn:
                raise ValueError(
                    f"advantage_transform={transform.name!r} takes a completion for one turn, and with "
                    f"{' and '.join(turns)} it has several: leave {transform.name!r} out."
                )
            if is_sharded and transform.needs_head:
                raise ValueError(
                    f"advantage_transform={transform.name!r} reads the rows of the LM head, which are whole on no "
                    f"rank under FSDP and ZeRO-3: train under DDP or ZeRO-2, or leave {transform.name!r} out."
                )
        if self.selecting and needing_all:
            raise ValueError(
                f"advantage_transform={','.join(self.selecting)!r} leaves sequences out of the loss, all of which are "
                f"in it with {', '.join(needing_all)}: change that, or choose another transform."
            )

    def verify_generation(self, batch: Batch, is_whole: bool, trainer: str) -> None:
        """
        Raise where the completions of a generation, those of this rank in `batch`, are not what transforms take them
        for. `is_whole`: TRL itself has made it, and there are rewards and a completion for each advantage.
        """
        if not is_whole:
            raise RuntimeError(
                f"advantage_transform={self._args.advantage_transform!r} needs the rewards of TRL's own generation, "
                f"which {trainer} does not make: set advantage_transform=None, or call "
                "`super()._generate_and_score_completions`."
            )
        one_turn = [transform.name for transform in self.transforms if transform.needs_one_turn]
        if one_turn and not bool((batch.scored.bool() == batch.completion_mask.bool()).all()):
            raise ValueError(
                f"advantage_transform={','.join(one_turn)!r} takes a completion for one turn, and in some of this "
                "generation a tool or environment has written: leave it out."
            )

    def chosen(self) -> dict[str, Any]:
        """Names and settings, by which a checkpoint knows them again."""
        return {name: getattr(self._args, name) for name in ("advantage_transform", *self.settings)}

    def apply(self, generation: Generation) -> torch.Tensor:
        """The advantages `[N]` that come to the loss, of a generation with the ones that TRL has made."""
        for transform in self.transforms:
            transform.verify_rewards(generation)
            result = transform.apply(generation)
            self._verify(result, generation, transform)
            if transform.stage == "rewards":
                generation.rewards = result
                result = normalised(result, generation.group, str(self._args.scale_rewards))
            generation.advantages = result.masked_fill(~generation.is_scored, 0)
        return generation.advantages

    @staticmethod
    def _verify(result: Any, generation: Generation, transform: Transform) -> None:
        shape, expected = list(getattr(result, "shape", [])), list(generation.rewards.shape)
        if not isinstance(result, torch.Tensor) or shape != expected:
            found = f"of shape {shape}" if isinstance(result, torch.Tensor) else f"of type {type(result).__name__}"
            raise ValueError(
                f"advantage_transform={transform.name!r}: `apply` of {type(transform).__name__} returned something "
                f"{found} instead of one number for each completion, a tensor of shape {expected}."
            )
        broken = int((~result[generation.is_scored].isfinite()).sum())
        if broken:
            raise ValueError(
                f"advantage_transform={transform.name!r}: `apply` of {type(transform).__name__} returned numbers that "
                f"are not finite for {broken} completions with a reward: look at what it divides by, and return 0 for "
                "a completion that is to be left out."
            )

    def state_dict(self) -> dict[str, Any]:
        """What each transform needs to go on, by its name."""
        return {transform.name: transform.state_dict() for transform in self.transforms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what [`state_dict`] returned; a transform of which it has nothing begins anew."""
        for transform in self.transforms:
            transform.load_state_dict(state.get(transform.name, {}))
