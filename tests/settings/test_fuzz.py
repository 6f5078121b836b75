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

# Valid for some configuration, whatever else it needs
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
    "token_weights": ["none", "sampler", "p3o", "kpo", "dppo_kl", "m2po", "dcpo", "bapo", "capo", None],
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
    "advantage_transform": ["dcpo", "redit", "empg", "cppo", "redit,dcpo,cppo", ["empg", "gtpo"], None],
    "seed": [0, 7, 2**31],
}
# Those of transformers' own, which it does not verify, are left out
FIELDS = sorted({*VALID, "group_microbatches", "router_aux_loss_coef", "fp16"} - {"optim", "seed", "warmup_steps"})
ODD = [NAN, INF, -INF, -1.0, 0, 1.5, "typo", [1.0], True]


def drawn(number: int) -> tuple[dict, bool]:
    """Settings, and whether a LoRA adapter is trained."""
    source = random.Random(f"{SEED} {number}")
    settings = {name: source.choice(VALID[name]) for name in source.sample(list(VALID), source.randint(2, 9))}
    if "beta" in settings and source.random() < 0.7:
        settings["kl_in_reward"] = bool(settings["beta"])
    if any(name.startswith("kpo_") for name in settings) and source.random() < 0.7:
        settings["token_weights"] = "kpo"
    if source.random() < 0.35:
        settings[source.choice(FIELDS)] = source.choice(ODD)
    return settings, source.random() < 0.4 or bool(settings.get("beta"))


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, CASES))])
def test_a_configuration_trains_or_is_refused_by_the_name_of_a_setting(number, tmp_path):
    settings, lora = drawn(number)
    print({**settings, "LoRA": lora})  # shown where it fails
    torch.manual_seed(number)
    model = tiny.model("qwen3")
    try:
        options = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if lora else {}
        trainer = training.build(tmp_path, model, options=options, **settings)
        trainer.train()
        assert trainer.state.global_step == 2
    except (ValueError, RuntimeError, FloatingPointError) as error:
        # Messages about the course of a run, and those of TRL, have a space in some names
        message = str(error).replace("learning rate", "learning_rate").replace("reward weights", "reward_weights")
        assert any(re.search(rf"\b{name}\b", message) for name in ISOPOConfig.__dataclass_fields__), message
    assert all(torch.isfinite(p).all() for p in model.parameters())
