"""What `transformers`' generation drew its tokens with, against a forward pass whose logits are processed by hand."""

import math
from contextlib import nullcontext

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor

from isopo_trl.loss.sampler import Recorder, behaviour_logps, is_own, note_origin, noting_logps
from isopo_trl.trl_seam.batch import Batch
from tests import tiny


TEXTS = ["What is 7 + 3?", "No", "Is it so, or is it not?"]
# Many tokens end a completion, so that completions are ragged
ENDS = [tiny.VOCABULARY[tiny.EOS], *range(20, 40)]
# Among the tokens that count as repeated
PADDING_IS_SEEN = Version(transformers.__version__) < Version("5.23")


def prompts(texts=TEXTS, copies=1):
    """Padded on the left, `input_ids` and `attention_mask`."""
    batch = tiny.tokenizer()(texts, return_tensors="pt", padding=True)
    return {name: value.repeat_interleave(copies, dim=0) for name, value in batch.items()}


def cut(ids, ends=ENDS):
    """Each row up to its first end, as TRL cuts."""
    rows = []
    for row in ids.tolist():
        length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:length])
    return rows


def recorded(model, batch=None, seed=0, listen_to=None, **settings):
    """Completions of the model and what was recorded of them; settings are those of `generate`."""
    batch = prompts() if batch is None else batch
    settings = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": ENDS, "top_k": 0, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with noting_logps(model if listen_to is None else listen_to) as recorders:
            output = model.generate(**batch, **settings)
    (recorder,) = recorders
    completions = cut(output[:, batch["input_ids"].shape[1] :], settings["eos_token_id"])
    return completions, recorder.logps(completions)


def processed(logits, seen, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """Log-probabilities `[V]` that a token is drawn with, `seen` being those before it."""
    logits = logits.double().tolist()
    for token in set(seen):
        factor = repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
        logits[token] *= factor
    logits = torch.tensor(logits, dtype=torch.float64) / temperature
    order = logits.argsort(descending=True).tolist()
    if top_k:
        logits[order[top_k:]] = -math.inf
    # The fewest of the likeliest tokens that have top_p together
    total = 0.0
    for place, p in enumerate(logits.softmax(0)[order].tolist()):
        if total >= top_p:
            logits[order[place:]] = -math.inf
            break
        total += p
    p = logits.softmax(0)
    logits[p < min_p * p.max()] = -math.inf
    return logits.log_softmax(0)


def by_hand(model, batch, completions, **settings):
    rows = []
    for padded, mask, completion in zip(batch["input_ids"], batch["attention_mask"], completions, strict=True):
        prompt = padded[mask.bool()].tolist()
        before = padded.tolist() if PADDING_IS_SEEN else prompt
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append([])
        for place, token in enumerate(completion):
            seen = [*before, *completion[:place]]
            rows[-1].append(processed(logits[place], seen, **settings)[token].item())
    return rows


def assert_close(own, expected, tolerance=1e-5):
    assert [len(row) for row in own] == [len(row) for row in expected]
    for one, other in zip(own, expected, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


SAMPLING = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SAMPLING, ids=lambda settings: str(settings) if settings else "plain")
def test_recorded_are_the_log_probabilities_that_tokens_were_drawn_with(settings):
    model = tiny.model("qwen3")
    completions, logps = recorded(model, **settings)
    lengths = [len(ids) for ids in completions]
    assert len(set(lengths)) > 1 and max(lengths) > 1
    assert_close(logps, by_hand(model, prompts(), completions, **settings))


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3_moe"])
def test_every_family_is_recorded(family):
    model = tiny.model(family)
    completions, logps = recorded(model, temperature=0.8)
    assert_close(logps, by_hand(model, prompts(), completions, temperature=0.8), 1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 1},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"renormalize_logits": True},
        {"eos_token_id": [104]},
        {"eos_token_id": list(range(105))},
        {"num_return_sequences": 2},
    ],
    ids=str,
)
def test_recorded_whatever_the_form_of_the_generation(settings):
    model = tiny.model("qwen3")
    completions, logps = recorded(model, seed=3, **settings)
    assert_close(logps, by_hand(model, prompts(copies=settings.get("num_return_sequences", 1)), completions))


def test_completion_that_fills_its_budget_and_one_that_ends_on_the_last_step_are_recorded_to_the_end():
    model = tiny.model("qwen3")
    seen = set()
    for seed in range(12):
        completions, logps = recorded(model, seed=seed, max_new_tokens=3)
        seen |= {(len(ids), ids[-1] in ENDS) for ids in completions}
        assert_close(logps, by_hand(model, prompts(), completions))
    assert {(3, True), (3, False), (1, True)} <= seen
    assert Recorder(greedy=False, others=[]).logps([[], []]) == [[], []]  # and one that heard nothing


class OnlyEven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = -math.inf
        return scores


def test_processor_of_the_caller_comes_before_the_recorder():
    model, batch = tiny.model("qwen3"), prompts()
    completions, logps = recorded(model, logits_processor=[OnlyEven()])
    assert all(token % 2 == 0 for ids in completions for token in ids)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        prompt = ids[mask.bool()].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completions[row]])).logits[0, len(prompt) - 1 : -1, ::2]
        chosen = torch.tensor(completions[row]) // 2
        expected = logits.log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)
        assert logps[row] == pytest.approx(expected.tolist(), abs=1e-5)


def test_base_model_of_an_adapter_is_recorded_with_the_adapter():
    model = get_peft_model(tiny.model("qwen3"), LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    completions, logps = recorded(model, listen_to=model.get_base_model(), temperature=1.2)
    assert_close(logps, by_hand(model, prompts(), completions, temperature=1.2))
    with model.disable_adapter(), pytest.raises(AssertionError):
        assert_close(logps, by_hand(model, prompts(), completions, temperature=1.2), 0.1)


def test_greedy_tokens_are_certain():
    completions, logps = recorded(tiny.model("qwen3"), do_sample=False, top_k=None, repetition_penalty=1.5)
    assert logps == [[0.0] * len(ids) for ids in completions]


@pytest.mark.parametrize("settings", [{"num_beams": 2, "do_sample": True}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_search_that_does_not_go_token_by_token_is_not_recorded(settings):
    model = tiny.model("qwen3")
    with noting_logps(model) as recorders:
        model.generate(**prompts(["What?"]), max_new_tokens=4, **settings)
    assert recorders == []


@pytest.mark.parametrize(
    ("settings", "temperature", "expected"),
    [
        ({}, 1.0, True),
        ({}, 0.7, False),
        ({"temperature": 0.7}, 0.7, True),
        ({"temperature": 1.2}, 1.0, False),
        ({"temperature": 0.7, "min_p": 0.1}, 0.7, False),
        ({"repetition_penalty": 1.1}, 1.0, False),
        ({"do_sample": False}, 1.0, False),
    ],
    ids=str,
)
def test_recorder_knows_whether_the_policy_itself_drew(settings, temperature, expected):
    model = tiny.model("qwen3")
    with noting_logps(model) as recorders:
        model.generate(**prompts(), **{"do_sample": True, "top_k": 0, "max_new_tokens": 2, **settings})
    assert recorders[0].draws_at(temperature) == expected


def test_model_is_as_before_afterwards_and_every_call_has_its_recorder():
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise KeyError("broken processor")

    model = tiny.model("qwen3")
    with noting_logps(model) as outer:
        with pytest.raises(KeyError, match="broken processor"), noting_logps(model) as inner:
            for text in ("What?", "No"):
                batch = prompts([text])
                output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=5)
                completions = cut(output[:, batch["input_ids"].shape[1] :], [2])
                for recorders in (inner, outer):
                    assert_close(recorders[-1].logps(completions), by_hand(model, batch, completions))
            model.generate(**prompts(), max_new_tokens=2, logits_processor=[Broken()])
        model.generate(**prompts(), max_new_tokens=2)
    assert (len(outer), len(inner)) == (4, 3) and "_get_logits_processor" not in vars(model)


def test_model_with_a_generation_of_its_own_is_left_alone():
    model = torch.nn.Module()
    before = dict(vars(model))
    with noting_logps(model) as recorders:
        assert vars(model).keys() == before.keys()
    assert recorders == [] and vars(model).keys() == before.keys()


@pytest.mark.parametrize("settings", [{"top_k": 5, "top_p": 0.9}, {"do_sample": False}], ids=str)
def test_listening_changes_neither_tokens_nor_the_random_stream(settings):
    model, results = tiny.model("qwen3"), []
    for listening in (nullcontext(), noting_logps(model)):
        with torch.random.fork_rng(devices=[]), listening:
            torch.manual_seed(0)
            output = model.generate(**prompts(), **{"do_sample": True, "max_new_tokens": 8, **settings})
            results.append((output.tolist(), torch.get_rng_state().tolist()))
    assert results[0] == results[1]


# Which policy drew a batch


OWN, SAMPLER, OLD = (torch.full((1, 2), logp) for logp in (-1.0, -2.0, -3.0))


@pytest.mark.parametrize(
    ("told", "steps", "by_policy", "expected"),
    [
        ({}, 0, True, OWN),
        ({"sampling": SAMPLER}, 0, True, OWN),  # but for rounding, what the sampler says
        ({"sampling": SAMPLER}, 0, False, SAMPLER),
        ({"sampling": SAMPLER, "old": OLD}, 1, True, SAMPLER),
        ({"old": OLD}, 1, False, OLD),
        ({"old": OLD}, 0, False, OWN),
        ({}, 1, False, OWN),  # nobody has told
    ],
)
def test_tokens_are_the_policys_own_if_it_drew_them_and_has_not_moved(told, steps, by_policy, expected):
    batch = Batch({f"{name}_per_token_logps": logps for name, logps in told.items()})
    note_origin(batch, 5, by_policy)
    assert behaviour_logps(batch, OWN, 5 + steps) is expected
    assert is_own(batch, 5 + steps) == (not steps and expected is OWN)
