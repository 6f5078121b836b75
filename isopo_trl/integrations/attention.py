"""
Attention without a mask.

TRL pads prompts on the left, so that attention gets a mask, and PyTorch has no fast kernel for one. A model that knows
positions by rotary embeddings alone sees how far apart tokens are, and not where they stand. So the decoder of such a
model gets sequences that begin at the first position. Padding stands behind them, where causal attention does not
look, and no mask is needed; what all rows have of it is left out. The decoder's output is moved back, so that nobody
outside of it notices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..trl_seam.head import scores_rows_alone
from ..trl_seam.loans import borrowed


# Of text alone, whose only knowledge of positions are rotary embeddings: in float64, this file's test finds the same
# hidden states and gradients wherever a sequence stands
FAMILIES = frozenset(
    (
        *("arcee", "cohere", "cohere2", "diffllama", "exaone4", "gemma", "gemma3_text", "glm", "glm4", "granite"),
        *("granitemoe", "helium", "llama", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi"),
        *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    )
)
# Others go by the largest position of a batch
_ROTARY = frozenset(("default", "linear", "llama3", "yarn"))
_LAYERS = frozenset(("full_attention", "sliding_attention"))
_TAKEN = {"input_ids", "attention_mask"}
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layout:
    """
    Where sequences stand if each begins at the first position.

    Args:
        shifts (`torch.Tensor`): `[B]`, positions of padding before each sequence.
        width (`int`): positions of the longest sequence.
    """

    shifts: torch.Tensor
    width: int

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Layout | None":
        """For an attention mask `[B, T]`; `None` where there is padding inside a sequence. Waits for the device."""
        real, T = mask != 0, mask.size(1)
        numbers = torch.arange(T, device=mask.device)
        first = torch.where(real, numbers, T).amin(1)
        ends = torch.where(real, numbers + 1, 0).amax(1)
        lengths = real.sum(1)
        whole = (lengths == ends - first) | (lengths == 0)
        is_whole, width = torch.stack([whole.all().to(lengths), lengths.max()]).tolist()
        return cls(torch.where(lengths == 0, 0, first), max(width, 1)) if is_whole else None

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T]` to `[B, width]`, with zeros for padding that was none before."""
        return _shifted(x, self.shifts, self.width)

    def moved_back(self, x: torch.Tensor, T: int) -> torch.Tensor:
        """`[B, width, d]` to `[B, T, d]`, with gradient and zeros for padding."""
        return _MovedBack.apply(x, self.shifts.to(x.device), T)


def _shifted(x: torch.Tensor, shifts: torch.Tensor, width: int) -> torch.Tensor:
    """`[B, T, ...]` to `[B, width, ...]`: at position t what was at t plus the row's shift, or zero."""
    B, T = x.shape[:2]
    places = torch.arange(width, device=x.device) + shifts.unsqueeze(1)
    rows = places.clamp(0, T - 1) + T * torch.arange(B, device=x.device).unsqueeze(1)
    moved = x.reshape(B * T, *x.shape[2:]).index_select(0, rows.view(-1)).view(B, width, *x.shape[2:])
    outside = (places < 0) | (places >= T)
    return moved.masked_fill_(outside.view(B, width, *[1] * (x.dim() - 2)), 0)


class _MovedBack(torch.autograd.Function):
    """By index, whose own gradient would be sums in any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shifts: torch.Tensor, T: int) -> torch.Tensor:
        ctx.shifts, ctx.width = shifts, x.size(1)
        return _shifted(x, -shifts, T)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _shifted(gradient, ctx.shifts, ctx.width), None, None


class Attention:
    """
    Leaves the mask out of passes of the models that can do without.

    Args:
        accelerator (`Accelerator`): who prepared them.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._unwrapped: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._is_given = False
        self._given: Layout | None = None

    def layout(self, model: nn.Module, mask: torch.Tensor, routes: bool) -> Layout | None:
        """
        Where the decoder of a model finds sequences with an attention mask `[B, T]`; `None` where they stay in their
        places.

        Args:
            routes: whether the pass also returns what the routers of a mixture chose, position by position.
        """
        return None if routes or self._movable(model) is None else Layout.of(mask)

    def given(self, layout: Layout | None) -> Any:
        """Context of a pass whose sequences stand as they do here."""
        return borrowed(self, _is_given=True, _given=layout)

    @contextmanager
    def without_mask(self, model: nn.Module) -> Iterator[None]:
        """Context of scoring passes of a model."""
        base = self._movable(model)
        if base is None or (self._is_given and self._given is None):
            yield
            return
        layouts: list[tuple[Layout, int] | None] = []

        def before(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            layouts.append(None)
            names = {name for name, value in kwargs.items() if value is not None and value is not False}
            if args or names - {"return_dict"} != _TAKEN:
                if self._is_given:
                    raise RuntimeError(
                        f"The decoder was called with {', '.join(sorted(names))}, and its sequences can be moved "
                        "where it gets input_ids and attention_mask alone: set attn_implementation='eager'."
                    )
                return None
            mask = kwargs["attention_mask"]
            layout = self._given if self._is_given else Layout.of(mask)
            if layout is None:
                return None
            layouts[-1] = layout, mask.size(1)
            return args, {**kwargs, "input_ids": layout.moved(kwargs["input_ids"]), "attention_mask": None}

        def after(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            moved = layouts.pop()
            if moved is not None:
                layout, T = moved
                output.last_hidden_state = layout.moved_back(output.last_hidden_state, T)
            return output

        decoder = base.base_model
        hooks = [decoder.register_forward_pre_hook(before, with_kwargs=True), decoder.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _movable(self, model: nn.Module) -> Any:
        """The model without wrappers and adapters, if its sequences can be moved."""
        if model not in self._unwrapped:  # looked up once: that takes a while
            self._unwrapped[model] = self._accelerator.unwrap_model(model)
        policy = self._unwrapped[model]
        adapters = getattr(policy, "peft_config", None)
        if isinstance(adapters, dict) and any(adapter.is_prompt_learning for adapter in adapters.values()):
            return None
        base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        return base if goes_by_distances(base) and self._has_fast_kernels(base) else None

    def _has_fast_kernels(self, base: Any) -> bool:
        """
        Whether PyTorch has any there for attention without a mask. Of keys that several queries share, GPUs have none
        but flash attention; the next is the slowest, and takes the most memory.
        """
        config, cuda = base.config, torch.backends.cuda
        if base.device.type != "cuda" or config.num_key_value_heads == config.num_attention_heads:
            return True
        if not (cuda.is_flash_attention_available() and cuda.flash_sdp_enabled()):
            return False
        in_halves = self._accelerator.mixed_precision in ("bf16", "fp16") or base.dtype in _HALVES
        return in_halves and flash_takes(config, torch.cuda.get_device_capability(base.device))


def flash_takes(config: Any, capability: tuple[int, int]) -> bool:
    """Whether PyTorch's flash attention runs a model in half precision on a GPU of this compute capability."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return capability >= (8, 0) and width <= 256


def goes_by_distances(base: Any) -> bool:
    """Whether a model of transformers knows where tokens stand by their distances alone."""
    config = base.config
    rotary = {"default"}
    for name in ("rope_parameters", "rope_scaling"):
        rotary |= set(_rotary_types(getattr(config, name, None)))
    return (
        config.model_type in FAMILIES
        # Not code from the Hub, which may give itself any name
        and any(kind.__module__.startswith("transformers.models.") for kind in type(base).__mro__)
        and config._attn_implementation == "sdpa"
        and rotary <= _ROTARY
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and not getattr(config, "output_router_logits", False)
        and not getattr(config, "use_bidirectional_attention", False)
        and getattr(config, "is_causal", True)
        and scores_rows_alone(base.device)
    )


def _rotary_types(parameters: Any) -> Iterator[str]:
    if not isinstance(parameters, dict):
        return
    for name, value in parameters.items():
        if name in ("rope_type", "type") and isinstance(value, str):
            yield value
        else:
            yield from _rotary_types(value)
