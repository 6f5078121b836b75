"""The [`ISOPOTrainer`]."""

import inspect
import math
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend, is_peft_model
from peft import PeftType
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from .advantages import Chain, Generation, Measured, totals
from .checkpoints import files, generation, model_card
from .checkpoints.choice import checkpoint_to_resume
from .checkpoints.weights import load_converted, lost_weights
from .config import ISOPOConfig
from .integrations import deepspeed, liger, peft_reference, vllm_weights
from .integrations.autograd_thread import calling_thread, is_on_one_device
from .integrations.deepspeed import before_step, caught_outputs, unseen_by_deepspeed
from .isopo import ISOPO
from .layers.read_elsewhere import refuse_readers
from .loss.dropout import noise_of_ratios
from .loss.forward import Weighed, broken_sequences, weigh
from .loss.frozen_head import frozen_head
from .loss.sampler import (
    PROMPT_NUMBERS,
    Turns,
    behaviour_logps,
    is_fresh,
    note_origin,
    note_prompts,
    says_what_drew_it,
)
from .loss.terms import Derivative, LossTerms, Terms
from .loss.zero_advantages import Skipping, equal_rewards, what_needs_all
from .narrow_weights import choice
from .narrow_weights.lost_steps import LostSteps
from .rewards import functions as reward_functions
from .rewards.kl_to_reference import KLReward
from .rewards.missing import MissingRewards
from .rules.direction import GradientSoFar, LastStep
from .step_size import optimizers
from .step_size.control import StepControl
from .step_size.controller import StepSize
from .step_size.drift import BehaviourBound, drift_sums
from .step_size.measurement import StepKL
from .step_size.precise_forward import PreciseForward
from .token_weights import Weighted, Weighting, ratio_loss
from .trl_seam.batch import REFERENCE_LOGPS, Batch, shuffled_by_group, verify_prompts
from .trl_seam.generation import Generated, Progress, prompts_read_once, samples_at_temperature, without_old_policy
from .trl_seam.head import HeadFigures, head_figures_noted, scored_rows_alone
from .trl_seam.loans import borrowed, intercepted, results_noted
from .trl_seam.log import add_all_to_log, add_to_log, replace_logged_advantages
from .trl_seam.loss import Figures, Outputs, TRLLoss, unequal_ranks, without_graph
from .trl_seam.rewards import add_reward
from .trl_seam.scoring import Scoring
from .trl_seam.trainer import get_config_model_id
from .trl_seam.vllm import ColocatedVLLM, is_colocated, weights_are_others


logger = get_logger(__name__)

# Multiple of max_grad_norm from which on clipping takes a gradient's length away
CUT_AWAY = 100
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
        self._clipping_was_said = False
        with peft_reference.base_weights_kept(model):
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._refuse_what_the_model_cannot()
        # What the model's parameters are, before anything is made of them
        self.shared_weights = vllm_weights.share(self, ColocatedVLLM(self)) if is_colocated(self) else None
        self.epsilon_low, self.epsilon_high = ratio_loss.clipping_range(args)
        if args.use_liger_kernel:
            args.liger_kernel_config = liger.kernels(self.model, args.liger_kernel_config)
        if is_peft_model(self.model) and "ref" in self.model.peft_config:
            # TRL's copy of a trained adapter; PEFT leaves virtual tokens trainable that are not in use
            for name, p in self.model.named_parameters():
                if ".ref." in name:
                    p.requires_grad_(False)
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
        self._asks_old_policy = weighting.needs_behaviour or self.terms.needs_behaviour
        self._needs_behaviour = self._asks_old_policy or args.bounds_drift
        for warning in (*self.weighting.warnings(), *self._warnings()):
            logger.warning(warning)
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
        backend = self.accelerator.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise ValueError(
                f"accelerate is to compile the model (dynamo_backend={backend.value.lower()}), which is not supported "
                "with ISOPO's layers, as torch_compile=True is not: set dynamo_backend to no in its configuration or "
                "on its command line, and leave ACCELERATE_DYNAMO_BACKEND unset."
            )
        refuse_sharding(args, self.accelerator)
        peft_reference.refuse_lost_part(self.model, args.beta)
        given = self.optimizer if self.optimizer_cls_and_kwargs is None else self.optimizer_cls_and_kwargs[0]
        choice.refuse(args, self.model, given, self.accelerator)
        if not self.reward_weights.any() and not args.kl_in_reward:
            raise ValueError(
                f"reward_weights={args.reward_weights} leaves out every reward, so that nothing would be learned: "
                "give at least one of them a weight other than 0."
            )
        prefix = is_peft_model(self.model) and self.model.active_peft_config.peft_type == PeftType.PREFIX_TUNING
        if prefix and args.gradient_checkpointing:
            raise ValueError(
                "Prefix tuning hands its virtual tokens to the model as a cache, which transformers drops under "
                "gradient checkpointing: set gradient_checkpointing=False, or use LoRA."
            )

    def _warnings(self) -> Iterator[str]:
        """What the user should know of the settings before training."""
        args = self.args
        rule = self.isopo.rule
        if self.weighting.of_plain_steps and not optimizers.is_plain(self.optimizer, args):
            yield (
                f"token_weights={args.token_weights!r} gates tokens by what a plain gradient step at the learning "
                "rate would do, and the steps of another optimizer have other lengths and directions, so that its "
                "bounds mean little: set optim='sgd' without momentum, or find bounds by off_policy/gated."
            )
        if rule.needs.direction:
            yield from self._warnings_of_direction()
        elif rule.needs.ntk and args.per_device_train_batch_size == 1:
            yield (
                f"rule={args.rule!r} lets the sequences of a microbatch act on each other, and "
                "per_device_train_batch_size=1 leaves each alone in its own: raise it, with fewer "
                "gradient_accumulation_steps for the same step, or take another rule."
            )
        others_draw = self.use_vllm or self.use_transformers_continuous_batching or self.rollout_func is not None
        is_one = not (others_draw or args.uses_stale_data) and samples_at_temperature(args)  # the ratio, by definition
        noise = noise_of_ratios(self.model) if self._needs_behaviour and not is_one else None
        if noise is not None:
            yield noise

    def _warnings_of_direction(self) -> Iterator[str]:
        """What the user should know of a rule that looks at a direction from before."""
        args, direction = self.args, self.isopo.rule.direction()
        if isinstance(direction, LastStep) and not optimizers.is_plain(self.optimizer, args):
            yield (
                f"rule={args.rule!r} makes a direction of its own of each step and those before, for plain gradient "
                "steps to follow, and another optimizer turns it elsewhere: set optim='sgd' without momentum, with "
                "target_kl (its default there) or a learning_rate of its own."
            )
        if isinstance(direction, GradientSoFar) and args.gradient_accumulation_steps == 1:
            yield (
                f"rule={args.rule!r} acts between the microbatches of a step, and gradient_accumulation_steps=1 makes "
                "one of each step, so that nothing is left of it but rule='none': raise it, with a lower "
                "per_device_train_batch_size for the same step, or take another rule."
            )

    def _prepare_to_go_back_twice(self, settings: str) -> None:
        """For terms of the loss that no rule may rescale, which these `settings` ask for."""
        args = self.args
        if args.use_liger_kernel:
            args.liger_kernel_config = liger.kernels(self.model, args.liger_kernel_config, settings)
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        if args.gradient_checkpointing and checkpointing.get("use_reentrant"):
            raise ValueError(
                f"{settings} needs to go back through the model twice, which reentrant checkpointing cannot do: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or (with LoRA under ZeRO-3, where TRL "
                "insists on it) gradient_checkpointing=False."
            )

    def _skipping(self) -> Skipping | None:
        """What leaves out sequences without an advantage, where that is asked for, or nobody would miss them."""
        args = self.args
        if args.skip_zero_advantage and self.terms:
            raise ValueError(
                f"skip_zero_advantage=True leaves out sequences that {', '.join(self.terms.settings)} acts on even "
                "without an advantage: set skip_zero_advantage=False, or leave the term out of the loss (beta can go "
                "into the reward, with kl_in_reward=True)."
            )
        skips = args.skip_zero_advantage
        if skips is None:
            needed = self.terms or self.isopo.rule.needs.ntk or args.top_entropy_quantile < 1
            skips = not needed and not self._is_changed("_prepare_inputs", "compute_loss", "_compute_loss")
        group: Any = args.num_generations if args.group_microbatches else 1
        across, always = self.weighting.looks_across_sequences, self.is_deepspeed_enabled
        return Skipping(Progress(self), self.accelerator, self.loss_type, group, across, always) if skips else None

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
        if controlled is not None:
            return controlled
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
        return max(rates, default=float(self.args.learning_rate))

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
        if skipping is not None and skipping.is_idle and accelerator.sync_gradients:
            # As they would be if the passes had been made: the optimizer steps, by its momentum
            for p in model.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
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
        # DeepSpeed has had its step, unless the norm was not finite; -1 is what it says of such a norm in places
        elif grad_norm is not None and not 0 <= grad_norm < math.inf:
            _refuse_norm(grad_norm, stepped=not self.accelerator.optimizer_step_was_skipped)
        elif grad_norm is not None:
            self._warn_of_clipping(grad_norm)
        return grad_norm

    def _warn_of_clipping(self, norm: float) -> None:
        """Say once that the units of a gradient to the letter of the paper are cut away, with its length in them."""
        args = self.args
        allowed = args.max_grad_norm or math.inf
        found = self.isopo.rule.scale == "paper" and args.target_kl is None and norm > CUT_AWAY * allowed
        if self._clipping_was_said or not found:
            return
        self._clipping_was_said = True
        letter, other = "scale='paper'", "set scale='relative', "
        if args.scale != "paper":  # and cannot be anything else
            letter, other = f"rule={args.rule!r}", ""
        logger.warning(
            f"{letter} leaves the gradient in the units of the rule, and max_grad_norm={allowed:g} cuts it to "
            f"{allowed / norm:.1g} of its length in this step (grad_norm={norm:,.4g}), so that every step has the "
            f"length of the bound: raise max_grad_norm to where grad_norm is, {other}or let target_kl find how long "
            "steps are. This is said once."
        )

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
        broken = int(figures.pop("broken_sequences"))
        by_rule = int(figures.pop("broken_by_rule", 0))
        if by_rule:
            raise FloatingPointError(
                f"rule={self.isopo.rule.name!r} returned coefficients that are not finite, at {by_rule} layers, "
                "though the gradients and their norms are: look at what it divides by and takes the root of, and "
                "return 0 for a sequence without a gradient. The weights have not been updated with them, and the "
                "running statistics do not contain them."
            )
        if broken:
            raise FloatingPointError(
                f"Gradients of this step are not finite (statistics of {broken} sequences are affected): lower the "
                "learning rate, or train in bf16 or fp32. The weights have not been updated with them, and the "
                "running statistics do not contain them."
            )
        norm = figures.pop("grad_norm", 0.0)
        if not math.isfinite(norm):
            _refuse_norm(norm, multiplier=figures["multiplier_max"])
        self._warn_of_clipping(norm)
        add_to_log(self, "train", {f"isopo/{name}": value for name, value in figures.items()})
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

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with scored_rows_alone(frozen_head):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

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
            return self._evaluated(trl_loss, batch)
        if self._is_seen_by_loss:
            self._see(batch)
        if self.step_control is not None:
            self.step_control.score_early(self.state.global_step)
        # The loss sees the sign of the advantage, all that its logic depends on, and the layers its size. Where there
        # is nothing to rescale, but terms without an advantage, the size is in the loss as well, and all goes back
        # together; what is not finite must be noticed by the layers
        sizes, in_loss = advantages.abs(), self._puts_sizes_into_loss
        signs = (ratio_loss.signs(advantages, self.loss_type) * batch.loss_weights).requires_grad_()
        self.isopo.begin(
            torch.where(sizes.isfinite(), 1.0, sizes) if in_loss else sizes,
            attention_mask=batch.sampled_mask,
            completion_mask=batch.completion_mask,
            loss_scale=1 / self.current_gradient_accumulation_steps,
            prompts=batch.get(PROMPT_NUMBERS),
            signs=signs.detach().sign(),
            sequence_keys=batch.keys_of_content if self.isopo.fisher_scope == "step" else None,
        )
        with caught_outputs(model, self._goes_back_twice and self.is_deepspeed_enabled) as caught:
            outputs, head = self._forward(trl_loss, batch)
        weighed, behaviour = self._weighed(batch.with_advantages(signs), outputs, advantages, head)
        leaves = without_graph(weighed.outputs)
        with nullcontext() if self.skipping is None else unequal_ranks(self):
            loss, figures = self.terms.of_policy(trl_loss, weighed.batch, leaves, advantages)
        self._add_drift(batch, outputs, behaviour)
        if self.terms.are_balance:
            terms = self.terms.within(loss, leaves.aux_loss, outputs)
        else:
            terms = self.terms(trl_loss, weighed.batch, outputs, self._older(batch, behaviour))
        moving = self._moving_terms(outputs, batch, terms)
        self._log_terms(figures, terms)
        self._log_weighted(weighed.weighted)
        # The loss is proportional to each |A_s|, so its value with the advantages in it follows from the derivative
        by_weights = [] if weighed.weights is None else [weighed.weights]
        slope, by_logps, *by_weights = torch.autograd.grad(loss, [signs, leaves.logps, *by_weights])
        value = loss.detach() + ((advantages * batch.loss_weights - signs.detach()) * slope).sum() + terms.value
        if in_loss:
            by_logps = by_logps * sizes.unsqueeze(1)
        loss = Derivative(weighed.outputs.logps, by_logps).term
        if not self.isopo.every_layer_was_reached:  # before the first backward
            refuse_readers(loss, self.model)
        pull = None if weighed.weighted.unscaled is None else weighed.weighted.unscaled()
        if pull is not None:
            # By what the loss multiplies a token: its normalisation, and TRL's masks
            share = -by_weights[0] * ratio_loss.signs(advantages, self.loss_type).unsqueeze(1)
            value = value + (share * pull.value).sum()
            moving.append(Derivative(outputs.logps, share * pull.slope))
        if moving:
            term = torch.stack([derivative.term for derivative in moving]).sum()
            if in_loss:
                loss = loss + term
            else:
                with unseen_by_deepspeed(model, caught):
                    self.isopo.unscaled(term)
        return loss + (value - loss).detach()

    def _evaluated(self, trl_loss: TRLLoss, batch: Batch) -> torch.Tensor:
        """The loss of an evaluation."""
        advantages, (outputs, head) = batch.advantages, self._forward(trl_loss, batch)
        weighed, behaviour = self._weighed(batch, outputs, advantages, head)
        leaves = without_graph(weighed.outputs)
        loss, figures = self.terms.of_policy(trl_loss, weighed.batch, leaves, advantages)
        if self.terms.are_balance:
            terms = self.terms.within(loss, leaves.aux_loss, outputs)
        else:
            terms = self.terms(trl_loss, weighed.batch, outputs, self._older(batch, behaviour))
        self._moving_terms(outputs, batch, terms)
        self._log_terms(figures, terms)
        self._log_weighted(weighed.weighted)
        return loss + terms.value

    def _forward(self, trl_loss: TRLLoss, batch: Batch) -> tuple[Outputs, HeadFigures | None]:
        """The forward pass of the loss, and what the LM head says of tokens, `[B, C]`, where anybody asks."""
        if not self.weighting.of_plain_steps:
            return trl_loss.forward(batch), None
        with head_figures_noted() as noted:
            outputs = trl_loss.forward(batch)
        (figures,) = noted
        return outputs, figures.of_completions(batch.completion_mask, batch.attention_mask.size(1))

    def _weighed(
        self, batch: Batch, outputs: Outputs, advantages: torch.Tensor, head: HeadFigures | None
    ) -> tuple[Weighed, torch.Tensor | None]:
        """The forward pass with its tokens weighed, and what they were drawn with, `[B, C]`, where anybody asks."""
        behaviour = None
        if self._needs_behaviour:
            behaviour = behaviour_logps(batch, outputs.logps.detach(), self._optimizer_steps)
        rate = self._rate_ahead() if self.weighting.of_plain_steps else None
        return weigh(self.weighting, batch, outputs, behaviour, advantages, head, rate), behaviour

    def _older(self, batch: Batch, behaviour: torch.Tensor | None) -> torch.Tensor | None:
        """What an older policy drew the tokens with, `[B, C]`, where the terms ask for it and there was one."""
        asked = self.terms.needs_behaviour and not is_fresh(batch, self._optimizer_steps)
        return behaviour if asked else None

    def _add_drift(self, batch: Batch, outputs: Outputs, behaviour: torch.Tensor | None) -> None:
        """Tell how far the policy has gone from the one that drew the tokens, where that is watched."""
        bound = None if self.step_control is None else self.step_control.behaviour
        if bound is not None and behaviour is not None:
            known = is_fresh(batch, self._optimizer_steps) or says_what_drew_it(batch)
            counted = batch.counted if known else torch.zeros_like(batch.counted)
            bound.add(drift_sums(outputs.logps, behaviour, counted))

    def _moving_terms(self, outputs: Outputs, batch: Batch, terms: LossTerms) -> list[Derivative]:
        """The terms that do not vanish on every rank; raises where log-probabilities are not finite."""
        broken = broken_sequences(outputs.logps, batch)
        # Here, where TRL has waited for the device already; over ranks, so that none is left waiting
        counts = torch.stack([broken, *(~derivative.vanishes for derivative in terms.derivatives)])
        broken, *moving = self.accelerator.reduce(counts, reduction="sum").tolist()
        if broken:
            raise FloatingPointError(
                f"The model's log-probabilities are not finite for {broken} sequences of this microbatch: lower the "
                "learning rate or max_grad_norm, or train in bf16 or fp32. The running statistics and the weights "
                "have not been touched by this step."
            )
        return [derivative for derivative, moves in zip(terms.derivatives, moving, strict=True) if moves]

    def _log_terms(self, of_policy: Figures, terms: LossTerms) -> None:
        add_all_to_log(self, "train" if self.model.training else "eval", self.terms.figures(of_policy, terms))

    def _log_weighted(self, weighted: Weighted) -> None:
        add_to_log(self, "train" if self.model.training else "eval", weighted.figures)
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
        # Unless a subclass has others
        if training and rewards and (self.skipping is not None or self.transforms):
            batch["advantages"] = self._without_rounding(batch["advantages"], rewards[-1])
        if self.transforms and self._is_in_training_step:
            batch["advantages"] = self._transformed(Batch(batch), rewards, completions)
        return batch

    def _transformed(self, batch: Batch, rewards: list[torch.Tensor], completions: list[Any]) -> torch.Tensor:
        """The advantages `[B]` of this rank's part of a generation, as the transforms leave them."""
        if not rewards or len(completions) != len(batch.advantages):
            raise RuntimeError(
                f"advantage_transform={self.args.advantage_transform!r} needs the rewards of TRL's own generation, "
                f"which {type(self).__name__} does not make: set advantage_transform=None, or call "
                "`super()._generate_and_score_completions`."
            )
        one_turn = [transform.name for transform in self.transforms.transforms if transform.needs_one_turn]
        if one_turn and not bool((batch.scored.bool() == batch.completion_mask.bool()).all()):
            raise ValueError(
                f"advantage_transform={','.join(one_turn)!r} takes a completion for one turn, and in some of this "
                "generation a tool or environment has written: leave it out."
            )
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

    def _without_rounding(self, advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        """The advantages `[B]` of this rank, 0 where all `rewards` `[N, functions]` of a group are the same."""
        if self.args.multi_objective_aggregation != "sum_then_normalize":
            return advantages  # which are not relative to the group
        group: Any = self.args.num_generations
        start = self.accelerator.process_index * len(advantages)
        equal = equal_rewards(rewards, self.reward_weights, group)[start : start + len(advantages)]
        return advantages.masked_fill(equal, 0)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        names, missing = self.reward_func_names, self.missing_rewards
        missing.begin()
        seen = missing.returned
        functions = [reward_functions.verified(*each, seen) for each in zip(self.reward_funcs, names, strict=True)]
        with borrowed(self, reward_funcs=functions):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.kl_reward is not None:
            self.kl_reward.leave_out_unscored(rewards)
        on_host, weights = rewards.detach().cpu(), self.reward_weights.cpu()
        by_function = self.args.multi_objective_aggregation == "normalize_then_sum"
        normalised = self.args.scale_rewards != "none" or by_function
        reward_functions.verify_size(on_host, weights, names, normalised)
        for function, name, column in zip(self.reward_funcs, names, on_host.unbind(1), strict=True):
            if isinstance(function, torch.nn.Module):  # which nobody has seen
                missing.returned(column.tolist(), name, of_all_ranks=True)
        if self._is_in_training_step:
            group: Any = self.num_generations
            missing.generated(on_host, weights, names, group, by_function)
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
            os.makedirs(folder, exist_ok=True)
            state = {
                **self.isopo.state_dict(),
                "weighting": self._chosen(),
                "position": generation.position(self),
                "optimizer_steps": self._optimizer_steps,
            }
            if self.transforms:
                state["advantages"] = self.transforms.state_dict()
            if self.step_control is not None:
                state["step_control"] = self.step_control.state_dict()
            torch.save(state, os.path.join(folder, files.STATE_FILE))
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

    def _chosen(self) -> dict[str, Any]:
        """What is done with tokens, by which a checkpoint knows it again: their weights, the loss, and its terms."""
        chosen = {**ratio_loss.of_loss(self.args), **self.terms.chosen, **self.weighting.chosen()}
        chosen |= self.transforms.chosen()
        return {**chosen, "skip_zero_advantage": self.skipping is not None}

    def _load_state(self, checkpoint: Path) -> None:
        """Before anything else is loaded, so that a checkpoint that does not fit changes nothing."""
        state = files.read_state(checkpoint)
        path, own = checkpoint / files.STATE_FILE, self._chosen()
        saved = state["weighting"]
        changed = [name for name in own if name in saved and saved[name] != own[name]]
        changes = ", ".join(f"{name}={saved[name]!r} to {own[name]!r}" for name in changed)
        kept = {"token_weights", *self.weighting.kept_on_resume}
        if any(self.isopo.rule.needs) and kept.intersection(changed):
            raise ValueError(
                f"{path}: The saved ISOPO statistics are of gradients under other token weights ({changes}): resume "
                "with the saved settings, or start a new run from the saved weights."
            )
        try:
            self.isopo.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        needed = [REFERENCE_LOGPS] * self.terms.needs_reference + ["generated_after"] * self._needs_behaviour
        if generation.restore(self, checkpoint, state["position"], needed):
            self._optimizer_steps = state["optimizer_steps"]  # by which its batches are dated
        self.transforms.load_state_dict(state.get("advantages", {}))
        if self.step_control is not None:
            self.step_control.load_state_dict(state.get("step_control", {}))
        if changes:
            logger.warning(f"The run goes on with other settings than it was saved with: {changes}.")
        if not files.has_optimizer(checkpoint):
            logger.warning(
                f"{checkpoint} has no state of the optimizer (save_only_model=True leaves it out): it starts anew, "
                "and the run goes on differently from one that was not interrupted."
            )


def refuse_sharding(args: ISOPOConfig, accelerator: Any) -> None:
    """Raise for a rule that needs a direction where whole gradients are on no rank, or out of the layers' sight."""
    state = accelerator.state
    fsdp, deepspeed_plugin = (getattr(state, f"{name}_plugin", None) for name in ("fsdp", "deepspeed"))
    if args._rule().needs.direction and (fsdp is not None or deepspeed_plugin is not None):
        raise ValueError(
            f"rule={args.rule!r} measures each layer's gradients against a direction of all its weights, which it "
            "takes from gradients that are whole on every rank, and "
            + ("FSDP shards them" if fsdp is not None else "DeepSpeed keeps them where no layer sees them")
            + ": train under DDP, or take another rule ('interacting' is the nearest)."
        )


def _refuse_norm(norm: float, multiplier: float | None = None, stepped: bool = False) -> None:
    """Raise for a gradient whose norm is not finite; `multiplier`: the step's largest, where it is known."""
    largest = "" if multiplier is None else f", the largest multiplier is {multiplier:.3g} times the mean one"
    raise FloatingPointError(
        f"The gradient of this step overflows: its norm is {norm}{largest}, though each sequence's own gradient is "
        "finite. "
        + (
            "DeepSpeed has stepped all the same, so the weights are lost: go back to the last checkpoint. "
            if stepped
            else "The weights and the optimizer are as they were before the step. "
        )
        + "A lower learning rate does not help. Scale the rewards down (or set scale_rewards='group'), and where "
        "multipliers are large, raise `regularization`, take exponents nearer to 0, or set scale='relative'."
    )
