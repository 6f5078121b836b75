"""What cannot be honoured is refused at construction, in one sentence that names the setting and the alternative."""

import ast
import dataclasses
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from isopo_trl import ISOPO, ISOPOConfig
from tests import tiny, training


ADDED = [
    field.name
    for field in dataclasses.fields(ISOPOConfig)
    if field.name not in {field.name for field in dataclasses.fields(GRPOConfig)}
]


def config(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


def sentences(message):
    return len(re.findall(r"[.!?](?=\s|$)", message))


# (settings, what the message must name)
REFUSED = [
    ({"rule": "natural"}, ["rule='natural'", "'fisher'", "'interacting'"]),
    ({"scale": "absolute"}, ["scale='absolute'", "'relative'", "'paper'"]),
    ({"rule": "interacting", "fisher_power": -1.0}, ["fisher_power", "rule='interacting'", "another rule"]),
    ({"rule": "interacting", "norm_power": 0.0}, ["norm_power", "rule='interacting'", "another rule"]),
    ({"rule": "interacting", "relative_power": 2.0}, ["relative_power", "rule='interacting'", "another rule"]),
    ({"fisher_power": float("nan")}, ["fisher_power=nan", "finite"]),
    ({"norm_power": float("inf")}, ["norm_power=inf", "finite"]),
    ({"regularization": -0.1}, ["regularization=-0.1", "not negative"]),
    ({"regularization": float("inf")}, ["regularization=inf", "finite"]),
    ({"regularization": float("nan")}, ["regularization=nan", "finite"]),
    ({"rule": "interacting", "regularization": 0.0}, ["regularization=0", "regularization > 0"]),
    (
        {"keep_small": True, "regularization": 0.0},
        ["keep_small=True", "regularization > 0", "keep_small=False"],
    ),
    ({"regularization": 1e-45}, ["regularization=1e-45", "set it to 0", "at least 1e-12"]),
    ({"regularization": 1e30}, ["regularization=1e+30", "at most 1e+06", "rule='none'"]),
    ({"rule": "interacting", "regularization": 1e-30}, ["regularization=1e-30", "at least 0.0001"]),
    ({"rule": "interacting", "regularization": 1e30}, ["regularization=1e+30", "at most 1e+06"]),
    ({"keep_small": True, "rule": "interacting"}, ["keep_small=True", "'interacting'", "keep_small=False"]),
    ({"keep_small": True, "rule": "none", "regularization": 1.0}, ["keep_small=True", "'none'", "keep_small=False"]),
    ({"regularization_decay": 1.0}, ["regularization_decay=1.0", "[0, 1)"]),
    ({"regularization_decay": -0.1}, ["regularization_decay=-0.1", "[0, 1)"]),
    ({"fisher_samples": 0}, ["fisher_samples=0", "at least 1"]),
    ({"fisher_samples": 2.5}, ["fisher_samples=2.5", "whole number"]),
    ({"fisher_scope": "batch"}, ["fisher_scope='batch'", "'microbatch', 'step'"]),
    ({"fisher_scope": 1}, ["fisher_scope=1", "int", "a text"]),
    *(
        ({"fisher_scope": "step", "rule": rule}, ["fisher_scope='step'", f"rule='{rule}'", "remove", "'fisher'"])
        for rule in ("interacting", "euclidean", "none")
    ),
    ({"fisher_scope": "step", "fisher_samples": 10**6}, ["fisher_samples=1000000", "memory", "at most 16384"]),
    # Losses of the ratio
    ({"loss_type": "typo"}, ["loss_type='typo'", "'dapo'", "'cispo'"]),
    *(
        ({"loss_type": loss_type, "token_weights": weights}, [f"'{loss_type}'", f"'{weights}'", "'none'", "'grpo'"])
        for loss_type, weights in (("cispo", "p3o"), ("sapo", "kpo"), ("vespo", "sampler"))
    ),
    ({"epsilon": 0.2, "token_weights": "sampler"}, ["epsilon=0.2", "token_weights='sampler'", "remove", "'none'"]),
    ({"epsilon_high": 0.3, "token_weights": "p3o"}, ["epsilon_high=0.3", "token_weights='p3o'", "remove"]),
    ({"epsilon": 0.1, "delta": 2.0, "token_weights": "p3o"}, ["epsilon=0.1, delta=2.0", "remove"]),
    ({"epsilon": -0.1}, ["epsilon=-0.1", "negative"]),
    ({"epsilon_high": float("nan")}, ["epsilon_high=nan", "negative"]),
    ({"epsilon": "0.2"}, ["epsilon='0.2'", "a number or None"]),
    ({"delta": 0.0}, ["delta=0.0", "above 0"]),
    ({"delta": float("nan")}, ["delta=nan", "above 0"]),
    ({"loss_type": "cispo", "epsilon_high": 0.0}, ["epsilon_high=0.0", "'cispo'", "5.0"]),
    ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, ["sapo_temperature_pos=0.0", "positive"]),
    ({"loss_type": "sapo", "sapo_temperature_neg": "1"}, ["sapo_temperature_neg='1'", "a number"]),
    ({"loss_type": "vespo", "vespo_k_pos": float("inf")}, ["vespo_k_pos=inf", "finite"]),
    ({"loss_type": "vespo", "vespo_lambda_neg": -1.0}, ["vespo_lambda_neg=-1.0", "not negative"]),
    (
        {"use_vllm": True, "epsilon": 0.2, "vllm_importance_sampling_clip_max": 2.0},
        ["vllm_importance_sampling_clip_max=2.0", "epsilon=0.2", "remove"],
    ),
    (
        {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_clip_min": 0.5},
        ["vllm_importance_sampling_clip_min=0.5", "loss_type='vespo'", "remove"],
    ),
    ({"kl_in_reward": True}, ["kl_in_reward=True", "set beta"]),
    ({"entropy_coef": float("nan")}, ["entropy_coef=nan", "finite"]),
    ({"entropy_coef": "0.1"}, ["entropy_coef='0.1'", "a number"]),
    ({"entropy_coef_max": float("inf")}, ["entropy_coef_max=inf", "finite"]),
    ({"entropy_target": float("nan")}, ["entropy_target=nan", "a number"]),
    ({"router_aux_loss_coef": float("nan")}, ["router_aux_loss_coef=nan", "finite"]),
    (
        {"vllm_importance_sampling_mode": "token_clip"},
        ["vllm_importance_sampling_mode='token_clip'", "'token_truncate'"],
    ),
    ({"token_weights": "ppo"}, ["token_weights='ppo'", "choose one of", "'none'", "'sampler'", "'p3o'", "'kpo'"]),
    ({"token_weights": ""}, ["token_weights=''", "choose one of"]),
    ({"kpo_gain": 0.01}, ["kpo_gain=0.01", "token_weights='none'", "remove", "token_weights='kpo'"]),
    (
        {"kpo_initial_variance": 0.0, "token_weights": "p3o"},
        ["kpo_initial_variance=0.0", "token_weights='p3o'", "remove", "token_weights='kpo'"],
    ),
    (
        {"kpo_process_noise": 1e-4, "token_weights": "sampler"},
        ["kpo_process_noise=0.0001", "token_weights='sampler'", "remove", "token_weights='kpo'"],
    ),
    ({"kpo_stop_gradient": True}, ["kpo_stop_gradient=True", "remove", "token_weights='kpo'"]),
    (
        {"kpo_gain": 0.1, "kpo_stop_gradient": True, "kpo_process_noise": 0.5},
        ["kpo_gain=0.1, kpo_stop_gradient=True, kpo_process_noise=0.5", "remove", "token_weights='kpo'"],
    ),
    ({"token_weights": "kpo", "kpo_gain": 0.0}, ["kpo_gain=0.0", "(0, 1]"]),
    ({"token_weights": "kpo", "kpo_gain": -0.1}, ["kpo_gain=-0.1", "(0, 1]"]),
    ({"token_weights": "kpo", "kpo_gain": 1.5}, ["kpo_gain=1.5", "(0, 1]"]),
    ({"token_weights": "kpo", "kpo_gain": float("nan")}, ["kpo_gain=nan", "(0, 1]"]),
    (
        {"token_weights": "kpo", "kpo_gain": 0.1, "kpo_initial_variance": 0.0},
        ["kpo_gain=0.1", "kpo_initial_variance=0.0", "either"],
    ),
    (
        {"token_weights": "kpo", "kpo_gain": 0.1, "kpo_process_noise": 1e-4},
        ["kpo_gain=0.1", "kpo_process_noise=0.0001", "either"],
    ),
    ({"token_weights": "kpo", "kpo_initial_variance": -1.0}, ["kpo_initial_variance=-1.0", "negative"]),
    ({"token_weights": "kpo", "kpo_process_noise": -1e-6}, ["kpo_process_noise=-1e-06", "negative"]),
    (
        {"token_weights": "kpo", "kpo_initial_variance": 0.0, "kpo_process_noise": 0.0},
        ["kpo_initial_variance=0", "kpo_process_noise=0", "raise one"],
    ),
    ({"token_weights": "kpo", "epsilon": -0.1}, ["epsilon=-0.1", "negative"]),
    ({"token_weights": "kpo", "epsilon_high": -0.2}, ["epsilon_high=-0.2", "negative"]),
    ({"token_weights": "kpo", "epsilon": float("nan")}, ["epsilon=nan"]),
    ({"token_weights": "kpo", "delta": 2.0}, ["delta=2.0", "remove"]),
    ({"token_weights": "p3o", "epsilon": 0.1}, ["epsilon=0.1", "remove", "token_weights='kpo'"]),
    (
        {"token_weights": "p3o", "vllm_importance_sampling_mode": "token_truncate"},
        ["vllm_importance_sampling_mode=token_truncate", "token_weights='p3o'", "remove", "token_weights='sampler'"],
    ),
    (
        {"token_weights": "kpo", "vllm_importance_sampling_clip_max": 2.0},
        ["vllm_importance_sampling_clip_max=2.0", "token_weights='kpo'", "remove"],
    ),
    (
        {"token_weights": "kpo", "off_policy_mask_threshold": 0.5},
        ["off_policy_mask_threshold", "token_weights='kpo'", "unset"],
    ),
    (
        {"token_weights": "kpo", "importance_sampling_level": "sequence"},
        ["importance_sampling_level='sequence'", "token_weights='kpo'", "importance_sampling_level='token'"],
    ),
    (
        {"token_weights": "p3o", "importance_sampling_level": "sequence"},
        ["importance_sampling_level='sequence'", "token_weights='p3o'", "importance_sampling_level='token'"],
    ),
    (
        {"token_weights": "sampler", "vllm_importance_sampling_correction": False},
        ["token_weights='sampler'", "vllm_importance_sampling_correction=False", "remove"],
    ),
    # Of another type
    ({"norm_power": "1"}, ["norm_power='1'", "str", "a number or None"]),
    ({"fisher_power": True}, ["fisher_power=True", "bool", "a number or None"]),
    ({"relative_power": [1.0]}, ["relative_power=[1.0]", "list", "a number or None"]),
    ({"regularization": torch.tensor(0.1)}, ["regularization=tensor(0.1000)", "Tensor", "a number or None"]),
    ({"regularization": 10**400}, ["regularization=1000", "too large"]),
    ({"regularization_decay": None}, ["regularization_decay=None", "NoneType", "a number"]),
    ({"regularization_decay": float("nan")}, ["regularization_decay=nan", "[0, 1)"]),
    ({"fisher_samples": True}, ["fisher_samples=True", "bool", "a whole number"]),
    ({"fisher_samples": "64"}, ["fisher_samples='64'", "str", "a whole number"]),
    ({"fisher_samples": None}, ["fisher_samples=None", "a whole number"]),
    ({"rule": None}, ["rule=None", "a text"]),
    ({"rule": ["fisher"]}, ["rule=['fisher']", "list", "a text"]),
    ({"scale": 1}, ["scale=1", "int", "a text"]),
    ({"keep_small": "yes", "regularization": 1.0}, ["keep_small='yes'", "True or False"]),
    ({"token_weights": ["p3o"]}, ["token_weights=['p3o']", "a text or None"]),
    ({"token_weights": "kpo", "kpo_gain": "0.1"}, ["kpo_gain='0.1'", "a number or None"]),
    ({"token_weights": "kpo", "kpo_process_noise": None}, ["kpo_process_noise=None", "a number"]),
    ({"token_weights": "kpo", "kpo_stop_gradient": 1}, ["kpo_stop_gradient=1", "True or False"]),
    ({"token_weights": "kpo", "epsilon": "0.1"}, ["epsilon='0.1'", "a number or None"]),
    ({"kl_in_reward": "true", "beta": 0.1}, ["kl_in_reward='true'", "True or False"]),
    ({"kl_in_reward": True, "beta": "0.1"}, ["beta='0.1'", "a number"]),
    # Numbers that leave no reward, turn it round, or drop it
    ({"kl_in_reward": True, "beta": float("nan")}, ["beta=nan", "finite"]),
    ({"kl_in_reward": True, "beta": float("inf")}, ["beta=inf", "finite"]),
    ({"kl_in_reward": True, "beta": 1e39}, ["beta=1e+39", "finite"]),
    ({"kl_in_reward": True, "beta": -0.1}, ["beta=-0.1", "not negative"]),
    ({"beta": float("nan")}, ["beta=nan", "finite"]),
    ({"reward_weights": [1.0, float("nan")]}, ["reward_weights=[1.0, nan]", "finite"]),
    ({"reward_weights": [float("-inf")]}, ["reward_weights=[-inf]", "finite"]),
    ({"reward_weights": [1e39]}, ["reward_weights=[1e+39]", "finite"]),
    ({"reward_weights": 1.0}, ["reward_weights=1.0", "list"]),
    ({"reward_weights": "1"}, ["reward_weights='1'", "list"]),
    ({"reward_weights": [None]}, ["reward_weights=[None]", "list"]),
    ({"top_entropy_quantile": float("nan")}, ["top_entropy_quantile=nan", "0 to 1"]),
    ({"top_entropy_quantile": -0.5}, ["top_entropy_quantile=-0.5", "0 to 1"]),
    ({"token_weights": "p3o", "off_policy_mask_threshold": float("nan")}, ["off_policy_mask_threshold=nan"]),
    # Bounds of importance weights
    *(
        ({**weights, f"vllm_importance_sampling_{name}": value}, [f"clip_{name[-3:]}={value}", expected])
        for weights in (
            {"token_weights": "sampler", "vllm_importance_sampling_mode": "token_truncate"},
            {"token_weights": "sampler", "vllm_importance_sampling_mode": "sequence_mask"},
            {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
            {},
        )
        for name, value, expected in (
            ("clip_max", -1.0, "above 0"),
            ("clip_max", 0.0, "above 0"),
            ("clip_max", float("nan"), "above 0"),
            ("clip_min", -0.5, "at least 0"),
            ("clip_min", float("nan"), "at least 0"),
        )
    ),
    (
        {
            "token_weights": "sampler",
            "vllm_importance_sampling_clip_max": None,
            "vllm_importance_sampling_clip_min": float("inf"),
        },
        ["vllm_importance_sampling_clip_min=inf", "finite"],
    ),
    ({"torch_compile": True}, ["torch_compile=True", "torch_compile=False"]),
    ({"torch_compile_backend": "eager"}, ["torch_compile=True", "torch_compile=False"]),
    ({"fp16": True}, ["fp16=True", "bf16=True"]),
]


@pytest.mark.parametrize("settings, names", REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_setting_is_refused_with_its_alternative(settings, names):
    with pytest.raises(ValueError) as error:
        config(**settings)
    message = str(error.value)
    assert all(name in message for name in names), message
    assert sentences(message) == 1 and message.endswith("."), message


def test_divergence_that_would_be_normalised_like_a_reward_is_refused():
    with pytest.raises(ValueError, match="normalize_then_sum"):
        config(beta=0.1, kl_in_reward=True, multi_objective_aggregation="normalize_then_sum")


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.2},
        {"epsilon": 0.0, "epsilon_high": float("inf"), "delta": float("inf")},
        {"epsilon": 0.0003, "epsilon_high": 0.0004, "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"loss_type": "cispo"},
        {"loss_type": "cispo", "epsilon_high": 5.0, "off_policy_mask_threshold": 0.5},
        {"loss_type": "sapo", "use_vllm": True, "rule": "interacting"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"regularization": 0},
        {"regularization_decay": 0.0},
        {"rule": "fisher", "fisher_power": 0.0},
        {"rule": "none", "norm_power": -1.0, "regularization": 1.0, "keep_small": True},
        {"router_aux_loss_coef": 0.0},
        {"beta": 0.1},
        {"beta": 0.1, "kl_in_reward": True},
        {"entropy_coef": -0.1, "use_adaptive_entropy": True, "entropy_target": float("inf")},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"top_entropy_quantile": 0.2, "num_iterations": 4, "mask_truncated_completions": True},
        {"token_weights": "sampler"},
        {"token_weights": "sampler", "importance_sampling_level": "sequence"},
        {"token_weights": "p3o", "use_vllm": True},
        {"token_weights": "p3o", "use_vllm": True, "vllm_importance_sampling_correction": False},
        {"token_weights": "p3o", "use_bias_correction_kl": True},
        {"token_weights": "kpo", "kpo_gain": 1.0, "kpo_stop_gradient": True},
        {"token_weights": "kpo", "kpo_initial_variance": 0.0},
        {"token_weights": "kpo", "kpo_process_noise": 0.0},
        {"token_weights": "kpo", "epsilon": 0.0, "epsilon_high": 0.0},
        {"token_weights": "kpo", "loss_type": "luspo"},
        {"token_weights": "sampler", "vllm_importance_sampling_clip_max": float("inf")},
        {"token_weights": "sampler", "vllm_importance_sampling_clip_min": 0.0},
        {"token_weights": "sampler", "vllm_importance_sampling_clip_min": 0.5},
        {"reward_weights": [1.0, 0.0, -0.5]},
        # A setting at its default is no setting
        {"kpo_initial_variance": 1.0, "kpo_process_noise": 1e-6, "kpo_gain": None, "kpo_stop_gradient": False},
    ],
    ids=str,
)
def test_setting_is_accepted(settings):
    config(**settings)


def test_numbers_of_numpy_become_pythons_own_so_that_a_checkpoint_can_be_loaded(tmp_path):
    given = {"regularization": np.float32(0.5), "norm_power": np.float64(-1), "fisher_samples": np.int64(7)}
    given |= {"regularization_decay": np.float16(0.5), "keep_small": np.bool_(True)}
    args = config(**given, reward_weights=np.array([2, 0.5]), rule="fig4")
    assert args.reward_weights == [2.0, 0.5]
    for name, value in given.items():
        assert getattr(args, name) == value and type(getattr(args, name)) in (float, int, bool), name
    isopo = ISOPO(tiny.model("qwen3"), "fig4", **given)
    torch.save(isopo.state_dict(), tmp_path / "state.pt")
    isopo.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


# Token weights


@pytest.mark.parametrize(
    "settings, resolved",
    [
        ({}, "none"),
        ({"vllm_importance_sampling_correction": False}, "none"),
        ({"use_vllm": True}, "sampler"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "none"),
        ({"use_vllm": True, "token_weights": "none"}, "none"),
        ({"use_vllm": True, "epsilon": 0.2}, "none"),  # the loss corrects by its own ratio
        ({"use_vllm": True, "loss_type": "sapo"}, "none"),
        ({"use_vllm": True, "token_weights": "p3o"}, "p3o"),
        ({"token_weights": "sampler"}, "sampler"),
        ({"token_weights": "kpo"}, "kpo"),
    ],
    ids=str,
)
def test_token_weights_follow_vllm_where_they_are_not_given(settings, resolved):
    assert config(**settings).token_weights == resolved


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, (0.0003, 0.0004)),
        ({"epsilon": 0.01}, (0.01, 0.0004)),
        ({"epsilon_high": 0.05}, (0.0003, 0.05)),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, (0.1, 0.3)),
        ({"epsilon": 0.0, "epsilon_high": 0.0}, (0.0, 0.0)),
    ],
    ids=str,
)
def test_clipping_range_of_kpo_is_its_own_where_it_is_not_given(settings, expected):
    args = config(token_weights="kpo", **settings)
    assert (args.epsilon, args.epsilon_high) == expected


@pytest.mark.parametrize("weights", ["none", "sampler", "p3o"])
def test_other_token_weights_leave_the_clipping_range_alone(weights):
    args = config(token_weights=weights)
    assert (args.epsilon, args.epsilon_high) == (None, None)


@pytest.mark.parametrize("settings", [{}, {"epsilon": 0.1, "epsilon_high": 0.3}, {"epsilon": 0.01}], ids=str)
def test_trainer_clips_where_the_configuration_says(settings, tmp_path):
    trainer = training.build(tmp_path, token_weights="kpo", **settings)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (trainer.args.epsilon, trainer.args.epsilon_high)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_vllm": True},
        {"token_weights": "p3o"},
        {"token_weights": "kpo"},
        {"token_weights": "kpo", "kpo_gain": 0.01, "epsilon": 0.1, "epsilon_high": 0.3},
        {"token_weights": "kpo", "kpo_initial_variance": 0.0, "kpo_stop_gradient": True},
        {"epsilon": 0.2},
        {"epsilon_high": 0.3, "use_vllm": True},
    ],
    ids=str,
)
def test_resolved_configuration_can_be_given_again(settings):
    args = config(**settings)
    names = [*ADDED, "epsilon", "epsilon_high", "use_vllm", "output_dir", "use_cpu", "bf16", "report_to"]
    again = ISOPOConfig(**{name: args.to_dict()[name] for name in names})
    assert [getattr(again, name) for name in names] == [getattr(args, name) for name in names]
    # TRL sets both of these, of which one can be given
    replaced = dataclasses.replace(args, generation_batch_size=None, learning_rate=0.5)
    assert [getattr(replaced, name) for name in names] == [getattr(args, name) for name in names]


def test_reentrant_checkpointing_is_refused_where_there_are_two_backward_passes(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    message = refused(tmp_path, token_weights="p3o", **settings)
    assert "token_weights='p3o'" in message and "{'use_reentrant': False}" in message
    assert sentences(message) == 1
    for accepted in ({"token_weights": "p3o", "rule": "none"}, {"token_weights": "kpo"}, {}):
        training.build(tmp_path, **accepted, **settings)


OF_THE_TRAINER = {"kl_in_reward", "token_weights", "group_microbatches", "skip_zero_advantage"}
OF_THE_OBJECT = {*ADDED} - OF_THE_TRAINER - {name for name in ADDED if name.startswith("kpo_")}


def test_object_of_its_own_refuses_the_same_settings():
    for settings, names in REFUSED:
        if settings.keys() <= OF_THE_OBJECT:
            with pytest.raises(ValueError, match=re.escape(names[0])):
                ISOPO(tiny.model("qwen3"), **settings)


@pytest.mark.parametrize(
    "settings, scope",
    [
        ({}, "step"),
        ({"rule": "fig4", "fisher_samples": 1024}, "step"),
        ({"fisher_samples": 1025}, "microbatch"),  # whose rows would fill the memory
        ({"fisher_scope": "microbatch"}, "microbatch"),
        *(({"rule": rule}, "microbatch") for rule in ("euclidean", "interacting", "none")),  # no Fisher norm
    ],
)
def test_the_metric_is_that_of_the_step_where_nothing_else_is_said(settings, scope, tmp_path):
    trainer = training.build(tmp_path, **settings)
    assert trainer.args.fisher_scope == settings.get("fisher_scope")  # so that another rule can be put in
    assert trainer.isopo.fisher_scope == scope == ISOPO(tiny.model("qwen3"), **settings).fisher_scope


# Refused by the trainer


def refused(folder, model="qwen3", error=ValueError, **arguments):
    with pytest.raises(error) as info:
        training.build(folder, model, **arguments)
    return str(info.value)


def test_configuration_of_grpo_is_refused(tmp_path):
    args = GRPOConfig(str(tmp_path), **training.SETTINGS)
    with pytest.raises(TypeError) as error:
        training.ISOPOTrainer(tiny.model("qwen3"), tiny.reward, args, tiny.prompts(4))
    assert "`ISOPOConfig`" in str(error.value) and "GRPOConfig" in str(error.value)
    assert sentences(str(error.value)) == 1


def test_prefix_tuning_under_gradient_checkpointing_is_refused(tmp_path):
    peft_config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    message = refused(tmp_path, options={"peft_config": peft_config}, gradient_checkpointing=True)
    assert "gradient_checkpointing=False" in message and sentences(message) == 1


def test_adapter_on_the_head_is_refused(tmp_path):
    message = refused(tmp_path, options={"peft_config": LoraConfig(r=2, target_modules=["q_proj", "lm_head"])})
    assert "lm_head" in message and "target_modules" in message


def test_model_without_trained_parameters_is_refused(tmp_path):
    model = tiny.model("qwen3")
    model.requires_grad_(False)
    assert "no trainable parameter" in refused(tmp_path, model)


def test_refusal_leaves_the_model_as_it_was(tmp_path):
    model = tiny.model("qwen3")
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.BatchNorm1d(16))
    assert "model.norm.1" in refused(tmp_path, model)
    assert not any("_isopo_layer" in module.__dict__ for module in model.modules())


def test_frozen_adapter_model_is_refused(tmp_path):
    model = get_peft_model(tiny.model("qwen3"), LoraConfig(r=2))
    model.requires_grad_(False)
    assert "no trainable parameter" in refused(tmp_path, model)


# The command line and the documentation


COMMAND = (
    "--output_dir out --use_cpu --report_to none --rule fig4 --fisher_power 0.5 --norm_power -1.5 --relative_power -2 "
    "--regularization 0.1 --regularization_decay 0.8 --keep_small --fisher_samples 250 --fisher_scope step "
    "--group_microbatches --skip_zero_advantage True --scale paper "
    "--beta 0.05 --kl_in_reward True --loss_type grpo --token_weights kpo --kpo_initial_variance 0.5 "
    "--kpo_process_noise 1e-4 --kpo_stop_gradient --epsilon 0.01 "
    "--target_kl 1e-4 --log_step_kl --step_kl_share 0.5 --behaviour_kl 0.01 --target_kl_offload True "
    "--num_iterations 2"
)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_every_setting_can_be_given_on_the_command_line(parser):
    parsed = parser([ISOPOConfig]) if parser is TrlParser else parser(ISOPOConfig)
    (args,) = parsed.parse_args_into_dataclasses(COMMAND.split())
    values = {name: getattr(args, name) for name in ADDED}
    assert values == {
        "rule": "fig4",
        "fisher_power": 0.5,
        "norm_power": -1.5,
        "relative_power": -2.0,
        "regularization": 0.1,
        "regularization_decay": 0.8,
        "keep_small": True,
        "fisher_samples": 250,
        "fisher_scope": "step",
        "group_microbatches": True,
        "skip_zero_advantage": True,
        "scale": "paper",
        "token_weights": "kpo",
        "kpo_gain": None,
        "kpo_initial_variance": 0.5,
        "kpo_process_noise": 1e-4,
        "kpo_stop_gradient": True,
        "kl_in_reward": True,
        "target_kl": 1e-4,
        "log_step_kl": True,
        "step_kl_share": 0.5,
        "behaviour_kl": 0.01,
        "target_kl_offload": True,
    }
    assert (args.epsilon, args.epsilon_high) == (0.01, 0.0004)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_fixed_gain_can_be_given_on_the_command_line(parser):
    parsed = parser([ISOPOConfig]) if parser is TrlParser else parser(ISOPOConfig)
    command = "--output_dir out --use_cpu --token_weights kpo --kpo_gain 0.0001 --kpo_stop_gradient False"
    (args,) = parsed.parse_args_into_dataclasses(command.split())
    assert (args.kpo_gain, args.kpo_stop_gradient) == (0.0001, False)


def test_settings_can_be_given_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("output_dir: out\nuse_cpu: true\nrule: npg\nregularization: 0.2\nbf16: false\n")
    (args,) = TrlParser([ISOPOConfig]).parse_args_and_config(
        ["--config", str(tmp_path / "run.yaml"), "--rule", "fig4"]
    )
    assert (args.rule, args.regularization) == ("fig4", 0.2)


def test_token_weights_can_be_given_in_a_file(tmp_path):
    lines = ["output_dir: out", "use_cpu: true", "bf16: false", "token_weights: kpo", "kpo_process_noise: 1e-4"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "kpo_stop_gradient: true"]))
    command = ["--config", str(tmp_path / "run.yaml")]
    (args,) = TrlParser([ISOPOConfig]).parse_args_and_config([*command, "--epsilon_high", "0.002"])
    assert (args.token_weights, args.kpo_process_noise, args.kpo_stop_gradient) == ("kpo", 1e-4, True)
    assert (args.epsilon, args.epsilon_high) == (0.0003, 0.002)
    # YAML reads the word none as text, and null as nothing
    for word, resolved in (("none", "none"), ("null", "none"), ("p3o", "p3o")):
        (tmp_path / "run.yaml").write_text("\n".join([*lines[:3], f"token_weights: {word}"]))
        (args,) = TrlParser([ISOPOConfig]).parse_args_and_config(command)
        assert args.token_weights == resolved


def test_refusal_reaches_the_command_line():
    command = "--output_dir out --use_cpu --kl_in_reward True"
    with pytest.raises(ValueError, match="set beta"):
        HfArgumentParser(ISOPOConfig).parse_args_into_dataclasses(command.split())


def test_configuration_survives_being_written_down():
    args = config(rule="fig4", regularization=0.3)
    again = ISOPOConfig(**{name: args.to_dict()[name] for name in [*ADDED, "output_dir", "use_cpu", "bf16"]})
    assert again._rule() == args._rule()


@pytest.mark.parametrize("name", ADDED)
def test_setting_is_documented(name):
    field = ISOPOConfig.__dataclass_fields__[name]
    assert field.metadata["help"]
    entry = re.search(
        rf"^        {name} \(`(\w+)`, \*optional\*(, defaults to `(.+)`)?\):$", ISOPOConfig.__doc__, re.M
    )
    assert entry, f"{name} is not in the docstring"
    documented = entry.group(3)
    assert (documented is None) == (field.default is None)
    if documented is not None:
        assert ast.literal_eval(documented) == field.default
    kind = field.type if isinstance(field.type, type) else field.type.__args__[0]
    assert entry.group(1) == kind.__name__


def test_defaults_of_grpo_are_kept():
    for field in dataclasses.fields(GRPOConfig):
        own = ISOPOConfig.__dataclass_fields__[field.name]
        if field.name != "epsilon":  # nothing is clipped unless it is asked for
            assert own.default == field.default and own.type == field.type, field.name
