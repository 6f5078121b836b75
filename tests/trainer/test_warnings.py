"""What would fail without a word is said, once, with what to change."""

import pytest

from tests import training


def said(caplog, words):
    return [record.message for record in caplog.records if words in record.message]


@pytest.mark.parametrize(
    ("rule", "size", "warned"), [("interacting", 1, True), ("interacting", 3, False), ("fisher", 1, False)]
)
def test_sequences_that_are_to_interact_and_are_alone_in_their_microbatch_are_warned_of(
    rule, size, warned, tmp_path, caplog
):
    settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 3}
    training.build(tmp_path, rule=rule, **settings)
    assert bool(said(caplog, "per_device_train_batch_size=1 leaves each alone")) == warned


@pytest.mark.parametrize(("optim", "warned"), [("adamw_torch", True), ("sgd", False)])
def test_bounds_of_plain_steps_beside_another_optimizer_are_warned_of(optim, warned, tmp_path, caplog):
    training.build(tmp_path, token_weights="capo", optim=optim)
    assert bool(said(caplog, "token_weights='capo' gates tokens by what a plain gradient step")) == warned
