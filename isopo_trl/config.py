"""Configuration of the [`ISOPOTrainer`]."""

from dataclasses import dataclass, field

from trl import GRPOConfig

from .attach import check_settings
from .geometry.coefficients import Rule


# Normalisations of the log-probability; the others are defined by what they do with the ratio to an old policy
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
SAMPLER_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class ISOPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`ISOPOTrainer`].

    [`ISOPOConfig`] inherits every parameter from [`~trl.GRPOConfig`] and adds the ones below. Symbols are those of the
    [ISOPO paper](https://huggingface.co/papers/2512.23353): for sequence `s`, `F_s` is the Fisher norm and `N_s` the
    Euclidean norm of its log-probability gradient at a layer, and its coefficient is `c_s = A_s f_s` with `f =
    reg2(F)^p reg2(N)^q reg2(F/N)^r` and `reg2(x) = sqrt(x^2 + lambda E[x^2])`.

    ISOPO has no old policy, no clipping and no term in the loss that does not carry an advantage. Settings that ask
    for one of these are refused, with the alternative named.

    Parameters:
        rule (`str`, *optional*, defaults to `"fisher"`):
            How each sequence's gradient is rescaled, layer by layer. Possible values are:

            - `"fisher"`: `f = 1 / F` (p = -1). Bounds each sequence's contribution to the KL divergence.
            - `"npg"`: `f = (F/N)^-2` (r = -2). The multiple of the gradient closest to the natural gradient.
            - `"fig4"`: `f = (F/N)^-2 / N` (q = -1, r = -2). The setting of the paper's figure 4.
            - `"euclidean"`: `f = 1 / N` (q = -1). A control: normalises, but not in the Fisher metric.
            - `"interacting"`: `c = (K + c0 I)^-1 A` with the layer's neural tangent kernel `K` and `c0 = lambda E[mean
              eigenvalue of K]`.
            - `"none"`: `f = 1`, plain REINFORCE.
        fisher_power (`float`, *optional*):
            Exponent p of the Fisher norm. If `None`, the rule's.
        norm_power (`float`, *optional*):
            Exponent q of the Euclidean norm. If `None`, the rule's.
        relative_power (`float`, *optional*):
            Exponent r of the relative norm `F/N`. If `None`, the rule's.
        regularization (`float`, *optional*):
            Regularisation lambda, in units of the running mean square. If `None`, `0`, and `1` for `"interacting"`.
        regularization_decay (`float`, *optional*, defaults to `0.9`):
            Decay of the running means `E`, per optimizer step.
        keep_small (`bool`, *optional*, defaults to `False`):
            Regularise by `sqrt(x^2 / (lambda E[x^2]) + 1)` instead of `reg2`, as the author's code can: sequences
            whose norm is small compared with the running mean keep their size. Requires `regularization > 0`. The two
            differ by a factor per layer, which `scale="relative"` divides out: it matters with `scale="paper"`.
        fisher_samples (`int`, *optional*, defaults to `64`):
            Number of token positions per microbatch at which the Fisher metric is taken (250 in the author's code).
            More than there are means all of them.
        scale (`str`, *optional*, defaults to `"relative"`):
            `"relative"` divides `f` by `E[f x] / E[x]`, where x is the norm that the rule is about, and multiplies the
            interacting coefficients by `c0`: coefficients are of order one, so that the learning rate, `max_grad_norm`
            and gradient accumulation mean what they mean in GRPO. `"paper"` is the formula to the letter.
        kl_in_reward (`bool`, *optional*, defaults to `False`):
            Whether to subtract `beta` times the KL divergence to the reference model from the reward, as TRL's
            `RLOOTrainer` does. Required for `beta != 0`: a KL term in the loss carries no advantage, so it cannot take
            part in ISOPO's single backward pass (and `use_bias_correction_kl`, which is about such a term, has no
            effect). Costs a forward pass of the reference model per generation, and one of the policy where the
            sampler does not return log-probabilities.

    > [!NOTE]
    > `loss_type` only chooses how log-probabilities are normalised, one of `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`,
    > `"luspo"`.
    """

    rule: str = field(
        default="fisher",
        metadata={
            "help": "How each sequence's gradient is rescaled, layer by layer: 'fisher' (1/F), 'npg' ((F/N)^-2), "
            "'fig4' ((F/N)^-2/N), 'euclidean' (1/N), 'interacting' ((K + c0 I)^-1 A), 'none' (REINFORCE)."
        },
    )
    fisher_power: float | None = field(
        default=None, metadata={"help": "Exponent p of the Fisher norm. If `None`, the rule's."}
    )
    norm_power: float | None = field(
        default=None, metadata={"help": "Exponent q of the Euclidean norm. If `None`, the rule's."}
    )
    relative_power: float | None = field(
        default=None, metadata={"help": "Exponent r of the relative norm F/N. If `None`, the rule's."}
    )
    regularization: float | None = field(
        default=None,
        metadata={
            "help": "Regularisation lambda, in units of the running mean square. If `None`, 0, and 1 for "
            "'interacting'."
        },
    )
    regularization_decay: float = field(
        default=0.9, metadata={"help": "Decay of the running means E, per optimizer step."}
    )
    keep_small: bool = field(
        default=False,
        metadata={
            "help": "Regularise by sqrt(x^2 / (lambda E[x^2]) + 1), which leaves sequences with a small norm alone. "
            "Requires `regularization > 0`."
        },
    )
    fisher_samples: int = field(
        default=64,
        metadata={
            "help": "Number of token positions per microbatch at which the Fisher metric is taken. More than there "
            "are means all of them."
        },
    )
    scale: str = field(
        default="relative",
        metadata={
            "help": "'relative': coefficients of order one, so that the learning rate means what it means in GRPO. "
            "'paper': the formula to the letter."
        },
    )
    kl_in_reward: bool = field(
        default=False,
        metadata={
            "help": "Whether to subtract `beta` times the KL divergence to the reference model from the reward. "
            "Required for `beta != 0`."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        self._rule()
        check_settings(self.regularization_decay, self.fisher_samples)
        for unsupported, message in self._refusals():
            if unsupported:
                raise ValueError(message)

    def _rule(self) -> Rule:
        """The rule these settings describe; raises where they contradict each other."""
        return Rule(
            name=self.rule,
            fisher_power=self.fisher_power,
            norm_power=self.norm_power,
            relative_power=self.relative_power,
            regularization=self.regularization,
            keep_small=self.keep_small,
            scale=self.scale,
        )

    def _refusals(self) -> list[tuple[bool, str]]:
        clipping = [
            f"{name}={getattr(self, name)}"
            for name in ("epsilon", "epsilon_high", "delta")
            if getattr(self, name) != GRPOConfig.__dataclass_fields__[name].default
        ]
        return [
            (
                self.loss_type not in LOSS_TYPES,
                f"loss_type={self.loss_type!r} is defined by the ratio to an old policy, which ISOPO does not "
                f"compute: use one of {', '.join(map(repr, LOSS_TYPES))} ('dapo' normalises as 'cispo' and 'vespo' "
                "do, 'grpo' as 'sapo' does).",
            ),
            (
                bool(clipping),
                f"{', '.join(clipping)} sets a clipping range, but ISOPO has no old policy and no clipping: remove it "
                "(each sequence's step is bounded by `rule`).",
            ),
            (
                self.beta != 0.0 and not self.kl_in_reward,
                f"beta={self.beta} adds a KL term to the loss, which carries no advantage and cannot be part of "
                "ISOPO's single pass: set kl_in_reward=True to subtract the KL from the reward instead.",
            ),
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
                self.entropy_coef != 0.0 or self.use_adaptive_entropy,
                "An entropy bonus (`entropy_coef`, `use_adaptive_entropy`) is a loss term without an advantage and "
                "cannot be part of ISOPO's single pass: set entropy_coef=0.0 and use_adaptive_entropy=False, and "
                "raise `temperature` or lower `top_entropy_quantile` to keep exploring.",
            ),
            (
                bool(self.router_aux_loss_coef),
                f"router_aux_loss_coef={self.router_aux_loss_coef} adds a load-balancing loss without an advantage, "
                "which cannot be part of ISOPO's single pass: set router_aux_loss_coef=0.0.",
            ),
            (
                self.vllm_importance_sampling_mode not in SAMPLER_MODES,
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} is unknown: choose one of "
                f"{', '.join(map(repr, SAMPLER_MODES))}.",
            ),
            (
                self.use_liger_kernel,
                "use_liger_kernel=True replaces layers by fused kernels whose gradients ISOPO cannot rescale: set "
                "use_liger_kernel=False.",
            ),
            (
                bool(self.torch_compile),
                "torch_compile=True is not supported with ISOPO's layers: set torch_compile=False.",
            ),
            (
                self.fp16,
                "fp16=True scales the loss dynamically, which ISOPO's running statistics do not follow: set bf16=True "
                "(or neither).",
            ),
        ]
