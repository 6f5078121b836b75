"""The share of moved weights is that of the sampled ones, from where the whole run began."""

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl.validation import MovedWeights, moved_weights
from tests import training


def that_move(model):
    """Every other weight of all but the first parameter, the embedding, so that places matter."""
    return [p.view(-1)[::2] for p in list(model.parameters())[1:]]


class Move(TrainerCallback):
    """At each step, moves some weights by as much as is said."""

    def __init__(self, model, distance):
        self.model, self.distance = model, distance

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        for weights in that_move(self.model):
            weights += self.distance


def run(folder, distance=0.0, threshold=1e-5, resume=None, begin=None, callback=True, **settings):
    """The log lines of steps that do nothing but what [`Move`] does."""
    trainer = training.build(folder, learning_rate=0.0, max_steps=2, **settings)
    if begin is not None:
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.fill_(begin)
    trainer.add_callback(Move(trainer.model, distance))  # before it looks
    if callback:
        trainer.add_callback(MovedWeights(trainer, threshold))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("sampled", [2**16, 500])
def test_share_is_that_of_the_weights_further_than_the_threshold(sampled, tmp_path, monkeypatch):
    """From 1, in bf16 steps of 2^-7 (2^-8 below): 6e-6 is no step, two of them are one in float32 alone."""
    monkeypatch.setattr(moved_weights, "SAMPLED", sampled)
    trainer, logs = run(tmp_path, distance=6e-6, begin=1.0)
    shares = [[log[f"weights/{name}"] for name in ("moved", "moved_bf16")] for log in logs]
    assert shares[0] == [0, 0] and shares[1][1] == 0
    total = sum(p.numel() for p in trainer.model.parameters())
    expected = sum(map(len, that_move(trainer.model))) / total
    assert 0.2 < expected < 0.45  # five deviations of 500
    assert shares[1][0] == pytest.approx(expected, abs=1e-6 if total <= sampled else 0.1)
    _, logs = run(tmp_path, distance=-0.01, begin=1.0)
    assert logs[0]["weights/moved_bf16"] == logs[0]["weights/moved"] > 0.1


def test_a_resumed_run_goes_on_from_where_the_first_one_began(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer, whole = run(tmp_path, distance=6e-6, begin=1.0, **settings)
    checkpoint = tmp_path / "checkpoint-1"
    resumed, rest = run(tmp_path, distance=6e-6, resume=str(checkpoint), **settings)
    assert rest[-1]["weights/moved"] == whole[-1]["weights/moved"] > 0.1
    callback = next(each for each in resumed.callback_handler.callbacks if isinstance(each, MovedWeights))
    assert (callback._start == 1.0).all()
    # One that was saved without it
    run(tmp_path / "other", callback=False, **settings)
    _, logs = run(tmp_path / "other", resume=str(tmp_path / "other" / "checkpoint-1"), **settings)
    assert "weights/moved" not in logs[-1] and "where they began is not known" in caplog.text


@pytest.mark.parametrize(("settings", "words"), [({"threshold": -1.0}, "threshold=-1.0"), ({}, "ZeRO-3 hides")])
def test_what_it_cannot_do_is_refused(settings, words, tmp_path, monkeypatch):
    trainer = training.build(tmp_path)
    if not settings:
        monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
        plugin = type("Plugin", (), {"zero_stage": 3})
        state = type("State", (), {"deepspeed_plugin": plugin})
        monkeypatch.setattr(trainer.accelerator, "state", state)
    with pytest.raises(ValueError, match=words):
        MovedWeights(trainer, **settings)
