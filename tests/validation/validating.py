"""Trainers on tiny models with a `ValidationCallback`, and what a validation is held against."""

import torch
from peft import LoraConfig

from isopo_trl.validation import ValidationCallback
from tests import tiny, training


FIGURES = ("validation/accuracy", "validation/length", "validation/kl")
# Sampling as unlike greedy decoding as can be
SAMPLING = {"temperature": 2.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


class Keeping(ValidationCallback):
    """Keeps the token ids of prompts and completions of the last validation, in the order in which they are made."""

    def validate(self):
        self.rows = []
        return super().validate()

    def _complete(self, rows):
        generated = super()._complete(rows)
        self.rows += zip(generated.prompt_ids, generated.completion_ids, strict=True)
        return generated


def model(ending=2.5):
    """A model that ends some of its completions; `ending` is how strongly it feels about it."""
    result = tiny.model("qwen3", tie=False)
    with torch.no_grad():
        result.lm_head.weight[tiny.VOCABULARY[tiny.EOS]] *= ending
    return result


def adapter(dropout=0.0):
    return LoraConfig(r=2, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear")


def sharper(policy):
    """The policy with logits of twice the size."""
    with torch.no_grad():
        policy.lm_head.weight *= 2
    return policy


def shaken(policy, seed=1, size=0.3):
    """The policy with noise added to its trained parameters, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=generator))
    return policy


def validating(folder, policy=None, *, data=None, reward=tiny.reward, callback=ValidationCallback, **options):
    """A trainer of two steps and its callback. Options with the callback's names go to it, others to the trainer."""
    own = {name: options.pop(name) for name in ("steps", "batch_size", "kl_prompts") if name in options}
    policy = model() if policy is None else policy
    trainer = training.build(folder, policy, **options)
    validation = callback(trainer, tiny.prompts(3) if data is None else data, reward, **own)
    trainer.add_callback(validation)
    return trainer, validation


def logged(trainer, name):
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def greedy(policy, prompt):
    """Token ids of the greedy completion of one prompt (text or messages) by itself."""
    tokenizer = tiny.tokenizer()
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    limit = training.SETTINGS["max_completion_length"]
    with torch.no_grad():
        output = policy.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=limit)
    return output[0, len(ids) :].tolist()
