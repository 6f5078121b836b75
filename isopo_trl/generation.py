"""The sampler's own log-probabilities out of `transformers`' generation, which computes them and keeps none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper
from transformers.generation import GenerationMode


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
def recording(model: Any) -> Iterator[list[Recorder]]:
    """
    Context in which `model.generate` is listened to: one [`Recorder`] for each call that draws token by token (beam
    search and the like do not).
    """
    recorders: list[Recorder] = []
    own = getattr(model, "_get_logits_processor", None)

    def with_recorder(generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        assert own is not None
        processors = own(generation_config, *args, **kwargs)
        mode = generation_config.get_generation_mode()
        if mode in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            recorders.append(Recorder(mode is GenerationMode.GREEDY_SEARCH, list(processors)))
            processors.append(recorders[-1])
        return processors

    if own is None:  # a model with a generation of its own
        yield recorders
        return
    replaced = model.__dict__.get("_get_logits_processor")
    model._get_logits_processor = with_recorder
    try:
        yield recorders
    finally:
        del model._get_logits_processor
        if replaced is not None:
            model._get_logits_processor = replaced
