"""Settings of GRPO's that would divide by zero or train with NaN are refused, whoever makes the configuration."""

import math

import numpy
import pytest

from isopo_trl import ISOPOConfig


OUTSIDE = {
    "num_generations": [0, 1, -2, None, math.nan, "8"],
    "per_device_train_batch_size": [0, math.nan],
    "gradient_accumulation_steps": [0],
    "generation_batch_size": [0],
    "steps_per_generation": [0],
    "num_iterations": [0, 1.5],
    "max_completion_length": [0],
    "temperature": [0.0, -1.0, math.nan, math.inf],
    "repetition_penalty": [0.0],
    "top_p": [0.0, 1.1, math.nan],
    "top_k": [-2, True],
    "min_p": [-0.1, 1.1, math.nan],
    "learning_rate": [math.nan, math.inf, -1e-6, "1e-6"],
    "weight_decay": [-0.1],
    "max_grad_norm": [math.nan, -1.0],
    "num_train_epochs": [-1.0],
    "neftune_noise_alpha": [math.nan],
    "entropy_coef_min": [math.inf],
    "sapo_temperature_pos": [0.0],
    "vespo_lambda_neg": [-1.0],
    "scale_rewards": ["False", "nonsense"],
    "importance_sampling_level": ["nonsense"],
    "multi_objective_aggregation": ["nonsense"],
}
AT_THE_EDGE = {
    "num_generations": 2,
    "generation_batch_size": None,
    "max_completion_length": None,
    "min_p": None,
    "temperature": 1e-3,
    "top_p": 1.0,
    "top_k": 0,
    "learning_rate": numpy.float32(0.0),
    "max_grad_norm": math.inf,
    "num_train_epochs": 0,
    "scale_rewards": False,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_setting_out_of_range_is_refused_by_name(name, tmp_path):
    for value in OUTSIDE[name]:
        with pytest.raises(ValueError, match=f"^{name}=.* must be "):
            ISOPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{name: value})


def test_a_setting_at_the_edge_of_its_range_is_taken(tmp_path):
    config = ISOPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **AT_THE_EDGE)
    assert config.temperature == 1e-3 and config.scale_rewards == "none"
