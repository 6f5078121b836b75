"""What transforms ask of completions is refused where it cannot be had."""

from types import SimpleNamespace

import pytest
import torch

from isopo_trl.advantages import Measured
from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.scoring import Scoring
from tests import tiny, training
from tests.trainer.fixed_rollout import fixed_rollout


def test_prompts_with_images_are_not_known_again_by_their_text():
    batch = Batch(prompt_ids=torch.ones(2, 3), prompt_mask=torch.ones(2, 3), pixel_values=torch.ones(2, 1))
    with pytest.raises(ValueError, match="these prompts have images: leave out .*'dcpo'"):
        _ = Measured(None, None, batch, [], 2, 0, 2).prompts


def without_a_head(model):
    model.get_output_embeddings = lambda: None


def quantised(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)


def short(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:3])


@pytest.mark.parametrize("change", [without_a_head, quantised, short])
def test_a_head_without_rows_for_all_tokens_is_refused(change):
    model = tiny.model("llama")
    change(model)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    scoring = Scoring(SimpleNamespace(model=model, accelerator=accelerator))
    with pytest.raises(ValueError, match=r"rows of LlamaForCausalLM's LM head.*105 tokens.*leave out .*'g2rl'"):
        scoring.head_rows()


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_a_completion_of_several_turns_is_not_weighed_by_its_entropy(tmp_path):
    rollout = fixed_rollout(lambda row: [20 + row, 30, 40 + row], env_mask=lambda row: [1, 0, 1])
    options = {"rollout_func": rollout}
    trainer = training.build(tmp_path, options=options, advantage_transform="empg")
    with pytest.raises(ValueError, match="advantage_transform='empg' takes a completion for one turn"):
        trainer.train()
