"""What is measured of a step is its KL divergence, by enumeration over the vocabulary."""

import math

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import TrainerCallback

from isopo_trl import ISOPOTrainer
from isopo_trl.step_size import measurement as measuring
from isopo_trl.step_size.measurement import StepKL, columns, divergences, drawn, measurement, sums
from isopo_trl.trl_seam import scoring
from isopo_trl.trl_seam.batch import Batch, scored_together
from isopo_trl.trl_seam.scoring import batch_logps, distribution_inputs, log_distributions, takes_positions
from tests import oracle, tiny, training
from tests.step_size.test_cuda_graphs import OnCPU


# On plain tensors


def distributions(*shape):
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    return before, (before + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


@pytest.mark.parametrize("at_a_time", [1, 14, 2**22])
def test_divergences_of_distributions_are_exact_and_masked(at_a_time, monkeypatch):
    monkeypatch.setattr(measuring, "COMPARED_AT_A_TIME", at_a_time)  # less than a position, two of six, all
    before, after = distributions(2, 3, 7)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    expected = (before.exp() * (before - after)).sum(-1)
    found = divergences(before + 5, after - 3, mask)  # logits, whatever they are shifted by
    torch.testing.assert_close(found[:, 0], (expected * mask).sum(1))
    assert found[:, 1].tolist() == [2, 1]
    before[0, 0, 2] = -math.inf  # cannot be drawn
    assert divergences(before, after, mask).isfinite().all()


def test_positions_count_for_those_that_they_stand_for():
    before, after = distributions(2, 3, 7)
    weights = torch.tensor([[1.0, 2.5, 0.0], [0.0, 1.0, 4.0]])
    expected = (before.exp() * (before - after)).sum(-1)
    found = divergences(before, after, weights)
    torch.testing.assert_close(found[:, 0], (expected * weights).sum(1))
    assert found[:, 1].tolist() == [3.5, 5.0]


@pytest.mark.parametrize("change", [0.5, 2.0, 95.0, 200.0])
def test_large_changes_are_told_in_float32(change):
    """Also where a token that was next to impossible is certain after the step."""
    before = torch.tensor([[[0.0, 0.0, 1.0], [0.0, -change, -1.0]]])
    after = before + torch.tensor([[[change, -change, 0.0], [-change, change, 0.0]]])
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close(divergences(before, after, torch.ones(1, 2))[0, 0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1000, 150_000])
@pytest.mark.parametrize("scale", [1, 10])
def test_small_divergences_are_told_in_float32(scale, size):
    generator = torch.Generator().manual_seed(0)
    logits, step = (torch.randn(4, 4, size, generator=generator) for _ in range(2))
    before = scale * logits
    exact = before.double().log_softmax(-1)
    spread = ((exact.exp() * step.square()).sum(-1) - (exact.exp() * step).sum(-1).square()).unsqueeze(-1)
    for kl in (1e-8, 1e-7, 1e-6, 1e-4, 1e-2, 1):
        after = (before + (2 * kl / spread).sqrt() * step).float()
        change = after.double().log_softmax(-1) - exact
        expected = (exact.exp() * (torch.expm1(change) - change)).sum()
        assert expected > kl
        found = divergences(before, after, torch.ones(4, 4))[:, 0].sum()
        assert found.item() == pytest.approx(expected.item(), rel=1e-3 if kl == 1e-8 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_that_cannot_occur_and_steps_without_measure(dtype):
    def kl(before, after):
        found = divergences(*(torch.tensor([[values]], dtype=dtype) for values in (before, after)), torch.ones(1, 1))
        return found[0, 0].item()

    never = -math.inf
    assert kl([never, 1.0, 2.0], [never, 1.0, 2.0]) == 0
    expected = kl([1.0, 2.0], [1.5, 2.0])
    assert expected > 0 and kl([never, 1.0, 2.0], [never, 1.5, 2.0]) == pytest.approx(expected, rel=1e-6)
    assert kl([never, 0.0], [0.0, 0.0]) == pytest.approx(math.log(2))  # half of the probability has gone there
    assert kl([-200.0, 0.0], [0.0, 0.0]) == pytest.approx(math.log(2))  # where float32 has 0
    assert kl([-80.0, 0.0], [80.0, 0.0]) == pytest.approx(80)
    assert kl([0.0, 0.0], [-300.0, 0.0]) == pytest.approx(150 - math.log(2))
    assert kl([0.0, 1.0], [never, 1.0]) == math.inf
    for broken in (math.nan, math.inf):
        for place in (0, 1):
            changed = [1.0, 2.0]
            changed[place] = broken
            assert math.isnan(kl(changed, [1.0, 2.0])) and math.isnan(kl([1.0, 2.0], changed))
    assert math.isnan(kl([1.0, 2.0], [never, never]))


def test_positions_are_all_of_the_first_and_some_of_the_others_which_stand_for_all():
    assert columns(5, 1.0, 0, 0) == columns(5, 7.0, 0, 0) == ([0, 1, 2, 3, 4], [1.0] * 5)
    hits = torch.zeros(320)
    for step in range(2000):
        places, weights = columns(320, 0.25, step, 0)
        assert len(places) == 80 and places[:40] == list(range(40)) and sorted(set(places)) == places
        assert weights[:40] == [1.0] * 40 and sum(weights) == pytest.approx(320)
        hits[places] += torch.tensor(weights)
    assert (hits[:40] == 2000).all()
    assert 1600 < hits.min() and hits.max() < 2400  # 2000 on average, standard deviation 110
    assert columns(3, 0.01, 0, 0)[1] == [3.0]  # at least one


def test_divergences_of_tokens_have_the_mean_of_those_of_distributions():
    before, after = distributions(7)
    of_each_token = divergences(before.unsqueeze(1), after.unsqueeze(1), torch.ones(7, 1))[:, 0]
    assert of_each_token.min() >= 0
    expected = (before.exp() * (before - after)).sum()
    torch.testing.assert_close((before.exp() * of_each_token).sum(), expected)


def test_the_error_is_that_of_a_ratio_of_sums_over_sequences_on_all_ranks():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (9,), generator=generator).double()
    kl = tokens * torch.rand(9, generator=generator, dtype=torch.float64)
    rows = torch.stack([kl, tokens], dim=1)
    empty = torch.zeros(1, 2, dtype=torch.float64)  # a sequence without a token is none
    found = measurement((sums(rows[:4]) + sums(torch.cat([rows[4:], empty]))).tolist())
    ratio = kl.sum() / tokens.sum()
    spread = (kl - ratio * tokens).var() * len(kl)
    assert found.kl == pytest.approx(ratio.item())
    assert found.stderr == pytest.approx((spread.sqrt() / tokens.sum()).item())
    one = measurement(sums(rows[:1]).tolist())
    assert one.stderr == one.kl
    nothing = measurement(sums(empty).tolist())
    assert nothing.kl == 0 and not nothing.is_known and one.is_known
    assert measurement(sums(torch.tensor([[0.0, 5.0]])).tolist()).is_known  # a step of 0


def test_sequences_are_drawn_evenly_and_from_a_stream_of_their_own():
    state, hits = torch.get_rng_state(), torch.zeros(128)
    for step in range(2000):
        places = drawn(128, 1 / 32, step, seed=0)
        assert [place // 32 for place in places] == [0, 1, 2, 3]  # one of each microbatch of 32
        hits[places] += 1
    assert torch.equal(state, torch.get_rng_state())
    assert 30 < hits.min() and hits.max() < 100  # 62.5 on average, standard deviation 8
    assert drawn(3, 1 / 32, 0, 0) != [] and drawn(5, 1.0, 7, 0) == [0, 1, 2, 3, 4]


# In a trainer


class Recorded(ISOPOTrainer):
    """Keeps the microbatches of the run, by optimizer step."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.__dict__.setdefault("batches", []).append(inputs)
        return inputs


class Weights(TrainerCallback):
    """Keeps the weights before and after every step."""

    def __init__(self):
        self.before, self.after = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: value.clone() for name, value in model.state_dict().items()})


def exact_divergences(model, batch, before, after, temperature):
    """Of each sequence alone, unpadded: those at its completion's positions, by enumeration."""
    found = []
    for place in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()]
        completion = batch["completion_ids"][place][batch["completion_mask"][place].bool()]
        ids, logits = torch.cat([prompt, completion]).unsqueeze(0), []
        for weights in (before, after):
            model.load_state_dict(weights)
            with torch.no_grad():
                logits.append((model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1))
        old, new = (values[len(prompt) - 1 : -1] for values in logits)
        found.append((old.exp() * (old - new)).sum(-1))
    return found


def summed(divergences, weights=None):
    """The measurement that divergences at the positions of sequences make, or at those that have a weight."""
    own = [torch.ones_like(each) if weights is None else weights[: len(each)] for each in divergences]
    rows = [[(each * w).sum().item(), w.sum().item()] for each, w in zip(divergences, own, strict=True)]
    return measurement(sums(torch.tensor(rows, dtype=torch.float64)).tolist())


@pytest.mark.parametrize("compared", ["all positions", "some positions", "tokens"])
def test_the_measured_divergence_is_that_of_the_step(compared, float64_throughout, tmp_path, monkeypatch):
    largest = 5000  # of 12 sequences with distributions over a hundred tokens: a few positions of each
    if compared == "some positions":
        monkeypatch.setattr(measuring, "LARGEST_LOGITS", largest)
    if compared == "tokens":
        monkeypatch.setattr(scoring, "takes_positions", lambda model: False)
    weights = Weights()
    trainer = training.build(
        tmp_path,
        tiny.model("qwen3", dtype=torch.float64),
        Recorded,
        options={"callbacks": [weights]},
        log_step_kl=True,
        step_kl_share=1.0,
        temperature=0.8,
        learning_rate=2e-3,
        max_steps=3,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        max_completion_length=12,
        model_init_kwargs=None,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step/kl" in line]
    assert len(lines) == 3
    model = tiny.model("qwen3", dtype=torch.float64).eval()
    for step, line in enumerate(lines):
        found = [
            each
            for batch in trainer.batches[2 * step : 2 * step + 2]
            for each in exact_divergences(model, batch, weights.before[step], weights.after[step], 0.8)
        ]
        exact = summed(found)
        if compared == "some positions":
            width = max(map(len, found))
            share = largest / (len(found) * width * model.config.vocab_size)
            places, counted = columns(width, share, step, trainer.args.seed)
            assert 2 <= len(places) < width
            standing = torch.zeros(width, dtype=torch.float64)
            standing[places] = torch.tensor(counted, dtype=torch.float64)
            exact = summed(found, standing)
        if compared == "tokens":
            assert abs(line["step/kl"] - exact.kl) < 5 * line["step/kl_stderr"]
            assert line["step/kl"] != pytest.approx(exact.kl, rel=1e-6)
        else:
            assert line["step/kl"] == pytest.approx(exact.kl, rel=1e-6)
            assert line["step/kl_stderr"] == pytest.approx(exact.stderr, rel=1e-6)


def test_some_of_the_sequences_tell_of_all_within_the_stated_error(float64_throughout, tmp_path):
    """A quarter of them, in twelve steps: by how many errors they are off has a mean square of about 1."""
    weights = Weights()
    trainer = training.build(
        tmp_path,
        tiny.model("qwen3", dtype=torch.float64),
        Recorded,
        options={"callbacks": [weights]},
        log_step_kl=True,
        step_kl_share=0.25,
        learning_rate=2e-3,
        max_steps=12,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=2,
        max_completion_length=6,
        data=tiny.prompts(24),
        model_init_kwargs=None,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step/kl" in line]
    model = tiny.model("qwen3", dtype=torch.float64).eval()
    errors = []
    for step, line in enumerate(lines):
        found = [
            each
            for batch in trainer.batches[2 * step : 2 * step + 2]
            for each in exact_divergences(model, batch, weights.before[step], weights.after[step], trainer.temperature)
        ]
        errors.append((line["step/kl"] - summed(found).kl) / line["step/kl_stderr"])
    assert len(errors) == 12
    assert 0.1 < sum(error**2 for error in errors) / 12 < 8, errors


@pytest.mark.parametrize("narrow", ["weights", "products", "base"])
def test_steps_in_bf16_are_measured_as_by_wider_numbers(narrow, tmp_path):
    """Which they would not be by bf16: rounding is of the size of the step there."""
    weights = Weights()
    base = tiny.model("qwen3", dtype=torch.float32 if narrow == "products" else torch.bfloat16)
    options = {"callbacks": [weights]}
    if narrow == "base":
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = training.build(
        tmp_path,
        base,
        Recorded,
        options=options,
        log_step_kl=True,
        step_kl_share=1.0,
        bf16=narrow != "weights",
        learning_rate=1e-3 if narrow == "weights" else 1e-4,
        max_steps=2,
        max_completion_length=12,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step/kl" in line]
    model = trainer.model.double().eval()
    if trainer.accelerator.native_amp:
        model.forward = model._original_forward
    for step, line in enumerate(lines):
        found = exact_divergences(model, trainer.batches[step], weights.before[step], weights.after[step], 1.0)
        assert line["step/kl"] == pytest.approx(summed(found).kl, rel=0.02)


def test_tokens_are_compared_where_a_model_has_no_logits_at_given_positions():
    class AtTheEnd(torch.nn.Module):
        def forward(self, input_ids, logits_to_keep: int = 0):
            raise NotImplementedError

    class Whole(torch.nn.Module):
        def forward(self, input_ids):
            raise NotImplementedError

    assert takes_positions(tiny.model("qwen3"))
    assert not takes_positions(AtTheEnd()) and not takes_positions(Whole())


def test_tokens_are_compared_in_all_batches_where_one_has_no_logits_to_give(tmp_path, monkeypatch):
    """As where some sequences have images, and others, perhaps on another rank, have none."""
    sizes = iter([0, 1000])
    monkeypatch.setattr(measuring, "scored_together", lambda trainer, batches: batches)
    monkeypatch.setattr(measuring, "distribution_size", lambda model, batch: next(sizes))
    kl = training.build(tmp_path, "qwen3", log_step_kl=True).step_control.kl
    batches = [Batch(oracle.random_batch([3, 2], [4, 5], 50, seed=seed).for_trl()) for seed in (0, 1)]
    kl._batches = [batch.rows([0, 1]) for batch in batches]
    kl.score()
    assert [before.shape for before in kl._before] == [batch.completion_mask.shape for batch in batches]
    assert kl.measure().is_known


class StopsEpoch(TrainerCallback):
    """Ends the first epoch inside an accumulation."""

    has_stopped = False

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop, self.has_stopped = not self.has_stopped, True


def test_what_an_epoch_has_broken_off_is_measured_with_the_step_that_it_goes_into(float64_throughout, tmp_path):
    weights = Weights()
    trainer = training.build(
        tmp_path,
        tiny.model("qwen3", dtype=torch.float64),
        Recorded,
        options={"callbacks": [weights, StopsEpoch()]},
        log_step_kl=True,
        step_kl_share=1.0,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        data=tiny.prompts(2),
        model_init_kwargs=None,
    )
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "step/kl" in line]
    assert len(trainer.batches) == 3
    model = tiny.model("qwen3", dtype=torch.float64).eval()
    found = [
        each
        for batch in trainer.batches
        for each in exact_divergences(model, batch, weights.before[0], weights.after[0], 1.0)
    ]
    assert line["step/kl"] == pytest.approx(summed(found).kl, rel=1e-6)


def test_measuring_leaves_a_run_as_it_is(tmp_path):
    runs = []
    for setting in ({}, {"log_step_kl": True}):
        trainer = training.build(tmp_path, "qwen3", max_steps=3, gradient_accumulation_steps=2, **setting)
        lines = training.train(trainer)
        kept = [{name: x for name, x in line.items() if "step/" not in name and "time" not in name} for line in lines]
        runs.append((kept, trainer.model.state_dict()))
        assert all(("step/kl" in line) == bool(setting) for line in lines)
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


def scored(trainer, batch, rows):
    """Log-probabilities of the sequences in `rows`, by the batch as it is, and by what is kept of it."""
    whole = Batch(batch)
    with torch.no_grad(), measuring.evaluating(trainer.model):
        expected = batch_logps(trainer, whole)[rows]
        (kept,) = scored_together(trainer, [whole.rows(rows[:1]), whole.rows(rows[1:])])
        inputs = distribution_inputs(kept, torch.arange(kept.completion_mask.size(1)))
        logits = log_distributions(trainer, *inputs)
        return expected, batch_logps(trainer, kept), logits, kept, whole


def test_sequences_taken_out_of_their_batch_are_scored_as_in_it(float64_throughout, tmp_path):
    trainer = training.build(
        tmp_path, tiny.model("qwen3", dtype=torch.float64), temperature=0.7, model_init_kwargs=None, log_step_kl=True
    )
    batch = oracle.random_batch([3, 9, 5, 2], [4, 6, 0, 3], 50).for_trl()
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][3, 1] = 0
    rows = [0, 3, 2]
    expected, found, logits, kept, whole = scored(trainer, batch, rows)
    width = kept.completion_mask.size(1)
    assert width == 4 and kept.attention_mask.size(1) == 5 + 4  # no wider than the longest of them
    assert torch.equal(kept.scored, whole.scored[rows][:, :width])
    mask = kept.scored.bool()
    torch.testing.assert_close(found[mask], expected[:, :width][mask])
    own = logits.log_softmax(-1).gather(-1, kept["completion_ids"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(own[mask], found[mask])


@pytest.mark.parametrize(
    "adapter",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["prompt tuning", "prefix tuning"],
)
def test_virtual_tokens_do_not_move_the_positions_that_are_compared(adapter, tmp_path):
    trainer = training.build(
        tmp_path, "llama", options={"peft_config": adapter}, log_step_kl=True, gradient_checkpointing=False
    )
    batch = Batch(oracle.random_batch([4, 6], [5, 3], 50).for_trl())
    with torch.no_grad(), measuring.evaluating(trainer.model):
        found = log_distributions(trainer, *distribution_inputs(batch, torch.arange(5)))
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=batch.attention_mask, use_cache=False).logits
    torch.testing.assert_close(found, logits[:, -6:-1])


def test_sequences_are_taken_out_of_all_microbatches_of_a_step(tmp_path):
    trainer = training.prepared(training.build(tmp_path, "qwen3", log_step_kl=True, step_kl_share=0.5), accumulation=2)
    kl = trainer.step_control.kl
    batches = [Batch(oracle.random_batch([3] * 5, [4] * 5, 50, seed=seed).for_trl()) for seed in (0, 1)]
    for batch in batches:
        kl.note(batch)
    taken = torch.cat([batch["completion_ids"] for batch in kl._batches])
    places = drawn(10, 0.5, 0, trainer.args.seed)
    assert len(places) == 5
    assert torch.equal(taken, torch.cat([batch["completion_ids"] for batch in batches])[places])


def test_completions_without_a_token_are_not_drawn_where_there_are_others(tmp_path):
    def taken(lengths, share):
        settings = {"log_step_kl": True, "step_kl_share": share}
        trainer = training.prepared(training.build(tmp_path, "qwen3", **settings))
        batch = Batch(oracle.random_batch([3] * 6, lengths, 50).for_trl())
        trainer.step_control.kl.note(batch)
        (found,) = trainer.step_control.kl._batches
        return found.scored.sum(dim=1).tolist()

    for share in (1 / 6, 0.5):
        assert all(taken([0, 1, 0, 0, 2, 3], share))
    assert taken([0, 1, 0, 0, 2, 3], 1.0) == [1, 2, 3]  # each of them once
    assert taken([0] * 6, 1 / 6) == [0]  # as many passes as on other ranks


def test_a_microbatch_that_is_not_drawn_is_not_looked_at(tmp_path, monkeypatch):
    """Which would wait for the device, once for each; unless completions may be masked."""
    looked, scored = [], Batch.scored.fget
    monkeypatch.setattr(Batch, "scored", property(lambda batch: looked.append(batch) or scored(batch)))
    seed = next(seed for seed in range(100) if drawn(3, 0.1, 0, seed) == [1])
    for masked in (False, True):
        settings = {"log_step_kl": True, "step_kl_share": 0.1, "mask_truncated_completions": masked, "seed": seed}
        trainer = training.prepared(training.build(tmp_path, "qwen3", **settings), accumulation=3)
        for number in range(3):
            looked.clear()
            trainer.step_control.kl.note(Batch(oracle.random_batch([3], [4], 50).for_trl()))
            assert bool(looked) == (number == 1 or masked and number == 0)


@pytest.mark.parametrize("masked", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_what_tools_wrote_is_measured_by_other_sequences_of_the_step(masked, tmp_path):
    """Two of three sequences are drawn, from microbatches of one; one that tells stays, if there is one."""
    settings = {"log_step_kl": True, "step_kl_share": 0.5}
    trainer = training.prepared(training.build(tmp_path, "qwen3", **settings), accumulation=3)
    kl, places = trainer.step_control.kl, drawn(3, 0.5, 0, trainer.args.seed)
    assert len(places) == 2
    batches = []
    for place in range(3):
        batch = oracle.random_batch([3], [4], 50, seed=place).for_trl()
        batch["tool_mask"] = torch.full_like(batch["completion_mask"], place not in masked)
        batches.append(Batch(batch))
        kl.note(batches[-1])
    (taken,) = kl._batches
    told = [place for place in places if place not in masked] or [place for place in range(3) if place not in masked]
    scored = taken["completion_ids"][taken.scored.any(dim=1)]
    assert torch.equal(scored, torch.cat([batches[place]["completion_ids"] for place in told]))


def test_empty_completions_are_measured_as_nothing(tmp_path):
    trainer = training.build(tmp_path, "qwen3", log_step_kl=True)
    batch = Batch(oracle.random_batch([3, 2], [0, 0], 50).for_trl())
    trainer.step_control.kl._batches = [batch.rows([0, 1])]
    trainer.step_control.kl.score()
    assert not trainer.step_control.kl.measure().is_known


def test_dropout_and_bf16_play_no_part_in_the_measurement(tmp_path):
    """Two scores of the same weights are the same, and with weights in float32 they are float32's."""
    model = tiny.model("qwen3")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    trainer = training.build(tmp_path, model, log_step_kl=True, bf16=True, disable_dropout=False)
    training.train(trainer)
    kl = trainer.step_control.kl
    assert trainer.accelerator.native_amp and trainer.model.training
    batch = Batch(oracle.random_batch([3, 9, 5], [4, 6, 3], 50).for_trl())
    kl._batches = [batch.rows([0, 1, 2])]
    kl.score()
    assert kl.measure().kl == 0
    (found,) = kl._before
    assert found.dtype == torch.float32
    with torch.no_grad():
        plain = tiny.model("qwen3").eval()
        plain.load_state_dict(trainer.model.state_dict())
        (kept,) = kl._batches
        ids = torch.cat([kept["prompt_ids"], kept["completion_ids"]], dim=1)
        logits = plain(input_ids=ids, attention_mask=kept.attention_mask, use_cache=False).logits
    mask = kept.scored.bool()
    expected = logits[:, -found.size(1) - 1 : -1]
    torch.testing.assert_close(found[mask], expected[mask])
    assert trainer.model.training and trainer.accelerator.native_amp


# Replayed


@pytest.mark.parametrize(
    ("temperature", "microbatches", "share"), [(1.0, 1, 1.0), (0.8, 1, 1.0), (1.0, 4, 1e-3)], ids=str
)
def test_passes_that_are_replayed_have_the_same_measurements(
    temperature, microbatches, share, float64_throughout, tmp_path, monkeypatch
):
    """
    Padded on the right, so that shapes come again; with completions of many lengths. Before the step, as soon as the
    sequences are known.
    """
    made, early = [], []

    class Noted(OnCPU):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

        def __call__(self, function, inputs, setting=None, again=False):
            output = super().__call__(function, inputs, setting, again)
            self.number = max(getattr(self, "number", 0), len(self._recordings))
            ids, mask, places = inputs
            assert ids.size(1) % 16 == 0 == len(places) % 16 and mask.shape == ids.shape
            return output

    score_early = StepKL.score_early

    def noted(kl):
        before = bool(kl._before)
        score_early(kl)
        early.append(bool(kl._before) and not before)

    monkeypatch.setattr(StepKL, "score_early", noted)
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)
    lines = {}
    for kind in (measuring.Replayed, Noted):
        monkeypatch.setattr(measuring, "Replayed", kind)
        trainer = training.build(
            tmp_path,
            tiny.model("gpt2", dtype=torch.float64),  # with absolute positions
            target_kl=1e-3,
            step_kl_share=share,
            gradient_accumulation_steps=microbatches,
            temperature=temperature,
            max_steps=6,
            max_completion_length=12,
            model_init_kwargs=None,
        )
        trainer.train()
        lines[kind] = [line for line in trainer.state.log_history if "step/kl" in line]
        assert trainer.step_control.kl._replayed is None  # whose memory is free again
    (passes,) = [each for each in made if hasattr(each, "number")]
    assert passes.number == 1
    assert len(lines[Noted]) == 6
    assert any(early) and not any(early[: len(early) // 2])
    for found, expected in zip(*lines.values(), strict=True):
        for name in ("step/kl", "step/kl_stderr", "step/learning_rate"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize(
    "case", ["replayed", "not yet recorded", "another rank", "not all are known", "others follow"]
)
def test_sequences_are_scored_between_microbatches_where_that_takes_no_time(case, tmp_path, monkeypatch):
    trainer = training.build(tmp_path, "qwen3", log_step_kl=True, gradient_accumulation_steps=2)
    kl = trainer.step_control.kl
    kl._share, trainer.current_gradient_accumulation_steps = (1.0 if case == "not all are known" else 1e-3), 2
    monkeypatch.setattr(measuring, "drawn", lambda count, share, *_: [0] if share < 1 else [0, count - 1])
    if case == "another rank":
        monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    batch = Batch(oracle.random_batch([4, 6], [3, 2], 50).for_trl())
    kl._replayed = OnCPU(trainer.model)
    if case != "not yet recorded":
        kl._replayed._recordings["a pass"] = None
    kl.score_early()
    assert not kl._before
    kl.begin()
    kl.note(batch)
    assert len(kl._batches) == 1
    kl.score_early()
    early = kl._before
    assert bool(early) == (case in ("replayed", "others follow"))
    if case == "others follow":  # an epoch ended here, and the step has more sequences
        kl.begin()
        kl.note(batch)
        assert not kl._before and len(kl._batches[0].completion_mask) == 2
    if case == "another rank":
        monkeypatch.undo()
    kl.score()
    if case == "replayed":
        assert kl._before is early
    assert len(kl._before[0]) == (2 if case == "others follow" else 1)
    assert kl.measure().kl == 0
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(1.5)
    assert kl.measure().kl > 0
    kl.forget()
    assert not kl._before and not kl._has_all


def changes_weights(event, data):
    """A callback that does so in the midst of a step."""

    def change(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            (p.data if data else p.detach()).mul_(1.01)

    return type("Changes", (TrainerCallback,), {event: change})()


@pytest.mark.parametrize("data", [False, True], ids=["in place", "behind PyTorch's back"])
@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step"])
def test_what_a_callback_does_to_weights_is_not_the_step(event, data, float64_throughout, tmp_path, monkeypatch):
    lines = {}
    for kind in (measuring.Replayed, OnCPU):
        monkeypatch.setattr(measuring, "Replayed", kind)
        options = {"callbacks": [changes_weights(event, data)]}
        settings = {"gradient_accumulation_steps": 4, "step_kl_share": 1e-3, "max_steps": 6, "log_step_kl": True}
        model = tiny.model("gpt2", dtype=torch.float64)
        trainer = training.build(tmp_path, model, options=options, model_init_kwargs=None, **settings)
        trainer.train()
        lines[kind] = [line["step/kl"] for line in trainer.state.log_history if "step/kl" in line]
    found, expected = lines.values()
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_weights_that_have_changed_since_are_scored_anew(kind, tmp_path):
    trainer = training.build(tmp_path, "qwen3", log_step_kl=True)
    kl = trainer.step_control.kl
    kl._batches = [Batch(oracle.random_batch([4, 6], [3, 2], 50).for_trl())]
    kl._replayed, kl._has_all = OnCPU(trainer.model), True
    kl._replayed._recordings["a pass"] = None
    kl.score_early()
    first = kl._before
    assert first
    kl.score()
    assert kl._before is first
    with torch.no_grad():
        next(getattr(trainer.model, kind)()).mul_(1.5)
    kl.score()
    assert kl._before is not first and kl.measure().kl == 0


def test_large_batches_are_padded_to_few_widths():
    widths = range(1, 10_000)
    found = [measuring.padded_width(width) for width in widths]
    assert all(a >= b and a % 128 == 0 for a, b in zip(found, widths, strict=True))
    assert all(a <= max(1.25 * b, b + 127) for a, b in zip(found, widths, strict=True))
    assert len({width for width in found if 1024 < width <= 2048}) == 4


@pytest.mark.parametrize("name", ["max_position_embeddings", "max_seq_len"])
def test_a_batch_is_not_padded_beyond_the_models_positions(name, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)
    trainer = training.build(tmp_path, "gpt2", log_step_kl=True)
    kl = trainer.step_control.kl
    kl._batches, kl._replayed = [None], OnCPU(trainer.model)
    room = trainer.model.config.max_position_embeddings
    if name == "max_seq_len":  # as MPT calls it
        trainer.model.config.max_position_embeddings, trainer.model.config.max_seq_len = None, room
    widths = {}
    for width in (15, 16, room - 3, room):
        widths[width] = kl._replayed_width(Batch(oracle.random_batch([5], [width - 5], 50).for_trl()))
    assert widths[room - 3] == widths[room] == 0
    assert all(found in (0, 16 * math.ceil(width / 16)) and found <= room - 2 for width, found in widths.items())


def test_padding_takes_no_more_logits_than_there_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)
    trainer = training.build(tmp_path, "qwen3", log_step_kl=True)
    kl, size = trainer.step_control.kl, 2 * trainer.model.config.vocab_size  # logits of a column
    batch = Batch(oracle.random_batch([4, 6], [3, 2], 50).for_trl())
    found = {}
    for number in (3, 5, 16, 40):
        monkeypatch.setattr(measuring, "LARGEST_LOGITS", number * size + size // 2)
        kl.forget()
        kl._batches, kl._replayed = [batch], OnCPU(trainer.model)
        kl.score()
        found[number] = kl._before[0].size(1)
        assert kl.measure().kl == 0 and kl._weights[0].sum(dim=1).tolist() == [3, 2]
    assert found == {3: 3, 5: 5, 16: 16, 40: 16}


def test_columns_are_as_many_however_long_completions_of_other_ranks_are(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)
    trainer = training.build(tmp_path, "qwen3", log_step_kl=True)
    kl, size = trainer.step_control.kl, 2 * 20 * trainer.model.config.vocab_size
    batch = Batch(oracle.random_batch([4, 6], [20, 18], 50).for_trl())
    monkeypatch.setattr(measuring, "LARGEST_LOGITS", size)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    for longer in (1.5, 1.7, 2.5):
        other = torch.tensor([[1.0, int(longer * size), longer]], dtype=torch.float64)
        monkeypatch.setattr(trainer.accelerator, "gather", lambda own, other=other: torch.cat([own, other]))
        kl.forget()
        kl._batches, kl._replayed = [batch], OnCPU(trainer.model)
        kl.score()
        assert kl._before[0].size(1) == 16 and kl._weights[0].sum(dim=1)[0] == pytest.approx(20)
        assert kl.rounding == longer  # the largest of all ranks
