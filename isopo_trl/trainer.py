"""The [`ISOPOTrainer`]."""

import inspect
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from .advantages import Chain, Generation, Measured, totals
from .checkpoints import generation, model_card
from .checkpoints.choice import checkpoint_to_resume
from .checkpoints.state import OwnState, described
from .checkpoints.weights import load_converted, lost_weights
from .config import ISOPOConfig
from .integrations import checkpointing, deepspeed, engines, liger, peft_reference, vllm_weights
from .integrations.attention import Attention
from .integrations.autograd_thread import calling_thread, is_on_one_device
from .integrations.deepspeed import before_step, caught_outputs, unseen_by_deepspeed
from .isopo import ISOPO
from .layers.read_elsewhere import refuse_readers
from .loss.dropout import noise_of_ratios
from .loss.frozen_head import frozen_head
from .loss.parts import LossInParts, LossParts
from .loss.sampler import PROMPT_NUMBERS, Turns, is_fresh, note_origin, note_prompts, says_what_drew_it
from .loss.terms import Derivative, Terms
from .loss.zero_advantages import Skipping, are_left_out, what_needs_all, without_rounding
from .narrow_weights import choice
from .narrow_weights.lost_steps import LostSteps
from .rewards import functions as reward_functions
from .rewards.kl_to_reference import KLReward
from .rewards.missing import MissingRewards
from .rules.direction import LastStep
from .step_size import advice, optimizers
from .step_size.control import StepControl
from .step_size.controller import StepSize
from .step_size.drift import BehaviourBound, drift_sums
from .step_size.gradient import GradientCheck
from .step_size.measurement import StepKL
from .step_size.precise_forward import PreciseForward
from .token_weights import Weighting, ratio_loss
from .trl_seam.batch import REFERENCE_LOGPS, Batch, shuffled_by_group, verify_number, verify_prompts
from .trl_seam.generation import Generated, Progress, prompts_read_once, samples_at_temperature, without_old_policy
from .trl_seam.head import scored_rows_alone
from .trl_seam.loans import borrowed, intercepted, results_noted
from .trl_seam.log import add_all_to_log, add_to_log, replace_logged_advantages
from .trl_seam.loss import TRLLoss, unequal_ranks
from .trl_seam.rewards import add_reward
from .trl_seam.scoring import Scoring
from .trl_seam.trainer import get_config_model_id
from .trl_seam.vllm import ColocatedVLLM, is_colocated, weights_are_others, without_texts


logger = get_logger(__name__)

# The constructor takes what GRPOTrainer's takes
_SIGNATURE = inspect.signature(GRPOTrainer.__init__)


class ISOPOTrainer(GRPOTrainer):
    """
    Trainer for Isometric Policy Optimization (ISOPO), proposed in [ISOPO: Proximal policy gradients without
    pi-old](https://huggingface.co/papers/2512.23353).

    With respect to [`~trl.GRPOTrainer`], the backward pass rescales each sequence's log-probability gradient, layer by
    layer, before it meets the advantage (see [`ISOPOConfig`]), and no pass over the data is made for an old policy's
    log-probabilities: where `token_weights` or the loss needs the behaviour policy's, they are the sampler's own, if
    it gives them. Nothing is clipped unless `epsilon`, `epsilon_high` or `delta` is given. Everything else
    (constructor, data sets, rewards, generation, tools, logging, checkpoints) is inherited.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from isopo_trl import ISOPOConfig, ISOPOTrainer
    >>> from trl.rewards import accuracy_reward

    >>> trainer = ISOPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=ISOPOConfig("Qwen3-0.6B-ISOPO", rule="fisher"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, and all others:
            As for [`~trl.GRPOTrainer`].
        args ([`ISOPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
    """

    args: ISOPOConfig
    model: Any
    reward_func_names: list[str]
    reward_funcs: list[Any]
    reward_processing_classes: list[Any]

    # What the model card's snippet asks, a text or messages; set it to one that may be published
    card_prompt: str | list[dict[str, str]] | None = None

    _tag_names = ["trl", "isopo"]
    _name = "ISOPO"
    _paper = {
        "title": "ISOPO: Proximal policy gradients without pi-old",
        "id": "2512.23353",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{abrahamsen2025isopo,
                title        = {{ISOPO: Proximal policy gradients without pi-old}},
                author       = {Nilin Abrahamsen},
                year         = 2025,
                eprint       = {arXiv:2512.23353},
            }"""),
    }

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any = None,
        args: ISOPOConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = ISOPOConfig(f"{model_name.split('/')[-1]}-ISOPO")
        if not isinstance(args, ISOPOConfig):
            raise TypeError(
                f"`args` must be an `ISOPOConfig`, got {type(args).__name__}: it takes the same arguments as "
                "`GRPOConfig`, and the rule."
            )
        weighting = ratio_loss.weighting_for(args)
        reward_functions.verify_callable(reward_funcs)
        given = _SIGNATURE.bind_partial(self, model, reward_funcs, args, *positional, **kwargs).arguments
        if given.get("environment_factory") is None:  # which may write the prompts
            for name in ("train_dataset", "eval_dataset"):
                verify_prompts(given.get(name), name)
        self._optimizer_steps = 0  # of this object, over all calls of `train`
        self.missing_rewards = MissingRewards()
        with peft_reference.base_weights_kept(model):
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._refuse_what_the_model_cannot()
        # As it is given: training puts one of its own in its place
        self._described_optimizer = described(args, self.optimizer, self.optimizer_cls_and_kwargs)
        # What the model's parameters are, before anything is made of them
        self.shared_weights = None
        if is_colocated(self):
            self.shared_weights = vllm_weights.share(self, ColocatedVLLM(self))
            self.vllm_generation.generation_kwargs = without_texts(self.vllm_generation.generation_kwargs)
        self.epsilon_low, self.epsilon_high = ratio_loss.clipping_range(args)
        if args.use_liger_kernel:
            args.liger_kernel_config = liger.kernels(self.model, args.liger_kernel_config)
        peft_reference.freeze_copy(self.model)
        self.isopo = ISOPO(
            self.model,
            args._rule(),
            regularization_decay=args.regularization_decay,
            fisher_samples=args.fisher_samples,
            fisher_scope=args.fisher_scope,
            seed=args.seed,
        )
        self.weighting: Weighting = weighting(args, self.accelerator)
        self.transforms = Chain(args)
        self.terms = Terms(self)
        self.attention = Attention(self.accelerator)
        self._asks_old_policy = weighting.needs_behaviour or self.terms.needs_behaviour
        self._needs_behaviour = self._asks_old_policy or args.bounds_drift
        for warning in self._warnings():
            logger.warning(warning)
        self.gradient_check = GradientCheck(self.isopo.rule, args)
        self.loss_in_parts = LossInParts(self.weighting, self.terms, self.accelerator, self._needs_behaviour)
        unscaled = [*self.terms.settings, *([f"token_weights={args.token_weights!r}"] * weighting.goes_back_twice)]
        # Without a rule there is nothing to rescale, and all terms of the loss go back together
        self._goes_back_twice = bool(unscaled) and any(self.isopo.rule.needs)
        self._puts_sizes_into_loss = bool(unscaled) and not self._goes_back_twice
        if self._goes_back_twice:
            self._prepare_to_go_back_twice(", ".join(unscaled))
        self._is_in_training_step = False
        self.skipping = self._skipping()
        self._refuse_transforms(given)
        if self.skipping is not None:
            self.add_callback(self.skipping)
        self.kl_reward: KLReward | None = None
        if args.kl_in_reward:
            self.kl_reward = KLReward(Scoring(self), self.accelerator, self._log)
            add_reward(self, KLReward.name, self.kl_reward, -args.beta)
        self.step_control = self._step_control() if args.measures_steps else None
        if self.step_control is not None:
            self.add_callback(self.step_control)
        if args.bf16_updates is None and not self.is_deepspeed_enabled:
            self.add_callback(LostSteps(self.accelerator))

    __init__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]

    def _refuse_what_the_model_cannot(self) -> None:
        args = self.args
        engines.refuse_compiled(self.accelerator)
        engines.refuse_sharding(args, self.accelerator)
        peft_reference.refuse_lost_part(self.model, args.beta)
        given = self.optimizer if self.optimizer_cls_and_kwargs is None else self.optimizer_cls_and_kwargs[0]
        choice.refuse(args, self.model, given, self.accelerator)
        reward_functions.verify_weights(self.reward_weights, args.kl_in_reward)
        checkpointing.refuse_prefix(args, self.model)

    def _warnings(self) -> Iterator[str]:
        """What the user should know of the settings before training."""
        args = self.args
        yield from self.weighting.warnings()
        yield from self.transforms.warnings()
        yield from advice.of_settings(args, self.isopo.rule, self.weighting, self.optimizer)
        others_draw = self.use_vllm or self.use_transformers_continuous_batching or self.rollout_func is not None
        is_one = not (others_draw or args.uses_stale_data) and samples_at_temperature(args)  # the ratio, by definition
        noise = noise_of_ratios(self.model) if self._needs_behaviour and not is_one else None
        if noise is not None:
            yield noise

    def _prepare_to_go_back_twice(self, settings: str) -> None:
        """For terms of the loss that no rule may rescale, which these `settings` ask for."""
        args = self.args
        if args.use_liger_kernel:
            args.liger_kernel_config = liger.kernels(self.model, args.liger_kernel_config, settings)
        checkpointing.refuse_reentrant(args, settings)

    def _skipping(self) -> Skipping | None:
        """What leaves out sequences without an advantage, where that is asked for, or nobody would miss them."""
        args, ntk = self.args, self.isopo.rule.needs.ntk
        has_own_loss = self._is_changed("_prepare_inputs", "compute_loss", "_compute_loss")
        if not are_left_out(args, self.terms.settings, ntk, has_own_loss):
            return None
        group: Any = args.num_generations if args.group_microbatches else 1
        across, always = self.weighting.looks_across_sequences, self.is_deepspeed_enabled
        return Skipping(Progress(self), self.accelerator, self.loss_type, group, across, always)

    def _refuse_transforms(self, given: dict[str, Any]) -> None:
        """Raise where transforms of advantages cannot be what they are; `given`: the constructor's arguments."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        own = f"a `_prepare_inputs` or loss of {type(self).__name__}'s own (and skip_zero_advantage=None)"
        needing = what_needs_all(self.args, self.terms.settings, self.isopo.rule.needs.ntk, self.weighting)
        self.transforms.refuse(
            turns=[name for name in ("tools", "environment_factory") if given.get(name)],
            is_sharded=self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3),
            needing_all=needing or [own] * (self.skipping is None),
        )

    def _step_control(self) -> StepControl:
        """What measures steps, and makes them as long as `target_kl` says."""
        args = self.args
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            given = ", ".join(args.given("target_kl", "behaviour_kl", "log_step_kl"))
            deepspeed.refuse_settings(config, given, args.target_kl is not None)
        if self.optimizer is not None:
            optimizers.refuse(self.optimizer, args.target_kl)
        is_auto = args.target_kl == "auto"
        size = None if args.target_kl is None else StepSize(0.0 if is_auto else float(args.target_kl))
        return StepControl(
            StepKL(
                Scoring(self),
                PreciseForward(self.accelerator, self.isopo.in_float32),
                self.accelerator,
                share=args.step_kl_share,
                seed=args.seed,
                masks_truncated=bool(self.mask_truncated_completions),
                # What is free while vLLM sleeps is not
                may_replay=not args.vllm_enable_sleep_mode and not self.is_deepspeed_enabled,
            ),
            size,
            BehaviourBound(args.behaviour_kl, Progress(self), self.accelerator) if args.bounds_drift else None,
            self.accelerator,
            is_auto=is_auto,
            goes_on=isinstance(self.isopo.rule.direction(), LastStep),
            log=lambda figures: self._log({f"step/{name}": value for name, value in figures.items()}),
            offload=args.target_kl_offload,
            engine=(lambda: self.model_wrapped) if self.is_deepspeed_enabled else None,
            others=lambda: self.callback_handler.callbacks,
        )

    def _get_learning_rate(self):
        """In the log: what the last step was made with."""
        made = None if self.step_control is None else self.step_control.learning_rate
        return super()._get_learning_rate() if made is None else made

    def _rate_ahead(self) -> float:
        """The largest learning rate of the step under way."""
        controlled = None if self.step_control is None else self.step_control.rate_ahead()
        return optimizers.largest_rate(self.optimizer, self.args) if controlled is None else controlled

    def _log(self, figures: dict[str, float]) -> None:
        add_to_log(self, "train" if self.model.training else "eval", figures)

    def _is_changed(self, *names: str) -> bool:
        """Whether a class beside this one and TRL's has a method of one of these names."""
        classes = type(self).__mro__
        others = [kind for kind in classes[: classes.index(GRPOTrainer)] if kind is not ISOPOTrainer]
        return any(name in vars(kind) for kind in others for name in names)

    # One optimizer step

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return choice.chosen(args, *GRPOTrainer.get_optimizer_cls_and_kwargs(args, model))

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self._forget_step()
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            self._load_state(checkpoint)
        with generation.past_epochs(self, checkpoint):
            try:
                return super().train(str(checkpoint) if checkpoint is not None else None, *args, **kwargs)
            except BaseException:
                self._forget_step()  # of which nothing may be left, learning rates included
                raise

    def _get_train_sampler(self, dataset=None):
        verify_number(self.train_dataset if dataset is None else dataset, self.args, self.num_generations)
        return super()._get_train_sampler(dataset)

    def training_step(self, model, inputs, num_items_in_batch=None):
        skipping, accelerator = self.skipping, self.accelerator
        skips = skipping.without_empty_passes() if skipping else nullcontext()
        try:
            with (
                skips,
                borrowed(self, _is_in_training_step=True),
                self._around_deepspeed(model) if self.is_deepspeed_enabled else nullcontext(),
            ):
                with calling_thread(self._is_on_one_device):
                    loss = super().training_step(model, inputs, num_items_in_batch)
        except BaseException:
            self._forget_step()
            raise
        self.isopo.end()
        if accelerator.sync_gradients:
            self.isopo.add_momentum()  # to the whole gradient, before it is clipped
            if skipping is not None:
                skipping.fill_gradients(model.parameters())
        return loss

    @cached_property
    def _is_on_one_device(self) -> bool:
        return is_on_one_device(self.model)  # asked when training begins

    @contextmanager
    def _around_deepspeed(self, engine: Any) -> Iterator[None]:
        """Context for the backward pass in which DeepSpeed makes its step."""
        control = self.step_control

        def before() -> None:
            self._close_step()
            if control is not None and self.accelerator.sync_gradients:
                control.prepare(self.state.global_step)

        stepping = nullcontext() if control is None else intercepted(engine.optimizer, "step", control.step)
        with before_step(engine, before), stepping:
            yield

    def _forget_step(self) -> None:
        """Forget the optimizer step under way."""
        self.isopo.forget_step()
        self.weighting.reset()
        if self.skipping is not None:
            self.skipping.reset()
        if self.step_control is not None:
            self.step_control.reset()

    def _get_grad_norm(self, model, grad_norm=None):
        # The last that happens before the optimizer's step, and the norm is at hand
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self.is_deepspeed_enabled:
            self._close_step(grad_norm)
        elif grad_norm is not None:  # DeepSpeed has had its step, unless the norm was not finite
            self.gradient_check.of_deepspeed(grad_norm, stepped=not self.accelerator.optimizer_step_was_skipped)
        return grad_norm

    def _close_step(self, grad_norm: torch.Tensor | None = None) -> None:
        if self.accelerator.sync_gradients:
            self._optimizer_steps += 1
            self.missing_rewards.step()
            if self.skipping is None or not self.skipping.is_idle:
                self._log_step(self.isopo.step(grad_norm, number=self.state.global_step + 1))
            if self.skipping is not None:
                add_to_log(self, "train", self.skipping.close())

    def _log_step(self, figures: dict[str, float]) -> None:
        off_policy = self.weighting.step()
        passed = self.gradient_check.passed(figures)
        add_to_log(self, "train", {f"isopo/{name}": value for name, value in passed.items()})
        self._log_off_policy("train", off_policy)

    def _log_off_policy(self, mode: str, figures: dict[str, torch.Tensor]) -> None:
        if figures:
            values = torch.stack(list(figures.values())).tolist()
            named_values = zip(figures, values, strict=True)
            add_to_log(self, mode, {f"off_policy/{name}": value for name, value in named_values})

    # The loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not inputs:  # a microbatch from which every sequence was left out
            return torch.zeros((), device=self.accelerator.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        entropy_counts = self.terms.has_bonus and not self._goes_back_twice
        with (
            scored_rows_alone(partial(frozen_head, entropy_counts=entropy_counts)),
            self.attention.without_mask(model),
        ):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        batch = Batch(inputs)
        advantages = batch.advantages
        if advantages.dim() != 1:
            raise ValueError(
                f"ISOPO takes one advantage per sequence, got shape {list(advantages.shape)}: per-token advantages "
                "are not supported."
            )
        trl_loss = TRLLoss(self, partial(super()._compute_loss, model))
        if not torch.is_grad_enabled():
            parts = self.loss_in_parts(trl_loss, batch, self._optimizer_steps, self._rate_ahead)
            self._log_loss(parts)
            return parts.policy + parts.terms.value
        if self._is_seen_by_loss:
            self._see(batch)
        if self.step_control is not None:
            self.step_control.score_early(self.state.global_step)
        # The loss sees the sign of the advantage, all that its logic depends on, and the layers its size. Where there
        # is nothing to rescale, but terms without an advantage, the size is in the loss as well, and all goes back
        # together; what is not finite must be noticed by the layers
        sizes, in_loss = advantages.abs(), self._puts_sizes_into_loss
        signs = (ratio_loss.signs(advantages, self.loss_type) * batch.loss_weights).requires_grad_()
        layout = self.attention.layout(model, batch.attention_mask, routes=self.aux_loss_enabled)
        self.isopo.begin(
            torch.where(sizes.isfinite(), 1.0, sizes) if in_loss else sizes,
            attention_mask=batch.sampled_mask if layout is None else layout.moved(batch.sampled_mask),
            completion_mask=batch.completion_mask,
            first_scored=None if layout is None else batch["prompt_ids"].size(1) - 1 - layout.shifts,
            loss_scale=1 / self.current_gradient_accumulation_steps,
            prompts=batch.get(PROMPT_NUMBERS),
            signs=signs.detach().sign(),
            sequence_keys=batch.keys_of_content if self.isopo.fisher_scope == "step" else None,
        )
        policy_in = None if self.skipping is None else unequal_ranks(self)
        catches = self._goes_back_twice and self.is_deepspeed_enabled
        with caught_outputs(model, catches) as caught, self.attention.given(layout):
            parts = self.loss_in_parts(
                trl_loss, batch, self._optimizer_steps, self._rate_ahead, signs=signs, policy_in=policy_in
            )
        self._add_drift(batch, parts)
        self._log_loss(parts)
        policy, moving, value = parts.going_back(batch, signs, self.loss_type)
        loss = Derivative(policy.output, policy.slope * sizes.unsqueeze(1) if in_loss else policy.slope).term
        if not self.isopo.every_layer_was_reached:  # before the first backward
            refuse_readers(loss, self.model)
        if moving:
            term = torch.stack([derivative.term for derivative in moving]).sum()
            if in_loss:
                loss = loss + term
            else:
                with unseen_by_deepspeed(model, caught):
                    self.isopo.unscaled(term)
        return loss + (value - loss).detach()

    def _add_drift(self, batch: Batch, parts: LossParts) -> None:
        """Tell how far the policy has gone from the one that drew the tokens, where that is watched."""
        bound = None if self.step_control is None else self.step_control.behaviour
        if bound is not None and parts.behaviour is not None:
            known = is_fresh(batch, self._optimizer_steps) or says_what_drew_it(batch)
            counted = batch.counted if known else torch.zeros_like(batch.counted)
            bound.add(drift_sums(parts.outputs.logps, parts.behaviour, counted))

    def _log_loss(self, parts: LossParts) -> None:
        mode, weighted = "train" if self.model.training else "eval", parts.weighed.weighted
        add_all_to_log(self, mode, parts.figures)
        add_to_log(self, mode, weighted.figures)
        if not torch.is_grad_enabled() and weighted.sums is not None:
            self._log_off_policy("eval", self.weighting.figures(weighted.sums))

    # Generation: no old policy but the sampler's; the KL, if any, in the reward

    def _prepare_inputs(self, generation_batch):
        group: Any = self.args.num_generations
        with shuffled_by_group(group) if self.args.group_microbatches else nullcontext():
            inputs = super()._prepare_inputs(generation_batch)
        # The model's own mode does not tell an evaluation: continuous batching leaves it in that of training
        if not self._is_in_training_step:
            return inputs
        if not self._is_seen_by_loss:
            self._see(Batch(inputs))
        if self.skipping is None:
            return inputs
        return self.skipping.next_microbatch(self.current_gradient_accumulation_steps, self._optimizer_steps)

    @cached_property
    def _is_seen_by_loss(self) -> bool:
        """Whether a subclass has microbatches of its own, which nobody sees before the loss."""
        return self.skipping is None and self._is_changed("_prepare_inputs")

    def _see(self, batch: Batch) -> None:
        """Show a microbatch to what measures steps: what a step does to sequences without an advantage counts, too."""
        if self.step_control is not None:
            fresh = is_fresh(batch, self._optimizer_steps)
            self.step_control.see(batch, self.state.global_step, self.current_gradient_accumulation_steps, fresh)

    def _generate_and_score_completions(self, inputs):
        training, needs_behaviour = self.model.training, self._needs_behaviour or self.transforms.needs_behaviour
        policy = self.accelerator.unwrap_model(self.model)
        turns = Turns(policy.get_base_model() if is_peft_model(policy) else policy, self.temperature)
        by_transformers = not (self.use_vllm or self.use_transformers_continuous_batching)
        # What drops at random drops something else for each completion
        reads_once = by_transformers and noise_of_ratios(self.model) is None

        completions: list[Any] = []

        def generated(rollout: Generated) -> bool:
            completions[:] = rollout.completions
            if self.kl_reward is not None:
                # What tokens were drawn with may be of another temperature, or truncated; a rollout_func is trusted
                own = self.rollout_func is not None or turns.drawn_by_policy
                own = own or (self.use_vllm and samples_at_temperature(self.args))
                self.kl_reward.generated(rollout.tool_mask, rollout.logps if own else None)
            # Where the sampler says nothing of its log-probabilities, TRL computes them, once, if data will be stale
            return self._asks_old_policy and training and rollout.logps is None

        listening = self.kl_reward.listening() if self.kl_reward is not None else nullcontext()
        single_turn = turns if needs_behaviour and by_transformers else None
        rewards: list[torch.Tensor] = []
        with (
            listening,
            results_noted(self, "_calculate_rewards", rewards),
            without_old_policy(self, single_turn=single_turn, generated=generated),
            prompts_read_once(self, policy) if reads_once else nullcontext(),
        ):
            batch = super()._generate_and_score_completions(inputs)
        if training and (self.isopo.rule.needs.ntk or self.weighting.needs_prompts):
            note_prompts(batch, self.accelerator.process_index, self.num_generations)
        if needs_behaviour or self.transforms:
            note_origin(batch, self._optimizer_steps, self.rollout_func is None and turns.drawn_by_policy)
        # Unless a subclass has others, or advantages are not relative to the group
        by_group = self.args.multi_objective_aggregation == "sum_then_normalize"
        if training and rewards and by_group and (self.skipping is not None or self.transforms):
            group: Any = self.args.num_generations
            rank = self.accelerator.process_index
            batch["advantages"] = without_rounding(batch["advantages"], rewards[-1], self.reward_weights, group, rank)
        if self.transforms and self._is_in_training_step:
            batch["advantages"] = self._transformed(Batch(batch), rewards, completions)
        return batch

    def _transformed(self, batch: Batch, rewards: list[torch.Tensor], completions: list[Any]) -> torch.Tensor:
        """The advantages `[B]` of this rank's part of a generation, as the transforms leave them."""
        is_whole = bool(rewards) and len(completions) == len(batch.advantages)
        self.transforms.verify_generation(batch, is_whole, type(self).__name__)
        group: Any = self.num_generations
        rows = self.args.per_device_train_batch_size
        rollout = Measured(Scoring(self), self.accelerator, batch, completions, group, self._optimizer_steps, rows)
        advantages = self.accelerator.gather(batch.advantages).cpu().double()
        whole = Generation(totals(rewards[-1], self.reward_weights), advantages, group, rollout)
        advantages = self.transforms.apply(whole)
        if advantages.any():
            self.missing_rewards.learned()
        replace_logged_advantages(self, advantages.tolist())
        self._log({f"advantages/{name}": value for name, value in whole.figures.items()})
        start = self.accelerator.process_index * len(batch.advantages)
        return advantages[start : start + len(batch.advantages)].to(batch.advantages)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        functions, names, missing = self.reward_funcs, self.reward_func_names, self.missing_rewards
        with borrowed(self, reward_funcs=missing.watched(functions, names)):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.kl_reward is not None:
            self.kl_reward.leave_out_unscored(rewards)
        group: Any = self.num_generations if self._is_in_training_step else None
        missing.calculated(rewards, self.reward_weights, functions, names, self.args, group)
        return rewards

    # State

    def create_model_card(  # type: ignore[override]  # as TRL has it
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            model_card.write(os.path.join(str(self.args.output_dir), "README.md"), model_name, self)

    def _save_checkpoint(self, model, trial):
        # First: what follows pushes the folder to the Hub and removes older checkpoints
        folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = os.path.join(self._get_output_dir(trial=trial), folder)
        generation.save(self, folder)
        if self.args.should_save:
            place = {"position": generation.position(self), "optimizer_steps": self._optimizer_steps}
            self._own_state().save(folder, place)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self._loaded_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights_are_others(self)

    def _load_best_model(self):
        self._loaded_from = self.state.best_model_checkpoint
        super()._load_best_model()
        weights_are_others(self)

    def _issue_warnings_after_load(self, load_result):
        """Where weights are missing, a warning is all that transformers has for it, and they begin anew."""
        lost = lost_weights(self.model, load_result.missing_keys)
        if lost:
            load_converted(self.model, self._loaded_from, lost)
        else:
            super()._issue_warnings_after_load(load_result)

    def _own_state(self) -> OwnState:
        """What is saved beside what TRL saves, and by what it knows again what is done with tokens."""
        chosen = {**ratio_loss.of_loss(self.args), **self.terms.chosen, **self.weighting.chosen()}
        chosen |= {**self.transforms.chosen(), "skip_zero_advantage": self.skipping is not None}
        parts = {"advantages": self.transforms or None, "step_control": self.step_control}
        there = {name: part for name, part in parts.items() if part is not None}
        binding = {"token_weights", *self.weighting.kept_on_resume}
        return OwnState(self.isopo, chosen, binding, there, self._described_optimizer)

    def _load_state(self, checkpoint: Path) -> None:
        state = self._own_state().load(checkpoint)
        needed = [REFERENCE_LOGPS] * self.terms.needs_reference + ["generated_after"] * self._needs_behaviour
        if generation.restore(self, checkpoint, state["position"], needed):
            self._optimizer_steps = state["optimizer_steps"]  # by which its batches are dated
