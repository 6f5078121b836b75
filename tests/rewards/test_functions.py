"""What a reward function may return, and the one sentence in which anything else is refused."""

import functools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification

from isopo_trl.rewards.functions import rewards, verify_size
from tests import tiny, training
from tests.test_config import sentences


@pytest.mark.parametrize(
    "returned",
    [
        [0.5, 1, None],
        (0.5, True, None),
        iter([0.5, 1.0, None]),
        [Fraction(1, 2), Decimal(1), None],
        [np.float16(0.5), np.bool_(True), None],
        [torch.tensor(0.5), torch.tensor([1]), None],
        [np.array([0.5]), np.array(1), None],
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_whatever_holds_one_number_per_completion_is_taken(returned):
    assert rewards(returned, "mine") == [0.5, 1.0, None]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_arrays_with_one_number_per_completion_are_taken(shape):
    for array in (torch.arange(3.0, dtype=torch.bfloat16).reshape(shape), np.arange(3).reshape(shape)):
        assert rewards(array, "mine") == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "returned, names",
    [
        (None, ["None of type NoneType"]),
        (torch.tensor(0.5), ["0.5 of type float"]),
        ("good", ["'good' of type str"]),
        ({0: 1.0}, ["{0: 1.0} of type dict"]),
        ([0.5, "1.0"], ["'1.0' of type str for completion 1"]),
        ([0.5, [1.0]], ["[1.0] of type list for completion 1"]),
        ([0.5, 1j], ["1j of type complex for completion 1"]),
        ([10**400], ["of type int for completion 0"]),
        (torch.ones(2, 2), ["[1.0, 1.0] of type list for completion 0"]),
        ([torch.ones(2)], ["of type Tensor for completion 0"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_list_of_numbers_is_refused_by_the_name_of_the_function(returned, names):
    with pytest.raises(ValueError) as error:
        rewards(returned, "mine")
    message = str(error.value)
    assert all(name in message for name in ["'mine'", "one number per completion", *names]), message
    assert sentences(message) == 1 and message.endswith("."), message


class Judge:
    """A reward function that is an object, and asynchronous."""

    def __init__(self, returned):
        self.returned = returned

    async def __call__(self, completions, **_):
        return self.returned


def fixed(completions, returned, **_):
    return returned


@pytest.mark.parametrize(
    "reward, name", [(Judge("good"), "Judge"), (functools.partial(fixed, returned=None), "fixed")]
)
def test_run_ends_before_it_trains_with_the_name_of_the_function(reward, name, tmp_path):
    trainer = training.build(tmp_path, reward=[tiny.reward, reward])
    with pytest.raises(ValueError, match=f"The reward function '{name}' returned .* one number per completion"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_functions_objects_coroutines_and_models_train_together_under_their_own_names(tmp_path):
    config = LlamaConfig(**tiny.SIZE, **tiny.IDS, num_labels=1)
    config._name_or_path = "judges/model"
    model = LlamaForSequenceClassification(config)
    functions = [tiny.reward, Judge(torch.arange(3.0)), functools.partial(fixed, returned=(0.0, None, True)), model]
    options = {"reward_processing_classes": [None, None, None, tiny.tokenizer()]}
    trainer = training.build(tmp_path, reward=functions, options=options)
    (*_, line) = training.train(trainer)
    assert trainer.reward_funcs[:3] == functions[:3]
    assert [line[f"rewards/{name}/mean"] for name in ("Judge", "fixed")] == [1.0, 0.5]
    assert math.isfinite(line["rewards/reward/mean"]) and math.isfinite(line["rewards/model/mean"])


@pytest.mark.parametrize("given", [5, (tiny.reward, tiny.reward), [tiny.reward, 5]], ids=["number", "tuple", "list"])
def test_what_cannot_be_called_is_refused_at_construction(given, tmp_path):
    with pytest.raises(ValueError, match="reward_funcs=.*cannot be called") as error:
        training.build(tmp_path, reward=given)
    assert sentences(str(error.value)) == 1


def test_weights_that_leave_out_every_reward_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"reward_weights=\[0.0\] leaves out every reward") as error:
        training.build(tmp_path, reward_weights=[0.0])
    assert sentences(str(error.value)) == 1
    training.build(tmp_path, reward_weights=[0.0, 1.0], reward=[tiny.reward, tiny.reward])
    # The divergence is a reward of its own; with LoRA, the reference is the model without the adapter
    options = {"peft_config": LoraConfig(r=2)}
    training.build(tmp_path, reward_weights=[0.0], beta=0.1, kl_in_reward=True, options=options)


# TRL's sums of rewards, in float32


def test_rewards_whose_sums_overflow_are_refused_instead_of_counting_as_zero():
    rewards = torch.tensor([[1.0, 2e38], [0.0, math.nan]])
    ones = torch.ones(2)
    verify_size(rewards, ones, ["one", "large"], normalised=False)
    for weights, normalised in ((ones, True), (torch.tensor([1.0, 2.0]), False)):
        with pytest.raises(ValueError, match="too large for float32.*'one': 1, 'large': 2e[+]38") as error:
            verify_size(rewards, weights, ["one", "large"], normalised)
        assert sentences(str(error.value)) == 1
    large = torch.tensor([[1e18, -1e18], [0.0, 3e18]])  # which TRL can normalise
    verify_size(large, torch.ones(2), ["one", "other"], normalised=True)
