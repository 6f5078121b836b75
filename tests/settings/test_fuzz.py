"""
Configurations at random: whatever is accepted trains to finite weights, whatever is not is refused in one clear error.

`ISOPO_FUZZ_CASES=2000 pytest -m slow tests/settings/test_fuzz.py` tries as many; `ISOPO_FUZZ_SEED` draws others.
"""

import math
import os
import random
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig

from isopo_trl import ISOPOConfig
from tests import tiny, training


CASES = int(os.environ.get("ISOPO_FUZZ_CASES", "150"))
SEED = int(os.environ.get("ISOPO_FUZZ_SEED", "0"))
NAN, INF = math.nan, math.inf

# What may be given, by field: valid for some configuration, whatever else it needs
VALID = {
    "rule": ["fisher", "npg", "fig4", "euclidean", "interacting", "none"],
    "fisher_power": [-1.0, 0.0, 0.5, -3, None, np.float32(-0.5)],
    "norm_power": [-1.0, 0.0, 1.0, -2.5, None],
    "relative_power": [-2.0, 0.0, 2, None],
    "regularization": [0.0, 0.1, 1, 1e-30, 1e30, 5e-324, None],
    "regularization_decay": [0.0, 0, 0.5, 0.999999, np.float64(0.9)],
    "keep_small": [True, False],
    "fisher_samples": [1, 2, 7, 10**6, np.int64(5)],
    "fisher_scope": ["microbatch", "step", None],
    "scale": ["relative", "paper"],
    "token_weights": ["none", "sampler", "p3o", "kpo", None],
    "kpo_gain": [1.0, 1, 0.01, 1e-30, None],
    "kpo_initial_variance": [0.0, 1e-12, 2, 1e30],
    "kpo_process_noise": [0.0, 1e-4, 1e30],
    "kpo_stop_gradient": [True, False],
    "kl_in_reward": [True, False],
    "beta": [0.0, 0.04, 1e-30, 10],
    "entropy_coef": [0.1, -0.1, 0.0],
    "use_adaptive_entropy": [True, False],
    "epsilon": [0.0, 0.0003, 0.2, INF, None],
    "epsilon_high": [0.0, 0.0004, 0.3, INF, None],
    "delta": [2.0, 1e-30, INF, None],
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    "sapo_temperature_neg": [1.05, 1e-30, 100],
    "vespo_k_pos": [0.0, 2.0, 1e30],
    "vespo_lambda_neg": [0.0, 2, 1e30],
    "scale_rewards": ["group", "batch", "none", True, False],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "importance_sampling_level": ["token", "sequence"],
    "mask_truncated_completions": [True, False],
    "top_entropy_quantile": [1.0, 0.5, 0.2, 0.0],
    "off_policy_mask_threshold": [0.5, 0.0, INF, None],
    "use_bias_correction_kl": [True, False],
    "reward_weights": [[1.0], [0.3], [-2], [1e-30], [1e30], None],
    "num_iterations": [1, 2, 3],
    "steps_per_generation": [1, 2, 3, None],
    "generation_batch_size": [3, 6, None],
    "gradient_accumulation_steps": [1, 2],
    "per_device_train_batch_size": [3, 6],
    "num_generations": [3, 2, 6],
    "temperature": [1.0, 0.7, 1.5, 100.0, 0.01],
    "top_p": [1.0, 0.9, 0.1],
    "top_k": [0, 1, 20],
    "min_p": [None, 0.1, 0.0],
    "repetition_penalty": [1.0, 1.2],
    "max_grad_norm": [1.0, 0.1, 0.0, 1e30],
    "optim": ["adamw_torch", "sgd", "adafactor", "rmsprop"],
    "learning_rate": [0.01, 1e-6, 0.0, 1.0],
    "weight_decay": [0.0, 0.1],
    "warmup_steps": [0, 1],
    "gradient_checkpointing": [True, False],
    "vllm_importance_sampling_correction": [True, False],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_importance_sampling_clip_max": [3.0, 1e-30, INF, 2, None],
    "vllm_importance_sampling_clip_min": [None, 0.0, 0.5, 1],
    "max_completion_length": [1, 6],
    "cast_lm_head_to_fp32": [True, False],
    "skip_zero_advantage": [True, False, None],
    "seed": [0, 7, 2**31],
}
NUMBERS = [NAN, INF, -INF, -1.0, "1", [1.0], True, 10**400]
INVALID = {
    "rule": ["natural", "", None, 1, ["fisher"], NAN],
    "fisher_power": NUMBERS[:3] + NUMBERS[4:],
    "norm_power": NUMBERS[:3] + NUMBERS[4:],
    "relative_power": NUMBERS[:3] + NUMBERS[4:],
    "regularization": NUMBERS,
    "regularization_decay": [*NUMBERS, 1.0, None],
    "keep_small": ["yes", 1, None, 0.0, NAN, []],
    "fisher_samples": [*NUMBERS, 0, 2.5, None],
    "fisher_scope": ["batch", 1, []],
    "scale": ["absolute", None, 1, []],
    "token_weights": ["ppo", "", 1, ["p3o"], True],
    "kpo_gain": [*NUMBERS, 0.0, 1.5],
    "kpo_initial_variance": [*NUMBERS, None],
    "kpo_process_noise": [*NUMBERS, None],
    "group_microbatches": ["yes", 1, None],
    "skip_zero_advantage": ["yes", 1],
    "kpo_stop_gradient": ["yes", 1, None],
    "kl_in_reward": ["yes", 1, None],
    "beta": [*NUMBERS, None, 1e39],
    "epsilon": [NAN, -0.1, "1", [1.0], True],
    "epsilon_high": [NAN, -0.1, "1", [1.0], True],
    "delta": [0.0, -2.0, "1", NAN],
    "loss_type": ["typo", None, 1, ["grpo"]],
    "sapo_temperature_pos": [*NUMBERS, 0.0],
    "vespo_k_neg": [*NUMBERS, None],
    "scale_rewards": ["typo", 2.5],
    "multi_objective_aggregation": ["typo"],
    "importance_sampling_level": ["typo"],
    "top_entropy_quantile": [NAN, -0.5, "1", None],
    "off_policy_mask_threshold": [NAN, "1", [1.0]],
    "reward_weights": [[NAN], [INF], [0.0], [1e39], 1.0, "1", ["1"], [], [1.0, 1.0], [None], [[1.0]]],
    "entropy_coef": [NAN, INF, "1"],
    "router_aux_loss_coef": [0.1, NAN, "1"],
    "fp16": [True],
    "vllm_importance_sampling_mode": ["typo", None],
    "vllm_importance_sampling_clip_max": [NAN, -1.0, 0.0, -INF, "1", [1.0], True],
    "vllm_importance_sampling_clip_min": [NAN, -1.0, INF, "1", [1.0], True],
    "num_generations": [4, 1, 0, -3],
    "per_device_train_batch_size": [0, -3],
    "gradient_accumulation_steps": [0, -1],
    "steps_per_generation": [0],
    "temperature": [0.0, -1.0, NAN],
    "learning_rate": [NAN, INF, -1.0],
}
# Words that stand for a field in messages about the course of a run, and in those of TRL
WORDS = {"learning_rate": "learning rate", "temperature": "temperature", "reward_weights": "reward weights"}


def drawn(number: int) -> tuple[dict, bool]:
    """Settings, and whether a LoRA adapter is trained."""
    source = random.Random(f"{SEED} {number}")
    settings = {name: source.choice(VALID[name]) for name in source.sample(list(VALID), source.randint(2, 9))}
    if "beta" in settings and source.random() < 0.7:
        settings["kl_in_reward"] = bool(settings["beta"])
    if any(name.startswith("kpo_") for name in settings) and source.random() < 0.7:
        settings["token_weights"] = "kpo"
    if source.random() < 0.35:
        name = source.choice(list(INVALID))
        settings[name] = source.choice(INVALID[name])
    return settings, source.random() < 0.4 or bool(settings.get("beta"))


def shown(settings: dict) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in settings.items())


def names_a_field(message: str) -> bool:
    fields = (*ISOPOConfig.__dataclass_fields__, *WORDS.values())
    return any(re.search(rf"\b{name}\b", message) for name in fields)


def outcome(number: int, folder) -> str:
    """What became of a configuration, "trained" or the error; raises `AssertionError` if it is not as it should be."""
    settings, lora = drawn(number)
    case = f"case {number}, seed {SEED}: {shown(settings)}{' with LoRA' if lora else ''}"
    options = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if lora else {}
    torch.manual_seed(number)
    model = tiny.model("qwen3")
    trainer = error = None
    try:
        trainer = training.build(folder, model, options=options, **settings)
        trainer.train()
    except (ValueError, RuntimeError, FloatingPointError) as refusal:
        error = refusal
    except Exception as other:
        raise AssertionError(f"{case}\n{type(other).__name__}: {other}") from other
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    assert not broken, f"{case}\nnot finite: {', '.join(broken[:3])} ({error})"
    if error is None:
        assert trainer.state.global_step == 2, case
        return "trained"
    assert names_a_field(str(error)), f"{case}\nnames no field: {type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("number", range(12))
def test_configuration_trains_or_is_refused(number, tmp_path):
    outcome(number, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_configurations_train_or_are_refused(tmp_path):
    failures, trained = [], 0
    for number in range(CASES):
        try:
            trained += outcome(number, tmp_path) == "trained"
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, f"{len(failures)} of {CASES} configurations:\n" + "\n\n".join(failures)
    assert trained > CASES / 10  # else nothing was tried
