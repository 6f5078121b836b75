"""What `optim_args` says to SGD reaches it, or is refused when the configuration is made."""

import pytest
import torch
from transformers import Trainer

from isopo_trl import ISOPOConfig
from isopo_trl.settings.optim_args import sgd_settings


def config(optim_args, optim="sgd"):
    return ISOPOConfig("unused", use_cpu=True, bf16=False, report_to=[], optim=optim, optim_args=optim_args)


@pytest.mark.parametrize(
    ("optim_args", "words"),
    [
        ("momentum=x", ["momentum=x", "a number from 0 to below 1"]),
        ("momentum=nan", ["momentum=nan"]),
        ("momentum=-0.1", ["momentum=-0.1"]),
        ("momentum=1", ["momentum=1 "]),
        ("momentum=0.9,dampening=inf", ["dampening=inf", "finite"]),
        ("momentum=0.9,nesterov=on", ["nesterov=on", "true or false"]),
        ("nesterov=true", ["nesterov=true", "a momentum above 0"]),
        ("momentum=0.9,dampening=0.1,nesterov=1", ["no dampening"]),
        ("momentum", ["'momentum'", "'momentum=0.9,nesterov=true'"]),
        ("momentum=0.9,", ["names and values"]),
        ({"momentum": 0.9}, ["optim_args={'momentum': 0.9}", "a text"]),
        ("lr=0.1", ["'lr'", "Set learning_rate"]),
        ("momentum=0.9, weight_decay=0.1", ["'weight_decay'", "Set weight_decay"]),
        ("maximize=true", ["'maximize'", "reward_weights"]),
        ("amsgrad=true", ["'amsgrad'", "Leave it out", "`optimizers`"]),
        ("foo=1", ["'foo'", "momentum, dampening and nesterov"]),
    ],
    ids=str,
)
def test_what_sgd_has_no_use_for_is_refused_by_name(optim_args, words):
    with pytest.raises(ValueError) as info:
        config(optim_args)
    assert all(word in str(info.value) for word in words), info.value


@pytest.mark.parametrize(
    "optim_args", [None, "", "momentum=0", "momentum = 0.9", "momentum=0.9,dampening=0.5", "momentum=.5,nesterov=Yes"]
)
def test_what_is_read_is_what_transformers_gives_to_sgd(optim_args):
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(config(optim_args))
    (group,) = kind([torch.zeros(1, requires_grad=True)], **settings).param_groups
    assert kind is torch.optim.SGD
    assert sgd_settings(optim_args) == {name: group[name] for name in ("momentum", "dampening", "nesterov")}


def test_other_optimizers_read_their_own():
    assert config("rank=8", optim="rmsprop").optim_args == "rank=8"
