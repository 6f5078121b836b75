"""ISOPO on a model: plan which layer takes which rule, put the layers in place, keep the running statistics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl
import trl.trainer.utils as trl_utils
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from trl.kernels import ChunkedLogProbFunction

from .geometry.coefficients import Ledger, Rule
from .geometry.running import RunningStatistics
from .geometry.sequences import Sequences, draw_samples
from .layers import KINDS, Layer, LMHeadLayer, Unsupported, frozen_norms, full_shape, lora_linears
from .microbatch import Microbatch


_ADVICE = "freeze them (`parameter.requires_grad_(False)`), or train with LoRA (`peft_config=LoraConfig({})`)."
_LINEAR, _ATTENTION = "target_modules='all-linear'", "target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']"


class ISOPO:
    """
    ISOPO attached to a model, for a training loop of one's own; [`ISOPOTrainer`] uses the same object.

    While a microbatch is under way, every trained layer's backward returns `sum_s c_s V_s` in place of `sum_s V_s`:
    `V_s` is the gradient of the loss over sequence `s`, which must not contain the advantage, and `c_s` comes from the
    rule and the advantage. Everything else (accumulation, clipping, DDP, FSDP2, checkpointing) works as before.

    Example:

    ```python
    isopo = ISOPO(model, rule="fisher")
    for batch in batches:
        optimizer.zero_grad()
        with isopo.microbatch(batch["advantages"], attention_mask=batch["attention_mask"]):
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
            loss = -(logps * batch["completion_mask"][:, 1:]).sum()  # without the advantages
            loss.backward()
        isopo.step()  # once per optimizer step
        optimizer.step()
    ```

    Args:
        model (`nn.Module`):
            Model to train, before it is wrapped for distributed training. Parameters that do not require a gradient
            are left alone; every other must belong to a supported layer.
        rule, fisher_power, norm_power, relative_power, regularization, keep_small, scale:
            See [`ISOPOConfig`].
        regularization_decay (`float`, *optional*, defaults to `0.9`):
            See [`ISOPOConfig`].
        fisher_samples (`int`, *optional*, defaults to `64`):
            See [`ISOPOConfig`].
        seed (`int`, *optional*, defaults to `0`):
            Seed of the stream from which the sampled positions are drawn. The global random stream is not touched.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: str = "fisher",
        *,
        fisher_power: float | None = None,
        norm_power: float | None = None,
        relative_power: float | None = None,
        regularization: float | None = None,
        regularization_decay: float = 0.9,
        keep_small: bool = False,
        fisher_samples: int = 64,
        scale: str = "relative",
        seed: int = 0,
    ):
        self.rule = Rule(
            name=rule,
            fisher_power=fisher_power,
            norm_power=norm_power,
            relative_power=relative_power,
            regularization=regularization,
            keep_small=keep_small,
            scale=scale,
        )
        check_settings(regularization_decay, fisher_samples)
        self.regularization_decay = regularization_decay
        self.fisher_samples = fisher_samples
        self.seed = seed
        self.current: Microbatch | None = None
        self._draws = 0
        self._verified = False
        self._last: tuple[Ledger, list[int]] | None = None
        self._running: RunningStatistics | None = None
        self._plain: RunningStatistics | None = None
        self._loaded: dict[str, Any] | None = None
        self._model = model
        self._checked = False
        self.layers = _plan(self, model)
        self._planned = {(layer.module, name) for layer in self.layers for name in layer.parameters}
        self._head = next((layer for layer in self.layers if isinstance(layer, LMHeadLayer)), None)
        # For speed alone: what they do for a trained parameter is what its layer would do
        self._fused = [*lora_linears(self, model, self.layers), *frozen_norms(self, model, self.layers)]
        for layer in (*self.layers, *self._fused):
            layer.attach()

    def detach(self) -> None:
        """Give the model its own layers back."""
        self.abort()
        for layer in (*self.layers, *self._fused):
            layer.detach()

    # One microbatch

    @contextmanager
    def microbatch(self, advantages: torch.Tensor, **kwargs: Any) -> Iterator[Microbatch]:
        """
        Context in which a microbatch's forward and backward run, once each; see [`begin`] for the arguments.
        """
        microbatch = self.begin(advantages, **kwargs)
        try:
            yield microbatch
            if self.current is not microbatch:
                raise RuntimeError("Another microbatch began inside this one: end one before the next begins.")
            if not any(microbatch.reached):
                raise RuntimeError(
                    "No trained layer was reached by a backward pass in this microbatch: run both the forward and "
                    "the backward inside the `with` block."
                )
        except BaseException:
            self.abort()
            raise
        self.end()

    def begin(
        self,
        advantages: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        sequence_ids: torch.Tensor | None = None,
        completion_mask: torch.Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> Microbatch:
        """
        Begin a microbatch: from here to [`end`], backward passes are ISOPO's.

        Args:
            advantages (`torch.Tensor`):
                `[m]`, one per sequence. Negative values are fine: the coefficient carries the sign.
            attention_mask (`torch.Tensor`, *optional*):
                `[B, T]`, for one sequence a row: nonzero at real positions, from which the Fisher samples are drawn.
            sequence_ids (`torch.Tensor`, *optional*):
                `[B, T]`, in place of the mask where rows hold several sequences: the sequence `0 .. m - 1` of each
                position, `-1` for padding.
            completion_mask (`torch.Tensor`, *optional*):
                `[B, C]`, only for models with TRL's fused LM head: which of the last `C` tokens are scored.
            loss_scale (`float`, *optional*, defaults to `1.0`):
                Constant that the loss is multiplied by and that may change from step to step, such as one over the
                number of accumulated microbatches.
        """
        if (attention_mask is None) == (sequence_ids is None):
            raise ValueError("Give either `attention_mask` (one sequence a row) or `sequence_ids`.")
        positions = attention_mask if attention_mask is not None else sequence_ids
        assert positions is not None
        if positions.dim() != 2:
            raise ValueError(f"Positions must have shape [B, T], got {list(positions.shape)}.")
        B, T = positions.shape
        if advantages.dim() != 1 or (attention_mask is not None and len(advantages) != B):
            expected = f"[{B}], one per row" if attention_mask is not None else "[m], one per sequence"
            raise ValueError(
                f"ISOPO takes one advantage per sequence, of shape {expected}, got {list(advantages.shape)}: "
                "per-token advantages are not supported (put token weights into the loss)."
            )
        if not self._checked:  # once per optimizer step
            self._check_trained()
            self._checked = True
        if attention_mask is not None:
            sequences, real = Sequences.regular(B, T), attention_mask != 0
        else:
            sequences, real = Sequences.from_ids(positions.reshape(-1), len(advantages)), positions >= 0
        samples = None
        if self.rule.needs.overlap:
            # The draw is a function of (seed, microbatch number over all ranks): nothing but a counter to save
            world, rank = _world()
            seed = (self.seed * 1_000_003 + self._draws * world + rank) % 2**63
            samples = draw_samples(real, self.fisher_samples, seed)
        self._draws += 1
        self._fold()
        self.current = Microbatch(
            shape=(B, T),
            sequences=sequences,
            samples=samples,
            advantages=advantages.detach(),
            rule=self.rule,
            running=self._statistics(advantages.device),
            loss_scale=loss_scale,
            scored=completion_mask,
        )
        if self._head is not None:
            _install_head(self._head)
        return self.current

    def unscaled(self, term: torch.Tensor) -> None:
        """
        Add the gradient of a loss term that carries no advantage, such as a KL or entropy term, to the microbatch
        under way: it reaches the parameters as it is. Call between the forward and the backward of the loss, which
        must not contain the term. Costs one more backward pass.

        Args:
            term (`torch.Tensor`):
                Scalar, computed from the same forward pass as the loss.
        """
        microbatch = self.current
        if microbatch is None:
            raise RuntimeError("`unscaled` was called outside of a microbatch: call it before the loss's backward.")
        if any(microbatch.reached):
            raise RuntimeError("`unscaled` was called after the loss's backward had begun: call it before.")
        if not microbatch.touched:
            raise RuntimeError(
                "No trained layer took part in the forward with gradients, so `unscaled` has nothing to go back "
                "through. With gradient checkpointing, use the variant with `use_reentrant=False`."
            )
        if self._plain is None:
            rule = Rule(name="none")
            self._plain = RunningStatistics(len(self.layers), self.regularization_decay, rule, term.device)
        microbatch.unscaled(term, self._plain)

    def end(self) -> None:
        """
        End the microbatch and verify that its backward reached no layer twice, and (the first one) every layer.
        """
        self._fold()

    def abort(self) -> None:
        """Forget the microbatch under way."""
        if self.current is not None:
            self.current.closed = True
        self.current = None
        _uninstall_head()

    def _fold(self) -> None:
        microbatch, self.current = self.current, None
        _uninstall_head()
        if microbatch is None:
            return
        microbatch.closed = True
        if any(microbatch.reached):
            self._verify(microbatch.reached)
            self._verify_unscaled(microbatch)
            self._verified = True
            self._last = (microbatch.ledger, microbatch.reached)
            microbatch.running.add(microbatch.ledger, [times > 0 for times in microbatch.reached])

    def _check_trained(self) -> None:
        """Refuse parameters that have become trainable since the layers were planned: nothing rescales them."""
        # Through the modules: FSDP swaps parameters, PEFT adds modules. Without their names, which take longer to make
        modules, new = [self._model], []
        while modules:
            module = modules.pop()
            modules += [child for child in module._modules.values() if child is not None]
            for name, p in module._parameters.items():
                if p is not None and p.requires_grad and (module, name) not in self._planned:
                    new.append((module, name))
        if new:
            places = {module: place for place, module in self._model.named_modules()}
            names = [_name(places[module], name) for module, name in new[:8]]
            raise RuntimeError(
                f"{', '.join(names)} became trainable after ISOPO was attached, so nothing would rescale the "
                "gradient: set `requires_grad` (or the adapter) before attaching, or `detach` and attach again."
            )

    def _verify(self, reached: list[int]) -> None:
        allowed = (1,) if not self._verified else (0, 1)
        wrong = [(layer, times) for layer, times in zip(self.layers, reached, strict=True) if times not in allowed]
        if wrong:
            listed = "; ".join(f"{', '.join(_names(layer))}: {times} times" for layer, times in wrong[:10])
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise RuntimeError(
                "The backward pass must reach every trained layer exactly once, but reached " + listed + more + ". "
                "Zero means that the layer took no part in the loss, or that something else replaced its forward; "
                "more than one, that it is shared between places of the model. To go on, " + _ADVICE.format(_LINEAR)
            )

    def _verify_unscaled(self, microbatch: Microbatch) -> None:
        """Refuse a term without an advantage whose gradient stayed with a layer that the loss did not reach."""
        if microbatch.plain is None:
            return
        both = zip(self.layers, microbatch.plain.reached, microbatch.reached, strict=True)
        lost = [_names(layer)[0] for layer, of_term, of_loss in both if of_term and not of_loss]
        if lost:
            raise RuntimeError(
                f"The term given to `unscaled` reached {', '.join(lost[:8])}, but the loss did not, so its gradient "
                "there is lost: take the term from what the loss is computed from, or freeze these layers."
            )

    # One optimizer step

    def step(self) -> dict[str, float]:
        """
        Close an optimizer step: update the running statistics over all its microbatches and ranks, and return the
        step's figures (see [`~geometry.running.RunningStatistics.step`]). Call once per optimizer step on every rank,
        after the last backward: without it there are no running means, and every microbatch goes by its own.

        `broken_sequences` in the figures counts sequences whose gradient or advantage is not finite: do not step the
        optimizer if it is not zero.
        """
        self._fold()
        if self._running is None:
            raise RuntimeError("`step` was called before any microbatch: run a forward and backward first.")
        self._checked = False
        return self._running.step()

    def _statistics(self, device: torch.device) -> RunningStatistics:
        """The running statistics, made on first use on the device of the data."""
        if self._running is None:
            self._running = RunningStatistics(len(self.layers), self.regularization_decay, self.rule, device)
            if self._loaded is not None:
                self._running.load_state_dict(self._loaded)
                self._loaded = None
        return self._running

    # State

    def state_dict(self) -> dict[str, Any]:
        """Running statistics and the place in the sample stream; the same on every rank."""
        running = self._running.state_dict() if self._running is not None else self._loaded
        return {
            "layers": [name for layer in self.layers for name in _names(layer)],
            "rule": repr(self.rule),
            "draws": self._draws,
            "running": running,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned; refuses the state of another model or rule."""
        own = self.state_dict()
        if state["layers"] != own["layers"]:
            difference = sorted(set(state["layers"]) ^ set(own["layers"]))[:6]
            raise ValueError(
                "The saved ISOPO statistics belong to other trained parameters (they differ in "
                f"{', '.join(difference) or 'order'}): resume with the same model and the same trained parameters."
            )
        if state["rule"] != own["rule"]:
            raise ValueError(
                f"The saved ISOPO statistics belong to {state['rule']}, but the run is configured with {own['rule']}: "
                "resume with the saved settings, or start a new run from the saved weights."
            )
        self._draws = state["draws"]
        if self._running is not None and state["running"] is not None:
            self._running.load_state_dict(state["running"])
        else:
            self._loaded = state["running"]

    # What was done

    def multipliers(self) -> dict[str, torch.Tensor]:
        """
        `c_s / A_s` of each sequence of the last microbatch, `[m]` (NaN where the advantage is zero), for each layer
        that its backward reached, by the name of its first parameter.
        """
        if self._last is None:
            raise RuntimeError("`multipliers` was called before any microbatch had ended.")
        ledger, reached = self._last
        advantages = torch.where(ledger.advantages == 0, torch.nan, ledger.advantages)
        table = (ledger.table[:, 0] / advantages).cpu()
        return {_names(layer)[0]: table[layer.index] for layer in self.layers if reached[layer.index]}

    # Coverage

    def coverage(self, sequences: int = 8, length: int = 1024) -> list[dict[str, Any]]:
        """
        Which rule and strategy each trained parameter gets in microbatches of `sequences` sequences of `length`
        positions: a list of rows `parameter`, `shape`, `rule`, `strategy`.
        """
        samples = min(self.fisher_samples, sequences * length) if self.rule.needs.overlap else 0
        return [
            {
                "parameter": _name(layer.name, name),
                "shape": full_shape(layer.module.get_parameter(name)),
                "rule": layer.kind,
                "strategy": layer.strategy(sequences, length, samples, self.rule.needs),
            }
            for layer in self.layers
            for name in layer.parameters
        ]

    def print_coverage(self, sequences: int = 8, length: int = 1024) -> None:
        """Print [`coverage`] as a table."""
        rows = [("parameter", "shape", "rule", "strategy")]
        rows += [
            (row["parameter"], " x ".join(map(str, row["shape"])), row["rule"], row["strategy"])
            for row in self.coverage(sequences, length)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def check_settings(regularization_decay: float, fisher_samples: int) -> None:
    """Raise if a setting that is not part of the rule is out of range."""
    if not 0 <= regularization_decay < 1:
        raise ValueError(f"regularization_decay={regularization_decay} must lie in [0, 1).")
    if not isinstance(fisher_samples, int) or fisher_samples < 1:
        raise ValueError(f"fisher_samples={fisher_samples} must be a whole number of at least 1.")


def _world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def _names(layer: Layer) -> list[str]:
    return [_name(layer.name, parameter) for parameter in layer.parameters]


def _name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _plan(isopo: ISOPO, model: nn.Module) -> list[Layer]:
    """A layer for every module that has trained parameters of its own; refuses the others by name."""
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ValueError(
            f"The trained parameters are split over {', '.join(sorted(map(str, devices)))}, which ISOPO does not "
            "support: load the model on one device (`device_map=None`), or shard it with FSDP2."
        )
    if any(_is_compiled(module) for module in model.modules()):
        raise ValueError(
            "The model is compiled (`torch.compile`), which ISOPO does not support, since its layers decide at every "
            "backward what to compute: give the model uncompiled."
        )
    if any("_isopo_layer" in module.__dict__ for module in model.modules()):
        raise ValueError("An ISOPO is attached to this model already: call its `detach` first.")
    head = _output_embeddings(model)
    # PEFT adds adapters of bare parameters (experts, routers) to the parameter and never calls them
    of_parameters = {
        module
        for wrapper in model.modules()
        if isinstance(wrapper, ParamWrapper)
        for adapters in (wrapper.lora_A, wrapper.lora_B)
        for module in adapters.modules()
    }
    layers: list[Layer] = []
    refused: list[str] = []
    experts = False
    for name, module in model.named_modules():
        trainable = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not trainable:
            continue
        kinds = (LMHeadLayer,) if module is head else KINDS
        try:
            if module in of_parameters:
                raise Unsupported("an adapter of a bare parameter")
            kind = next((kind for kind in kinds if kind.accepts(module, trainable)), None)
            reason = f"{type(module).__name__} is not a kind of layer that ISOPO knows"
        except Unsupported as error:
            kind, reason = None, str(error)
        if kind is None:
            refused += [f"{_name(name, parameter)} ({reason})" for parameter in trainable]
            # PEFT's 'all-linear' includes stacks of experts
            experts = experts or module in of_parameters or any(p.dim() > 2 for p in trainable.values())
        else:
            layers.append(kind(isopo, module, name, len(layers)))
    if refused:
        advice = _ADVICE.format(_ATTENTION if experts else _LINEAR)
        more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
        raise ValueError("ISOPO cannot train " + "; ".join(refused[:8]) + more + ": " + advice)
    if not layers:
        raise ValueError("The model has no trainable parameter: ISOPO has nothing to do.")
    return layers


def _is_compiled(module: nn.Module) -> bool:
    # `torch.compile(model)` wraps, `model.compile()` replaces the call; the wrapper's class takes seconds to import
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and hasattr(head, "modules_to_save"):  # PEFT's trained copy
        head = next((m for m in head.modules_to_save.values() if any(p.requires_grad for p in m.parameters())), head)
    return head


class _Dispatch:
    """Stands in the place where TRL looks up its fused head's function."""

    def __init__(self, head: LMHeadLayer):
        self.apply = head.fused


def _install_head(head: LMHeadLayer) -> None:
    setattr(trl_utils, _PLACE, _Dispatch(head))


def _uninstall_head() -> None:
    setattr(trl_utils, _PLACE, _TRL_FUNCTION)


_PLACE = "_ChunkedLogProbFunction"
_TRL_FUNCTION = getattr(trl_utils, _PLACE, None)
if _TRL_FUNCTION is not ChunkedLogProbFunction:
    raise ImportError(
        f"TRL {trl.__version__} has no trl.trainer.utils.{_PLACE}, through which isopo_trl reaches the LM head: "
        "install trl 1.16, or a newer isopo_trl."
    )
