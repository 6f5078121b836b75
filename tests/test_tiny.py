"""The tiny models and their tokenizer: what every other test relies on."""

import pytest
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from tests import tiny


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TEXT = 'What is 12 + 3?\n "x" <call>{}</call><|user|></s>'


def test_tokenizer_gives_text_back_and_its_template_serves_trls_tool_loop():
    tokenizer = tiny.tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT and len(tokenizer) == len(tiny.VOCABULARY) > max(ids)
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    question = [{"role": "user", "content": "1+2?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*question, answer], return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert parse_response(tokenizer, whole[len(prompt) :], prefix=prompt) == answer


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_model_is_the_same_on_every_run_and_its_tokenizer_comes_back_from_disk(family, tmp_path):
    state = torch.get_rng_state()
    model, again, other = (tiny.model(family, tie=tie) for tie in (True, True, False))
    assert torch.equal(state, torch.get_rng_state())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert other.get_input_embeddings().weight is not other.get_output_embeddings().weight
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    path = tiny.save(tmp_path, family)
    assert AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"] == tiny.tokenizer()(TEXT)["input_ids"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_left_padding_does_not_change_a_sequence(family):
    model = tiny.model(family, dtype=torch.float64)
    batch = tiny.tokenizer()(tiny.prompts(5)["prompt"][:], padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) > 1
    # Without position ids, gpt2 would count the padding, and the others would round other rotary angles
    position_ids = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    together = model(**batch, position_ids=position_ids).logits
    for row, ids, length in zip(together, batch["input_ids"], lengths, strict=True):
        alone = model(ids[None, -length:]).logits[0]
        torch.testing.assert_close(row[-length:], alone, rtol=1e-13, atol=1e-13)
