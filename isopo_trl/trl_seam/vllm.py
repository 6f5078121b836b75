"""TRL's vLLM in the trainer's process: its weights, how TRL sends it the trainer's, and who else does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .required import require


_GENERATION = "trl.generation.vllm_generation.VLLMGeneration"
require(
    f"{_GENERATION}.sync_weights",
    mentions=("_iter_named_params", "load_weights", "reset_prefix_cache", "enable_sleep_mode"),
)
require(f"{_GENERATION}._iter_named_params", mentions=("_fix_param_name_to_vllm", "named_parameters"))
require(f"{_GENERATION}._fix_param_name_to_vllm", "name")
require(f"{_GENERATION}.generate", mentions=("_llm_weights_sleeping", "sync_weights", "generation_kwargs"))
require("trl.GRPOTrainer.__init__", mentions=("vllm_generation", "_last_loaded_step"))
require("trl.GRPOTrainer._generate_single_turn", mentions=("vllm_generation", "sync_weights", "_last_loaded_step"))


class ColocatedVLLM:
    """vLLM in the process of a trainer."""

    def __init__(self, trainer: Any):
        self._generation = trainer.vllm_generation

    def own(self) -> dict[str, torch.nn.Parameter]:
        """The trainer's parameters, by the names under which TRL sends them."""
        generation = self._generation
        return {generation._fix_param_name_to_vllm(name): p for name, p in generation.model.named_parameters()}

    def theirs(self) -> dict[str, torch.Tensor]:
        """vLLM's parameters, by name."""
        return dict(self._model.named_parameters())

    def stacked(self) -> Mapping[str, Sequence[str]]:
        """Names of modules whose matrices are several of the checkpoint's, one above the other, and these in order."""
        return getattr(self._model, "packed_modules_mapping", None) or {}

    def load(self, name: str, values: torch.Tensor) -> None:
        """Send a parameter, as TRL does."""
        self._model.load_weights([(name, values)])

    def weights_have_changed(self) -> None:
        """Let nothing be taken of what the weights before have computed."""
        self._generation.llm.reset_prefix_cache()

    def send_by(self, stand_in: Callable[[Callable[[], None]], None]) -> None:
        """From now on TRL's sending goes to `stand_in`, whose argument is TRL's own."""
        send = self._generation.sync_weights
        self._generation.sync_weights = lambda: stand_in(send)

    @property
    def _model(self) -> Any:
        return self._generation.llm.llm_engine.model_executor.driver_worker.model_runner.model


def is_colocated(trainer: Any) -> bool:
    """Whether the trainer has vLLM in its process."""
    return trainer.use_vllm and trainer.vllm_mode == "colocate"


def without_texts(settings: dict[str, Any] | None) -> dict[str, Any]:
    """
    Generation settings with which vLLM writes no texts, since TRL takes the tokens. It writes them token by token, in
    Python, while the GPU waits. Only where strings are to end a completion, it has to.
    """
    settings = settings or {}
    return settings if settings.get("stop") else {"detokenize": False, **settings}


def weights_are_others(trainer: Any) -> None:
    """Let vLLM get the weights before the next generation, though no step was made: TRL goes by their number alone."""
    if trainer.use_vllm:
        trainer._last_loaded_step = -1
