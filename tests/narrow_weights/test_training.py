"""Runs of the trainer with weights in bf16."""

import pytest
import torch
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames

from isopo_trl import ISOPOConfig
from isopo_trl.narrow_weights.choice import KINDS
from isopo_trl.narrow_weights.optimizers import Narrow, NarrowAdamW, NarrowSGD
from isopo_trl.step_size.controller import OVERSHOOT
from tests import tiny, training


def build(folder, dtype=torch.bfloat16, **settings):
    settings = {"learning_rate": 1e-5, "weight_decay": 0.1, "bf16_updates": "exact", "optim": "sgd", **settings}
    return training.build(folder, tiny.model("qwen3", dtype=dtype), **settings)


def unwrapped(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def bits(value):
    """Those of a remainder may be a NaN's, which equals nothing."""
    return value.view(torch.int16) if value.dtype == torch.bfloat16 else value


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "sgd", "optim_args": "momentum=0.5", "bf16_updates": "stochastic"},
        {"optim": "adamw_torch_fused", "adam_beta2": 0.99, "lr_scheduler_type": "linear", "max_steps": 4},
    ],
    ids=str,
)
def test_a_run_under_target_kl_resumes_to_the_last_bit(settings, tmp_path, caplog):
    target = 1e-3
    settings = {"target_kl": target, "step_kl_share": 1.0, "max_steps": 4, "save_strategy": "steps", **settings}
    settings |= {"save_steps": 2, "bf16": True, "learning_rate": 1.0 if settings["optim"] == "sgd" else 0.05}
    with caplog.at_level("WARNING", logger="isopo_trl"):
        whole = build(tmp_path, **settings)
        whole.train()
    lines = [line for line in whole.state.log_history if "loss" in line]
    assert settings["optim"] == "sgd" or lines[0]["step/kept"] < 1
    assert all(0 < line["step/kl"] <= OVERSHOOT * target for line in lines)
    assert not [record for record in caplog.records if "rounding them" in record.getMessage()]
    optimizer = unwrapped(whole)
    assert isinstance(optimizer, NarrowSGD if settings["optim"] == "sgd" else NarrowAdamW)
    assert optimizer.seed == whole.args.seed
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.0]  # transformers' own groups
    resumed = build(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.equal(one, other), name
    states = [unwrapped(trainer).state_dict()["state"] for trainer in (whole, resumed)]
    for place, state in states[0].items():
        assert state.keys() == states[1][place].keys()
        for name, value in state.items():
            assert torch.equal(bits(value), bits(states[1][place][name]))


def test_without_it_a_warning_says_once_what_share_of_the_first_step_was_lost(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="isopo_trl"):
        plain = build(tmp_path, bf16_updates=None, learning_rate=1e-5)
        plain.train()
    (said,) = [record.getMessage() for record in caplog.records if "rounding them" in record.getMessage()]
    assert "of the first step" in said and not isinstance(unwrapped(plain), Narrow)


class Gradients(TrainerCallback):
    """Keeps the gradients right before each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append([p.grad for p in model.parameters()])


def test_gradients_add_up_in_float32_where_that_is_asked_for(tmp_path):
    """Of steps with an advantage, and of one without, which is left out."""
    for wide in (False, True):
        rewards = iter([0.0] * 6 + [float(number) for number in range(6)] * 3)
        seen = Gradients()
        trainer = build(
            tmp_path,
            reward=lambda completions, rewards=rewards, **_: [next(rewards) for _ in completions],
            options={"callbacks": [seen]},
            **{"gradient_accumulation_steps": 2, "max_steps": 3, "float32_gradients": wide, "bf16": True},
        )
        trainer.train()
        nothing, *others = seen.steps
        assert all(not gradient.any() for gradient in nothing)
        for gradients in seen.steps:
            assert all(gradient.dtype == (torch.float32 if wide else torch.bfloat16) for gradient in gradients)
        for gradients in others:
            narrow = [gradient.bfloat16().to(gradient.dtype) for gradient in gradients]
            assert wide != all(map(torch.equal, gradients, narrow))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"bf16_updates": "nearest"}, "give 'stochastic', 'exact' or None"),
        ({"bf16_updates": True}, "bf16_updates=True is of type bool"),
        ({"bf16_updates": None, "float32_gradients": True}, "float32_gradients=True is about weights in bf16"),
        *(({"optim": name.value}, f"optim='{name.value}'") for name in OptimizerNames if name.value not in KINDS),
    ],
    ids=str,
)
def test_other_values_and_optimizers_are_refused(settings, said, tmp_path):
    with pytest.raises((TypeError, ValueError), match=said):
        ISOPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{"bf16_updates": "exact", **settings})


def test_models_and_optimizers_that_have_no_use_for_it_are_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match="trained weights in bf16, of which this model has none"):
        build(tmp_path, dtype=torch.float32)
    model = tiny.model("qwen3", dtype=torch.bfloat16)
    options = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    with pytest.raises(ValueError, match=r"but one was given \(SGD\)"):
        training.build(tmp_path, model, options=options, bf16_updates="exact", optim="sgd")
