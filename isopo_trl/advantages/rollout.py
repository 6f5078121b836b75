"""What transforms ask of a generation's completions: on this rank by the trainer's passes, gathered over ranks."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from ..geometry.reservoir import content_keys
from ..geometry.statistics import scalar_dtype
from ..loss.sampler import behaviour_logps, is_own
from ..trl_seam.batch import Batch, has_images
from ..trl_seam.scoring import Scoring, distribution_inputs, takes_positions


class Measured:
    """
    A [`Rollout`] by the trainer's own passes, none of which is made unless it is asked for.

    Args:
        scoring ([`Scoring`]): the trainer's scoring passes.
        accelerator (`Accelerator`): the ranks.
        batch ([`Batch`]): the completions of this rank, as TRL has generated them, with their origin noted.
        completions (`list`): the same as texts or lists of messages.
        group (`int`): completions per prompt.
        optimizer_steps (`int`): number of optimizer steps up to now.
        rows (`int`): how many sequences a pass may have.
    """

    def __init__(
        self,
        scoring: Scoring,
        accelerator: Any,
        batch: Batch,
        completions: list[Any],
        group: int,
        optimizer_steps: int,
        rows: int,
    ):
        self._scoring, self._accelerator, self._batch = scoring, accelerator, batch
        self._completions, self._group = completions, group
        self._optimizer_steps, self._rows = optimizer_steps, rows

    def _of_all_ranks(self, values: torch.Tensor) -> torch.Tensor:
        gathered = self._accelerator.gather(values.contiguous()).cpu()
        return gathered.double() if gathered.is_floating_point() else gathered

    @cached_property
    def prompts(self) -> torch.Tensor:
        if has_images(self._batch):
            raise ValueError(
                "advantage_transform knows a prompt again by its text, and these prompts have images: leave out what "
                "keeps something of each prompt ('dcpo')."
            )
        keys = content_keys(self._batch["prompt_ids"], self._batch["prompt_mask"])
        return self._of_all_ranks(keys)[:: self._group]

    @cached_property
    def has_tokens(self) -> torch.Tensor:
        return self._of_all_ranks(self._batch.scored.any(1).int()).bool()

    @cached_property
    def entropies(self) -> torch.Tensor:
        entropies, scored = self._scoring.entropies(self._batch, self._rows), self._batch.scored
        means = (entropies.to(scalar_dtype(entropies.device)) * scored).sum(1) / scored.sum(1).clamp(min=1)
        return self._of_all_ranks(means)

    @cached_property
    def log_ratios(self) -> torch.Tensor:
        batch = self._batch
        own = torch.tensor([is_own(batch, self._optimizer_steps)], dtype=torch.int32, device=self._accelerator.device)
        if self._accelerator.gather(own).min():
            return torch.zeros(self._accelerator.num_processes * len(batch.advantages), dtype=torch.float64)
        logps = self._scoring.logps_without_gradient(batch, self._rows)
        ratios = logps.to(scalar_dtype(logps.device)) - behaviour_logps(batch, logps, self._optimizer_steps)
        return self._of_all_ranks(torch.nan_to_num(ratios, nan=0.0).mul(batch.scored).sum(1))

    @cached_property
    def sensitivities(self) -> torch.Tensor:
        if has_images(self._batch) or not takes_positions(self._scoring.base_model()):
            raise ValueError(
                "advantage_transform='g2rl' asks for the logits at given positions of texts, which this model, or a "
                "prompt with images, does not give: leave 'g2rl' out."
            )
        head = self._scoring.head_rows()
        rows = [self._sensitivity(self._batch.rows([row]), head) for row in range(len(self._batch.advantages))]
        return self._of_all_ranks(torch.stack(rows))

    def _sensitivity(self, batch: Batch, head: torch.Tensor) -> torch.Tensor:
        """`[d]`, of the only sequence of a batch; one pass, without gradient."""
        scored = batch.scored[0].bool()
        columns = torch.arange(len(scored), device=scored.device)
        with torch.no_grad():
            logits = self._scoring.log_distributions(*distribution_inputs(batch, columns))[0]
            # Rounded to the rows' own type, in which they are multiplied
            p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1).to(head.dtype)
            difference = (head[batch["completion_ids"][0]] - p @ head)[scored]
            wide = torch.promote_types(head.dtype, torch.float32)
            return difference.to(wide).sum(0) / max(int(scored.sum()), 1)

    def which(self, holds: Callable[[Any], bool]) -> torch.Tensor:
        device = self._accelerator.device
        found = [int(holds(completion)) for completion in self._completions]
        return self._of_all_ranks(torch.tensor(found, dtype=torch.int32, device=device)).bool()
