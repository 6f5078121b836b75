"""What a transform of advantages is, and the registry of those there are."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ..settings.names import refuse_taken
from ..settings.ranges import Bound, outside


# In this order: rewards are changed, advantages are made of them, these are changed, and some are set to 0
STAGES = ("rewards", "normalisation", "advantages", "selection")


class Rollout(Protocol):
    """What can be asked of a generation's completions, of all ranks; all ranks have to ask the same."""

    @property
    def prompts(self) -> torch.Tensor:
        """`[N / G]`, a key of each prompt, the same whenever it comes again."""

    @property
    def has_tokens(self) -> torch.Tensor:
        """`[N]`, which completions have scored tokens: not those that `mask_truncated_completions` has masked."""

    @property
    def entropies(self) -> torch.Tensor:
        """`[N]`, the mean entropy of the distributions that a completion's tokens were drawn from; 0 without any."""

    @property
    def log_ratios(self) -> torch.Tensor:
        """`[N]`, the sum of `log pi - log mu` over a completion's tokens; `mu` is what they were drawn with."""

    @property
    def sensitivities(self) -> torch.Tensor:
        """
        `[N, d]`, the mean over a completion's tokens of `W_y - sum_v p_v W_v`, with the rows `W` of the LM head; 0
        without any.
        """

    def which(self, holds: Callable[[Any], bool]) -> torch.Tensor:
        """`[N]`, of which completions, texts or lists of messages, something holds."""


@dataclass
class Generation:
    """
    The completions of a generation, of all ranks, as a transform sees them: those of a prompt follow each other. All
    numbers are float64, on the host.

    Args:
        rewards (`torch.Tensor`): `[N]`, weighted sums over the reward functions; NaN where none gave one.
        advantages (`torch.Tensor`): `[N]`, as they are up to now; 0 where there is no reward.
        group (`int`): `G`, the number of completions per prompt.
        rollout ([`Rollout`]): more of the completions, which is computed where it is asked for.
        figures (`dict[str, float]`): takes what is to be logged, under `advantages/`.
    """

    rewards: torch.Tensor
    advantages: torch.Tensor
    group: int
    rollout: Rollout
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def is_scored(self) -> torch.Tensor:
        """`[N]`, which completions have a reward."""
        return ~self.rewards.isnan()

    def places(self) -> Iterator[torch.Tensor]:
        """For each prompt, the places among all completions of those of its own that have a reward."""
        for first in range(0, len(self.rewards), self.group):
            yield first + self.is_scored[first : first + self.group].nonzero().flatten()


class Transform(ABC):
    """
    A transform of a generation's rewards or advantages, before they come to the loss.

    A subclass is registered by name ([`register`]) and chosen by `ISOPOConfig(advantage_transform=...)`. It has to say
    [`apply`]; all else has a default. What it is given is the same on every rank, and so must be what it returns.

    Attributes:
        name (`str`): the registered name, set by [`register`].
        title (`str`): what messages call it.
        credit (`str`): a sentence for the model card.
        stage (`str`): what [`apply`] returns. `"rewards"`: other rewards, of which advantages are made as TRL does.
            `"normalisation"`: advantages that are made of the rewards in another way than TRL's. `"advantages"`:
            other advantages. `"selection"`: the advantages, with 0 for sequences that are to be left out.
        settings (`tuple[str, ...]`): fields of the configuration that are its own: refused without it.
        ranges (`dict[str, tuple]`): ranges of some of these, by their names, and what messages say that they are.
        takes_rewards (`tuple[int, int]`, *optional*): the only two rewards that it takes.
        gives_any_reward (`bool`): whether it makes rewards of any size, after which none that takes only two can come.
        needs_behaviour (`bool`): whether it asks for [`Rollout.log_ratios`].
        needs_head (`bool`): whether it asks for [`Rollout.sensitivities`].
        needs_one_turn (`bool`): whether it has no meaning for completions in which a tool or environment has written.

    Args:
        args ([`ISOPOConfig`]): the settings, as checked by [`refusals`].
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    credit: ClassVar[str] = ""
    stage: ClassVar[str] = "advantages"
    settings: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[dict[str, tuple[Bound, str]]] = {}
    takes_rewards: ClassVar[tuple[int, int] | None] = None
    gives_any_reward: ClassVar[bool] = False
    needs_behaviour: ClassVar[bool] = False
    needs_head: ClassVar[bool] = False
    needs_one_turn: ClassVar[bool] = False

    def __init__(self, args: Any):
        self.args = args

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        """Pairs of whether a setting cannot be honoured with this transform, and the message that says so."""
        yield from (outside(args, name, *of) for name, of in cls.ranges.items())
        yield (
            cls.takes_rewards is not None and args.kl_in_reward,
            f"kl_in_reward=True makes rewards of any size, and advantage_transform={cls.name!r} needs rewards of "
            f"{_both(cls.takes_rewards)}: set kl_in_reward=False, which leaves the divergence in the loss.",
        )

    def verify_rewards(self, generation: Generation) -> None:
        """Raise for a reward that it does not take."""
        if self.takes_rewards is None:
            return
        one, two = self.takes_rewards
        rewards = generation.rewards
        other = rewards[generation.is_scored & (rewards != one) & (rewards != two)]
        if len(other):
            raise ValueError(
                f"advantage_transform={self.name!r} needs rewards of {one} and {two}, and this generation has "
                f"{other[0].item():.4g}: let reward_funcs return these two, with reward_weights of 1."
            )

    @abstractmethod
    def apply(self, generation: Generation) -> torch.Tensor:
        """Rewards or advantages `[N]`, as `stage` says."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that resumes needs: tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # nothing, unless there is a state
        """Take what [`state_dict`] returned; `{}` where a checkpoint has nothing of it."""


# The registry


TRANSFORMS: dict[str, type[Transform]] = {}
T = TypeVar("T", bound=type[Transform])


def register(name: str) -> Callable[[T], T]:
    """
    Class decorator that registers a [`Transform`] as `ISOPOConfig(advantage_transform=name)`.

    Example:

    ```python
    @register("positive")
    class Positive(Transform):
        def apply(self, generation):
            return generation.advantages.clamp(min=0)
    ```
    """

    def registered(transform: T) -> T:
        refuse_taken("advantage_transform", name, TRANSFORMS, transform)
        if transform.stage not in STAGES or "," in name:
            raise ValueError(
                f"advantage_transform={name!r}, with stage={transform.stage!r}, cannot be registered: give a name "
                f"without a comma, and a stage that is one of {', '.join(map(repr, STAGES))}."
            )
        transform.name = name
        TRANSFORMS[name] = transform
        return transform

    return registered


def named(names: str | None) -> list[type[Transform]]:
    """The transforms of these names, which commas separate; raises `ValueError` for one that is unknown."""
    listed = [] if names is None else [name.strip() for name in names.split(",")]
    for name in listed:
        if name not in TRANSFORMS:
            raise ValueError(
                f"advantage_transform={names!r}: {name!r} is unknown, choose one of "
                f"{', '.join(map(repr, TRANSFORMS))}, or several of them with commas between."
            )
    return [TRANSFORMS[name] for name in listed]


def _wrong_after(one: type[Transform], other: type[Transform]) -> str:
    """Why `other` cannot come after `one`; nothing where it can."""
    if STAGES.index(one.stage) > STAGES.index(other.stage):
        return f"{other.name!r} would undo what {one.name!r} does, as {other.stage} come before {one.stage}"
    if one.gives_any_reward and other.takes_rewards is not None:
        return f"{other.name!r} needs rewards of {_both(other.takes_rewards)}, which {one.name!r} changes"
    return ""


def _both(rewards: tuple[int, int] | None) -> str:
    return " and ".join(map(str, rewards or ()))


def refusals(args: Any) -> Iterator[tuple[bool, str]]:
    """All that the transforms, chosen or not, find wrong with the settings."""
    given = args.advantage_transform
    chosen = named(given)
    pairs = [
        (_wrong_after(one, other), _wrong_after(other, one), other)
        for one, other in itertools.combinations(dict.fromkeys(chosen), 2)
    ]
    # Those first that go in no order
    for wrong, turned, other in sorted(pairs, key=lambda pair: not pair[1]):
        remedy = f"put {other.name!r} first"
        if turned:
            remedy = f"the other way round {turned}, so leave one of them out"
        yield bool(wrong), f"advantage_transform={given!r}: {wrong}: {remedy}."
    normalising = [transform.name for transform in chosen if transform.stage == "normalisation"]
    yield (
        len(normalising) > 1 or len({*chosen}) < len(chosen),
        f"advantage_transform={given!r} names a transform twice, or two that make advantages of rewards "
        f"({', '.join(name for name, kind in TRANSFORMS.items() if kind.stage == 'normalisation')}): keep one of "
        "them.",
    )
    of_rewards = [transform.name for transform in chosen if transform.stage in STAGES[:2]]
    yield (
        bool(of_rewards) and args.multi_objective_aggregation != "sum_then_normalize",
        f"advantage_transform={given!r} takes one reward per completion, and multi_objective_aggregation="
        f"{args.multi_objective_aggregation!r} normalises each function's by itself: set "
        "multi_objective_aggregation='sum_then_normalize'.",
    )
    yield (
        bool(normalising) and args.scale_rewards != "group",
        f"scale_rewards={args.scale_rewards!r} has no meaning with advantage_transform={given!r}, which makes "
        "advantages of rewards in its own way: remove it.",
    )
    for transform in TRANSFORMS.values():
        own = args.given(*transform.settings) if transform not in chosen else []
        yield (
            bool(own),
            f"{', '.join(own)} is a setting of {transform.title or transform.name}, which advantage_transform="
            f"{given!r} does not name: remove it, or set advantage_transform={transform.name!r}.",
        )
    for transform in chosen:
        yield from transform.refusals(args)
