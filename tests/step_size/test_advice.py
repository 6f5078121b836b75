"""Targets that are too large, and measurements by one sequence, are told from others, and said once."""

import math

import pytest
import torch

from isopo_trl.step_size.advice import of_measurement, of_target
from isopo_trl.step_size.controller import Measurement
from isopo_trl.step_size.measurement import divergences, measurement, sums
from tests import training


def test_a_target_is_judged_by_what_it_is_per_completion():
    assert of_target(1.0, None, 0.05) is None  # before a completion was seen
    assert of_target(2e-4, 250.0, 0.05) is None and of_target(0.05, 9.0, 0.05) is None
    assert of_target(1.0, 0.4, 0.05) is None
    said = of_target(1.0, 60.0, 0.05)
    assert "60 nats per completion of 60 tokens" in said and "set target_kl=0.0008, or target_kl='auto'" in said
    assert of_target(0.05, 11.0, 0.05) is not None and of_target(2e-3, 300.0, 0.05) is not None


def test_a_measurement_by_one_sequence_is_told_from_one_by_several():
    before, after = torch.zeros(2, 3), torch.tensor([[0.1, 0.2, 0.0], [0.3, -0.1, 0.1]])
    rows = divergences(before, after, torch.ones(2, 3))
    assert of_measurement(measurement(sums(rows).tolist())) is None
    assert "raise step_kl_share" in of_measurement(measurement(sums(rows[:1]).tolist()))
    for nothing in (Measurement(0.0, math.inf), Measurement(0.0, 0.0), Measurement(math.inf, math.nan)):
        assert of_measurement(nothing) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_kl": 1.0}, ["target_kl=1 nats per token are ", "raise step_kl_share"]),
        ({"log_step_kl": True}, ["raise step_kl_share"]),
        ({"target_kl": 1e-3, "step_kl_share": 1.0}, []),
    ],
    ids=str,
)
def test_a_run_says_each_once(settings, words, tmp_path, caplog):
    training.build(tmp_path, **settings).train()
    said = [record.message for record in caplog.records if record.name.startswith("isopo_trl.step_size")]
    assert len(said) == len(words) and all(word in text for word, text in zip(words, said, strict=True))
