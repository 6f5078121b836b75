"""What `target_kl` says of DeepSpeed's settings. That steps are of the right length under it: tests/distributed."""

import pytest
import torch

from isopo_trl.integrations import deepspeed_weights


@pytest.mark.parametrize(
    "config,said",
    [
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' in DeepSpeed's settings, where learning rates"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "'nvme'"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "'nvme'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "'ratio': 0.3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "'super_offload'"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "'zenflow'"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "'zero_hpz_partition_size'"),
    ],
    ids=str,
)
def test_settings_with_which_steps_cannot_be_taken_back_are_refused_by_name(config, said):
    with pytest.raises(ValueError, match=f"^target_kl=0.1 does not work with {said}"):
        deepspeed_weights.check_settings(config, "target_kl=0.1", True)
    # Where there is no target, a step that is one can be measured
    if said in ("'super_offload'", "'zenflow'"):
        with pytest.raises(ValueError, match=said):
            deepspeed_weights.check_settings(config, "log_step_kl=True", False)
    else:
        deepspeed_weights.check_settings(config, "log_step_kl=True", False)


@pytest.mark.parametrize(
    "zero",
    [{}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"stage": 3, "offload_param": None, "zenflow": None}],
    ids=str,
)
def test_what_works_is_not_refused(zero):
    deepspeed_weights.check_settings(
        {"zero_optimization": zero, "optimizer": {"type": "AdamW"}}, "target_kl=0.1", True
    )
    deepspeed_weights.check(torch.optim.SGD([torch.zeros(1)], lr=0.1))


class FP16_Optimizer:
    """Has the name of what DeepSpeed makes of an optimizer without ZeRO, in bf16."""


def test_an_optimizer_that_is_not_known_is_refused_by_name():
    with pytest.raises(ValueError, match="does not work with DeepSpeed's FP16_Optimizer.* take ZeRO stage 1, 2 or 3"):
        deepspeed_weights.check(FP16_Optimizer())
