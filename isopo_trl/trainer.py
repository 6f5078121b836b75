"""The [`ISOPOTrainer`]."""

import inspect
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id

from . import model_card
from .config import ISOPOConfig
from .generation import recording
from .isopo import ISOPO
from .objectives import (
    batch_figures,
    filtered,
    kalman_gains,
    kl_pull,
    log_ratios,
    p3o_weights,
    ratio_sums,
    sampler_weights,
    token_gains,
)


logger = get_logger(__name__)

STATE_FILE = "isopo_state.pt"
# The constructor takes what GRPOTrainer's takes
_SIGNATURE = inspect.signature(GRPOTrainer.__init__)


class ISOPOTrainer(GRPOTrainer):
    """
    Trainer for Isometric Policy Optimization (ISOPO), proposed in [ISOPO: Proximal policy gradients without
    pi-old](https://huggingface.co/papers/2512.23353).

    With respect to [`~trl.GRPOTrainer`], the backward pass rescales each sequence's log-probability gradient, layer by
    layer, before it meets the advantage (see [`ISOPOConfig`]), and no pass over the data is made for an old policy's
    log-probabilities: where `token_weights` need the behaviour policy's, they are the sampler's own, if it gives them.
    Everything else (constructor, data sets, rewards, generation, tools, logging, checkpoints) is inherited.

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
    reward_funcs: list[Any]
    reward_processing_classes: list[Any]

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
        given = _SIGNATURE.bind(self, model, reward_funcs, args, *positional, **kwargs).arguments
        silent = not args.use_vllm and given.get("rollout_func") is None and args.token_weights == "none"
        if args.off_policy_mask_threshold is not None and silent:
            raise ValueError(
                "off_policy_mask_threshold compares with the sampler's log-probabilities, which only vLLM or a "
                "`rollout_func` returns, or transformers' generation for token_weights: set use_vllm=True or "
                "token_weights, or leave the threshold unset."
            )
        # Inputs of the loss under way; the forward pass inside it adds the token weights
        self._loss_inputs: dict[str, Any] | None = None
        # Sums over the step's tokens, so far
        self._ratio_sums: torch.Tensor | None = None
        self._updates = 0  # optimizer steps
        # For the turns of the last generation: did the policy itself, and nothing else, draw the tokens?
        self._turns: list[bool] = []
        self._accumulation = args.gradient_accumulation_steps
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.aux_loss_enabled:
            raise ValueError(
                f"{type(self.model).__name__} adds a load-balancing loss by default (router_aux_loss_coef="
                f"{self.router_aux_loss_coef}), which carries no advantage and cannot be part of ISOPO's single pass: "
                "set router_aux_loss_coef=0.0."
            )
        if is_peft_model(self.model) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{type(self.model.active_peft_config).__name__} adds virtual tokens in front of every sequence, "
                "which ISOPO does not support: use LoRA (`peft_config=LoraConfig(target_modules='all-linear')`)."
            )
        self.isopo = ISOPO(
            self.model,
            args._rule(),
            regularization_decay=args.regularization_decay,
            fisher_samples=args.fisher_samples,
            seed=args.seed,
        )
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        if args.token_weights == "p3o" and any(self.isopo.rule.needs) and args.gradient_checkpointing:
            if checkpointing.get("use_reentrant"):
                raise ValueError(
                    "token_weights='p3o' goes back through the model twice, which reentrant checkpointing cannot do: "
                    "set gradient_checkpointing_kwargs={'use_reentrant': False}, or (with LoRA under ZeRO-3, where "
                    "TRL insists on it) gradient_checkpointing=False."
                )
        if args.token_weights == "kpo" and not self._samples_at_temperature:
            logger.warning(
                "Tokens are not sampled from the distribution that is trained (top_p, top_k, min_p, "
                "repetition_penalty, generation_kwargs), so filtered ratios leave KPO's narrow range from the first "
                "step: most tokens with a negative advantage are clipped, and sampling at a higher temperature can "
                "flatten the policy whatever the reward. Sample at `temperature` alone, set epsilon and epsilon_high "
                "to 0.2, or use token_weights='p3o'."
            )
        if args.kl_in_reward:
            self._reference: dict[str, Any] = {}
            # New lists: TRL keeps the ones it was given
            self.reward_funcs = [*self.reward_funcs, self._kl_to_reference]
            self.reward_func_names = [*self.reward_func_names, "kl_to_reference"]
            self.reward_processing_classes = [*self.reward_processing_classes, None]
            self.reward_weights = torch.cat([self.reward_weights, torch.tensor([-args.beta])])

    __init__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]

    @property
    def _samples_at_temperature(self) -> bool:
        """Whether generation is asked for samples at the temperature of the loss, and for nothing else."""
        args, others = self.args, dict(self.args.generation_kwargs or {})  # type: ignore[arg-type]
        same = others.pop("temperature", args.temperature) == args.temperature and not others
        return same and (args.top_p, args.top_k, args.min_p, args.repetition_penalty) == (1.0, 0, None, 1.0)

    # The loss

    def train(self, *args, **kwargs):
        self._ratio_sums = None
        return super().train(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except BaseException:
            self.isopo.abort()
            self._ratio_sums = None
            raise
        self.isopo.end()
        if self.accelerator.sync_gradients:
            self._updates += 1
            self._log_step(self.isopo.step())
        return loss

    def _compute_loss(self, model, inputs):
        inputs = dict(inputs)
        advantages = inputs["advantages"]
        if advantages.dim() != 1:
            raise ValueError(
                f"ISOPO takes one advantage per sequence, got shape {list(advantages.shape)}: per-token advantages "
                "are not supported."
            )
        if self.off_policy_mask_threshold is not None and "sampling_per_token_logps" not in inputs:
            raise ValueError(
                "off_policy_mask_threshold compares with the sampler's log-probabilities, but the generation or "
                "`rollout_func` returned none: return `logprobs`, or leave the threshold unset."
            )
        train = torch.is_grad_enabled()
        method = self.args.token_weights
        if train:
            # The loss sees the sign of the advantage (all that its logic depends on), the backward the rest
            sign = torch.where(advantages < 0, -1.0, 1.0).to(advantages.dtype).requires_grad_()
            inputs["advantages"] = sign
            mask = inputs["completion_mask"]
            microbatch = self.isopo.begin(
                advantages.abs(),
                attention_mask=torch.cat([inputs["prompt_mask"], mask], dim=1),
                completion_mask=mask,
                loss_scale=1 / self.current_gradient_accumulation_steps,
            )
        weighted = method in ("sampler", "p3o")  # TRL multiplies by weights where it thinks that they are vLLM's
        with self._settings(beta=0.0, use_vllm=weighted, vllm_importance_sampling_correction=weighted):
            self._loss_inputs = inputs
            try:
                loss = super()._compute_loss(model, inputs)
            finally:
                self._loss_inputs = None
        # Here, where TRL has waited for the device already
        broken = int(self.accelerator.reduce(inputs["broken"], reduction="sum"))  # so that no rank is left waiting
        if broken:
            raise FloatingPointError(
                f"The model's log-probabilities are not finite for {broken} sequences of this microbatch: lower the "
                "learning rate or max_grad_norm, or train in bf16 or fp32. The running statistics and the weights "
                "have not been touched by this step."
            )
        if not train:
            return loss
        # The loss is proportional to each |A_s|, so its value with the advantages in it follows from the derivative
        weights = [inputs["importance_sampling_ratio"]] if method == "p3o" else []
        slope, *by_weight = torch.autograd.grad(loss, [sign, *weights], retain_graph=True)
        value = loss.detach() + ((advantages - sign.detach()) * slope).sum()
        if method == "p3o" and inputs["ess"] < 1:
            logps, ess = inputs["logps"], inputs["ess"]
            # By what the loss multiplies a token: its normalisation, and TRL's masks
            share = -by_weight[0] * sign.detach().unsqueeze(1)
            kl, kl_slope = kl_pull(inputs["log_ratio"], self.args.use_bias_correction_kl)
            value = value + (share * (1 - ess) * kl).sum()
            pull = share * (1 - ess) * kl_slope
            if any(self.isopo.rule.needs):
                with _unseen_by_deepspeed(model, inputs["outputs"]):
                    self.isopo.unscaled((pull * logps).sum())
            else:  # there is nothing to rescale, and both parts can go back together
                policy = share * weights[0].detach() * advantages.unsqueeze(1)
                loss = ((pull - policy) * logps).sum()
                # An advantage that is not finite is to be noticed
                microbatch.set_advantages(torch.where(advantages.isfinite(), 1.0, advantages))
        return loss + (value - loss).detach()

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        forward = super()._get_per_token_logps_and_entropies
        inputs, outputs = self._loss_inputs, []
        catch = None
        twice = self.args.token_weights == "p3o" and any(self.isopo.rule.needs)
        if inputs is not None and twice and self.is_deepspeed_enabled:
            catch = model.register_forward_hook(lambda module, args, output: outputs.extend(output.values()))
        try:
            logps, entropies, aux_loss = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        finally:
            if catch is not None:
                catch.remove()
        if inputs is None:
            if self.args.kl_in_reward:  # this is the reference model's pass, for `_kl_to_reference`
                arguments = (input_ids, attention_mask, logits_to_keep, *args)
                self._reference.update(logps=logps, arguments=arguments, keywords=kwargs)
            return logps, entropies, aux_loss
        inputs["outputs"] = [x for x in outputs if isinstance(x, torch.Tensor)]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        inputs["broken"] = (~torch.isfinite(logps.detach()) & mask.bool()).any(dim=1).sum()
        if self.args.token_weights != "none":
            behaviour = self._behaviour_logps(logps.detach(), inputs)
            inputs.pop("old_per_token_logps", None)  # TRL would take the ratio to it
            logps = self._weigh_tokens(logps, behaviour, mask, inputs)
        return logps, entropies, aux_loss

    # Token weights

    def _behaviour_logps(self, logps, inputs):
        """Log-probabilities under the policy that drew the tokens; NaN where nobody knows."""
        sampler = inputs.get("sampling_per_token_logps")
        fresh = int(inputs.get("generated_after", -1)) == self._updates
        if sampler is not None and not (fresh and inputs.get("drawn_by_policy", False)):
            return sampler
        return logps if fresh else inputs.get("old_per_token_logps", logps)

    def _weigh_tokens(self, logps, behaviour, mask, inputs):
        """Put the weights into the inputs of the loss, and return what takes the place of `logps` there."""
        log_ratio = torch.where(mask.bool(), log_ratios(logps, behaviour), 0)
        sums = ratio_sums(log_ratio, mask)
        method = self.args.token_weights
        if method == "kpo":
            rho = self._filtered(log_ratio, mask)
            sums = torch.cat([sums, (rho.detach().exp() * mask).sum(dtype=sums.dtype).unsqueeze(0)])
        sums = self.accelerator.reduce(sums, reduction="sum")
        if torch.is_grad_enabled():
            # Over the step's microbatches up to this one: the later ones have not been seen
            self._ratio_sums = sums = sums if self._ratio_sums is None else self._ratio_sums + sums
        else:
            self._log_ratios("eval", sums)
        if method == "kpo":
            if self.args.kpo_stop_gradient:
                rho = rho.detach() + (logps - logps.detach())
            inputs["old_per_token_logps"] = torch.zeros_like(logps)
            return rho
        if method == "p3o":
            ess = batch_figures(sums)["ess"].to(logps.dtype)
            weights = p3o_weights(log_ratio, ess).requires_grad_(torch.is_grad_enabled())
            inputs.update(importance_sampling_ratio=weights, logps=logps, log_ratio=log_ratio.detach(), ess=ess)
        else:
            inputs["importance_sampling_ratio"] = self._sampler_correction(logps.detach(), behaviour, mask)
        return logps

    def _filtered(self, log_ratio, mask):
        args, length = self.args, log_ratio.shape[1]
        if args.kpo_gain is not None:
            schedule = torch.full((length,), args.kpo_gain, dtype=torch.float64)
        else:
            schedule = kalman_gains(length, args.kpo_initial_variance, args.kpo_process_noise)
        return filtered(log_ratio, token_gains(mask, schedule))

    def _log_ratios(self, mode: str, sums: torch.Tensor) -> None:
        figures = batch_figures(sums[:4])
        if len(sums) > 4:
            figures["filtered_ratio_mean"] = sums[4] / sums[0].clamp(min=1)
        for name, value in zip(figures, torch.stack(list(figures.values())).tolist(), strict=True):
            self._metrics[mode][f"off_policy/{name}"].append(value)

    def _sampler_correction(self, logps, sampler_logps, mask):
        mode = self.vllm_importance_sampling_mode
        weights = sampler_weights(
            logps,
            sampler_logps,
            mask,
            mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        # The metrics that TRL logs of its own correction, under the same names
        scored = mask.bool() & ~torch.isnan(sampler_logps)
        difference = torch.where(scored, (logps - sampler_logps).abs(), 0)
        of_interest = weights.flatten() if mode.startswith("sequence") else weights[mask.bool()]
        if of_interest.numel() == 0:
            of_interest = weights.new_zeros(1)
        figures = {
            "sampling_logp_difference/mean": difference.sum() / scored.sum().clamp(min=1),
            "sampling_logp_difference/max": difference.max(),
            "importance_sampling_ratio/min": of_interest.min(),
            "importance_sampling_ratio/mean": of_interest.mean(),
            "importance_sampling_ratio/max": of_interest.max(),
        }
        gathered = self.accelerator.gather(torch.stack(list(figures.values())).unsqueeze(0))
        metrics = self._metrics["train" if self.model.training else "eval"]
        over_ranks = {
            "min": gathered.amin(0).tolist(),
            "mean": gathered.mean(0).tolist(),
            "max": gathered.amax(0).tolist(),
        }
        for place, name in enumerate(figures):
            metrics[f"sampling/{name}"].append(over_ranks[name.rpartition("/")[2]][place])
        return weights

    def _log_step(self, figures: dict[str, float]) -> None:
        sums, self._ratio_sums = self._ratio_sums, None
        broken = int(figures.pop("broken_sequences"))
        if broken:
            raise FloatingPointError(
                f"Gradients of this step are not finite (statistics of {broken} sequences are affected): lower the "
                "learning rate, or train in bf16 or fp32. The weights have not been updated with them, and the "
                "running statistics do not contain them."
            )
        for name, value in figures.items():
            self._metrics["train"][f"isopo/{name}"].append(value)
        if sums is not None:
            self._log_ratios("train", sums)

    # Generation: no old policy but the sampler's; the KL, if any, in the reward

    def _generate_and_score_completions(self, inputs):
        # TRL computes old-policy log-probabilities where these two settings say that it needs them
        self._accumulation = self.args.gradient_accumulation_steps
        correction = self.vllm_importance_sampling_correction
        self.args.gradient_accumulation_steps = self._generate_every
        self.vllm_importance_sampling_correction = False
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.args.gradient_accumulation_steps = self._accumulation
            self.vllm_importance_sampling_correction = correction
        if self.args.token_weights != "none":
            output["generated_after"] = torch.tensor(self._updates)
            output["drawn_by_policy"] = torch.tensor(self._drawn_by_policy)
        return output

    @property
    def _drawn_by_policy(self) -> bool:
        return self.rollout_func is None and bool(self._turns) and all(self._turns)

    @property
    def _generate_every(self) -> int:
        """Number of microbatches for which a generation serves."""
        assert self.args.steps_per_generation is not None  # set by GRPOConfig
        return self.args.steps_per_generation * self.num_iterations

    def _generate(self, prompts):
        training = self.model.training
        self._turns = []
        output = super()._generate(prompts)
        if output[4] is None and self.args.token_weights != "none" and training:
            # The sampler says nothing of its log-probabilities: TRL computes them, once, if data will be stale
            self.args.gradient_accumulation_steps = self._accumulation
        if self.args.kl_in_reward:
            # What tokens were drawn with may be of another temperature, or truncated; a rollout_func is trusted
            own = self.rollout_func is not None or self._drawn_by_policy
            own = own or (self.use_vllm and self._samples_at_temperature)
            self._reference.update(tool_mask=output[2], sampler_logps=output[4] if own else None)
        return output

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        generate = super()._generate_single_turn
        elsewhere = self.use_vllm or self.use_transformers_continuous_batching
        if self.args.token_weights == "none" or elsewhere:
            return generate(prompt_ids, *args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        with recording(model.get_base_model() if is_peft_model(model) else model) as recorders:
            completion_ids, logprobs = generate(prompt_ids, *args, **kwargs)
        if logprobs is None and len(recorders) == 1:
            logprobs = recorders[0].logps(completion_ids)
            self._turns.append(recorders[0].draws_at(self.temperature))
        return completion_ids, logprobs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        infinite = torch.isinf(rewards).sum(0).tolist()
        for name, count in zip(self.reward_func_names, infinite, strict=True):
            if count:
                raise ValueError(
                    f"The reward function {name!r} returned an infinite reward for {count} completions: return a "
                    "finite number, or None to leave a completion out."
                )
        if self.args.kl_in_reward:  # a completion that no reward function scores stays unscored
            unscored = torch.isnan(rewards[:, :-1]).all(dim=1)
            if unscored.any():
                logger.warning(
                    f"All reward functions returned None for {int(unscored.sum())} of {len(unscored)} completions, "
                    "which are left out: please ensure that at least one returns a valid reward."
                )
            rewards[:, -1] = rewards[:, -1].masked_fill(unscored, torch.nan)
        return rewards

    def _kl_to_reference(self, **kwargs: Any) -> list[float]:
        """Reward function: estimate of the KL divergence from the reference model, summed over each completion."""
        reference = self._reference
        input_ids, attention_mask, logits_to_keep, *args = reference["arguments"]
        mask = attention_mask[:, -logits_to_keep:].float()
        mask = mask * _padded(reference["tool_mask"], mask, fill=1)
        if reference["sampler_logps"] is not None:
            logps = _padded(reference["sampler_logps"], mask, fill=0)
        else:
            checkpointing: Any = self.args.gradient_checkpointing_kwargs
            with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
                logps, _, _ = super()._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, logits_to_keep, *args, **reference["keywords"]
                )
        # A token that the sampler could not score says nothing about the divergence
        kl = torch.nan_to_num(logps - reference["logps"], nan=0.0) * mask
        totals = self.accelerator.reduce(torch.stack([kl.sum(), mask.sum()]), reduction="sum")
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["kl"].append((totals[0] / totals[1].clamp(min=1.0)).item())
        return kl.sum(dim=1).tolist()

    @contextmanager
    def _settings(self, **settings: Any) -> Iterator[None]:
        """Context in which the trainer's attributes have these values."""
        own = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in own.items():
                setattr(self, name, value)

    # State

    def create_model_card(  # type: ignore[override]  # as TRL has it
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            model_card.complete(os.path.join(str(self.args.output_dir), "README.md"), model_name, self)

    def _save_checkpoint(self, model, trial):
        # First: what follows pushes the folder to the Hub and removes older checkpoints
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = os.path.join(self._get_output_dir(trial=trial), folder)
            os.makedirs(folder, exist_ok=True)
            torch.save(self.isopo.state_dict(), os.path.join(folder, STATE_FILE))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{checkpoint} has no {STATE_FILE}, so ISOPOTrainer did not save it, or not completely: to go on from "
                "its weights, load them as the model and start a new run."
            )
        self.isopo.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


@contextmanager
def _unseen_by_deepspeed(engine: Any, outputs: list[torch.Tensor]) -> Iterator[None]:
    """
    Context for a backward pass that is not the loss's. DeepSpeed would take it for that: by hooks on what the engine's
    forward returned (none elsewhere: `outputs` is empty), which divide the gradient and get ready for the reduction,
    and in ZeRO-3 by counters that say whether a module's parameters are still to be fetched.
    """
    hooks = [(x._backward_hooks, dict(x._backward_hooks)) for x in outputs if x._backward_hooks]
    modules = engine.modules() if outputs else ()
    names = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
    counters = [
        (module, name, module.__dict__[name]) for module in modules for name in names if name in module.__dict__
    ]
    try:
        for own, _ in hooks:
            own.clear()
        yield
    finally:
        for own, kept in hooks:
            own.update(kept)
        for module, name, value in counters:
            setattr(module, name, value)


def _padded(rows: list[list] | None, like: torch.Tensor, fill: float) -> torch.Tensor:
    """Lists of numbers (or `None` in place of one) as a tensor of the shape of `like`, filled up on the right."""
    padded = torch.full_like(like, fill)
    for row, values in enumerate(rows or []):
        values = [float("nan") if value is None else float(value) for value in values]
        padded[row, : len(values)] = torch.tensor(values, dtype=like.dtype)
    return padded
