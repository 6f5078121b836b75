"""What a token weighting is, and the registry of those there are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ..settings.names import refuse_taken
from ..settings.ranges import Bound, outside
from ..trl_seam.head import HeadFigures
from .ratios import batch_figures, log_ratios, ratio_sums


@dataclass(frozen=True)
class Tokens:
    """
    A microbatch's completion tokens, as a weighting sees them.

    Args:
        logps (`torch.Tensor`): `[B, C]`, log-probabilities of the training forward, with their gradient.
        behaviour (`torch.Tensor`): `[B, C]`, those under the policy that drew the tokens; NaN where nobody knows.
        mask (`torch.Tensor`): `[B, C]`, nonzero at scored tokens.
        log_ratio (`torch.Tensor`): `[B, C]`, `log r_t` with the gradient of `logps`; 0 where no token is scored.
        advantages (`torch.Tensor`, *optional*): `[B]`, those of the sequences.
        ids (`torch.Tensor`, *optional*): `[B, C]`, the tokens themselves.
        prompts (`torch.Tensor`, *optional*): `[B]`, the number of each sequence's prompt, where it is known.
        head ([`HeadFigures`], *optional*): `[B, C]`, what the LM head says of each token, where it was asked.
        learning_rate (`float`, *optional*): that of the optimizer step under way, likewise.
    """

    logps: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    head: HeadFigures | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Unscaled:
    """
    A term of the loss that carries no advantage, token by token and before the loss's normalisation.

    Args:
        value (`torch.Tensor`): `[B, C]`, without gradient.
        slope (`torch.Tensor`): `[B, C]`, its derivative with respect to each token's log-probability.
    """

    value: torch.Tensor
    slope: torch.Tensor


@dataclass
class Weighted:
    """
    What a weighting makes of a microbatch.

    Args:
        weights (`torch.Tensor`, *optional*):
            `[B, C]`, or `[B, 1]` for whole sequences: multiply each token's part of the loss, without gradient.
        log_ratio (`torch.Tensor`, *optional*):
            `[B, C]`, with gradient, in place of the log-probabilities: the objective is then `min(r A, clip(r) A)` of
            this ratio, clipped at the configuration's `epsilon` and `epsilon_high`.
        old_logps (`torch.Tensor`, *optional*):
            `[B, C]`, without gradient: those of the old policy to which TRL's loss takes the ratio, and clips it.
            Cannot be combined with the others.
        unscaled (`Callable`, *optional*):
            Asked after the loss, where the device has been waited for: the term that no rule may rescale, or `None`
            where it vanishes. Needs `goes_back_twice`, and cannot be combined with `log_ratio`.
        sums (`torch.Tensor`, *optional*):
            As [`Weighting.observe`] returned them; observed afterwards if `None`.
        figures (`dict[str, float]`):
            To be logged for this microbatch, beside those of the step.
    """

    weights: torch.Tensor | None = None
    log_ratio: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    unscaled: Callable[[], Unscaled | None] | None = None
    sums: torch.Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.unscaled is not None and self.log_ratio is not None:
            raise ValueError(
                "A weighting returned both `log_ratio` and `unscaled`: the loss's normalisation, which the unscaled "
                "term shares, cannot be told from the clipped ratio, so return only one of the two."
            )
        others = (self.weights, self.log_ratio, self.unscaled)
        if self.old_logps is not None and any(other is not None for other in others):
            raise ValueError(
                "A weighting returned `old_logps` together with `weights`, `log_ratio` or `unscaled`: the loss would "
                "count the ratio twice, so return only one of them."
            )


class Ranks(Protocol):
    """The processes that share a step, as [`~accelerate.Accelerator`] has them."""

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor: ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor: ...


class OneRank:
    """A process alone."""

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Weighting(ABC):
    """
    A weighting of tokens: how much each token's log-probability counts, apart from the sequences' coefficients.

    A subclass is registered by name ([`register`]) and chosen by `ISOPOConfig(token_weights=...)`. It has to say
    [`weigh`]; all else has a default.

    Attributes:
        name (`str`): the registered name, set by [`register`].
        title (`str`): what messages call it.
        credit (`str`): a sentence for the model card.
        settings (`tuple[str, ...]`): fields of the configuration that are its own: refused with another weighting.
        ranges (`dict[str, tuple]`): ranges of some of these, by their names, and what messages say that they are.
        kept_on_resume (`tuple[str, ...]`): those among its settings that change the size of tokens' gradients, and so
            what a checkpoint's running means are of: it is not resumed with others.
        defaults (`dict[str, float]`): settings of GRPO that mean something under this weighting, and what they are
            where the user gave none (`epsilon`, `epsilon_high`); without an entry they are refused.
        needs_behaviour (`bool`): whether it looks at the behaviour policy's log-probabilities at all.
        needs_prompts (`bool`): whether it asks in training which sequences are of one prompt.
        of_plain_steps (`bool`): whether it looks at what a step along the gradient does to the LM head: it is told the
            head's figures and the learning rate, and means steps of SGD without momentum.
        goes_back_twice (`bool`): whether there is an unscaled term, which has a backward pass of its own.
        looks_across_sequences (`bool`): whether a sequence without an advantage matters, to others or by itself. Then
            `skip_zero_advantage` leaves out none unless all ratios are 1.

    Args:
        args ([`ISOPOConfig`]): the settings, as checked by [`refusals`].
        ranks ([`Ranks`], *optional*): the processes that share a step.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    credit: ClassVar[str] = ""
    settings: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[dict[str, tuple[Bound, str]]] = {}
    kept_on_resume: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, float]] = {}
    needs_behaviour: ClassVar[bool] = True
    needs_prompts: ClassVar[bool] = False
    of_plain_steps: ClassVar[bool] = False
    goes_back_twice: ClassVar[bool] = False
    looks_across_sequences: ClassVar[bool] = True

    def __init__(self, args: Any, ranks: Ranks | None = None):
        self.args = args
        self.ranks: Ranks = OneRank() if ranks is None else ranks
        # Over the step's tokens so far, on all ranks; None before the first
        self.sums: torch.Tensor | None = None

    # Settings

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        """Pairs of whether a setting cannot be honoured with this weighting, and the message that says so."""
        yield from (outside(args, name, *of) for name, of in cls.ranges.items())
        yield (
            args.importance_sampling_level != "token",
            f"importance_sampling_level={args.importance_sampling_level!r} averages ratios over a sequence, but "
            f"token_weights={cls.name!r} is made of tokens' ratios: set importance_sampling_level='token'.",
        )

    @classmethod
    def refusals_beside(cls, args: Any, chosen: "type[Weighting]") -> Iterator[tuple[bool, str]]:
        """Refusals of this weighting's settings while another one is `chosen`."""
        given = args.given(*(name for name in cls.settings if name not in chosen.settings))
        yield (
            bool(given),
            f"{', '.join(given)} is a setting of {cls.title or cls.name}, but token_weights={chosen.name!r}: remove "
            f"it, or set token_weights={cls.name!r}.",
        )

    def warnings(self) -> list[str]:
        """What the user should know before training."""
        return []

    def chosen(self) -> dict[str, Any]:
        """Its name and settings, by which a checkpoint knows the weighting again."""
        settings = {name: getattr(self.args, name) for name in (*self.settings, *self.defaults)}
        return {"token_weights": self.name, **settings}

    # One microbatch

    def __call__(
        self,
        logps: torch.Tensor,
        behaviour: torch.Tensor,
        mask: torch.Tensor,
        advantages: torch.Tensor | None = None,
        **others: Any,
    ) -> Weighted:
        """
        Weigh the tokens of a microbatch, given by the fields of [`Tokens`] but for their ratio, and, where gradients
        are recorded, add it to the step's.
        """
        log_ratio = torch.where(mask.bool(), log_ratios(logps, behaviour), 0)
        tokens = Tokens(logps, behaviour, mask, log_ratio, advantages, **others)
        weighted = self.weigh(tokens)
        if not isinstance(weighted, Weighted):
            raise TypeError(
                f"token_weights={self.name!r}: `weigh` of {type(self).__name__} returned {type(weighted).__name__} "
                "instead of `Weighted`: say what the numbers are, as in `return Weighted(weights=...)`."
            )
        if weighted.unscaled is not None and not self.goes_back_twice:
            raise TypeError(
                f"token_weights={self.name!r} returned an unscaled term: set `goes_back_twice = True` on "
                f"{type(self).__name__}, so that the trainer prepares for its backward pass."
            )
        if weighted.sums is None:
            weighted.sums = self.observe(tokens)
        return weighted

    @abstractmethod
    def weigh(self, tokens: Tokens) -> Weighted:
        """What becomes of a microbatch's tokens."""

    def observe(self, tokens: Tokens, *others: torch.Tensor) -> torch.Tensor:
        """
        Sums over the scored tokens `[4 + len(others)]` ([`ratio_sums`], then `others`, one number each), of all ranks
        and, in training, of the step's microbatches up to this one: the later ones have not been seen.
        """
        sums = ratio_sums(tokens.log_ratio, tokens.mask)
        if others:
            sums = torch.cat([sums, *(other.to(sums.dtype).reshape(1) for other in others)])
        sums = self.ranks.reduce(sums, reduction="sum")
        if torch.is_grad_enabled():
            self.sums = sums = sums if self.sums is None else self.sums + sums
        return sums

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `[n]` of all ranks as one tensor, the same on each; every rank may have another number of them."""
        longest = int(self.ranks.gather(torch.tensor([len(values)], device=values.device)).max())
        if not longest:
            return values
        padded = torch.nn.functional.pad(values, (0, longest - len(values)), value=torch.nan)
        gathered = self.ranks.gather(padded)
        return gathered[~gathered.isnan()]

    def figures(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is logged, under `off_policy/`, of the sums that [`observe`] returned."""
        return batch_figures(sums[:4])

    # One optimizer step

    def step(self) -> dict[str, torch.Tensor]:
        """Close an optimizer step, and return its figures; none without a microbatch."""
        sums, self.sums = self.sums, None
        return {} if sums is None else self.figures(sums)

    def reset(self) -> None:
        """Forget the step under way."""
        self.sums = None


# Of those that take bounds from a batch
SCOPE: dict[str, tuple[Bound, str]] = {
    "token_weights_scope": (
        (lambda x: x in ("step", "microbatch"), "'step' or 'microbatch'"),
        "says which tokens bounds are taken from",
    )
}


# The registry


WEIGHTINGS: dict[str, type[Weighting]] = {}
W = TypeVar("W", bound=type[Weighting])


def register(name: str) -> Callable[[W], W]:
    """
    Class decorator that registers a [`Weighting`] as `ISOPOConfig(token_weights=name)`.

    Example:

    ```python
    @register("capped")
    class Capped(Weighting):
        def weigh(self, tokens):
            return Weighted(weights=tokens.log_ratio.detach().exp().clamp(max=2.0))
    ```
    """

    def registered(weighting: W) -> W:
        refuse_taken("token_weights", name, WEIGHTINGS, weighting)
        weighting.name = name
        WEIGHTINGS[name] = weighting
        return weighting

    return registered


def named(name: str | None) -> type[Weighting]:
    """The weighting of this name; raises `ValueError` if there is none."""
    if name not in WEIGHTINGS:
        raise ValueError(f"token_weights={name!r} is unknown: choose one of {', '.join(map(repr, WEIGHTINGS))}.")
    return WEIGHTINGS[name]


def refusals(args: Any) -> Iterator[tuple[bool, str]]:
    """All that the weightings, chosen or not, find wrong with the settings."""
    chosen = named(args.token_weights)
    for other in WEIGHTINGS.values():
        if other is not chosen:
            yield from other.refusals_beside(args, chosen)
    yield from chosen.refusals(args)
