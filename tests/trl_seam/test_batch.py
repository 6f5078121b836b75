"""TRL's batch: names for its keys, images that stay with their sequences, and groups that stay whole."""

import pytest
import torch
from datasets import IterableDataset
from trl.trainer import grpo_trainer
from trl.trainer.utils import split_tensor_dict

from isopo_trl.trl_seam.batch import (
    Batch,
    joined_batches,
    rows_of_batch,
    shuffled_by_group,
    together,
    verify_prompts,
)
from tests import tiny, training


def text(prompts, completions, **extra):
    """Rows of token ids, 0 for padding, as TRL's batch."""
    prompt_ids, completion_ids = torch.tensor(prompts), torch.tensor(completions)
    masks = {"prompt_mask": (prompt_ids != 0).long(), "completion_mask": (completion_ids != 0).long()}
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, **masks, **extra}


def test_batch_is_a_copy_with_names():
    tools = torch.tensor([[1, 0, 1], [1, 1, 1]])
    given = text([[0, 1], [1, 1]], [[1, 1, 0], [1, 1, 1]], tool_mask=tools, advantages=torch.tensor([1.0, -1.0]))
    batch = Batch(given)
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.scored.tolist() == [[1, 0, 0], [1, 1, 1]] and batch.sampler_logps is None
    batch.advantages = torch.zeros(2)
    batch.loss_weights = torch.tensor([0.0, 2.0])  # a sequence without a weight does not count
    assert batch.counted.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch.sampled_mask.tolist() == [[0] * 5, [1] * 5]
    assert given["advantages"].tolist() == [1.0, -1.0] and "loss_weights" not in given


def test_a_weighed_batch_says_no_more_than_it_is_told():
    """Weights, and an old policy's log-probabilities, are those given; what TRL has scored does not count beside."""
    batch = Batch(text([[1]], [[1, 2]], old_per_token_logps=torch.zeros(1, 2)))
    weights, logps = torch.full((1, 2), 0.5), torch.full((1, 2), -3.0)
    assert batch.weighed().old_logps is None and not batch.weighed().has_weights
    weighed = batch.weighed(weights, old_logps=logps, sampler_logps=2 * logps)
    assert weighed["importance_sampling_ratio"] is weights and weighed.old_logps is logps
    assert torch.equal(weighed.sampler_logps, 2 * logps)
    assert batch.old_logps.tolist() == [[0.0, 0.0]] and batch.sampler_logps is None


def test_batches_are_put_together_with_no_more_padding_than_needed():
    one = Batch(text([[0, 0, 5], [0, 6, 7]], [[1, 2, 0], [3, 0, 0]], tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])))
    (both,) = together([one, Batch(text([[8]], [[4]]))], padding=9)
    assert both["prompt_ids"].tolist() == [[9, 5], [6, 7], [9, 8]]
    assert both["completion_ids"].tolist() == [[1, 2], [3, 9], [4, 9]]
    assert both.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0]]
    assert both.scored.tolist() == [[1, 0], [1, 0], [1, 0]]
    (empty,) = together([Batch(text([[8]], [[0, 0]]))], padding=9)
    assert empty["completion_mask"].tolist() == [[0]]  # the model wants a position to score


# Images


@pytest.mark.parametrize("counts", [[2, 0], [1, 1], [2, 2]], ids=str)
def test_images_that_are_padded_to_a_row_per_sequence_stay_with_it(counts):
    """As for Idefics and SmolVLM; there may by chance be as many of them as rows."""
    pixels = torch.arange(4.0).view(2, 2, 1, 1, 1)
    batch = Batch(text([[1], [2]], [[1], [2]], pixel_values=pixels, num_images=counts))
    for row in (0, 1):
        for part in (batch.rows([row]), rows_of_batch(joined_batches([batch]), [row])):
            assert torch.equal(part["pixel_values"], pixels[[row]]) and part["num_images"] == [counts[row]]


def test_padded_images_of_several_microbatches_stay_with_their_sequences():
    pixels = torch.arange(8.0).view(4, 2, 1, 1, 1)
    whole = {"prompt_ids": torch.arange(4).unsqueeze(1), "pixel_values": pixels, "num_images": [1, 1, 1, 2]}
    halves = split_tensor_dict(whole, 2)  # in the first of which every sequence has one
    for order, rows in ((halves, [0, 2, 3]), (halves[::-1], [2, 0, 1])):
        part = rows_of_batch(joined_batches(order), rows)
        assert part["prompt_ids"].flatten().tolist() == [0, 2, 3]
        assert torch.equal(part["pixel_values"], pixels[[0, 2, 3]]) and part["num_images"] == [1, 1, 2]


def test_images_of_several_tiles_are_not_taken_for_padded_ones():
    """As for LLaVA-NeXT: one after the other, with their sizes, and as many of them as sequences."""
    pixels, sizes = torch.arange(4.0).view(2, 2, 1, 1, 1), torch.tensor([[1, 2], [3, 4]])
    whole = {"prompt_ids": torch.arange(2), "pixel_values": pixels, "image_sizes": sizes, "num_images": [2, 0]}
    part = rows_of_batch(joined_batches([whole]), [0])
    assert torch.equal(part["pixel_values"], pixels) and torch.equal(part["image_sizes"], sizes)


# Groups


def test_groups_are_drawn_from_the_same_random_stream_and_all_orders_come():
    batch = {"none": None, "rows": torch.arange(6).unsqueeze(1), "texts": list("abcdef"), "count": torch.tensor(6)}
    torch.manual_seed(0)
    grpo_trainer.shuffle_sequence_dict(batch)
    after = torch.get_rng_state()
    own = grpo_trainer.shuffle_sequence_dict
    torch.manual_seed(0)
    orders = set()
    with shuffled_by_group(2):
        mixed = grpo_trainer.shuffle_sequence_dict(batch)
        assert torch.equal(torch.get_rng_state(), after)
        for _ in range(1000):
            orders.add(tuple(grpo_trainer.shuffle_sequence_dict(batch)["rows"].flatten().tolist()))
    assert grpo_trainer.shuffle_sequence_dict is own
    rows = mixed["rows"].flatten().tolist()
    assert mixed["none"] is None and mixed["count"] == 6
    assert mixed["texts"] == ["abcdef"[row] for row in rows]
    # 3! orders of the groups, 2 of the sequences in each
    assert all({order[k] // 2 for k in (i, i + 1)} == {order[i] // 2} for order in orders for i in (0, 2, 4))
    assert len(orders) == 6 * 8


def test_a_generation_that_cuts_a_group_is_an_error_that_names_the_setting():
    with shuffled_by_group(4), pytest.raises(RuntimeError, match="6 sequences.*num_generations=4"):
        grpo_trainer.shuffle_sequence_dict({"rows": torch.arange(6)})


# Data sets


def test_data_without_prompts_are_refused_with_their_columns_before_anything_is_loaded(tmp_path):
    questions = tiny.prompts(4).rename_column("prompt", "question").add_column("answer", ["4"] * 4)
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt'.*has question, answer: rename"):
        training.build(tmp_path, "no such model", data=questions)
    for options in ({"eval_dataset": questions}, {"eval_dataset": {"sums": questions}}):
        with pytest.raises(ValueError, match=r"eval_dataset(\['sums'\])? has no column 'prompt'"):
            training.build(tmp_path, "no such model", options=options)


def test_data_that_may_yet_have_prompts_are_taken():
    questions = tiny.prompts(4).rename_column("prompt", "question")
    unknown = IterableDataset.from_generator(lambda: iter(questions))
    transformed = questions.with_transform(lambda rows: {"prompt": rows["question"]})
    for data in (None, tiny.prompts(4), tiny.prompts(4).to_iterable_dataset(), unknown, transformed):
        verify_prompts(data, "train_dataset")
