import pytest
import torch
import trl
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from tests import tiny


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def test_tokenizer_round_trips_text_and_special_tokens():
    text = 'What is 12 + 3?\n "x" <call>{}</call><|user|></s>'
    tokenizer = tiny.tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(tiny.VOCABULARY) > max(ids)


def test_chat_template_serves_trls_tool_loop():
    tokenizer = tiny.tokenizer()
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    question = [{"role": "user", "content": "1+2?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*question, answer], return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert parse_response(tokenizer, whole[len(prompt) :], prefix=prompt) == answer


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_model_ties_what_was_asked_and_leaves_the_global_random_stream(family, tie):
    state = torch.get_rng_state()
    model = tiny.model(family, tie=tie)
    assert torch.equal(state, torch.get_rng_state())
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tie
    again, other = tiny.model(family, tie=tie), tiny.model(family, tie=tie, seed=1)
    for parameter, same, different in zip(model.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert not torch.equal(parameter, different)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_left_padding_does_not_change_a_sequence(family, dtype):
    model = tiny.model(family, dtype=dtype)
    batch = tiny.tokenizer()(tiny.prompts(5)["prompt"][:], padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) > 1
    # Without position ids, gpt2 would count the padding, and the others would round other rotary angles.
    position_ids = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    together = model(**batch, position_ids=position_ids).logits
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for row, ids, length in zip(together, batch["input_ids"], lengths, strict=True):
        alone = model(ids[None, -length:]).logits[0]
        torch.testing.assert_close(row[-length:], alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_grpo_moves_every_parameter_of_a_saved_model(family, tmp_path):
    prompts = tiny.conversational_prompts if len(family) % 2 else tiny.prompts  # four families, and five
    path = tiny.save(tmp_path / "model", family)
    text = "What is 1 + 2?"
    assert AutoTokenizer.from_pretrained(path)(text)["input_ids"] == tiny.tokenizer()(text)["input_ids"]
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(model=path, reward_funcs=tiny.reward, args=args, train_dataset=prompts(4))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert [name for name, parameter in trainer.model.named_parameters() if torch.equal(parameter, before[name])] == []
