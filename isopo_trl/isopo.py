"""ISOPO on a model, for a training loop of one's own."""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .fisher_rows.rows import Draw, FisherRows
from .fisher_rows.scope import valid_samples, valid_scope
from .geometry.sequences import Sequences, draw_samples
from .layers.parts import part_of
from .layers.plan import ADVICE, coverage, full_name, groups, parameter_names, plan, shortcuts, trained_parameters
from .microbatch import CurrentMicrobatch, Microbatch
from .rules.direction import GivenDirection, GradientSoFar, LastStep
from .rules.ledger import Ledger
from .rules.registry import make_rule
from .rules.rule import Rule
from .rules.running import EXPECTATIONS, RunningStatistics
from .rules.trial import verify_own_rule
from .settings.types import typed
from .trl_seam.loans import borrowed


logger = logging.getLogger(__name__)

# Multiplier, in units of the layer's mean one, above which a sequence's gradient is out of proportion
OUT_OF_PROPORTION = 100


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
            are left alone. Where the gradient of another cannot be had per sequence (a batch norm), it is refused by
            name.
        rule (`str` or [`Rule`], *optional*, defaults to `"fisher"`):
            A registered rule's name, or a rule.
        settings:
            Settings of a rule that is given by its name: for the paper's, `fisher_power`, `norm_power`,
            `relative_power`, `regularization`, `keep_small` and `scale`, see [`ISOPOConfig`].
        regularization_decay (`float`, *optional*, defaults to `0.9`):
            See [`ISOPOConfig`].
        fisher_samples (`int`, *optional*, defaults to `64`):
            See [`ISOPOConfig`].
        fisher_scope (`str`, *optional*):
            See [`ISOPOConfig`]. With `"step"`, tell [`begin`] of each sequence's key.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the stream from which the sampled positions are drawn. The global random stream is not touched.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "fisher",
        *,
        regularization_decay: float = 0.9,
        fisher_samples: int = 64,
        fisher_scope: str | None = None,
        seed: int = 0,
        **settings: Any,
    ):
        self.rule = make_rule(rule, **settings)
        verify_own_rule(self.rule)
        self.regularization_decay = valid_decay(regularization_decay)
        self.fisher_samples = valid_samples(fisher_samples)
        self.fisher_scope = valid_scope(fisher_scope, self.fisher_samples, self.rule)
        self.seed = typed("seed", seed, int)
        self._sequences = 0  # begun in this step
        self._current = CurrentMicrobatch()
        self._draws = 0
        self._direction = self.rule.direction()
        self._microbatches = 0  # of this step, that had a backward
        self._loss_scale: float | None = None  # of these
        self._is_advanced = False  # whether the step has its momentum
        self._last: tuple[Ledger, list[int]] | None = None
        self._running: RunningStatistics | None = None
        self._loaded: dict[str, Any] | None = None
        self._model = model
        self._naming: RemovableHandle | None = None  # in a microbatch whose sequences have no keys
        self._parameters_are_planned = False  # checked once per optimizer step
        self.every_layer_was_reached = False  # checked in the first backward
        self._outlier_was_reported = False
        self.layers = plan(self._current, model)
        self._rows: FisherRows | None = None
        if self.fisher_scope == "step":
            self._rows = FisherRows(self.fisher_samples, self.seed, len(self.layers))
        # The layer of each entry in the running statistics, and what the entry is called
        self._layer_of_entry = [layer for layer in self.layers for _ in layer.indices]
        self._entry_names = [name for layer in self.layers for name in layer.entry_names()]
        self._planned = {place for layer in self.layers for place in layer.places}
        self._shortcuts = [
            *groups(self._current, model, self.layers),
            *shortcuts(self._current, model, self.layers),
        ]
        if self.rule.needs.direction:
            self._refuse_parts()
        for layer in (*self.layers, *self._shortcuts):
            layer.attach()

    @property
    def current(self) -> Microbatch | None:
        """The microbatch under way, if there is one."""
        return self._current.microbatch

    def in_float32(self) -> AbstractContextManager[None]:
        """Context of passes without gradient that are made in float32: layers that have a faster way take it."""
        return borrowed(self._current, in_float32=True)

    def detach(self) -> None:
        """Give the model its own layers back."""
        self.abort()
        for layer in (*self.layers, *self._shortcuts):
            layer.detach()

    def _stop_naming(self) -> None:
        if self._naming is not None:
            self._naming.remove()
            self._naming = None

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
            if not any(microbatch.visits):
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
        first_scored: torch.Tensor | None = None,
        loss_scale: float = 1.0,
        sequence_keys: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
        signs: torch.Tensor | None = None,
    ) -> Microbatch:
        """
        Begin a microbatch: from here to [`end`], backward passes are ISOPO's.

        Args:
            advantages (`torch.Tensor`):
                `[m]`, one per sequence. Negative values are fine: the coefficient carries the sign.
            attention_mask (`torch.Tensor`, *optional*):
                `[B, T]`, for one sequence per row: nonzero at real positions, from which the Fisher samples are drawn.
            sequence_ids (`torch.Tensor`, *optional*):
                `[B, T]`, in place of the mask where rows hold several sequences: the sequence `0 .. m - 1` of each
                position, `-1` for padding.
            completion_mask (`torch.Tensor`, *optional*):
                `[B, C]`, only for TRL's chunked log-probabilities: which of the last `C` tokens are scored.
            first_scored (`torch.Tensor`, *optional*):
                `[B]`, where these are not the last: the position that predicts the first of them, row by row.
            loss_scale (`float`, *optional*, defaults to `1.0`):
                Constant that the loss is multiplied by and that may change from step to step, such as one over the
                number of accumulated microbatches.
            sequence_keys (`torch.Tensor`, *optional*):
                `[m]`, whole numbers, only for `fisher_scope="step"`: by which each sequence is known, in whichever
                microbatch and step and on whichever rank it is ([`~geometry.reservoir.content_keys`] makes them of its
                tokens). A sequence is not measured with rows of its own from the step before. If `None`, draws go by
                its number in the step, counted over ranks in turn, and it is known again by the `input_ids` that the
                model is called with, if it is.
            prompts (`torch.Tensor`, *optional*):
                `[m]`, number of each sequence's prompt, by which cosines between gradients are reported.
            signs (`torch.Tensor`, *optional*):
                `[m]`, signs of the advantages where the loss contains them, for the same figures; 0 for a sequence
                that only fills in, and is not to be counted.
        """
        given = {"advantages": advantages, "attention_mask": attention_mask, "sequence_ids": sequence_ids}
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) and (value is not None or name == "advantages"):
                raise TypeError(
                    f"`{name}` must be a tensor, got {type(value).__name__}: give `torch.tensor({name})`, on the "
                    "device of the model."
                )
        if (attention_mask is None) == (sequence_ids is None):
            raise ValueError("Give either `attention_mask` (one sequence per row) or `sequence_ids`.")
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
        for name, value in (("prompts", prompts), ("signs", signs)):
            if value is not None and value.shape != advantages.shape:
                raise ValueError(
                    f"`{name}` must have one entry per sequence, shape {list(advantages.shape)}, got "
                    f"{list(value.shape)}."
                )
        direction = self._direction if self.rule.needs.direction or self._direction.is_there else None
        if isinstance(direction, LastStep):
            self._verify_loss_scale(loss_scale)
        if isinstance(direction, GradientSoFar) and self._microbatches and not direction.is_kept(self._trained()):
            raise RuntimeError(
                f"rule={self.rule.name!r} goes by the gradient of the step's earlier microbatches, and no parameter "
                "has one: call `step` once per optimizer step, before `zero_grad`, and do not train under DeepSpeed, "
                "which keeps gradients elsewhere."
            )
        if not self._parameters_are_planned:
            self._refuse_new_parameters()
            if direction is not None:
                self._refuse_parts()
            self._parameters_are_planned = True
        if attention_mask is not None:
            sequences, real = Sequences.regular(B, T), attention_mask != 0
        else:
            sequences, real = Sequences.from_ids(positions.reshape(-1), len(advantages)), positions >= 0
        self._close()
        samples = draw = None
        if self._rows is not None:
            keys = self._keys(sequence_keys, advantages)
            draw = self._rows.draw(real, sequences, keys, loss_scale, None if sequence_keys is None else keys)
            samples = draw.samples
            if sequence_keys is None:
                self._naming = self._model.register_forward_pre_hook(_NamedByTokens(draw), with_kwargs=True)
        elif self.rule.needs.overlap:
            # The draw is a function of (seed, microbatch number over all ranks): nothing but a counter to save
            world, rank = _world()
            seed = (self.seed * 1_000_003 + self._draws * world + rank) % 2**63
            samples = draw_samples(real, self.fisher_samples, seed)
        self._draws += 1
        self._current.microbatch = Microbatch(
            shape=(B, T),
            sequences=sequences,
            samples=samples,
            advantages=advantages.detach(),
            rule=self.rule,
            running=self._statistics(advantages.device),
            loss_scale=loss_scale,
            scored=completion_mask,
            first_scored=first_scored,
            draw=draw,
            prompts=prompts,
            signs=signs,
            direction=direction,
        )
        self._current.microbatch.ledger.beside_terms = isinstance(direction, LastStep)
        return self._current.microbatch

    def _keys(self, given: torch.Tensor | None, advantages: torch.Tensor) -> torch.Tensor:
        """The sequences' keys, `[m]`."""
        m, device = len(advantages), advantages.device
        if given is None:
            world, rank = _world()
            return torch.arange(self._sequences, self._sequences + m, device=device) * world + rank
        if given.shape != (m,) or given.is_floating_point() or given.is_complex():
            raise ValueError(
                f"`sequence_keys` must be whole numbers of shape [{m}], one per sequence, got {given.dtype} of shape "
                f"{list(given.shape)}."
            )
        return given.to(device, torch.long)

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
        if any(microbatch.visits):
            raise RuntimeError("`unscaled` was called after the loss's backward had begun: call it before.")
        if not microbatch.in_graph:
            raise RuntimeError(
                "No trained layer took part in the forward with gradients, so `unscaled` has nothing to go back "
                "through. With gradient checkpointing, use the variant with `use_reentrant=False`."
            )
        microbatch.backward_of_term(term)

    def end(self) -> None:
        """
        End the microbatch and verify that its backward reached no layer twice, and (the first one) every layer.
        """
        self._close()

    def abort(self) -> None:
        """Forget the microbatch under way."""
        self._stop_naming()
        if self.current is not None:
            self.current.closed = True
            if self._rows is not None and any(self.current.visits):
                self._rows.restart()  # some layers have its rows, others have not
        self._current.microbatch = None

    def forget_step(self) -> None:
        """Forget the optimizer step under way, which was broken off: nothing of it counts in the next one."""
        self.abort()
        self._sequences = 0
        if isinstance(self._direction, LastStep) and self._is_advanced:
            self._direction.forget()
        self._start_step()
        if self._running is not None:
            self._running.forget_step()
        if self._rows is not None:
            self._rows.restart()

    def _start_step(self) -> None:
        self._microbatches, self._loss_scale, self._is_advanced = 0, None, False

    def _close(self) -> None:
        """Close the microbatch under way, if there is one, and take its figures into the step's."""
        microbatch, self._current.microbatch = self.current, None
        self._stop_naming()
        if microbatch is None:
            return
        microbatch.closed = True
        if any(microbatch.visits):
            self._verify_visits(microbatch.visits)
            self._verify_terms(microbatch)
            self.every_layer_was_reached = True
            self._last = (microbatch.ledger, microbatch.visits)
            self._microbatches += 1
            microbatch.running.add(microbatch.ledger, list(map(bool, microbatch.visits)))
            if self._rows is not None and microbatch.draw is not None:
                visits = zip(self._layer_of_entry, microbatch.visits, strict=True)
                self._rows.commit(microbatch.draw, [layer.index for layer, times in visits if not times])
                self._sequences += microbatch.sequences.count

    def _refuse_new_parameters(self) -> None:
        """Refuse parameters that have become trainable since the layers were planned: nothing rescales them."""
        new = trained_parameters(self._model, self._planned)
        if new:
            modules = {module: name for name, module in self._model.named_modules()}
            names = sorted(full_name(modules[module], name) for module, name in new)
            raise RuntimeError(
                f"{', '.join(names[:8])} became trainable after ISOPO was attached, so nothing would rescale the "
                "gradient: set `requires_grad` (or the adapter) before attaching, or `detach` and attach again."
            )

    def _verify_visits(self, visits: list[int]) -> None:
        least = 0 if self.every_layer_was_reached else 1
        if least <= min(visits) and max(visits) <= 1:
            return
        pairs = zip(self._layer_of_entry, visits, strict=True)
        wrong = [(layer, times) for layer, times in pairs if not (0 if layer.is_alias else least) <= times <= 1]
        wrong = list(dict.fromkeys(wrong))  # a stack is one layer here
        if wrong:
            listed = "; ".join(f"{', '.join(parameter_names(layer))}: {times} times" for layer, times in wrong[:10])
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise RuntimeError(
                "The backward pass must reach every trained layer exactly once, but reached " + listed + more + ". "
                "Zero means that the layer took no part in the loss, or that something else replaced its forward; "
                "more than one, that it is shared between places of the model. To go on, " + ADVICE
            )

    def _verify_terms(self, microbatch: Microbatch) -> None:
        """Refuse a term without an advantage whose gradient stayed with a layer that the loss did not reach."""
        if not microbatch.visits_of_terms or all(microbatch.visits):
            return
        both = zip(self._entry_names, microbatch.visits_of_terms, microbatch.visits, strict=True)
        lost = [name for name, of_term, of_loss in both if of_term and not of_loss]
        if lost:
            raise RuntimeError(
                f"The term given to `unscaled` reached {', '.join(lost[:8])}, but the loss did not, so its gradient "
                "there is lost: take the term from what the loss is computed from, or freeze these layers."
            )

    # A direction

    def _trained(self) -> dict[torch.Tensor, str]:
        """The trained parameters as they are now, by their first names; not kept, since FSDP2 exchanges them."""
        found: dict[torch.Tensor, str] = {}
        for layer in self.layers:
            for (holder, own), name in zip(layer.places, parameter_names(layer), strict=True):
                found.setdefault(holder.get_parameter(own), name)
        return found

    def hold(self, direction: Mapping[str, torch.Tensor] | None) -> None:
        """
        Hold a direction `D`, such as the gradient of held-out problems: from the next microbatch on, the layers
        compute `<V_s, D>`, which [`projections`] returns, and which a rule finds whose `needs` ask for it.

        Args:
            direction (`dict[str, torch.Tensor]`, *optional*):
                Tensors of the shapes of trained parameters, by their names in the model. They are not copied: give a
                clone of `p.grad`, to which the next backward adds. Where one is left out, the direction is zero.
                `None` holds none.
        """
        if type(self._direction) is not GivenDirection:
            raise ValueError(
                f"rule={self.rule.name!r} has a direction of its own, and takes none from `hold`: take another rule."
            )
        # Another object: a microbatch under way goes on with the one that it began with
        if direction is None:
            self._direction = GivenDirection()
            return
        named, trained = dict(self._model.named_parameters(remove_duplicate=False)), self._trained()
        found: dict[torch.Tensor, torch.Tensor] = {}
        for name, D in direction.items():
            p = named.get(name)
            if p is None or p not in trained:
                raise ValueError(
                    f"`hold` was given a direction of {name!r}, which is no trained parameter of the model: give the "
                    "names that its `named_parameters` has."
                )
            if not isinstance(D, torch.Tensor) or not D.is_floating_point() or D.shape != p.shape:
                shown = f"{D.dtype} of shape {list(D.shape)}" if isinstance(D, torch.Tensor) else type(D).__name__
                raise ValueError(
                    f"The direction of {name!r} must be a tensor of numbers of shape {list(p.shape)}, got {shown}."
                )
            if D.device != p.device:
                raise ValueError(
                    f"The direction of {name!r} is on {D.device}, the parameter on {p.device}: move it there."
                )
            found[p] = D.detach()
        self._refuse_parts()
        self._direction = GivenDirection(found)

    def add_momentum(self) -> None:
        """
        Add to a step's gradient what a rule with momentum (`"spring"`) has kept of the step before, and keep the sum.
        Call once per optimizer step, after the last backward and before the gradient is clipped; where nothing is
        clipped, [`step`] does it. With other rules, nothing happens.
        """
        self._close()
        if not isinstance(self._direction, LastStep) or self._is_advanced or not self._microbatches:
            return
        assert self._loss_scale is not None
        self._direction.advance(self._trained(), self._loss_scale / self._microbatches)
        self._is_advanced = True

    def _verify_loss_scale(self, loss_scale: float) -> None:
        """Raise for a constant in which a step's microbatches differ, whose gradients add up to no direction then."""
        if self._is_advanced:
            raise RuntimeError("A microbatch began between `add_momentum` and `step`: close the step first.")
        if self._microbatches and self._loss_scale != loss_scale:
            raise ValueError(
                f"loss_scale={loss_scale:g} differs from that of the step's other microbatches, {self._loss_scale:g}, "
                f"and rule={self.rule.name!r} keeps their sum in one unit: give all of a step the same."
            )
        self._loss_scale = loss_scale

    def _refuse_parts(self) -> None:
        """Refuse a direction of parameters that are not whole on a rank, since layers see them whole."""
        for layer in self.layers:
            for (holder, own), name in zip(layer.places, parameter_names(layer), strict=True):
                p: Any = holder._parameters[own]
                kind = "FSDP2" if isinstance(p, DTensor) else "DeepSpeed ZeRO-3" if hasattr(p, "ds_id") else None
                if kind is not None:
                    asks = f"rule={self.rule.name!r} measures" if self.rule.needs.direction else "`hold` asks for"
                    raise ValueError(
                        f"{asks} the gradients against a direction, which is sharded under {kind} as {name} is, while "
                        "a layer's backward needs all of it: train under DDP, or take another rule."
                    )

    # One optimizer step

    def step(self, grad_norm: torch.Tensor | None = None, number: int | None = None) -> dict[str, float]:
        """
        Close an optimizer step: update the running statistics over all its microbatches and ranks, and return the
        step's figures (see [`~rules.running.RunningStatistics.step`]). Call once per optimizer step on every rank,
        after the last backward: without it there are no running means, and every microbatch goes by its own.

        `broken_sequences` in the figures counts sequences whose gradient or advantage is not finite, or their
        coefficient (with a rule of one's own, `broken_by_rule` tells which): do not step the optimizer if it is not
        zero. Finite gradients can still overflow in their sum, which their norm tells. The first step with a
        multiplier out of proportion is reported by a warning.

        Args:
            grad_norm (`torch.Tensor`, *optional*):
                Scalar, what `clip_grad_norm_` returned; is in the figures as `grad_norm`, at no transfer of its own.
                Do not step the optimizer if it is not finite.
            number (`int`, *optional*):
                What the warning is to call this step.
        """
        self._close()
        if self._running is None:
            raise RuntimeError("`step` was called before any microbatch: run a forward and backward first.")
        if isinstance(self._direction, LastStep) and grad_norm is not None and not self._is_advanced:
            raise RuntimeError(
                f"rule={self.rule.name!r} adds to the gradient before it is clipped: call `add_momentum` before "
                "`clip_grad_norm_`, whose result `step` was given."
            )
        self.add_momentum()
        self._parameters_are_planned = False
        figures = self._running.step(grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm)
        if isinstance(self._direction, LastStep) and not _is_whole(figures):
            self._direction.forget()
        self._start_step()
        if self._rows is not None:
            # Rows of a step in which nothing counts, such as a pass that only DeepSpeed needs, would all be zero
            self._rows.close(keep=figures["broken_sequences"] == 0 and self._running.sequences > 0)
            self._measure_by_rows(self._running)
            self._sequences = 0
        self._report_outlier(self._running.proportions, number)
        return figures

    def _report_outlier(self, proportions: list[float], number: int | None) -> None:
        """Warn of a multiplier that is out of proportion, once; `proportions` as the running statistics have them."""
        largest = max(proportions)
        if self._outlier_was_reported or largest <= OUT_OF_PROPORTION:
            return
        self._outlier_was_reported = True
        if _world()[1] != 0:
            return
        name = self._entry_names[proportions.index(largest)]
        given = getattr(self.rule, "regularization", None)
        if given is None:
            remedy = f"Bound the multiplier in rule={self.rule.name!r}"
        else:
            remedy = f"Set regularization={10 * given or 0.1:g} (it is {given:g}), which bounds the multiplier"
        logger.warning(
            f"In {'this step' if number is None else f'step {number}'}, a sequence's gradient at {name} was "
            f"multiplied by {largest:,.0f} times the layer's mean multiplier: the sequence has next to no gradient "
            f"there, and may outweigh all the others. {remedy}. This is said once."
        )

    def _statistics(self, device: torch.device) -> RunningStatistics:
        """The running statistics, made on first use on the device of the data."""
        if self._running is None:
            parts = [part_of(layer) for layer in self._layer_of_entry]
            self._running = RunningStatistics(len(parts), self.regularization_decay, self.rule, device, parts)
            if self._loaded is not None:
                self._running.load_state_dict(self._loaded)
                self._loaded = None
            self._measure_by_rows(self._running)
        return self._running

    def _measure_by_rows(self, running: RunningStatistics) -> None:
        if self._rows is not None:
            running.measure_by_rows([self._rows.is_held(layer.index) for layer in self._layer_of_entry])

    # State

    def state_dict(self) -> dict[str, Any]:
        """Running statistics and the place in the sample stream; the same on every rank."""
        running = self._running.state_dict() if self._running is not None else self._loaded
        return {
            "layers": [name for layer in self.layers for name in parameter_names(layer)],
            "rule": self.rule.settings,
            "regularization_decay": self.regularization_decay,
            "fisher_samples": self.fisher_samples,
            "fisher_scope": self.fisher_scope,
            "draws": self._draws,
            "running": running,
            "direction": (
                self._direction.state_dict(self._trained()) if isinstance(self._direction, LastStep) else None
            ),
            "rows": None if self._rows is None else self._rows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restore what [`state_dict`] returned; refuses the state of another model or rule, and warns of another decay or
        number of samples, with which the running means go on.
        """
        _verify_form(state, len(self._layer_of_entry))
        own = self.state_dict()
        if state["layers"] != own["layers"]:
            difference = sorted(set(state["layers"]) ^ set(own["layers"]))[:6]
            raise ValueError(
                "The saved ISOPO statistics belong to other trained parameters (they differ in "
                f"{', '.join(difference) or 'order'}): resume with the same model and the same trained parameters."
            )
        if state["rule"] != own["rule"]:
            raise ValueError(
                f"The saved ISOPO statistics belong to {_listed(state['rule'])}, but the run is configured with "
                f"{_listed(own['rule'])}: resume with the saved settings, or start a new run from the saved weights."
            )
        overlap = self.rule.needs.overlap
        used = {"regularization_decay": any(self.rule.needs), "fisher_samples": overlap, "fisher_scope": overlap}
        changed = [name for name in used if used[name] and state[name] != own[name]]
        if changed:
            changes = ", ".join(f"{name}={state[name]!r} to {own[name]!r}" for name in changed)
            warnings.warn(f"The saved ISOPO statistics go on with other settings: {changes}.", stacklevel=2)
        if isinstance(self._direction, LastStep):
            self._direction.load_state_dict(state["direction"], self._trained())
        self._draws = state["draws"]
        if self._rows is not None and not self._rows.load_state_dict(state["rows"]):
            logger.warning(
                "The saved ISOPO statistics have no rows of the last step, or not as many as are set here: under "
                "fisher_scope='step', the first step goes by the microbatch, as that of a new run does."
            )
        if self._running is not None and state["running"] is not None:
            self._running.load_state_dict(state["running"])
            self._measure_by_rows(self._running)
        else:
            self._loaded = state["running"]

    # What was done

    def multipliers(self) -> dict[str, torch.Tensor]:
        """
        `c_s / A_s` of each sequence of the last microbatch, `[m]` (NaN where the advantage is zero), for each layer
        that its backward reached, by the name of its first parameter; each expert of a mixture is a layer, with its
        number behind the name.
        """
        ledger, reached = self._last_of("multipliers")
        advantages = torch.where(ledger.advantages == 0, torch.nan, ledger.advantages)
        table = (ledger.table[:, 0] / advantages).cpu()
        return {self._entry_names[entry]: table[entry] for entry in reached}

    def projections(self) -> dict[str, torch.Tensor]:
        """
        `<V_s, D>` of each sequence of the last microbatch, `[m]`, on the direction that is held, for each layer that
        its backward reached, named as in [`multipliers`]. `V_s` is of the loss: it has its sign and its constants. A
        parameter that is used twice (tied embedding and head) has two entries with the same `D`.
        """
        ledger, reached = self._last_of("projections")
        table = _projected(ledger).cpu()
        return {self._entry_names[entry]: table[entry] for entry in reached}

    def influences(self) -> torch.Tensor:
        """
        `sum over layers of c_s <V_s, D>` of each sequence of the last microbatch, `[m]`, on the direction that is
        held. The gradient that the microbatch's backward has made is `sum_s c_s V_s`; so with `D` the gradient of a
        loss, this is by how much a plain step along a sequence's part of it lowers that loss, to first order and per
        unit of the learning rate.
        """
        ledger, reached = self._last_of("influences")
        return (ledger.table[reached, 0] * _projected(ledger)[reached]).sum(0).cpu()

    def _last_of(self, asked: str) -> tuple[Ledger, list[int]]:
        """The ledger of the last microbatch, and the entries of the layers that its backward reached."""
        if self._last is None:
            raise RuntimeError(f"`{asked}` was called before any microbatch had ended.")
        ledger, visits = self._last
        return ledger, [entry for entry, times in enumerate(visits) if times]

    # Coverage

    def coverage(self, sequences: int = 8, length: int = 1024) -> list[dict[str, Any]]:
        """
        Which kind of layer takes each trained parameter, and by which strategy, in microbatches of `sequences`
        sequences of `length` positions: a list of rows `parameter`, `shape`, `kind`, `strategy`.
        """
        return coverage(self.layers, self.rule, sequences, length, self.fisher_samples)

    def print_coverage(self, sequences: int = 8, length: int = 1024) -> None:
        """Print [`coverage`] as a table."""
        rows = [("parameter", "shape", "kind", "strategy")]
        rows += [
            (row["parameter"], " x ".join(map(str, row["shape"])), row["kind"], row["strategy"])
            for row in self.coverage(sequences, length)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class _NamedByTokens:
    """
    Hook before a model's forward: the sequences of a microbatch that were given no keys are known by their tokens. A
    copy of the model has one that does nothing.
    """

    def __init__(self, draw: Draw | None = None):
        self._draw = draw

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self._draw is not None and isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            self._draw.name(ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NamedByTokens, ()


def valid_decay(regularization_decay: float) -> float:
    """The setting; raises if it is of another type or out of range."""
    regularization_decay = typed("regularization_decay", regularization_decay, float)
    if not 0 <= regularization_decay < 1:
        raise ValueError(f"regularization_decay={regularization_decay} must lie in [0, 1).")
    return regularization_decay


def _projected(ledger: Ledger) -> torch.Tensor:
    """The projections `[L, m]` of a microbatch; raises where there are none."""
    if ledger.projection is None:
        raise RuntimeError("No direction was held in the last microbatch: call `hold` before it begins.")
    return ledger.projection


def _is_whole(figures: dict[str, float]) -> bool:
    """Whether a step has a gradient that is finite, as far as its figures tell."""
    return figures["broken_sequences"] == 0 and math.isfinite(figures.get("grad_norm", 0.0))


def _world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def _verify_form(state: Any, entries: int) -> None:
    """Raise unless this looks like what [`ISOPO.state_dict`] returns, with running means of so many layers."""
    kinds: dict[str, Any] = {
        "layers": list,
        "rule": dict,
        "regularization_decay": float,
        "fisher_samples": int,
        "fisher_scope": str,
        "draws": int,
        "running": (dict, type(None)),
        "direction": (dict, type(None)),
        "rows": (dict, type(None)),
    }
    content = state if isinstance(state, dict) else {}
    wrong = [name for name, kind in kinds.items() if name not in content or not isinstance(content[name], kind)]
    if wrong:
        raise ValueError(
            f"This is not a state of ISOPO, or not all of it ({', '.join(wrong)} missing, or of another type): "
            f"{_SOURCE}."
        )
    if content["running"] is not None:
        mean = content["running"].get("mean")
        shape = [entries, len(EXPECTATIONS)]
        if not isinstance(mean, torch.Tensor) or list(mean.shape) != shape or not mean.isfinite().all():
            raise ValueError(f"The saved ISOPO statistics are not {shape} finite running means: {_SOURCE}.")


_SOURCE = "load what `state_dict` of this version returned, or start a new run from the saved weights"


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
