"""The share of the trained weights that have moved since training began, from a sample of them."""

import base64
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOTrainer

from ..narrow_weights.stream import first_element
from ..step_size.taken_back import local
from ..trl_seam.log import add_to_log


logger = get_logger(__name__)

# Weights that are looked at, of all trained ones together
SAMPLED = 2**16


class MovedWeights(TrainerCallback, ExportableState):
    """
    Logs the share of the trained weights that have moved since training began.

    It is a figure of [Reinforcement Learning Finetunes Small Subnetworks in Large Language
    Models](https://huggingface.co/papers/2505.11711). `weights/moved` is of the weights as the model has them,
    `weights/moved_bf16` of the same rounded to bf16 before they are compared, where a short step is no step at all.

    At each log line 65,536 weights, drawn once from all trained ones by the trainer's `seed`, are compared with their
    values at the start. These are saved with the trainer's state, so that a run that is resumed goes on with them.

    Example:

    ```python
    >>> from isopo_trl.validation import MovedWeights

    >>> trainer.add_callback(MovedWeights(trainer))
    >>> trainer.train()
    ```

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of any kind derived from TRL's `GRPOTrainer`.
        threshold (`float`, *optional*, defaults to `1e-5`):
            How far a weight has to be from its start to have moved.
    """

    def __init__(self, trainer: GRPOTrainer, threshold: float = 1e-5):
        accelerator, args = trainer.accelerator, trainer.args
        if not threshold >= 0:
            raise ValueError(
                f"threshold={threshold} is a distance between two values of a weight: give a number of at least 0."
            )
        stage = accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0
        if stage == 3 or (trainer.is_fsdp_enabled and not accelerator.is_fsdp2):
            kind = "DeepSpeed's ZeRO-3" if stage == 3 else "FSDP 1"
            raise ValueError(
                f"MovedWeights looks at single weights, and {kind} hides whose they are: use FSDP 2, DDP or ZeRO up "
                "to stage 2, or leave it out."
            )
        self._trainer: Any = trainer
        self.threshold, self._seed = threshold, args.seed
        # The number of trained weights, and the sampled ones' values at the start, in float32 on the CPU
        self._total = 0
        self._start: torch.Tensor | None = None

    def state(self) -> dict[str, Any]:
        start = b"" if self._start is None else self._start.numpy().tobytes()
        return {"args": {}, "attributes": {"total": self._total, "start": base64.b64encode(start).decode()}}

    def on_train_begin(self, args, state, control, **kwargs):
        self._total = sum(p.numel() for p in self._trained())
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        if state.global_step == 0:
            self._start = self._at_start()
        elif isinstance(saved, dict) and saved["attributes"]["total"] == self._total and saved["attributes"]["start"]:
            values = np.frombuffer(base64.b64decode(saved["attributes"]["start"]), np.float32)
            self._start = torch.from_numpy(values.copy())
        elif self._start is None:
            logger.warning(
                "The share of moved weights is not measured in this run: it resumes from a checkpoint that was saved "
                "without MovedWeights or for other weights, and where they began is not known."
            )
        state.stateful_callbacks[name] = self.state()

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_log and self._start is not None:
            add_to_log(self._trainer, "train", self.measure())

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The figures as they are now; on every rank."""
        assert self._start is not None, "training has not begun"
        places, values = self._sample()
        start = self._start.to(values.device)[places]
        narrow = values.bfloat16().float() - start.bfloat16().float()
        moved = [(distance.abs() > self.threshold).sum() for distance in (values - start, narrow)]
        sums = self._over_ranks(torch.stack([*moved, torch.tensor(len(places), device=values.device)]).float())
        whole, rounded, number = sums.tolist()
        return {"weights/moved": whole / max(number, 1), "weights/moved_bf16": rounded / max(number, 1)}

    def _trained(self) -> list[torch.Tensor]:
        return [p for p in self._trainer.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _at_start(self) -> torch.Tensor:
        places, values = self._sample()
        both = values.new_zeros(2, min(SAMPLED, self._total))
        both[0, places], both[1, places] = values, 1.0
        sums, counts = self._over_ranks(both).cpu()
        return sums / counts.clamp(min=1)

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the sampled weights this rank holds, and their values in float32."""
        chosen = torch.arange(self._total)
        if self._total > SAMPLED:
            generator = torch.Generator().manual_seed(self._seed)
            chosen = torch.randint(self._total, (SAMPLED,), generator=generator).sort().values
        places, values, first = [], [], 0
        for p in self._trained():
            own = local(p).detach()
            begin = first + first_element(p, "MovedWeights", "leave it out")
            low, high = torch.searchsorted(chosen, torch.tensor([begin, begin + own.numel()])).tolist()
            places.append(torch.arange(low, high, device=own.device))
            values.append(own.reshape(-1)[(chosen[low:high] - begin).to(own.device)].float())
            first += p.numel()
        device = self._trainer.accelerator.device
        return tuple(torch.cat([each.to(device) for each in of]) for of in (places, values))  # type: ignore[return-value]

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Their sum over the ranks, where each holds other weights."""
        sharded = any(isinstance(p, DTensor) for p in self._trained())
        return self._trainer.accelerator.reduce(sums, reduction="sum") if sharded else sums
