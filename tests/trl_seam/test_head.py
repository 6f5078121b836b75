"""Which rows TRL's LM head gets."""

import pytest
import trl.trainer.utils
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.scoring import Scoring
from tests import oracle, training


@pytest.mark.parametrize(("kind", "expected"), [(ISOPOTrainer, 6 + 5 + 2), (GRPOTrainer, 3 * (5 + 6 - 1))])
def test_the_head_of_a_trainer_on_a_cpu_gets_the_scored_rows_alone(kind, expected, tmp_path, monkeypatch):
    function = trl.trainer.utils._ChunkedLogProbFunction
    rows, own = [], function.apply
    monkeypatch.setattr(function, "apply", lambda hidden, *others: rows.append(len(hidden)) or own(hidden, *others))
    trainer = training.prepared(training.build(tmp_path, kind=kind))
    batch = oracle.random_batch([3, 1, 5], [6, 5, 2], 100).for_trl()
    trainer._compute_loss(trainer.model, batch)
    Scoring(trainer).logps(Batch(batch))
    assert rows == [expected, expected]
    assert trl.trainer.utils._use_triton.__module__ == "trl.kernels.chunked_logprob"  # given back
