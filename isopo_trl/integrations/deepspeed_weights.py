"""
The weights before a step of DeepSpeed's optimizer, so that it can be taken back along itself.

ZeRO's optimizers move flat partitions in float32, each rank its own, from which the model's weights are made after
every step: by copying them to the model's type, and gathering them from all ranks (ZeRO-3: what is to stay gathered).
So a copy of the rank's partitions is kept, and when they are moved, the model's weights are made from them anew, as
the optimizer's own step does it. What is private to DeepSpeed in that stands here.
"""

from typing import Any

import torch

from ..step_size.taken_back import KeptWeights


def check_settings(config: dict[str, Any], given: str, has_target: bool) -> None:
    """
    Raise for settings of DeepSpeed's with which steps cannot be measured or, where they have a target, not be taken
    back, or have no learning rate to find.

    Args:
        config (`dict`): DeepSpeed's settings.
        given (`str`): the settings that ask for steps to be measured, for the message.
        has_target (`bool`): whether steps have a target.
    """
    zero = config.get("zero_optimization") or {}
    optimizer, parameters = (zero.get(f"offload_{name}") or {} for name in ("optimizer", "param"))
    share = optimizer.get("ratio", 1.0)
    unmeasured = [
        (bool(optimizer.get("super_offload")), "'super_offload'", "it steps while the backward pass is under way"),
        (zero.get("zenflow") is not None, "'zenflow'", "it steps while the next forward pass is under way"),
    ]
    without_target = [
        ("scheduler" in config, "'scheduler'", "learning rates are not multiples of one, as lr_scheduler_type's are"),
        ("nvme" in (optimizer.get("device"), parameters.get("device")), "'nvme'", "weights are not in memory"),
        (share != 1.0, f"'ratio': {share}", "a second optimizer steps with learning rates of its own"),
        (zero.get("zero_hpz_partition_size", 1) > 1, "'zero_hpz_partition_size'", "weights have a second copy"),
    ]
    for is_set, name, reason in unmeasured + without_target * has_target:
        if is_set:
            raise ValueError(
                f"{given} does not work with {name} in DeepSpeed's settings, where {reason}: leave one of the two "
                "out, or use DDP or FSDP2."
            )


def check(optimizer: Any) -> None:
    """Raise for an optimizer of the engine whose weights cannot be moved from outside."""
    if not _is_plain(optimizer) and type(optimizer).__name__ not in _PARTITIONS:
        raise ValueError(
            f"target_kl does not work with DeepSpeed's {type(optimizer).__name__}, whose copies of the weights it "
            "cannot move: take ZeRO stage 1, 2 or 3, or DDP or FSDP2, or leave target_kl out."
        )


def kept_weights(optimizer: Any, offload: bool = False) -> KeptWeights:
    """
    What takes the steps of the engine's optimizer back: a copy.

    Args:
        optimizer: the engine's, which passes [`check`].
        offload (`bool`): whether to keep the copy in the memory of the host.
    """
    if _is_plain(optimizer):  # no ZeRO, in float32: the model's weights themselves
        return KeptWeights([p for group in optimizer.param_groups for p in group["params"]], offload)
    return KeptPartitions(optimizer, offload)


class KeptPartitions(KeptWeights):
    """
    A copy of the partitions that this rank's part of ZeRO's optimizer moves.

    Args:
        optimizer: ZeRO's optimizer, of any stage.
        offload (`bool`): whether to keep the copy in the memory of the host.
    """

    def __init__(self, optimizer: Any, offload: bool = False):
        super().__init__(list(getattr(optimizer, _PARTITIONS[type(optimizer).__name__])), offload)
        self._optimizer = optimizer

    @torch.no_grad()
    def move(self, share: float) -> None:
        """As [`KeptWeights.move`], with the model's weights."""
        super().move(share)
        if type(self._optimizer).__name__ == _STAGE_3:
            _refresh_stage_3(self._optimizer)
        else:
            self._optimizer.update_lp_params()


_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
# Where the optimizers keep what they move
_PARTITIONS = {
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",  # ZeRO-1 and ZeRO-2
    "BF16_Optimizer": "fp32_groups_flat_partition",  # ZeRO-1 in bf16 with gradients in float32
    _STAGE_3: "fp32_partitioned_groups_flat",
}


def _is_plain(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer)


def _refresh_stage_3(optimizer: Any) -> None:
    """What ZeRO-3's step does when its partitions have moved."""
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
