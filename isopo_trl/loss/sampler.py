"""
What a generation's tokens were drawn with: the sampler's own log-probabilities out of `transformers`' generation,
which computes them and keeps none, and the policy that a batch was drawn by.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper
from transformers.generation import GenerationMode

from ..trl_seam.batch import Batch
from ..trl_seam.loans import intercepted


class Recorder(LogitsProcessor):
    """
    Last of the logits processors: notes with what log-probability each token was drawn, after temperature, top-k,
    penalties and all else, one step after the other.

    Args:
        greedy (`bool`): whether the most likely token is taken, with certainty, instead of a random one.
        others (`list[LogitsProcessor]`): the processors before this one.
    """

    def __init__(self, greedy: bool, others: list[Any]):
        self.greedy = greedy
        self.others = others
        self._columns: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is not None:
            self._columns.append(self._of(input_ids[:, -1]))
        self._scores = scores
        return scores

    def _of(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._scores is not None
        if self.greedy:
            return self._scores.new_zeros(len(tokens))
        chosen = self._scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return chosen - self._scores.logsumexp(1)

    def draws_at(self, temperature: float) -> bool:
        """Whether tokens are drawn from the model's distribution at this temperature, and from nothing else."""
        temperatures = [getattr(p, "temperature", None) for p in self.others if type(p) is TemperatureLogitsWarper]
        only = len(temperatures) == len(self.others)
        return not self.greedy and only and (temperatures or [1.0]) == [temperature]

    def logps(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens of `completions`, which begin with the first token that was drawn."""
        if self._scores is None:
            return [[] for _ in completions]
        # The last token of a completion that went on to the end is in no input
        steps = len(self._columns) + 1
        last = [ids[-1] if len(ids) == steps else 0 for ids in completions]
        columns = [*self._columns, self._of(torch.tensor(last, device=self._scores.device))]
        rows = torch.stack(columns, dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]


@contextmanager
def noting_logps(model: Any) -> Iterator[list[Recorder]]:
    """
    Context in which `model.generate` notes what it draws tokens with: one [`Recorder`] for each call that draws token
    by token (beam search and the like do not).
    """
    recorders: list[Recorder] = []

    def with_recorder(own: Callable[..., Any], generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = own(generation_config, *args, **kwargs)
        mode = generation_config.get_generation_mode()
        if mode in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            recorders.append(Recorder(mode is GenerationMode.GREEDY_SEARCH, list(processors)))
            processors.append(recorders[-1])
        return processors

    is_usual = hasattr(model, "_get_logits_processor")  # not a model with a generation of its own
    with intercepted(model, "_get_logits_processor", with_recorder) if is_usual else nullcontext():
        yield recorders


class Turns:
    """
    The turns of one generation by `transformers`: stands in for the trainer's own, and adds what tokens were drawn
    with.
    """

    def __init__(self, model: Any, temperature: float):
        self._model = model
        self._temperature = temperature
        self._on_policy: list[bool] = []

    def __call__(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list, list | None]:
        with noting_logps(self._model) as recorders:
            completion_ids, logps = generate(*args, **kwargs)
        if logps is None and len(recorders) == 1:
            logps = recorders[0].logps(completion_ids)
            self._on_policy.append(recorders[0].draws_at(self._temperature))
        return completion_ids, logps

    @property
    def drawn_by_policy(self) -> bool:
        """Whether the policy itself, at the loss's temperature, and nothing else drew the tokens of every turn."""
        return bool(self._on_policy) and all(self._on_policy)


# Which prompt a completion is of


PROMPT_NUMBERS = "prompt_numbers"  # a batch's key of the number of each sequence's prompt, `[B]`


def note_prompts(batch: dict[str, Any], rank: int, generations: int | None) -> None:
    """Note in a generated batch, in which completions of a prompt follow each other over all ranks, whose they are."""
    count = len(batch["advantages"])
    numbers = torch.arange(rank * count, (rank + 1) * count, device=batch["advantages"].device)
    batch[PROMPT_NUMBERS] = numbers // (generations or 1)


# Which policy drew a batch


def note_origin(batch: dict[str, Any], optimizer_steps: int, drawn_by_policy: bool) -> None:
    """
    Note in a batch that TRL keeps and cuts up how many optimizer steps came before its generation, and whether the
    policy itself, at the loss's temperature, and nothing else drew its tokens.
    """
    batch["generated_after"] = torch.tensor(optimizer_steps)
    batch["drawn_by_policy"] = torch.tensor(drawn_by_policy)


def is_fresh(batch: Batch, optimizer_steps: int) -> bool:
    """Whether no optimizer step came between the generation of a batch, whose origin was noted, and now."""
    return int(batch.get("generated_after", -1)) == optimizer_steps


def says_what_drew_it(batch: Batch) -> bool:
    """Whether anybody has told what the tokens of a batch were drawn with."""
    return batch.sampler_logps is not None or batch.old_logps is not None


def is_own(batch: Batch, optimizer_steps: int) -> bool:
    """Whether the policy as it is now drew the tokens of a batch, as far as anybody knows: then all ratios are 1."""
    fresh = is_fresh(batch, optimizer_steps)
    return fresh and (batch.sampler_logps is None or bool(batch.get("drawn_by_policy", False)))


def behaviour_logps(batch: Batch, logps: torch.Tensor, optimizer_steps: int) -> torch.Tensor:
    """
    Log-probabilities `[B, C]` under the policy that drew the tokens; NaN where nobody knows.

    Args:
        batch ([`Batch`]): with its origin noted.
        logps (`torch.Tensor`): `[B, C]`, those of the policy as it is, without gradient.
        optimizer_steps (`int`): number of optimizer steps up to now.
    """
    fresh = is_fresh(batch, optimizer_steps)
    if batch.sampler_logps is not None and not (fresh and batch.get("drawn_by_policy", False)):
        return batch.sampler_logps
    return logps if fresh or batch.old_logps is None else batch.old_logps
