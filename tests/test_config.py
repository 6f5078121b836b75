"""What cannot be honoured is refused at construction, in one sentence that names the setting and the alternative."""

import ast
import dataclasses
import re

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from isopo_trl import ISOPO, ISOPOConfig
from tests import tiny, training


ADDED = [
    field.name
    for field in dataclasses.fields(ISOPOConfig)
    if field.name not in {field.name for field in dataclasses.fields(GRPOConfig)}
]
OF_TOKENS = ("kpo_", "dppo_", "m2po_", "pspo_", "bapo_", "capo_", "token_weights_scope")
OF_ADVANTAGES = ("redit_", "pacs_", "empg_", "g2rl_", "cppo_", "simpletir_", "gtpo_")
NAN, INF = float("nan"), float("inf")
CLIP, SAMPLER = "vllm_importance_sampling_clip", {"token_weights": "sampler"}
KPO, P3O = {"token_weights": "kpo"}, {"token_weights": "p3o"}


def config(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


def sentences(message):
    return len(re.findall(r"[.!?](?=\s|$)", message))


# (settings, what the message must name); types and ranges of single settings are tested in `tests/settings`
REFUSED = [
    ({"rule": "natural"}, ["rule='natural'", "'fisher'", "'interacting'"]),
    ({"rule": None}, ["rule=None", "a text"]),
    ({"scale": "absolute"}, ["scale='absolute'", "'relative'", "'paper'"]),
    ({"rule": "interacting", "norm_power": 0.0}, ["norm_power", "rule='interacting'", "another rule"]),
    ({"norm_power": INF}, ["norm_power=inf", "finite"]),
    ({"fisher_power": True}, ["fisher_power=True", "bool", "a number or None"]),
    ({"regularization": -0.1}, ["regularization=-0.1", "not negative"]),
    ({"regularization": NAN}, ["regularization=nan", "finite"]),
    ({"regularization": 1e-45}, ["regularization=1e-45", "set it to 0", "at least 1e-12"]),
    ({"regularization": 1e30}, ["regularization=1e+30", "at most 1e+06", "rule='none'"]),
    ({"rule": "interacting", "regularization": 0.0}, ["regularization=0", "regularization > 0"]),
    ({"rule": "interacting", "regularization": 1e-30}, ["regularization=1e-30", "at least 0.0001"]),
    ({"keep_small": True, "regularization": 0.0}, ["keep_small=True", "regularization > 0", "keep_small=False"]),
    ({"keep_small": True, "rule": "interacting"}, ["keep_small=True", "'interacting'", "keep_small=False"]),
    ({"keep_small": True, "rule": "none", "regularization": 1.0}, ["keep_small=True", "'none'", "keep_small=False"]),
    ({"regularization_decay": 1.0}, ["regularization_decay=1.0", "[0, 1)"]),
    ({"regularization_decay": NAN}, ["regularization_decay=nan", "[0, 1)"]),
    ({"fisher_samples": 0}, ["fisher_samples=0", "at least 1"]),
    ({"fisher_samples": 2.5}, ["fisher_samples=2.5", "whole number"]),
    ({"fisher_scope": "batch"}, ["fisher_scope='batch'", "'microbatch', 'step'"]),
    ({"fisher_scope": "step", "rule": "none"}, ["fisher_scope='step'", "rule='none'", "remove", "'fisher'"]),
    ({"fisher_scope": "step", "fisher_samples": 10**6}, ["fisher_samples=1000000", "memory", "at most 16384"]),
    # Losses of the ratio
    ({"loss_type": "typo"}, ["loss_type='typo'", "'dapo'", "'cispo'"]),
    ({"loss_type": "cispo", **P3O}, ["'cispo'", "'p3o'", "'none'", "'grpo'"]),
    ({"epsilon": 0.1, "delta": 2.0, **P3O}, ["epsilon=0.1, delta=2.0", "'p3o'", "remove", "token_weights='kpo'"]),
    ({"epsilon_high": NAN}, ["epsilon_high=nan", "negative"]),
    ({"epsilon": "0.2"}, ["epsilon='0.2'", "a number or None"]),
    ({"delta": 0.0}, ["delta=0.0", "above 0"]),
    ({"loss_type": "cispo", "epsilon_high": 0.0}, ["epsilon_high=0.0", "'cispo'", "5.0"]),
    ({"use_vllm": True, "epsilon": 0.2, f"{CLIP}_max": 2.0}, [f"{CLIP}_max=2.0", "epsilon=0.2", "remove"]),
    ({"use_vllm": True, "loss_type": "vespo", f"{CLIP}_min": 0.5}, [f"{CLIP}_min=0.5", "loss_type='vespo'", "remove"]),
    # Token weights
    ({"token_weights": "ppo"}, ["token_weights='ppo'", "choose one of", "'none'", "'sampler'", "'p3o'", "'kpo'"]),
    ({"token_weights": ""}, ["token_weights=''", "choose one of"]),
    (
        {"kpo_gain": 0.1, "kpo_stop_gradient": True, **P3O},
        ["kpo_gain=0.1, kpo_stop_gradient=True", "token_weights='p3o'", "remove", "token_weights='kpo'"],
    ),
    ({**KPO, "kpo_gain": 0.0}, ["kpo_gain=0.0", "(0, 1]"]),
    ({**KPO, "kpo_gain": NAN}, ["kpo_gain=nan", "(0, 1]"]),
    ({**KPO, "kpo_gain": 0.1, "kpo_initial_variance": 0.0}, ["kpo_gain=0.1", "kpo_initial_variance=0.0", "either"]),
    ({**KPO, "kpo_gain": 0.1, "kpo_process_noise": 1e-4}, ["kpo_gain=0.1", "kpo_process_noise=0.0001", "either"]),
    ({**KPO, "kpo_initial_variance": -1.0}, ["kpo_initial_variance=-1.0", "negative"]),
    ({**KPO, "kpo_process_noise": -1e-6}, ["kpo_process_noise=-1e-06", "negative"]),
    (
        {**KPO, "kpo_initial_variance": 0.0, "kpo_process_noise": 0.0},
        ["kpo_initial_variance=0", "kpo_process_noise=0", "raise one"],
    ),
    ({**KPO, "epsilon": -0.1}, ["epsilon=-0.1", "negative"]),
    ({**KPO, "delta": 2.0}, ["delta=2.0", "remove"]),
    ({**KPO, f"{CLIP}_max": 2.0}, [f"{CLIP}_max=2.0", "token_weights='kpo'", "remove", "token_weights='sampler'"]),
    ({**KPO, "off_policy_mask_threshold": 0.5}, ["off_policy_mask_threshold", "token_weights='kpo'", "unset"]),
    *(
        ({**weights, "importance_sampling_level": "sequence"}, ["='sequence'", *weights.values(), "_level='token'"])
        for weights in (KPO, P3O)
    ),
    *(
        ({"token_weights": weights, name: value}, [f"{name}={value}", "give"])
        for weights, name, value in (
            *(("dppo_tv", "dppo_delta", -0.1), ("dppo_kl", "dppo_delta", NAN), ("dppo_kl", "dppo_cap", 0.0)),
            *(("m2po", "m2po_budget", INF), ("pspo", "pspo_alpha", 1.0), ("bapo", "bapo_target", -1.0)),
            *(("capo", "capo_tau_h", 0.0), ("capo", "capo_tau_f", INF), ("m2po", "token_weights_scope", "batch")),
        )
    ),
    ({"token_weights": "dcpo", "delta": 2.0}, ["delta=2.0", "token_weights='dcpo'", "remove"]),
    ({"token_weights": "aspo", "dppo_cap": 2.0}, ["dppo_cap=2.0", "'aspo'", "remove", "token_weights='dppo_tv'"]),
    ({**SAMPLER, "vllm_importance_sampling_correction": False}, ["'sampler'", "_correction=False", "remove"]),
    ({"vllm_importance_sampling_mode": "token_clip"}, ["_mode='token_clip'", "'token_truncate'"]),
    *(
        ({**weights, f"{CLIP}_{name}": value}, [f"clip_{name}={value}", expected])
        for weights in (SAMPLER, {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, {})
        for name, value, expected in (("max", 0.0, "above 0"), ("max", NAN, "above 0"), ("min", -0.5, "at least 0"))
    ),
    ({**SAMPLER, f"{CLIP}_max": None, f"{CLIP}_min": INF}, [f"{CLIP}_min=inf", "finite"]),
    # Advantages
    *(
        ({"advantage_transform": given}, [f"advantage_transform={given!r}", repr(unknown), "'dcpo'", "commas"])
        for given, unknown in (("grpo", "grpo"), ("", ""), ("dcpo,,cppo", ""), ("dcpo;cppo", "dcpo;cppo"))
    ),
    ({"advantage_transform": 1}, ["advantage_transform=1", "a text or None"]),
    ({"advantage_transform": ["dcpo", 1]}, ["advantage_transform=['dcpo', 1]", "a text or None"]),
    ({"advantage_transform": "cppo,redit"}, ["'redit'", "undo", "'cppo'", "put 'redit' first"]),
    ({"advantage_transform": "redit,empg,dcpo"}, ["'dcpo'", "undo", "'empg'", "put 'dcpo' first"]),
    ({"advantage_transform": "empg,redit,cppo"}, ["'redit'", "undo", "'empg'", "put 'redit' first"]),
    ({"advantage_transform": "redit,g2rl", "g2rl_lambda": 1.0}, ["'g2rl' needs", "1 and -1", "put 'g2rl' first"]),
    *(
        ({"advantage_transform": given, "g2rl_lambda": 1.0}, ["'pacs' needs rewards of 0 and 1", repr(other), "out"])
        for given, other in (
            *(("g2rl,pacs", "g2rl"), ("pacs,g2rl", "g2rl"), ("redit,g2rl,pacs", "redit"), ("g2rl,empg,pacs", "g2rl")),
        )
    ),
    *(
        ({"advantage_transform": given}, ["'pacs' needs rewards of 0 and 1", "'redit'", "leave one of them out"])
        for given in ("redit,pacs", "pacs,redit", "redit,empg,pacs")
    ),
    *(
        ({"advantage_transform": given, "scale_rewards": "none"}, ["'gtpo' would", left_out, "put 'gtpo' first"])
        for given, left_out in (("cppo,gtpo", "cppo"), ("simpletir,gtpo", "simpletir"))
    ),
    ({"advantage_transform": "gtpo,empg", "scale_rewards": "none"}, ["'empg'", "undo", "put 'empg' first"]),
    ({"advantage_transform": "gtpo"}, ["='gtpo'", "scale_rewards='group'", "set scale_rewards='none'"]),
    ({"advantage_transform": "redit,gtpo", "scale_rewards": "batch"}, ["='batch'", "set scale_rewards='none'"]),
    (
        {"advantage_transform": "gtpo", "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
        ["='gtpo'", "='normalize_then_sum'", "'sum_then_normalize'"],
    ),
    ({"gtpo_threshold": 1.0, "token_weights": "gtpo", "group_microbatches": True}, ["gtpo_threshold=1.0", "'gtpo'"]),
    (
        {"advantage_transform": "redit", "redit_noise": "gaussian"},
        ["redit_noise='gaussian'", "redit_scale", "no number", "give a"],
    ),
    ({"advantage_transform": "dcpo,pacs"}, ["two", "(dcpo, pacs)", "keep one"]),
    ({"advantage_transform": "empg,empg"}, ["advantage_transform='empg,empg'", "twice", "keep one"]),
    ({"advantage_transform": "dcpo", "scale_rewards": "none"}, ["scale_rewards='none'", "'dcpo'", "remove"]),
    (
        {"advantage_transform": "redit", "multi_objective_aggregation": "normalize_then_sum"},
        ["advantage_transform='redit'", "='normalize_then_sum'", "'sum_then_normalize'"],
    ),
    ({"redit_scale": 0.1}, ["redit_scale=0.1", "ReDit", "advantage_transform=None", "'redit'"]),
    ({"advantage_transform": "dcpo", "cppo_pruning": 0.2}, ["cppo_pruning=0.2", "='dcpo'", "'cppo'"]),
    ({"advantage_transform": "pacs", "num_iterations": 2}, ["'pacs'", "num_iterations=1", "steps_per_generation"]),
    *(
        ({"advantage_transform": name, "beta": 0.1, "kl_in_reward": True, **more}, ["kl_in_reward=True", repr(name)])
        for name, more in (("pacs", {}), ("g2rl", {"g2rl_lambda": 1.0}))
    ),
    ({"advantage_transform": "g2rl"}, ["g2rl_lambda=None", "no number", "give a"]),
    *(
        ({"advantage_transform": name.partition("_")[0], name: value}, [f"{name}={value!r}", expected])
        for name, value, expected in (
            *(("redit_noise", "pink", "'uniform', 'gaussian'"), ("redit_scale", INF, "finite")),
            *(("redit_scale", -0.1, "at least 0"), ("pacs_beta", 0.0, "above 0"), ("empg_k", NAN, "at least 0")),
            *(("g2rl_lambda", -1.0, "at least 0"), ("cppo_pruning", 1.0, "below 1"), ("cppo_pruning", NAN, "below 1")),
            *(("simpletir_answer", "(", "regular expression"), ("simpletir_answer", "", "not empty")),
            *(("simpletir_deviation", -1.0, "at least 0"), ("gtpo_entropy", -0.1, "at least 0")),
            *(("gtpo_threshold", 0.0, "above 0"), ("gtpo_threshold", NAN, "above 0")),
        )
    ),
    # Numbers that leave no reward, turn it round, or drop it
    ({"kl_in_reward": True}, ["kl_in_reward=True", "set beta"]),
    ({"kl_in_reward": True, "beta": "0.1"}, ["beta='0.1'", "a number"]),
    ({"kl_in_reward": True, "beta": 1e39}, ["beta=1e+39", "finite"]),
    ({"beta": -0.1}, ["beta=-0.1", "not negative"]),
    ({"beta": NAN}, ["beta=nan", "finite"]),
    ({"reward_weights": [1.0, NAN]}, ["reward_weights=[1.0, nan]", "finite"]),
    ({"reward_weights": [1e39]}, ["reward_weights=[1e+39]", "finite"]),
    ({"reward_weights": 1.0}, ["reward_weights=1.0", "list"]),
    ({"reward_weights": [None]}, ["reward_weights=[None]", "list"]),
    ({"top_entropy_quantile": NAN}, ["top_entropy_quantile=nan", "0 to 1"]),
    ({**P3O, "off_policy_mask_threshold": NAN}, ["off_policy_mask_threshold=nan"]),
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


def test_object_of_its_own_refuses_the_same_settings():
    of_the_trainer = {"kl_in_reward", "token_weights", "group_microbatches", "skip_zero_advantage"}
    of_the_trainer |= {"advantage_transform"}
    of_the_object = {name for name in ADDED if not name.startswith(OF_TOKENS + OF_ADVANTAGES)} - of_the_trainer
    cases = [case for case in REFUSED if case[0].keys() <= of_the_object]
    assert len(cases) > 15
    for settings, names in cases:
        with pytest.raises(ValueError, match=re.escape(names[0])):
            ISOPO(torch.nn.Linear(2, 2), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0, "epsilon_high": INF, "delta": INF},
        {"loss_type": "cispo", "epsilon_high": 5.0, "off_policy_mask_threshold": 0.5},
        {"loss_type": "sapo", "use_vllm": True, "rule": "interacting"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"regularization": 0, "regularization_decay": 0.0, "fisher_power": 0.0, "router_aux_loss_coef": 0.0},
        {"rule": "none", "norm_power": -1.0, "regularization": 1.0, "keep_small": True},
        {"beta": 0.1, "kl_in_reward": True, "reward_weights": [1.0, 0.0, -0.5]},
        {"entropy_coef": -0.1, "use_adaptive_entropy": True, "entropy_target": INF},
        {"top_entropy_quantile": 0.2, "num_iterations": 4, "mask_truncated_completions": True},
        {**SAMPLER, "importance_sampling_level": "sequence", f"{CLIP}_max": INF, f"{CLIP}_min": 0.0},
        {**P3O, "use_vllm": True, "vllm_importance_sampling_correction": False, "use_bias_correction_kl": True},
        {**KPO, "kpo_gain": 1.0, "kpo_stop_gradient": True, "loss_type": "luspo"},
        {**KPO, "kpo_initial_variance": 0.0, "epsilon": 0.0, "epsilon_high": 0.0},
        {**KPO, "kpo_process_noise": 0.0},
        {"advantage_transform": ["redit", "dcpo", "empg", "cppo"], "redit_noise": "gaussian", "redit_scale": 0.05}
        | {"cppo_pruning": 0.9},
        {"advantage_transform": "redit,empg,gtpo,cppo", "scale_rewards": False, "gtpo_threshold": INF},
        {"advantage_transform": "dcpo,gtpo"},  # which makes advantages of its own
        {"advantage_transform": "empg,cppo", "multi_objective_aggregation": "normalize_then_sum"},
        # A setting at its default is no setting
        {"kpo_initial_variance": 1.0, "kpo_process_noise": 1e-6, "kpo_gain": None, "kpo_stop_gradient": False},
    ],
    ids=str,
)
def test_setting_that_can_be_honoured_is_accepted(settings):
    config(**settings)


def test_numbers_of_numpy_become_pythons_own_so_that_a_checkpoint_can_be_loaded(tmp_path):
    given = {"regularization": np.float32(0.5), "norm_power": np.float64(-1), "fisher_samples": np.int64(7)}
    args = config(**given, keep_small=np.bool_(True), reward_weights=np.array([2, 0.5]), rule="fig4")
    assert args.reward_weights == [2.0, 0.5] and args.keep_small is True
    assert all(type(getattr(args, name)) in (float, int) for name in given)
    isopo = ISOPO(torch.nn.Linear(2, 2), "fig4", **given)
    torch.save(isopo.state_dict(), tmp_path / "state.pt")
    isopo.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


# Settings that follow others


@pytest.mark.parametrize(
    "settings, resolved",
    [
        ({"vllm_importance_sampling_correction": False}, "none"),
        ({"use_vllm": True}, "sampler"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "none"),
        ({"use_vllm": True, "token_weights": "none"}, "none"),
        ({"use_vllm": True, "epsilon": 0.2}, "none"),  # the loss corrects by its own ratio
        ({"use_vllm": True, "loss_type": "sapo"}, "none"),
        ({"use_vllm": True, **P3O}, "p3o"),
    ],
    ids=str,
)
def test_token_weights_follow_vllm_where_they_are_not_given(settings, resolved):
    assert config(**settings).token_weights == resolved


@pytest.mark.parametrize(
    "settings, expected",
    [
        (KPO, (0.0003, 0.0004)),
        ({**KPO, "epsilon": 0.01}, (0.01, 0.0004)),
        ({**KPO, "epsilon": 0.0, "epsilon_high": 0.0}, (0.0, 0.0)),
        (P3O, (None, None)),
    ],
    ids=str,
)
def test_clipping_range_of_kpo_is_its_own_where_it_is_not_given(settings, expected, tmp_path):
    trainer = training.build(tmp_path, **settings)
    assert (trainer.args.epsilon, trainer.args.epsilon_high) == expected
    if settings["token_weights"] == "kpo":
        assert (trainer.epsilon_low, trainer.epsilon_high) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"use_vllm": True, "rule": "fig4", "regularization": 0.3},
        P3O,
        {**KPO, "kpo_gain": 0.01, "epsilon": 0.1, "epsilon_high": 0.3},
        {**KPO, "kpo_initial_variance": 0.0, "kpo_stop_gradient": True},
        {"epsilon_high": 0.3, "use_vllm": True},
    ],
    ids=str,
)
def test_resolved_configuration_can_be_given_again(settings):
    args = config(**settings)
    names = [*ADDED, "epsilon", "epsilon_high", "use_vllm", "output_dir", "use_cpu", "bf16", "report_to"]
    again = ISOPOConfig(**{name: args.to_dict()[name] for name in names})
    # TRL sets both of these, of which one can be given
    replaced = dataclasses.replace(args, generation_batch_size=None, learning_rate=0.5)
    for other in (again, replaced):
        assert [getattr(other, name) for name in names] == [getattr(args, name) for name in names]


@pytest.mark.parametrize(
    "settings, scope",
    [
        ({"rule": "fig4", "fisher_samples": 1024}, "step"),
        ({"fisher_samples": 1025}, "microbatch"),  # whose rows would fill the memory
        ({"fisher_scope": "microbatch"}, "microbatch"),
        ({"rule": "interacting"}, "microbatch"),  # no Fisher norm
    ],
)
def test_the_metric_is_that_of_the_step_where_nothing_else_is_said(settings, scope, tmp_path):
    trainer = training.build(tmp_path, **settings)
    assert trainer.args.fisher_scope == settings.get("fisher_scope")  # so that another rule can be put in
    assert trainer.isopo.fisher_scope == scope == ISOPO(torch.nn.Linear(2, 2), **settings).fisher_scope


# Refused by the trainer


def refused(folder, model="qwen3", **arguments):
    with pytest.raises(ValueError) as info:
        training.build(folder, model, **arguments)
    return str(info.value)


def test_reentrant_checkpointing_is_refused_where_there_are_two_backward_passes(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    message = refused(tmp_path, **P3O, **settings)
    assert "token_weights='p3o'" in message and "{'use_reentrant': False}" in message
    assert sentences(message) == 1
    for accepted in ({**P3O, "rule": "none"}, KPO):
        training.build(tmp_path, **accepted, **settings)


def test_configuration_of_grpo_is_refused(tmp_path):
    args = GRPOConfig(str(tmp_path), **training.SETTINGS)
    with pytest.raises(TypeError, match="`ISOPOConfig`.*GRPOConfig") as error:
        training.ISOPOTrainer(tiny.model("qwen3"), tiny.reward, args, tiny.prompts(4))
    assert sentences(str(error.value)) == 1


def test_refusal_leaves_the_model_as_it_was(tmp_path):
    model = tiny.model("qwen3")
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.BatchNorm1d(16))
    assert "model.norm.1" in refused(tmp_path, model)
    assert not any("_isopo_layer" in module.__dict__ for module in model.modules())


# The command line and the documentation


GIVEN = {
    **{"rule": "fig4", "fisher_power": 0.5, "norm_power": -1.5, "relative_power": -2.0, "regularization": 0.1},
    **{"regularization_decay": 0.8, "keep_small": True, "fisher_samples": 250, "fisher_scope": "step"},
    **{"group_microbatches": True, "skip_zero_advantage": True, "scale": "paper", "token_weights": "kpo"},
    **{"kpo_initial_variance": 0.5, "kpo_process_noise": 1e-4, "kpo_stop_gradient": True, "kl_in_reward": True},
    **{"target_kl": 1e-4, "log_step_kl": True, "step_kl_share": 0.5, "behaviour_kl": 0.01, "target_kl_offload": True},
    **{"bf16_updates": "exact", "float32_gradients": True},
}
# Of other token weights
BESIDE = [
    {"token_weights": "dppo_kl", "dppo_delta": 0.1, "dppo_cap": 5.0},
    {"token_weights": "m2po", "m2po_budget": 0.1},
    {"token_weights": "pspo", "pspo_alpha": 0.2},
    {"token_weights": "bapo", "bapo_target": 0.5, "token_weights_scope": "microbatch"},
    {"token_weights": "capo", "capo_tau_h": 0.1, "capo_tau_f": 1e-3},
    {"advantage_transform": "redit,empg", "redit_noise": "gaussian", "redit_scale": 0.1},
    {"advantage_transform": "pacs", "pacs_beta": 2.0},
    {"advantage_transform": "gtpo", "scale_rewards": "none", "gtpo_entropy": 0.2, "gtpo_threshold": 1.0},
    {"advantage_transform": "g2rl,empg", "g2rl_lambda": 0.5, "empg_k": 2.0},
    {"advantage_transform": "simpletir,cppo", "simpletir_answer": "####", "simpletir_deviation": 0.01}
    | {"cppo_pruning": 0.25},
]


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_every_setting_can_be_given_on_the_command_line(parser):
    others = {"output_dir": "out", "use_cpu": True, "beta": 0.05, "epsilon": 0.01, "num_iterations": 2}
    command = " ".join(f"--{name} {value}" for name, value in {**others, **GIVEN}.items())
    parser = parser([ISOPOConfig])
    (args,) = parser.parse_args_into_dataclasses(command.split())
    defaults = {name: ISOPOConfig.__dataclass_fields__[name].default for name in ADDED}
    assert {name: getattr(args, name) for name in ADDED} == {**defaults, **GIVEN}
    assert (args.epsilon, args.epsilon_high) == (0.01, 0.0004)
    for given in BESIDE:
        command = " ".join(
            f"--{name} {value}" for name, value in {"output_dir": "out", "use_cpu": True, **given}.items()
        )
        (args,) = parser.parse_args_into_dataclasses(command.split())
        assert {name: getattr(args, name) for name in given} == given


def test_settings_can_be_given_in_a_file(tmp_path):
    file, lines = tmp_path / "run.yaml", "output_dir: out\nuse_cpu: true\nbf16: false\nregularization: 0.2\n"

    def parsed(more, *command):
        file.write_text(lines + more)
        return TrlParser([ISOPOConfig]).parse_args_and_config(["--config", str(file), *command])[0]

    args = parsed("rule: npg\ntoken_weights: kpo\nkpo_gain: 1e-4", "--rule", "fig4", "--epsilon_high", "0.002")
    assert (args.rule, args.regularization, args.token_weights, args.kpo_gain) == ("fig4", 0.2, "kpo", 1e-4)
    assert (args.epsilon, args.epsilon_high) == (0.0003, 0.002)
    assert parsed("advantage_transform: [redit, dcpo]").advantage_transform == "redit,dcpo"
    # YAML reads the word none as text, and null as nothing
    assert parsed("token_weights: none").token_weights == parsed("token_weights: null").token_weights == "none"


def test_every_setting_is_documented_with_its_type_and_default():
    for name in ADDED:
        field = ISOPOConfig.__dataclass_fields__[name]
        assert field.metadata["help"], name
        entry = rf"^        {name} \(`(\w+)`(?: or `.+`)?, \*optional\*(?:, defaults to `(.+)`)?\):$"
        ((kind, default),) = re.findall(entry, ISOPOConfig.__doc__, re.M)
        assert (ast.literal_eval(default) if default else None) == field.default, name
        written = ISOPOConfig.__annotations__[name]  # a parser replaces the field's own
        assert kind == (written if isinstance(written, type) else written.__args__[0]).__name__, name


def test_defaults_of_grpo_are_kept():
    for field in dataclasses.fields(GRPOConfig):
        own = ISOPOConfig.__dataclass_fields__[field.name]
        if field.name != "epsilon":  # nothing is clipped unless it is asked for
            assert own.default == field.default and own.type == field.type, field.name
