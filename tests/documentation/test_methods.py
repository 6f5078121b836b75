"""The callback on the page of methods does what SFPO does, and refuses where it would not."""

import re
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tests import training


PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.fixture(scope="module")
def slow_fast():
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names, code = {}, block.partition("\ndef near_50")[0]
    assert code.count("\n") <= 50
    exec(compile(code, PAGE.name, "exec"), names)
    return names["SlowFast"]


class Watch(TrainerCallback):
    """Writes down the weights before and after each step."""

    def __init__(self, model):
        self.model, self.begun, self.ended = model, [], []

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters() if p.requires_grad])

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun.append(self.weights())

    def on_step_end(self, args, state, control, **kwargs):
        self.ended.append(self.weights())


def run(folder, slow_fast, resume=None, **settings):
    # Three passes of two optimizer steps over each of two generations
    settings = {"num_iterations": 3, "steps_per_generation": 4, "gradient_accumulation_steps": 2, **settings}
    trainer = training.build(folder, max_steps=12, optim="sgd", learning_rate=0.1, epsilon=0.2, **settings)
    trainer.add_callback(slow_fast(trainer, alpha=0.7))
    watch = Watch(trainer.model)
    trainer.add_callback(watch)
    drawn, generate = [], trainer._generate
    trainer._generate = lambda prompts: drawn.append(trainer.state.global_step) or generate(prompts)
    trainer.train(resume_from_checkpoint=resume)
    return watch, drawn


def test_the_last_pass_begins_part_of_the_way_that_the_others_have_gone(slow_fast, tmp_path):
    watch, drawn = run(tmp_path, slow_fast)
    assert drawn == [0, 6]
    for step in range(12):
        before = watch.begun[0] if step == 0 else watch.ended[step - 1]
        if step % 6 == 4:
            start = watch.begun[step - 4]
            expected = start + 0.7 * (before - start)
            torch.testing.assert_close(watch.begun[step], expected, rtol=0, atol=1e-6)
            assert (before - watch.begun[step]).norm() > 1e-3 * (before - start).norm()
        else:
            assert torch.equal(watch.begun[step], before)


def test_where_it_would_go_elsewhere_it_refuses(slow_fast, tmp_path):
    for settings in (
        {"num_iterations": 1},
        {"steps_per_generation": 3},
        {"target_kl": 1e-3},
        {"bf16_updates": "stochastic"},
    ):
        trainer_settings = {"num_iterations": 3, "gradient_accumulation_steps": 2, "optim": "sgd", **settings}
        model = "qwen3"
        if "bf16_updates" in settings:
            model = training.tiny.model("qwen3").bfloat16()
        trainer = training.build(tmp_path, model, **trainer_settings)
        with pytest.raises(ValueError, match=r"num_iterations=K \+ 1|Leave out target_kl"):
            slow_fast(trainer)
    run(tmp_path / "saved", slow_fast, save_strategy="steps", save_steps=3)
    with pytest.raises(ValueError, match="Resume from a step that is a multiple of 6"):
        run(tmp_path / "saved", slow_fast, str(tmp_path / "saved" / "checkpoint-3"))
    watch, _ = run(tmp_path / "saved", slow_fast, str(tmp_path / "saved" / "checkpoint-6"))
    assert len(watch.begun) == 6
