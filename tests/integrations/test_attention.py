"""The decoder gets sequences that begin at the first position, and no mask; nothing else is different."""

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel

from isopo_trl.integrations.attention import FAMILIES, Attention, Layout, flash_takes, goes_by_distances
from tests import oracle, tiny, training
from tests.gradients import architectures


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0]])
ATTENTION = "scaled_dot_product_attention"


@pytest.fixture
def attention():
    return Attention(Accelerator(cpu=True))


@pytest.fixture
def masks(monkeypatch):
    """Masks that PyTorch's attention is called with, and how many positions."""
    seen, own = [], getattr(functional, ATTENTION)

    def noting(query, *args, attn_mask=None, **kwargs):
        seen.append((attn_mask, query.shape[2]))
        return own(query, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, ATTENTION, noting)
    return seen


# Where sequences stand


def test_sequences_begin_at_the_first_position():
    ids = torch.arange(1, 28).view(3, 9)
    layout = Layout.of(MASK)
    assert layout.shifts.tolist() == [3, 1, 2] and layout.width == 6
    assert layout.moved(ids * MASK).tolist() == [[4, 5, 6, 7, 8, 0], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 0, 0]]
    assert layout.moved(MASK).sum(1).tolist() == MASK.sum(1).tolist()


def test_what_comes_back_stands_where_it_stood():
    layout = Layout.of(MASK)
    x = torch.randn(3, 9, 2, dtype=torch.float64) * MASK.unsqueeze(2)
    moved = torch.stack([layout.moved(feature) for feature in x.unbind(2)], 2).requires_grad_()
    assert torch.equal(layout.moved_back(moved, 9), x)
    assert torch.autograd.gradcheck(lambda x: layout.moved_back(x, 9), moved)


def test_padding_inside_of_a_sequence_stays_where_it_is():
    for change in ({(0, 5): 0}, {(1, 8): 1}, {(2, 0): 1}):
        mask = MASK.clone()
        for place, value in change.items():
            mask[place] = value
        assert Layout.of(mask) is None


def test_a_row_of_nothing_but_padding_is_no_obstacle():
    mask = torch.cat([MASK, torch.zeros(1, 9, dtype=torch.long)])
    assert Layout.of(mask).shifts.tolist() == [3, 1, 2, 0] and Layout.of(mask).width == 6
    assert Layout.of(torch.zeros(2, 5)).width == 1


# Models


def outputs(model, context):
    """Hidden states of real positions, and gradients of a sum of them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, MASK.shape, generator=generator)
    model.zero_grad()
    with context:
        hidden = model.base_model(input_ids=ids, attention_mask=MASK, use_cache=False).last_hidden_state
    hidden = hidden * MASK.unsqueeze(2)
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return hidden.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_sees_distances_alone(family, attention, masks):
    model = architectures.build(family)
    model.set_attn_implementation("sdpa")
    assert goes_by_distances(model)
    own = outputs(model, attention.given(None))
    assert all(mask is not None for mask, _ in masks)
    masks.clear()
    moved = outputs(model, attention.without_mask(model))
    assert {width for _, width in masks} == {6}
    assert [mask for mask, _ in masks].count(None) >= 1  # the others are of windows
    for one, other in zip([own[0], *own[1]], [moved[0], *moved[1]], strict=True):
        assert (one - other).norm() <= 1e-9 * one.norm()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt2", {}),  # learned positions
        ("gpt_oss", {}),
        ("qwen3", {"_attn_implementation": "eager"}),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}),
        ("qwen3_moe", {"output_router_logits": True}),
    ],
)
def test_others_keep_their_masks(family, change, attention):
    model = tiny.model(family)
    if not change:
        model.config._attn_implementation = "sdpa"
    for name, value in change.items():
        setattr(model.config, name, value)
    assert not goes_by_distances(model)
    assert attention.layout(model, MASK, routes=False) is None
    with attention.without_mask(model):
        assert not model.base_model._forward_hooks


def test_code_from_elsewhere_keeps_its_masks():
    class Llama(PreTrainedModel):
        config_class = LlamaConfig
        base_model_prefix = "model"
        _supports_sdpa = True

    own = tiny.model("llama")
    assert goes_by_distances(own)
    other = Llama(own.config)
    assert (other.config.model_type, other.config._attn_implementation) == ("llama", "sdpa")
    assert not goes_by_distances(other)


# A trainer


def trainer_for(folder, **settings):
    chosen = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_checkpointing": False}
    model = tiny.model("qwen3", dtype=torch.float64)
    return training.prepared(training.build(folder, model, data=tiny.prompts(4), **chosen, **settings))


def batch_of_four():
    return oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)


def test_flash_attention_runs_from_ampere_on_and_heads_of_up_to_256_numbers():
    sizes = {"hidden_size": 1024, "num_attention_heads": 4}
    assert flash_takes(LlamaConfig(**sizes), (8, 0)) and flash_takes(LlamaConfig(**sizes), (9, 0))
    assert not flash_takes(LlamaConfig(**sizes), (7, 5))
    assert not flash_takes(LlamaConfig(**sizes, head_dim=320), (9, 0))


def test_a_step_has_no_mask_and_no_more_padding_than_needed(tmp_path, masks):
    trainer = trainer_for(tmp_path)
    training.gradients(trainer, batch_of_four().for_trl())
    assert masks and set(masks) == {(None, 9)}  # of 13 positions
    masks.clear()
    trainer._get_per_token_logps_and_entropies(
        trainer.model, batch_of_four().input_ids, batch_of_four().attention_mask, 8
    )
    assert masks and set(masks) == {(None, 9)}


@pytest.mark.usefixtures("float64_throughout")
def test_a_step_without_a_mask_is_the_step_with_one(tmp_path, monkeypatch):
    moved = training.gradients(trainer_for(tmp_path / "moved", rule="interacting"), batch_of_four().for_trl())
    monkeypatch.setattr("isopo_trl.integrations.attention.FAMILIES", frozenset())
    own = training.gradients(trainer_for(tmp_path / "own", rule="interacting"), batch_of_four().for_trl())
    assert moved[0] == pytest.approx(own[0], rel=1e-9)
    assert training.distance(moved[1], own[1]) < 1e-9


def test_a_completion_with_a_hole_is_masked(tmp_path, masks):
    batch = batch_of_four()
    batch.completion_mask[0, 2] = 0
    trainer = trainer_for(tmp_path)
    training.gradients(trainer, batch.for_trl())
    assert masks and all(mask is not None and width == 13 for mask, width in masks)
    masks.clear()
    trainer._get_per_token_logps_and_entropies(trainer.model, batch.input_ids, batch.attention_mask, 8)
    assert masks and all(mask is not None and width == 13 for mask, width in masks)


def test_what_else_the_decoder_is_given_is_an_error_in_a_step_and_else_keeps_the_mask(tmp_path, masks, monkeypatch):
    trainer = trainer_for(tmp_path)
    forward = trainer.model.forward

    def with_positions(*args, **kwargs):
        return forward(*args, position_ids=torch.arange(13).expand(4, 13), **kwargs)

    monkeypatch.setattr(trainer.model, "forward", with_positions)
    batch = batch_of_four()
    trainer._get_per_token_logps_and_entropies(trainer.model, batch.input_ids, batch.attention_mask, 8)
    assert masks and all(mask is not None for mask, _ in masks)
    with pytest.raises(RuntimeError, match="attention_mask, input_ids, position_ids.*attn_implementation='eager'"):
        trainer.compute_loss(trainer.model, batch.for_trl())
