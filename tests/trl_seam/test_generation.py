"""TRL's generation without its pass for an old policy, and what is asked of a sampler."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import GenerationConfig
from trl import GRPOTrainer

from isopo_trl import ISOPOConfig
from isopo_trl.trl_seam.generation import prompts_read_once, samples_at_temperature, without_old_policy
from tests import tiny, training


PROMPTS = [dict(row) for row in tiny.prompts(3)]


@pytest.mark.parametrize("wanted", [False, True])
def test_old_policy_is_scored_only_where_it_is_wanted(wanted, tmp_path):
    rollouts, settings = [], {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = training.build(tmp_path, kind=GRPOTrainer, **settings)

    def generated(rollout):
        rollouts.append(rollout)
        return wanted

    with without_old_policy(trainer, single_turn=None, generated=generated):
        batch = trainer._generate_and_score_completions(PROMPTS)
    assert ("old_per_token_logps" in batch) == wanted
    (rollout,) = rollouts
    assert [len(ids) for ids in rollout.completion_ids] == batch["completion_mask"].sum(1).tolist()
    assert [len(ids) for ids in rollout.prompt_ids] == batch["prompt_mask"].sum(1).tolist()
    assert rollout.logps is None and rollout.tool_mask is None and len(rollout.completions) == 3


def test_trainer_is_as_it_was_after_a_generation_that_fails(tmp_path):
    trainer = training.build(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4)

    def broken(**_):
        raise KeyError("broken reward")

    trainer.reward_funcs = [broken]
    before = dict(vars(trainer))
    with pytest.raises(KeyError, match="broken reward"):
        trainer._generate_and_score_completions(PROMPTS)
    assert trainer.args.gradient_accumulation_steps == 2
    assert vars(trainer).keys() == before.keys() and all(vars(trainer)[name] is before[name] for name in before)


def test_generation_that_returns_something_else_is_refused(tmp_path):
    class Short(GRPOTrainer):
        def _generate(self, prompts):
            return super()._generate(prompts)[:7]

    trainer = training.build(tmp_path, kind=Short)
    with pytest.raises(RuntimeError, match="7 values instead of 8"):
        with without_old_policy(trainer, single_turn=None, generated=lambda rollout: False):
            trainer._generate_and_score_completions(PROMPTS)


# Prompts that are read once for all of their completions

# The others forget what is behind a window, or prepare what they read in a way of their own
READS_ONCE = ("llama", "qwen2", "qwen3", "gpt2", "qwen3_moe")


def generated(model, prompts_once=True, distributed=DistributedType.NO, mixed_precision="no", **settings):
    """Tokens and logits of a greedy generation of two completions of each prompt, and how many tokens were read."""
    ids = torch.tensor([[5, 9, 20, 31, 12], [0, 0, 7, 14, 11]]).repeat_interleave(2, 0)
    args = SimpleNamespace(**{"generation_kwargs": None, "cache_implementation": None, **settings})
    accelerator = SimpleNamespace(distributed_type=distributed, mixed_precision=mixed_precision)
    trainer = SimpleNamespace(args=args, accelerator=accelerator)
    asked = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    read = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    note = base.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].numel()))
    with prompts_read_once(trainer, model) if prompts_once else nullcontext(), note:
        config = GenerationConfig(**asked, eos_token_id=[])
        output = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), generation_config=config)
    return output.sequences, torch.stack(output.logits), sum(read)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_prompts_that_are_read_once_have_the_completions_of_prompts_that_are_not(family, lora):
    model = tiny.model(family, dtype=torch.float64).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).double()
    tokens, logits, read = generated(model)
    expected_tokens, expected_logits, all_read = generated(model, prompts_once=False)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-12)
    assert all_read == 4 * 5 + 4 * 3
    assert read == (2 * 4 + 4 * 4 if family in READS_ONCE else all_read)


@pytest.mark.parametrize(
    "settings",
    [
        {"distributed": DistributedType.MULTI_CPU},
        {"mixed_precision": "bf16"},
        {"generation_kwargs": {"use_cache": False}},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_prompts_are_read_as_trl_has_it_where_more_is_asked_for(settings):
    assert generated(tiny.model("llama"), **settings)[-1] == 4 * 5 + 4 * 3


def test_virtual_tokens_are_left_to_peft():
    model = get_peft_model(tiny.model("llama"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    assert generated(model)[-1] == 4 * 5 + 4 * 3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_trainer_reads_a_prompt_once_unless_its_completions_drop_others(dropout, tmp_path):
    lora = LoraConfig(target_modules="all-linear", lora_dropout=dropout)
    trainer = training.build(tmp_path, options={"peft_config": lora}, per_device_train_batch_size=6)
    caches = []
    base = trainer.model.get_base_model()
    own = base.generate
    base.generate = lambda **kwargs: caches.append("past_key_values" in kwargs) or own(**kwargs)
    trainer._generate_and_score_completions([row for row in tiny.prompts(2) for _ in range(3)])
    assert caches == [dropout == 0]
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}}, True),
        ({"generation_kwargs": {"temperature": 1.2}}, False),
        ({"generation_kwargs": {"min_p": 0.1}}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
    ids=str,
)
def test_sampler_that_is_not_the_policy_is_known_by_its_settings(settings, expected):
    assert samples_at_temperature(ISOPOConfig("unused", **training.SETTINGS, **settings)) == expected
