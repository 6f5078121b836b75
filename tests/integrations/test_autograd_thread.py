"""In which thread the backward pass runs: the one that asks for it, where the model is on one device."""

import pytest
import torch
from torch import nn

from isopo_trl.integrations.autograd_thread import calling_thread, is_on_one_device
from tests import training


def by_devices():
    """Whether a backward pass that is asked for now runs in PyTorch's threads."""
    return torch._C._is_multithreading_enabled()


def test_threads_are_as_they_were_after_the_context_also_where_it_fails():
    with pytest.raises(KeyError), calling_thread():
        assert not by_devices()
        raise KeyError
    assert by_devices()
    with calling_thread(allowed=False):
        assert by_devices()


def test_a_model_on_several_devices_keeps_their_threads():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert is_on_one_device(model) and is_on_one_device(nn.Identity())
    model[1].to("meta")
    assert not is_on_one_device(model)


@pytest.mark.parametrize("on_one_device", [True, False])
def test_the_trainers_passes_run_in_the_calling_thread(on_one_device, tmp_path):
    trainer = training.build(tmp_path, entropy_coef=0.1, max_steps=1)  # with a pass of its own
    if not on_one_device:
        trainer._is_on_one_device = False
    seen, layers = [], trainer.model.model.layers
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: seen.append(by_devices()))
    training.train(trainer)
    assert seen == [not on_one_device] * 2 * len(layers) and by_devices()
