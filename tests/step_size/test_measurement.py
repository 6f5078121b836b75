"""What is measured of a step is its KL divergence, by enumeration over the vocabulary."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import TrainerCallback

from isopo_trl.step_size import measurement as measuring
from isopo_trl.step_size.control import acts_within_steps
from isopo_trl.step_size.measurement import StepKL, columns, divergences, drawn, measurement, sums
from isopo_trl.trl_seam import scoring
from isopo_trl.trl_seam.batch import Batch, together
from isopo_trl.trl_seam.scoring import Scoring, distribution_inputs, most_positions, takes_positions
from tests import oracle, tiny, training
from tests.step_size.enumeration import Run, ratio_of_sums
from tests.step_size.test_cuda_graphs import OnCPU


# On plain tensors


def distributions(*shape):
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    return before, (before + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


@pytest.mark.parametrize("at_a_time", [1, 14, 2**22])
def test_divergences_are_exact_and_count_for_the_positions_they_stand_for(at_a_time, monkeypatch):
    monkeypatch.setattr(measuring, "COMPARED_AT_A_TIME", at_a_time)  # less than a position, two of six, all
    before, after = distributions(2, 3, 7)
    weights = torch.tensor([[1.0, 2.5, 0.0], [0.0, 1.0, 4.0]])
    expected = (before.exp() * (before - after)).sum(-1)
    after[0, 2] = math.nan  # where nothing counts
    found = divergences(before + 5, after - 3, weights)  # logits, whatever they are shifted by
    torch.testing.assert_close(found[:, 0], (expected * weights).sum(1))
    assert found[:, 1].tolist() == [3.5, 5.0]
    # Those of tokens have them for their mean
    of_each_token = divergences(*(x[0, 0].unsqueeze(1) for x in (before, after)), torch.ones(7, 1))[:, 0]
    torch.testing.assert_close((before[0, 0].exp() * of_each_token).sum(), expected[0, 0])
    assert of_each_token.min() >= 0


@pytest.mark.parametrize("change", [1e-4, 1e-3, 0.1, 3.0, 95.0])
@pytest.mark.parametrize(("scale", "size"), [(10, 1000), (1, 150_000)])
def test_divergences_of_all_sizes_are_told_in_float32(scale, size, change):
    """From 1e-8 nats on, up to where a token that was next to impossible is certain after the step."""
    before, step = (torch.randn(1, 4, size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    before *= scale
    after = before + change * step
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    expected = (p.exp() * (torch.expm1(q - p) - (q - p))).sum().item()
    found = divergences(before, after, torch.ones(1, 4))[0, 0].item()
    assert found == pytest.approx(expected, rel=3e-3 if change == 1e-4 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_that_cannot_occur_and_steps_without_measure(dtype):
    def kl(before, after):
        found = divergences(*(torch.tensor([[values]], dtype=dtype) for values in (before, after)), torch.ones(1, 1))
        return found[0, 0].item()

    never = -math.inf
    assert kl([never, 1.0, 2.0], [never, 1.0, 2.0]) == 0
    assert kl([never, 1.0, 2.0], [never, 1.5, 2.0]) == pytest.approx(kl([1.0, 2.0], [1.5, 2.0]), rel=1e-6)
    assert kl([never, 0.0], [0.0, 0.0]) == pytest.approx(math.log(2))  # half of the probability has gone there
    for low in (-95.0, -200.0):  # where float32 has too large an exponential, and 0
        assert kl([low, 0.0], [0.0, 0.0]) == pytest.approx(math.log(2))
    assert kl([0.0, 0.0], [-300.0, 0.0]) == pytest.approx(150 - math.log(2))
    assert kl([0.0, 1.0], [never, 1.0]) == math.inf
    for broken in ([math.nan, 2.0], [1.0, math.inf]):
        assert math.isnan(kl(broken, [1.0, 2.0])) and math.isnan(kl([1.0, 2.0], broken))
    assert math.isnan(kl([1.0, 2.0], [never, never]))


def test_sequences_are_drawn_evenly_and_from_a_stream_of_their_own():
    state, hits = torch.get_rng_state(), torch.zeros(128)
    for step in range(1000):
        places = drawn(128, 1 / 32, step, seed=0)
        assert [place // 32 for place in places] == [0, 1, 2, 3]  # one of each microbatch of 32
        hits[places] += 1
    assert torch.equal(state, torch.get_rng_state())
    assert 8 < hits.min() and hits.max() < 60  # 31 on average, standard deviation 6
    assert drawn(3, 1 / 32, 0, 0) != [] and drawn(5, 1.0, 7, 0) == [0, 1, 2, 3, 4]


def test_positions_are_all_of_the_first_and_some_of_the_others_which_stand_for_all():
    assert columns(5, 1.0, 0, 0) == columns(5, 7.0, 0, 0) == ([0, 1, 2, 3, 4], [1.0] * 5)
    assert columns(3, 0.01, 0, 0)[1] == [3.0]  # at least one
    hits = torch.zeros(320)
    for step in range(1000):
        places, weights = columns(320, 0.25, step, 0)
        assert len(places) == 80 and sum(weights) == pytest.approx(320) and sorted(set(places)) == places
        hits[places] += torch.tensor(weights)
    assert (hits[:40] == 1000).all()
    assert 600 < hits.min() and hits.max() < 1400  # 1000 on average, standard deviation 80


def rows(divergences):
    """As [`divergences`] has them: sums and numbers."""
    return torch.tensor([[each.sum(), len(each)] for each in divergences], dtype=torch.float64)


def test_the_error_is_that_of_a_ratio_of_sums_over_sequences_on_all_ranks():
    lengths = torch.randint(1, 50, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [torch.rand(length, dtype=torch.float64) * length for length in lengths]
    empty = torch.zeros(1, 2, dtype=torch.float64)  # a sequence without a token is none
    found = measurement((sums(rows(sequences[:4])) + sums(torch.cat([rows(sequences[4:]), empty]))).tolist())
    expected = ratio_of_sums(sequences)
    assert found.kl == pytest.approx(expected.kl) and found.stderr == pytest.approx(expected.stderr)
    one = measurement(sums(rows(sequences[:1])).tolist())
    assert one.stderr == one.kl and one.is_known
    nothing = measurement(sums(empty).tolist())
    assert nothing.kl == 0 and not nothing.is_known
    assert measurement([0.0, 5.0, 0.0, 25.0, 0.0, 1.0]).is_known  # a step of 0


# In a training run


def in_float64():
    return tiny.model("qwen3", dtype=torch.float64)


@pytest.mark.parametrize("compared", ["all", "some sequences", "some positions", "tokens"])
def test_the_measured_divergence_is_that_of_the_step(compared, float64_throughout, tmp_path, monkeypatch):
    largest = 5000  # of 12 sequences with distributions over a hundred tokens: a few positions of each
    if compared == "some positions":
        monkeypatch.setattr(measuring, "LARGEST_LOGITS", largest)
    if compared == "tokens":
        monkeypatch.setattr(scoring, "takes_positions", lambda model: False)
    share = 0.4 if compared == "some sequences" else 1.0
    settings = {"log_step_kl": True, "step_kl_share": share, "learning_rate": 2e-3, "max_completion_length": 12}
    settings |= {"temperature": 0.8, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    run = Run(tmp_path, in_float64, **settings)
    assert len(run.lines) == 2
    for step, line in enumerate(run.lines):
        every = run.divergences(step, run.trainer.batches[2 * step : 2 * step + 2])
        seed, weights = run.trainer.args.seed, None
        found = [every[place] for place in drawn(12, share, step, seed)]
        assert len(found) == (5 if compared == "some sequences" else 12)
        if compared == "some positions":
            width = max(map(len, found))
            share_of_positions = largest / (len(found) * width * run.trainer.model.config.vocab_size)
            places, counted = columns(width, share_of_positions, step, seed)
            assert 2 <= len(places) < width
            weights = torch.zeros(width).index_put((torch.tensor(places),), torch.tensor(counted))
        exact = ratio_of_sums(found, weights)
        if compared == "tokens":
            assert abs(line["step/kl"] - exact.kl) < 5 * line["step/kl_stderr"]
            assert line["step/kl"] != pytest.approx(exact.kl, rel=1e-6)
        else:
            assert line["step/kl"] == pytest.approx(exact.kl, rel=1e-6)
            assert line["step/kl_stderr"] == pytest.approx(exact.stderr, rel=1e-6)


@pytest.mark.parametrize("narrow", ["weights", "products", "base"])
def test_bf16_and_dropout_play_no_part_in_the_measurement(narrow, tmp_path):
    """Rounding to bf16 is of the size of the step."""

    def build():
        model = tiny.model("qwen3", dtype=torch.float32 if narrow == "products" else torch.bfloat16)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, lora) if narrow == "base" else model

    settings = {"log_step_kl": True, "step_kl_share": 1.0, "disable_dropout": False, "max_completion_length": 12}
    settings |= {"bf16": narrow != "weights", "learning_rate": 1e-3 if narrow == "weights" else 1e-4}
    run = Run(tmp_path, build, **settings)
    for step, line in enumerate(run.lines):
        exact = ratio_of_sums(run.divergences(step, [run.trainer.batches[step]]))
        assert line["step/kl"] == pytest.approx(exact.kl, rel=0.02)
    assert all(module.training for module in run.trainer.model.modules())
    assert run.trainer.accelerator.native_amp == (narrow != "weights")


class StopsEpoch(TrainerCallback):
    """Ends the first epoch inside an accumulation."""

    has_stopped = False

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop, self.has_stopped = not self.has_stopped, True


def test_what_an_epoch_has_broken_off_is_measured_with_the_step_that_it_goes_into(float64_throughout, tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "data": tiny.prompts(2)}
    run = Run(tmp_path, in_float64, callbacks=[StopsEpoch()], log_step_kl=True, step_kl_share=1.0, **settings)
    (line,) = run.lines
    assert len(run.trainer.batches) == 3
    assert line["step/kl"] == pytest.approx(ratio_of_sums(run.divergences(0, run.trainer.batches)).kl, rel=1e-6)


def test_measuring_leaves_a_run_as_it_is(tmp_path):
    runs = []
    for setting in ({}, {"log_step_kl": True}):
        trainer = training.build(tmp_path, gradient_accumulation_steps=2, **setting)
        lines = training.train(trainer)
        kept = [{name: x for name, x in line.items() if "step/" not in name and "time" not in name} for line in lines]
        runs.append((kept, trainer.model.state_dict()))
        assert all(("step/kl" in line) == bool(setting) for line in lines)
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


# The sequences


class Listening:
    """Stands in for a trainer's scoring passes: keeps the batches that are scored."""

    model = torch.nn.Identity()

    def base_model(self):
        return self.model

    def together(self, batches):
        return together(batches, padding=0)

    def logps(self, batch):
        self.batch = batch
        return torch.zeros(batch.completion_mask.shape)


def scored(batches, share, seed=0, **settings):
    """The sequences by which a step of these microbatches is measured."""
    listening = Listening()
    precise = SimpleNamespace(passes=lambda model: nullcontext(), rounding=lambda *_: 0.0)
    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    kl = StepKL(listening, precise, accelerator, share=share, seed=seed, may_replay=False, **settings)
    for batch in batches:
        kl.note(batch, 0, len(batches))
    kl.score(0)
    return listening.batch


def text(prompts, completions, seed=0, **extra):
    return Batch({**oracle.random_batch(prompts, completions, 50, seed).for_trl(), **extra})


def test_completions_without_a_token_are_not_drawn_where_there_are_others():
    def tokens(lengths, share):
        return scored([text([3] * 6, lengths)], share).scored.sum(dim=1).tolist()

    for share in (1 / 6, 0.5):
        assert all(tokens([0, 1, 0, 0, 2, 3], share))
    assert tokens([0, 1, 0, 0, 2, 3], 1.0) == [1, 2, 3]  # each of them once
    assert tokens([0] * 6, 1 / 6) == [0]  # as many passes as on other ranks


@pytest.mark.parametrize("by", ["tools", "truncation"])
@pytest.mark.parametrize("masked", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_what_is_masked_is_measured_by_other_sequences_of_the_step(masked, by):
    """Two of three sequences are drawn, from microbatches of one; those that tell stay, if there are any."""
    places, batches = drawn(3, 0.5, 0, seed=0), []
    for place in range(3):
        batch = text([3], [0 if by == "truncation" and place in masked else 4], seed=place)
        if by == "tools":
            batch["tool_mask"] = torch.full_like(batch["completion_mask"], place not in masked)
        batches.append(batch)
    taken = scored(batches, 0.5, masks_truncated=by == "truncation")
    assert len(places) == len(taken.scored) == 2  # as many passes as on other ranks
    tell = [place for place in range(3) if place not in masked]
    found = taken["completion_ids"][taken.scored.any(dim=1)].tolist()
    found = [place for place in tell if batches[place]["completion_ids"][0].tolist() in found]
    assert found and {place for place in places if place in tell} <= set(found)


@pytest.mark.parametrize("masked", [False, True])
def test_a_microbatch_that_is_not_drawn_is_not_looked_at(masked, monkeypatch):
    """Which would wait for the device, once for each; unless completions may be masked."""
    looked, own = [], Batch.scored.fget
    monkeypatch.setattr(Batch, "scored", property(lambda batch: looked.append(batch.get("number")) or own(batch)))
    seed = next(seed for seed in range(100) if drawn(3, 0.1, 0, seed) == [1])
    scored([text([3], [4], number=number) for number in range(3)], 0.1, seed, masks_truncated=masked)
    assert {number for number in looked if number is not None} == ({0, 1} if masked else {1})


def test_sequences_taken_out_of_their_batch_are_scored_as_in_it(float64_throughout, tmp_path):
    passes = Scoring(training.build(tmp_path, in_float64(), temperature=0.7))
    whole = text([3, 9, 5, 2], [4, 6, 0, 3])
    whole["tool_mask"] = torch.ones_like(whole["completion_mask"])
    whole["tool_mask"][3, 1] = 0
    rows = [0, 3, 2]
    with torch.no_grad(), measuring.evaluating(passes.model):
        expected = passes.logps(whole)[rows]
        (kept,) = passes.together([whole.rows(rows[:1]), whole.rows(rows[1:])])
        found = passes.logps(kept)
    width = kept.completion_mask.size(1)
    assert width == 4 and kept.attention_mask.size(1) == 5 + 4  # no wider than the longest of them
    assert torch.equal(kept.scored, whole.scored[rows][:, :width])
    mask = kept.scored.bool()
    torch.testing.assert_close(found[mask], expected[:, :width][mask])


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_do_not_move_the_positions_that_are_compared(adapter, tmp_path):
    options = {"peft_config": adapter(task_type="CAUSAL_LM", num_virtual_tokens=3)}
    trainer = training.build(tmp_path, "llama", options=options, gradient_checkpointing=False)
    batch = text([4, 6], [5, 3])
    with torch.no_grad(), measuring.evaluating(trainer.model):
        found = Scoring(trainer).log_distributions(*distribution_inputs(batch, torch.arange(5)))
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=batch.attention_mask, use_cache=False).logits
    torch.testing.assert_close(found, logits[:, -6:-1])


def test_a_model_whose_logits_are_to_be_had_at_the_end_alone_is_not_asked_for_others():
    class AtTheEnd(torch.nn.Module):
        def forward(self, input_ids, logits_to_keep: int = 0):
            raise NotImplementedError

    assert takes_positions(tiny.model("qwen3"))
    assert not takes_positions(AtTheEnd()) and not takes_positions(torch.nn.Identity())


def test_tokens_are_compared_in_all_batches_where_one_has_no_logits_to_give(tmp_path, monkeypatch):
    """As where some sequences have images, and others, perhaps on another rank, have none."""
    sizes, passes = iter([0, 1000]), []
    monkeypatch.setattr(Scoring, "together", lambda self, batches: batches)
    monkeypatch.setattr(Scoring, "log_distributions", None)
    monkeypatch.setattr(measuring, "distribution_size", lambda model, batch: next(sizes))
    kl = training.build(tmp_path, log_step_kl=True, step_kl_share=1.0).step_control.kl
    logps = Scoring.logps
    monkeypatch.setattr(Scoring, "logps", lambda self, batch: passes.append(batch) or logps(self, batch))
    for seed in (0, 1):
        kl.note(text([3, 2], [4, 5], seed), 0, 2)
    kl.score(0)
    assert kl.measure().is_known and len(passes) == 4


# Replayed


@pytest.fixture
def replaying(monkeypatch):
    monkeypatch.setattr(measuring, "Replayed", OnCPU)
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)


def lines_of_both(folder, monkeypatch, **settings):
    """The log lines of a run without replayed passes, and of one with them."""
    for kind in (measuring.Replayed, OnCPU):
        monkeypatch.setattr(measuring, "Replayed", kind)
        model = tiny.model("gpt2", dtype=torch.float64)  # with absolute positions
        trainer = training.build(folder, model, max_steps=4, gradient_accumulation_steps=2, **settings)
        trainer.train()
        assert trainer.step_control.kl._replayed is None  # whose memory is free again
        yield [line for line in trainer.state.log_history if "step/kl" in line]


def test_passes_that_are_replayed_have_the_same_measurements(float64_throughout, tmp_path, monkeypatch):
    """Padded, so that shapes come again, with completions of many lengths; before the step as early as may be."""
    early, score_early = [], StepKL.score_early
    monkeypatch.setattr(StepKL, "score_early", lambda kl, step: early.append(step) or score_early(kl, step))
    monkeypatch.setattr(measuring, "REPLAYED_WIDTH", 16)
    settings = {"target_kl": 1e-3, "step_kl_share": 0.5, "temperature": 0.8, "max_completion_length": 12}
    expected, found = lines_of_both(tmp_path, monkeypatch, **settings)
    assert len(found) == 4 and len(early) >= 2
    for line, other in zip(found, expected, strict=True):
        for name in ("step/kl", "step/kl_stderr", "learning_rate"):
            assert line[name] == pytest.approx(other[name], rel=1e-6)


def changes_weights(event):
    """A callback that does so in the midst of a step, behind PyTorch's back."""

    def change(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            p.data.mul_(1.01)

    return type("Changes", (TrainerCallback,), {event: change})()


def test_what_a_callback_does_to_weights_is_not_the_step(float64_throughout, tmp_path, monkeypatch):
    options = {"callbacks": [changes_weights("on_substep_end")]}
    expected, found = lines_of_both(tmp_path, monkeypatch, log_step_kl=True, step_kl_share=1e-3, options=options)
    assert [line["step/kl"] for line in found] == pytest.approx([line["step/kl"] for line in expected], rel=1e-6)
    for event in ("on_substep_end", "on_pre_optimizer_step"):
        assert acts_within_steps([TrainerCallback(), changes_weights(event)])
    assert not acts_within_steps([TrainerCallback(), changes_weights("on_step_end")])


def step_after_two(folder):
    """A measurement that has recorded its passes, by two steps; the model, and what it is called with from now on."""
    trainer = training.build(folder, log_step_kl=True, step_kl_share=1.0)
    kl, passes = trainer.step_control.kl, []
    for step in range(2):
        kl.begin()
        kl.note(text([4, 6], [3, 2]), step, 1)
        assert not kl.may_score_early
        kl.score(step)
        assert kl.measure().kl == 0
        kl.forget()
    trainer.model.register_forward_pre_hook(lambda *given: passes.append(given[2]), with_kwargs=True)
    kl.begin()
    return kl, trainer, passes


@pytest.mark.parametrize("change", ["nothing", "parameters", "buffers", "sequences"])
def test_a_pass_that_was_made_early_stands_until_weights_or_sequences_change(change, replaying, tmp_path):
    kl, trainer, passes = step_after_two(tmp_path)
    kl.note(text([4, 6], [3, 2]), 2, 1)
    assert kl.may_score_early
    kl.score_early(2)
    assert not kl.may_score_early
    with torch.no_grad():
        if change == "sequences":  # an epoch ended here, and the step has more of them
            kl.begin()
            kl.note(text([4, 6], [3, 2], seed=1), 2, 1)
        elif change != "nothing":
            next(getattr(trainer.model, change)()).mul_(1.5)
        number = len(passes)
        kl.score(2)
        assert (len(passes) > number) == (change != "nothing")
        assert len(passes[-1]["input_ids"]) == (4 if change == "sequences" else 2)
        assert kl.measure().kl == 0
        next(trainer.model.parameters()).mul_(1.5)
        assert kl.measure().kl > 0


def test_ranks_do_not_score_early_and_agree_on_what_rounding_comes_to(replaying, tmp_path, monkeypatch):
    kl, trainer, _ = step_after_two(tmp_path)
    for microbatch in range(2):
        kl.note(text([4, 6], [3, 2]), 2, 2)
        assert kl.may_score_early == (microbatch == 1)  # when all sequences are known
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert not kl.may_score_early
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.cat([own, own + 1]))
    kl.score(2)
    assert kl.rounding == 1  # the largest of all ranks


def test_padding_takes_no_more_positions_or_logits_than_there_may_be(replaying, tmp_path, monkeypatch):
    kl, trainer, passes = step_after_two(tmp_path)
    config = trainer.model.config
    room = config.max_position_embeddings

    def padded(completions, most=1000):
        """How wide the batch is that the model gets, and how many columns of logits it is asked for."""
        monkeypatch.setattr(measuring, "LARGEST_LOGITS", int((most + 0.5) * 2 * config.vocab_size))
        kl.forget()
        kl.note(text([4, 6], completions), 2, 1)
        kl.score(2)
        assert kl.measure().kl == 0
        return passes[-1]["input_ids"].size(1), len(passes[-1]["logits_to_keep"])

    for most, expected in ((3, 3), (5, 5), (16, 16), (40, 16)):
        assert padded([3, 2], most) == (16, expected)
    assert padded([11, 2]) == (32, 16)
    assert len({measuring.padded_width(width) for width in range(129, 257)}) == 4  # few shapes, however wide
    assert [padded([width - 6, 2])[0] for width in (room - 40, room - 31, room)] == [room - 32, room - 31, room]
    for name in ("max_position_embeddings", "max_seq_len"):  # as MPT calls it
        config = SimpleNamespace(get_text_config=lambda name=name: SimpleNamespace(**{name: 100}))
        assert most_positions(SimpleNamespace(config=config)) == 98
