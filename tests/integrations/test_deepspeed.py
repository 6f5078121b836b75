"""What DeepSpeed must not see, and which of its settings are refused. Training under it: tests/distributed."""

import pytest
import torch

from isopo_trl.integrations import deepspeed


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
        ({}, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, None),
        ({"zero_optimization": {"stage": 3, "offload_param": None, "zenflow": None}, "optimizer": {}}, None),
    ],
    ids=str,
)
def test_settings_with_which_steps_cannot_be_taken_back_are_refused_by_name(config, said):
    # Where there is no target, a step that is one can be measured
    for given, has_target in (("target_kl=0.1", True), ("log_step_kl=True", False)):
        if said and (has_target or said in ("'super_offload'", "'zenflow'")):
            with pytest.raises(ValueError, match=f"^{given} does not work with {said}"):
                deepspeed.refuse_settings(config, given, has_target)
        else:
            deepspeed.refuse_settings(config, given, has_target)


def test_an_optimizer_that_is_not_known_is_refused_by_name():
    deepspeed.refuse_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    without_zero = type("FP16_Optimizer", (), {})()  # what DeepSpeed makes of one in bf16
    with pytest.raises(ValueError, match="does not work with DeepSpeed's FP16_Optimizer.* take ZeRO stage 1, 2 or 3"):
        deepspeed.refuse_optimizer(without_zero)


class Engine(torch.nn.Linear):
    """Listens to backward passes as DeepSpeed does: by hooks on what it returns, and by counters of modules."""

    def __init__(self):
        super().__init__(2, 2)
        self.backwards, self.steps, self.ds_grads_remaining = 0, 0, 5

    def forward(self, x):
        output = super().forward(x)
        output.register_hook(self._count)
        return {"logits": output, "other": None}

    def _count(self, gradient):
        self.backwards += 1

    def step(self, by=1):
        self.steps += by
        return self.steps


def test_a_backward_pass_that_is_not_the_losss_is_not_seen():
    engine = Engine()
    with deepspeed.caught_outputs(engine, wanted=True) as outputs:
        term = engine(torch.ones(1, 2))["logits"].sum()
    engine(torch.ones(1, 2))
    assert len(outputs) == 1 and not engine._forward_hooks
    with pytest.raises(KeyError), deepspeed.unseen_by_deepspeed(engine, outputs):
        term.backward(retain_graph=True)
        engine.ds_grads_remaining = 0
        raise KeyError
    assert engine.backwards == 0 and engine.ds_grads_remaining == 5 and engine.weight.grad is not None
    term.backward()
    assert engine.backwards == 1
    with deepspeed.caught_outputs(engine, wanted=False) as outputs:
        engine(torch.ones(1, 2))
    assert not outputs


def test_what_is_done_before_a_step_of_the_engine_can_stop_it():
    engine, seen = Engine(), []

    def act():
        seen.append(engine.steps)
        if len(seen) == 2:
            raise FloatingPointError

    with pytest.raises(FloatingPointError), deepspeed.before_step(engine, act):
        assert engine.step(by=2) == 2
        engine.step()
    assert engine.step() == 3 and seen == [0, 2]


class DeepSpeedZeroOptimizer:
    """Has the name of ZeRO's: moves a partition in float32, from which the model's weight is made."""

    def __init__(self):
        self.weight, self.single_partition_of_fp32_groups = torch.ones(3).bfloat16(), [torch.ones(3)]

    def update_lp_params(self):
        self.weight.copy_(self.single_partition_of_fp32_groups[0])


def test_weights_are_made_anew_from_the_partitions_that_were_moved():
    optimizer = DeepSpeedZeroOptimizer()
    deepspeed.refuse_optimizer(optimizer)
    partitions, moved = deepspeed.moved_weights(optimizer)
    partitions[0].fill_(2.0)
    moved()
    assert optimizer.weight.tolist() == [2.0] * 3
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert deepspeed.moved_weights(plain)[0] == plain.param_groups[0]["params"]
