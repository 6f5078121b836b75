"""Configuration of the [`ISOPOTrainer`]."""

import inspect
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from trl import GRPOConfig

from .advantages import refusals as refused_transforms
from .fisher_rows.scope import valid_samples, valid_scope
from .isopo import valid_decay
from .narrow_weights import choice
from .rules.direction import LastStep
from .rules.registry import make_rule, rule_names, rule_settings
from .rules.rule import Rule
from .settings.optim_args import sgd_settings
from .settings.ranges import Bound, outside, verify_ranges
from .settings.types import shown, type_fields, typed
from .step_size import optimizers
from .token_weights import WEIGHTINGS, ratio_loss, refusals


# Numbers of GRPO's that are read here or by a weighting
_OF_GRPO = (
    *("beta", "delta", "epsilon_high", "off_policy_mask_threshold", "router_aux_loss_coef", "top_entropy_quantile"),
    *("entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
    *("sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    *(f"vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min")),
)
# TRL holds the weights of rewards in float32
_LARGEST = 3.4e38
_WEIGHT: Bound = (lambda x: 0 <= x < _LARGEST, "a number that is finite and not negative")
_FRACTION: Bound = (lambda x: x >= 0, "a number from 0 to 1")
_SHARE: Bound = (lambda x: 0 < x <= 1, "a number in (0, 1]")


C = TypeVar("C", bound=type)  # of a dataclass


def _with_help(config: C) -> C:
    """The dataclass, whose settings say on a command line what its docstring says of them."""
    entries = re.findall(r"^    ([\w, ]+) \(.+\):\n((?:\n|        .+\n)+)", inspect.getdoc(config) or "", re.MULTILINE)
    fields: Any = vars(config)["__dataclass_fields__"]
    for names, meaning in entries:
        for name in set(names.split(", ")) & {*config.__annotations__}:
            fields[name].metadata = {"help": " ".join(meaning.split())}
    return config


@_with_help
@dataclass
class ISOPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`ISOPOTrainer`].

    [`ISOPOConfig`] inherits every parameter from [`~trl.GRPOConfig`] and adds the ones below. Symbols are those of the
    [ISOPO paper](https://huggingface.co/papers/2512.23353): for sequence `s`, `F_s` is the Fisher norm and `N_s` the
    Euclidean norm of its log-probability gradient at a layer, and its coefficient is `c_s = A_s f_s` with `f =
    reg2(F)^p reg2(N)^q reg2(F/N)^r` and `reg2(x) = sqrt(x^2 + lambda E[x^2])`.

    ISOPO makes no pass for an old policy and does not clip unless it is asked to. Settings that cannot be honoured are
    refused, with the alternative named. Terms of the loss that carry no advantage (`beta`, the entropy bonus,
    `router_aux_loss_coef`, P3O's pull) are not rescaled: all of them together cost one more backward pass, and none
    with `rule="none"` or where they vanish.

    Parameters:
        rule (`str`, *optional*, defaults to `"fisher"`):
            How each sequence's gradient is rescaled, layer by layer. Possible values are:

            - `"fisher"`: `f = 1 / F` (p = -1). Bounds each sequence's contribution to the KL divergence.
            - `"npg"`: `f = (F/N)^-2` (r = -2). The multiple of the gradient closest to the natural gradient.
            - `"fig4"`: `f = (F/N)^-2 / N` (q = -1, r = -2). The setting of the paper's figure 4.
            - `"euclidean"`: `f = 1 / N` (q = -1). A control: normalises, but not in the Fisher metric.
            - `"interacting"`: `c = (K + c0 I)^-1 A` with the layer's neural tangent kernel `K` and `c0 = lambda E[mean
              eigenvalue of K]`.
            - `"spring"`: [SPRING](https://huggingface.co/papers/2401.10190), `interacting` with momentum: `c = (K + c0
              I)^-1 (A - mu V phi)` and `phi <- mu phi + V^T c` for the direction `phi` of a step, which is the
              gradient that the optimizer gets. For plain steps (`optim="sgd"`).
            - `"proma"`: [PROMA](https://huggingface.co/papers/2601.10498), `c = A` without what the step's earlier
              microbatches would do to the sequences of this one.
            - `"none"`: `f = 1`, plain REINFORCE.
            - The name of a rule that was added with `isopo_trl.rules.register_rule`.
        fisher_power (`float`, *optional*):
            Exponent p of the Fisher norm. If `None`, the rule's.
        norm_power (`float`, *optional*):
            Exponent q of the Euclidean norm. If `None`, the rule's.
        relative_power (`float`, *optional*):
            Exponent r of the relative norm `F/N`. If `None`, the rule's.
        regularization (`float`, *optional*):
            Regularisation lambda, in units of the running mean square. If `None`, `0.1`, which keeps a sequence with
            next to no gradient at a layer from being blown up there, and `1` for `"interacting"`, `"spring"`, `"fig4"`
            and whatever has exponents of more than 2 in all. `0` is the paper's formula without regularisation.
            Otherwise between 1e-12 and 1e6, for `"interacting"` and `"spring"` from 1e-4.
        regularization_decay (`float`, *optional*, defaults to `0.9`):
            Decay of the running means `E`, per optimizer step.
        spring_decay (`float`, *optional*, defaults to `0.9`):
            Part mu of the last step's direction that `"spring"` keeps, from 0 to below 1. `0` is `"interacting"` with
            `scale="paper"`.
        proma_strength (`float`, *optional*, defaults to `1.0`):
            How many times `"proma"` takes away the projection of the accumulated gradient on the sequences of a
            microbatch.
        proma_bound (`float`, *optional*, defaults to `0.5`):
            How long the projection that `"proma"` takes away may be, in lengths of the microbatch's own gradient.
            Beyond it, it is shortened.
        keep_small (`bool`, *optional*, defaults to `False`):
            Whether sequences whose norm is small compared with the running mean keep their size, regularised by
            `sqrt(x^2 / (lambda E[x^2]) + 1)` instead of `reg2`, as the author's code can. Requires `regularization >
            0`. The two differ by a factor per layer, which `scale="relative"` divides out: it matters with
            `scale="paper"`.
        fisher_samples (`int`, *optional*, defaults to `64`):
            Number of token positions at which the Fisher metric is taken (250 in the author's code). More than there
            are means all of them.
        fisher_scope (`str`, *optional*):
            Where the positions of the Fisher metric are from. Possible values are:

            - `"step"`: all microbatches and ranks of the optimizer step before, whose inputs and cotangents at these
              positions are kept for each layer, so that no coefficient depends on how the batch is cut into
              microbatches or spread over ranks. The first step goes by the microbatch. Takes memory for `2
              fisher_samples` rows of each layer's inputs and outputs.
            - `"microbatch"`: the microbatch whose sequences are measured, as in the paper.

            If `None`, `"step"` for rules that have a Fisher norm, but with more than 1,024 samples `"microbatch"`.
        group_microbatches (`bool`, *optional*, defaults to `False`):
            Whether to keep the completions of one prompt in one microbatch, which TRL shuffles apart: for
            `"interacting"`, which sees the sequences of one microbatch. Not better than shuffled ones on GSM8K. The
            order of the prompts stays random. Requires that `num_generations` divides `per_device_train_batch_size`.
        skip_zero_advantage (`bool`, *optional*):
            Whether to leave out sequences whose advantage is zero (all rewards of the group were the same) before the
            forward pass, and to pack the others of an optimizer step into fewer or smaller microbatches.
            The loss stays normalised as in the whole batch: with `"none"` the step is the same, with other rules
            statistics and running means are those of the sequences that carry an advantage. With
            `group_microbatches`, a group is kept if one of its sequences has an advantage. Refused beside terms of the
            loss that every sequence has (`beta`, the entropy bonus, `router_aux_loss_coef`), and beside
            `top_entropy_quantile`, and with `"spring"`. If `None`, it is done wherever it is not refused, but not with
            `"interacting"` and `"proma"`, whose coefficients depend on all sequences of a microbatch, and not in a
            trainer with a `_prepare_inputs`, `compute_loss` or `_compute_loss` of its own, which may use them. With
            `True`, these get `{}` for a microbatch that is left empty.
        scale (`str`, *optional*, defaults to `"relative"`):
            What becomes of the units of a rule's formula. Possible values are:

            - `"relative"`: `f` is divided by `E[f x] / E[x]`, where x is the norm that the rule is about, and the
              interacting coefficients are multiplied by `c0`. So coefficients are of order one, and the learning rate,
              `max_grad_norm` and gradient accumulation mean what they mean in GRPO.
            - `"paper"`: the formula to the letter, as `"spring"` always is.
        token_weights (`str`, *optional*):
            How much each token of off-policy data counts, from the ratio `r = pi / pi_behaviour` to the policy that
            drew it: an older one, or the same one in other arithmetic or at another temperature. Its log-probabilities
            are the sampler's own. Works with every rule. Possible values are:

            - `"none"`: every token counts the same.
            - `"sampler"`: r, truncated or masked as `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max` say,
              also without vLLM (`"token_truncate"` is `min(r, cap)`; TRL's default masks whole sequences).
            - `"p3o"`: [P3O](https://huggingface.co/papers/2605.12380). `min(r, ESS)` and a pull `(1 - ESS) KL(pi ||
              pi_behaviour)`, with the normalised effective sample size ESS of the step's tokens. Where data is
              off-policy, the pull costs another backward pass (none with `rule="none"`). The tokens being drawn by
              the behaviour policy, its gradient is that of `log pi` times `r log r`; `use_bias_correction_kl=False`
              ignores that, as the code of P3O's authors does (`1 - 1 / r`).
            - `"kpo"`: [KPO](https://huggingface.co/papers/2602.10609). The objective `min(r A, clip(r) A)` with `log
              r` passed through a Kalman filter along the completion.
            - `"dppo_tv"`, `"dppo_kl"`, `"m2po"`, `"dcpo"`, `"aspo"`, `"pspo"`, `"bapo"`, `"gtpo"`, `"capo"`:
              weights of the field's methods, without gradient, as in `docs/methods.md`.
            - The name of a weighting that was added with `isopo_trl.token_weights.register`.

            If `None`, `"sampler"` where vLLM generates with `vllm_importance_sampling_correction` and the loss is not
            one of the ratio itself (see `epsilon` and `loss_type`), else `"none"`.
        epsilon, epsilon_high, delta (`float`, *optional*):
            Distances from 1 at which ratios to the behaviour policy are clipped. If one of them is given, the
            objective is GRPO's, `min(r A, clip(r) A)`, with the ratio r to the behaviour policy (of whole sequences
            with `importance_sampling_level="sequence"`), clipped to `(1 - epsilon, 1 + epsilon_high)`, and with the
            defaults of GRPO for the others. If `None`, nothing is clipped unless another one is given. With
            `token_weights="kpo"`, the range of filtered ratios; by default, 0.0003 and 0.0004. With `"dcpo"` and
            `"aspo"`, the epsilons of theirs; by default, 0.16 and 0.2, and 0.2 and 0.2.
        kpo_gain (`float`, *optional*):
            Fixed gain in place of the Kalman filter's schedule, in (0, 1].
        kpo_initial_variance (`float`, *optional*, defaults to `1.0`):
            Variance P_0 of KPO's initial state, in units of the observation noise V. With `0`, as in the code
            that KPO's authors published, gains rise from `kpo_process_noise` instead of falling from 1/2.
        kpo_process_noise (`float`, *optional*, defaults to `1e-6`):
            Process noise Q of KPO's filter, in units of V. Gains tend to about its square root.
        kpo_stop_gradient (`bool`, *optional*, defaults to `False`):
            Whether to take no gradient through KPO's filter, as the code that KPO's authors published does: token t is
            weighted by its own filtered ratio, instead of by those of all later tokens that it takes part in.
        dppo_delta (`float`, *optional*):
            Distance of a token's probabilities under the policy and the behaviour policy beyond which DPPO gives it no
            gradient if that would lead on. If `None`, 0.15 for `"dppo_tv"` and 0.05 for `"dppo_kl"`.
        dppo_cap (`float`, *optional*, defaults to `20.0`):
            Largest ratio by which DPPO weighs a token.
        m2po_budget (`float`, *optional*, defaults to `0.04`):
            Mean of `(log r)^2` of the tokens that lead on, each cut down to M2PO's bound. Tokens beyond the bound are
            gated.
        pspo_alpha (`float`, *optional*, defaults to `0.1`):
            The behaviour policy's share of PSPO's smoothed policy, from 0 to below 1.
        bapo_target (`float`, *optional*, defaults to `1.0`):
            What BAPO has tokens with a positive advantage weigh beside those with a negative one, before it stops to
            widen its bounds.
        token_weights_scope (`str`, *optional*, defaults to `"step"`):
            Which tokens M2PO and BAPO take their bounds from, on all ranks. Possible values are:

            - `"step"`: those of the optimizer step, as far as its microbatches have been seen.
            - `"microbatch"`: those of a microbatch, as in the authors' code.
        capo_tau_h (`float`, *optional*, defaults to `0.01`):
            Change of the objective, by a plain step at the LM head along one token's gradient, from which on CAPO
            gates the token.
        capo_tau_f (`float`, *optional*, defaults to `1e-4`):
            Change of the policy by such a step, from which on CAPO gates the token.
        advantage_transform (`str`, *optional*):
            What becomes of a group's rewards or advantages between TRL's reward functions and the loss. The name of a
            transform, or several, with commas between, that are applied one after another (a list is taken as well).
            If `None`, they stay as they are. Possible values are:

            - `"redit"`: noise on the rewards (ReDit).
            - `"g2rl"`: rewards scaled by the novelty of a completion's direction (G2RL).
            - `"dcpo"`: rewards standardised over all visits of their prompt (DCPO).
            - `"pacs"`: residuals of a classification of right and wrong (PACS).
            - `"empg"`: advantages weighed by the entropy of a completion's tokens (EMPG, one turn).
            - `"cppo"`: of each group, the completions with the largest advantages alone (CPPO).
            - `"simpletir"`: none of completions with a void turn (SimpleTIR).
            - `"gtpo"`: advantages less a part of the entropy, and none of uncertain completions (GTPO).
            - The name of a transform that was added with `isopo_trl.advantages.register`.
        redit_noise (`str`, *optional*, defaults to `"uniform"`):
            ReDit's noise: `"uniform"` or `"gaussian"`.
        redit_scale (`float`, *optional*):
            How far uniform noise reaches to either side, or the deviation of Gaussian noise, with which it has to be
            given: the sources have no number. If `None`, 0.05 for uniform noise.
        pacs_beta (`float`, *optional*, defaults to `1.0`):
            PACS's factor of the log-ratios.
        empg_k (`float`, *optional*, defaults to `1.0`):
            How much less uncertain completions count in EMPG.
        g2rl_lambda (`float`, *optional*):
            How much novelty scales a reward in G2RL, with which it has to be given: the paper has no number.
        cppo_pruning (`float`, *optional*, defaults to `0.5`):
            Share of a group's completions that CPPO leaves out, from 0 to below 1, rounded down to whole completions.
        simpletir_answer (`str`, *optional*, defaults to `"\\\\boxed{"`):
            Regular expression by which SimpleTIR knows an answer. GSM8K's is `"####"`.
        simpletir_deviation (`float`, *optional*, defaults to `0.001`):
            Deviation of a group's rewards below which SimpleTIR leaves the group out.
        gtpo_entropy (`float`, *optional*, defaults to `0.1`):
            How much of a completion's mean entropy GTPO subtracts from its advantage.
        gtpo_threshold (`float`, *optional*, defaults to `0.6931471805599453`):
            Mean entropy, in nats, above which GTPO drops a completion; by default ln 2.
        kl_in_reward (`bool`, *optional*, defaults to `False`):
            Whether to subtract `beta` times the KL divergence to the reference model from the reward, as TRL's
            `RLOOTrainer` does, instead of adding it to the loss. There it takes part in the advantages and needs no
            backward pass of its own. Costs a forward pass of the reference model per generation, as in the loss, and
            one of the policy where the sampler does not return its log-probabilities, or draws at another temperature
            or truncated.
        target_kl (`float` or `"auto"`, *optional*):
            KL divergence, in nats per completion token, by which one optimizer step is to move the policy on the data
            it was computed from: `"auto"` or a number. The learning rate is then found while training: `learning_rate`
            is where the search starts, and a schedule multiplies the target instead. A step that goes too far is
            shortened before anything else happens. `"auto"` is 0.05 nats per completion, divided by the mean length of
            completions, and 0.25 for SGD without momentum, whose steps add up with `"spring"` alone. If `None`, the
            learning rate is what it is; but `optim="sgd"` has `"auto"` where no learning rate is given either.
        log_step_kl (`bool`, *optional*, defaults to `False`):
            Whether to measure the KL divergence of each step, and log it as `step/kl`, where it has no target.
        step_kl_share (`float`, *optional*, defaults to `0.03125`):
            Share of an optimizer step's sequences by which its length is measured, in (0, 1], and at least one on each
            rank. They are scored once before and once after the step.
        behaviour_kl (`float`, *optional*):
            Bound on the KL divergence of the policy from the one that drew the data, in nats per token, where
            completions serve for more than one optimizer step. When the next step would go beyond it, completions of
            the same prompts are generated anew, earlier than `steps_per_generation` and `num_iterations` say. If
            `None`, 16 times `target_kl`, as far as four steps go in one direction. Without `target_kl`, or where it is
            infinite, there is no bound.
        target_kl_offload (`bool`, *optional*, defaults to `False`):
            Whether to keep a copy of the trained weights for `target_kl` in the memory of the host. Without it, there
            is one on the device, unless they are large and the optimizer is AdamW, whose steps can be undone. SGD's
            steps are tried before they are made, and need none.
        bf16_updates (`str`, *optional*):
            How trained weights in bf16 keep a step, which is mostly smaller than what they can hold. Steps are made
            in float32, by `optim` (`"sgd"`, `"adamw_torch"`, `"adamw_torch_fused"`), whose moments are in float32.
            Possible values are:

            - `"stochastic"`: rounded up or down at random, so that the mean is right: no memory, some noise. The
              random numbers are a function of `seed`, the step and the weight.
            - `"exact"`: beside each weight, a remainder of 16 bits makes it float32. The model computes with the
              nearest bf16. Remainders begin at random, so that a first step is seen at once.

            If `None`, PyTorch rounds to nearest, and a warning says what share of the first step was lost.
        float32_gradients (`bool`, *optional*, defaults to `False`):
            Whether gradients of weights in bf16 are added up in float32 over microbatches, which takes 2 more bytes
            per weight. With `bf16_updates`, in one process.

    > [!NOTE]
    > `loss_type` chooses how log-probabilities are normalised, one of `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`,
    > `"luspo"`; or a loss of the ratio to the behaviour policy, `"cispo"` (with the cap `epsilon_high`), `"sapo"`,
    > `"vespo"`.
    """

    rule: str = "fisher"
    fisher_power: float | None = None
    norm_power: float | None = None
    relative_power: float | None = None
    regularization: float | None = None
    regularization_decay: float = 0.9
    spring_decay: float = 0.9
    proma_strength: float = 1.0
    proma_bound: float = 0.5
    keep_small: bool = False
    fisher_samples: int = 64
    fisher_scope: str | None = None
    group_microbatches: bool = False
    skip_zero_advantage: bool | None = None
    scale: str = "relative"
    token_weights: str | None = None
    epsilon: float | None = None  # type: ignore[assignment]  # GRPO's own cannot be left out
    kpo_gain: float | None = None
    kpo_initial_variance: float = 1.0
    kpo_process_noise: float = 1e-6
    kpo_stop_gradient: bool = False
    dppo_delta: float | None = None
    dppo_cap: float = 20.0
    m2po_budget: float = 0.04
    pspo_alpha: float = 0.1
    bapo_target: float = 1.0
    token_weights_scope: str = "step"
    capo_tau_h: float = 0.01
    capo_tau_f: float = 1e-4
    advantage_transform: str | None = None
    redit_noise: str = "uniform"
    redit_scale: float | None = None
    pacs_beta: float = 1.0
    empg_k: float = 1.0
    g2rl_lambda: float | None = None
    cppo_pruning: float = 0.5
    simpletir_answer: str = r"\\boxed{"
    simpletir_deviation: float = 0.001
    gtpo_entropy: float = 0.1
    gtpo_threshold: float = math.log(2)
    kl_in_reward: bool = False
    target_kl: float | str | None = None
    log_step_kl: bool = False
    step_kl_share: float = 0.03125
    behaviour_kl: float | None = None
    target_kl_offload: bool = False
    bf16_updates: str | None = None
    float32_gradients: bool = False

    def __post_init__(self):
        self._type_settings()
        weighting = WEIGHTINGS.get(self.token_weights or "none")  # one that is unknown is refused below
        for name, value in weighting.defaults.items() if weighting is not None else ():
            if getattr(self, name) is None:
                setattr(self, name, value)
        verify_ranges(vars(self))
        super().__post_init__()
        if self.optim == "sgd":
            sgd_settings(self.optim_args)  # raises where transformers would not, or only later
        if self.target_kl is None and self.optim == "sgd" and self.learning_rate == type(self).learning_rate:
            self.target_kl = "auto"  # AdamW's rate is next to none for plain gradient steps
        if self.token_weights is None:
            corrected = self.use_vllm and self.vllm_importance_sampling_correction
            self.token_weights = "sampler" if corrected and not ratio_loss.takes_ratio(self) else "none"
        rule = self._rule()
        valid_decay(self.regularization_decay)
        valid_scope(self.fisher_scope, valid_samples(self.fisher_samples), rule)
        refused = (
            *refusals(self),
            *refused_transforms(self),
            *ratio_loss.refusals(self),
            *choice.refusals(self),
            *self._refusals(),
        )
        for unsupported, message in refused:
            if unsupported:
                raise ValueError(message)

    def _type_settings(self) -> None:
        """Replace settings by values of Python's own types; raises for one of another type."""
        own = [name for name in type(self).__dataclass_fields__ if name not in GRPOConfig.__dataclass_fields__]
        if isinstance(self.target_kl, str) and self.target_kl != "auto":  # as a command line has a number
            with suppress(ValueError):
                self.target_kl = float(self.target_kl)
        names: Any = self.advantage_transform
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            self.advantage_transform = ",".join(names)
        type_fields(self, [*own, "epsilon", *_OF_GRPO])
        if isinstance(self.target_kl, str) and self.target_kl != "auto":
            raise ValueError(f"target_kl={shown(self.target_kl)} is of type str: give a number, 'auto' or None.")
        if self.target_kl != "auto":
            self.target_kl = typed("target_kl", self.target_kl, "float | None")
        given: Any = self.reward_weights
        if given is not None:
            try:
                weights = [typed("reward_weights", weight, float) for weight in given]
            except (TypeError, ValueError):
                weights = [math.nan]
            if not all(abs(weight) < _LARGEST for weight in weights):
                raise ValueError(
                    f"reward_weights={shown(given)} must be a list of finite numbers, one per reward function."
                )
            self.reward_weights = weights

    def _rule(self) -> Rule:
        """The rule these settings describe; raises where they contradict each other."""
        # Fields that are settings of any rule: the chosen one may refuse them
        names = {name for rule in rule_names() for name in rule_settings(rule)}
        fields = {name: field for name, field in type(self).__dataclass_fields__.items() if name in names}
        given = {name: getattr(self, name) for name in fields}
        return make_rule(self.rule, **{name: x for name, x in given.items() if x != fields[name].default})

    @property
    def measures_steps(self) -> bool:
        """Whether the KL divergence of each optimizer step is measured."""
        return self.target_kl is not None or self.bounds_drift or self.log_step_kl

    @property
    def microbatches_per_generation(self) -> int:
        """Number of microbatches for which a generation serves."""
        return (self.steps_per_generation or 1) * self.num_iterations

    @property
    def uses_stale_data(self) -> bool:
        """Whether completions serve for more than one optimizer step."""
        return self.gradient_accumulation_steps % self.microbatches_per_generation != 0

    @property
    def bounds_drift(self) -> bool:
        """Whether the divergence from the behaviour policy is bounded; it is not where data is used but once."""
        asked = self.target_kl is not None if self.behaviour_kl is None else self.behaviour_kl < math.inf
        return asked and self.uses_stale_data

    def given(self, *names: str) -> list[str]:
        """The settings among `names` that are not at their defaults, as `name=value`."""
        defaults = {name: field.default for name, field in type(self).__dataclass_fields__.items()}
        settings = [name for name in names if name in defaults]
        return [f"{name}={getattr(self, name)}" for name in settings if getattr(self, name) != defaults[name]]

    def _refusals(self) -> list[tuple[bool, str]]:
        loading: Any = self.accelerator_config
        group: Any = self.num_generations
        steps = ", ".join(self.given("target_kl", "behaviour_kl", "log_step_kl"))
        refused = optimizers.refusal_by_name(
            str(getattr(self.optim, "value", self.optim)), steps, bool(self.target_kl)
        )
        return [
            outside(self, "beta", _WEIGHT, "is the weight of the KL divergence"),
            (
                self.kl_in_reward and self.beta == 0.0,
                "kl_in_reward=True needs a coefficient: set beta to the weight of the KL divergence.",
            ),
            (
                self.kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum",
                "kl_in_reward=True needs multi_objective_aggregation='sum_then_normalize': 'normalize_then_sum' would "
                "divide the KL divergence by its own standard deviation, and beta would lose its meaning.",
            ),
            (
                self.group_microbatches and self.per_device_train_batch_size % group != 0,
                f"group_microbatches=True keeps the completions of a prompt in one microbatch of one device, and "
                f"num_generations={group} of them do not fill a per_device_train_batch_size of "
                f"{self.per_device_train_batch_size}: make that a multiple of num_generations, with fewer "
                "gradient_accumulation_steps for the same step, or set group_microbatches=False.",
            ),
            (
                self.group_microbatches and loading.split_batches,
                "group_microbatches=True needs a per_device_train_batch_size that is one device's, but "
                "split_batches=True in accelerator_config divides it among the devices: set split_batches=False.",
            ),
            (
                bool(self.skip_zero_advantage) and self.top_entropy_quantile < 1,
                f"skip_zero_advantage=True leaves out sequences whose tokens top_entropy_quantile="
                f"{self.top_entropy_quantile} compares the others with: set one of the two to its default.",
            ),
            (
                bool(self.skip_zero_advantage) and isinstance(self._rule().direction(), LastStep),
                f"skip_zero_advantage=True leaves out sequences that rule={self.rule!r} holds against the last step's "
                "direction, and steps in which it would go on alone: set skip_zero_advantage=False.",
            ),
            outside(self, "top_entropy_quantile", _FRACTION, "is the fraction of tokens that is trained on"),
            (
                self.off_policy_mask_threshold is not None and math.isnan(self.off_policy_mask_threshold),
                "off_policy_mask_threshold=nan would drop every sequence with a negative advantage: give a number, or "
                "leave the threshold unset.",
            ),
            (
                isinstance(self.target_kl, float) and not 0 < self.target_kl < math.inf,
                f"target_kl={self.target_kl} is the KL divergence of one optimizer step, in nats per token: give a "
                "positive number, 2e-4 for example, or None.",
            ),
            (
                self.behaviour_kl is not None and not 0 < self.behaviour_kl,
                f"behaviour_kl={self.behaviour_kl} is a bound on the KL divergence from the policy that drew the "
                "data, in nats per token: give a positive number, or None.",
            ),
            (
                self.behaviour_kl is not None and self.behaviour_kl < math.inf and not self.bounds_drift,
                f"behaviour_kl={self.behaviour_kl} bounds the drift over several optimizer steps on one batch, but "
                "here completions serve for one step: raise num_iterations, or steps_per_generation above "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, or leave behaviour_kl out.",
            ),
            outside(self, "step_kl_share", _SHARE, "is the share of a step's sequences by which it is measured"),
            (
                self.step_kl_share != type(self).step_kl_share and not self.measures_steps,
                f"step_kl_share={self.step_kl_share} is of no use where steps are not measured: set target_kl, "
                "behaviour_kl or log_step_kl=True, or leave it out.",
            ),
            (
                self.target_kl_offload and self.target_kl is None,
                "target_kl_offload=True is about weights that are kept for target_kl: set target_kl, or leave it out.",
            ),
            (
                self.target_kl is not None and self.learning_rate == 0,
                f"target_kl={self.target_kl} multiplies the learning rate, which is 0: give learning_rate a number to "
                "start from, 1e-6 for example.",
            ),
            (
                self.measures_steps and bool(refused),
                str(refused),
            ),
            (
                bool(self.torch_compile),
                "torch_compile=True is not supported with ISOPO's layers: set torch_compile=False "
                "(use_liger_kernel=True fuses what lies between them).",
            ),
            (
                self.fp16,
                "fp16=True scales the loss dynamically, which ISOPO's running statistics do not follow: set bf16=True "
                "(or neither).",
            ),
        ]
