"""
Which passes are recorded, and what a recording is good for. Without a GPU, by recordings that call the function again;
`test_cuda.py` has graphs.
"""

import copy
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from isopo_trl.step_size import cuda_graphs
from isopo_trl.step_size.cuda_graphs import Replayed, State, are_close, is_recordable
from tests import tiny


class Again:
    """As a graph: reads its own copy of the inputs, and writes its output to one place."""

    def __init__(self, function, inputs, output):
        self.function, self.inputs, self.output, self.replays = function, inputs, output, 0
        function(*inputs)

    def replay(self, inputs):
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.replays += 1
        self.output.copy_(self.function(*self.inputs))
        return self.output


class OnCPU(Replayed):
    recording = Again
    room = True
    kept = 0

    def _is_recordable(self):
        return True

    def _has_room(self):
        return self.room

    def _tried(self, function, inputs):
        return function(*inputs)

    def _new_pool(self):
        return object()

    def _new_recording(self, function, inputs, output):
        return self.recording(function, inputs, output)

    def _kept(self):
        return self.kept

    def _free(self):
        pass


@pytest.fixture(autouse=True)
def second_of_a_kind(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SEEN_BEFORE", 1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).eval().requires_grad_(False)


def rows(number, value=1.0):
    return (torch.full((number, 3), value),)


def test_a_pass_is_recorded_when_its_shapes_come_again_and_reads_inputs_and_weights_anew(model):
    passes = OnCPU(model)
    assert torch.equal(passes(model, rows(2)), model(*rows(2))) and not passes._recordings
    assert torch.equal(passes(model, rows(1)), model(*rows(1))) and not passes._recordings
    assert torch.equal(passes(model, rows(2, 5.0)), model(*rows(2, 5.0)))
    (recording,) = passes._recordings.values()
    number = recording.replays
    model[0].weight.add_(1)
    assert torch.equal(passes(model, rows(2, 7.0)), model(*rows(2, 7.0))) and recording.replays == number + 1
    assert torch.equal(passes(model, rows(1)), model(*rows(1))) and len(passes._recordings) == 2
    passes._drop()
    assert not passes._recordings and passes._output is None and passes._pool is None


def test_what_one_step_needs_is_not_recorded_for_it(model, monkeypatch):
    monkeypatch.undo()
    passes = OnCPU(model)
    for number in (0, 0, 1, 1):
        passes(model, rows(2))
        assert len(passes._recordings) == number


def test_without_room_nothing_is_recorded_until_there_is_some(model):
    passes = OnCPU(model)
    passes.room = False
    for _ in range(3):
        assert torch.equal(passes(model, rows(2)), model(*rows(2))) and not passes._recordings
    passes.room = True
    assert torch.equal(passes(model, rows(2)), model(*rows(2))) and passes._recordings


def test_graphs_keep_no_more_memory_than_they_may(model):
    passes = OnCPU(model)
    for number, kept in ((2, cuda_graphs.MOST_KEPT), (3, cuda_graphs.MOST_KEPT + 1)):
        passes.kept = kept
        for _ in range(3):
            assert torch.equal(passes(model, rows(number)), model(*rows(number)))
        assert passes.is_usable == bool(passes._recordings) == (number == 2)


def test_dtypes_and_settings_have_recordings_of_their_own(model):
    passes = OnCPU(model)

    def scaled(setting):
        return lambda x: model(x.float()) * setting

    for setting in (1.0, 2.0):
        for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long)):
            for _ in range(3):
                assert torch.equal(passes(scaled(setting), (x,), setting), setting * model(x.float()))
    assert len(passes._recordings) == 4


def test_the_output_stays_in_its_place_unless_it_is_wanted(model):
    passes = OnCPU(model)
    eager = passes(model, rows(2))
    assert passes.own(eager) is eager
    first = passes(model, rows(2))
    kept, expected = passes.own(first), first.clone()
    second = passes(model, rows(2, 9.0))
    assert second.data_ptr() == first.data_ptr() and not torch.equal(first, expected)
    assert torch.equal(kept, expected)


def test_a_larger_output_takes_the_place_of_all(model):
    passes = OnCPU(model)
    for number in (2, 2, 1, 1):
        passes(model, rows(number))
    assert len(passes._recordings) == 2 and passes._output.numel() == 10
    for _ in range(2):
        passes(model, rows(4))
    assert len(passes._recordings) == 1 and passes._output.numel() == 20
    assert torch.equal(passes(model, rows(2, 3.0)), model(*rows(2, 3.0)))


def test_the_recording_that_was_used_longest_ago_makes_room(model, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDED", 10)
    passes = OnCPU(model)
    numbers = list(range(9, 1, -1))
    for number in [number for number in numbers for _ in range(2)]:
        passes(model, rows(number))
    assert len(passes._recordings) == cuda_graphs.MOST_AT_A_TIME == 8
    passes(model, rows(9))
    for _ in range(2):
        passes(model, rows(1))
    sizes = [recording.output.size(0) for recording in passes._recordings.values()]
    assert sizes == [7, 6, 5, 4, 3, 2, 9, 1]  # 8 is gone
    for number in (8, 7, 8, 7):  # one more is recorded, and then no other, however often it comes
        assert torch.equal(passes(model, rows(number)), model(*rows(number)))
    sizes = [recording.output.size(0) for recording in passes._recordings.values()]
    assert sizes == [6, 5, 4, 3, 2, 9, 1, 8]


@pytest.mark.parametrize("again", [False, True])
def test_recordings_are_dropped_when_a_tensor_has_moved_and_given_up_when_that_goes_on(again, model, caplog):
    passes = OnCPU(model)
    with caplog.at_level(logging.INFO):
        for move in range(3):
            for _ in range(2):
                passes(model, rows(2))
            assert len(passes._recordings) == 1 and passes.is_usable
            owner = model[1] if move else model[0]
            name = "running_mean" if move else "weight"  # a buffer as well
            getattr(owner, name).data = getattr(owner, name) + 1
            assert torch.equal(passes(model, rows(2), again=again), model(*rows(2))) and not passes._recordings
    assert not passes.is_usable and len(caplog.records) == 1
    for _ in range(3):
        assert torch.equal(passes(model, rows(2)), model(*rows(2)))
    assert not passes._recordings


def test_other_adapters_are_another_state():
    model = get_peft_model(tiny.model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    state = State.of(model)
    assert state.is_that(State.of(model))
    with model.disable_adapter():
        assert not state.is_that(State.of(model))
    assert state.is_that(State.of(model))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    added = State.of(model)
    model.set_adapter("other")
    assert not added.is_that(State.of(model))
    before = State.of(model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(0.5)  # a number, which a graph would have kept
    assert not before.is_that(State.of(model))


class Fails(Again):
    error: Exception = RuntimeError("operation not permitted when stream is capturing")

    def __init__(self, *args):
        raise self.error


class OutOfMemory(Fails):
    error = torch.OutOfMemoryError("no more")


class Differs(Again):
    def replay(self, inputs):
        return super().replay(inputs).mul_(1.1)


class Moves(Again):
    """A pass leaves the model with a buffer out of the recording, as some rotary embeddings do."""

    def __init__(self, function, inputs, output):
        super().__init__(function, inputs, output)
        function[1].running_var = function[1].running_var.clone()


@pytest.mark.parametrize("recording", [Fails, OutOfMemory, Differs, Moves])
def test_what_cannot_be_recorded_is_done_as_usual_and_said_once(recording, model, caplog):
    passes = OnCPU(model)
    passes.recording = recording
    with caplog.at_level(logging.INFO):
        for value in range(4):
            assert torch.equal(passes(model, rows(2, float(value))), model(*rows(2, float(value))))
    assert not passes.is_usable and not passes._recordings and passes._output is None
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if recording is Differs else logging.INFO)


def test_an_error_of_the_model_itself_is_raised(model):
    passes = OnCPU(model)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            passes(model, (torch.ones(2, 4),))


def test_outputs_are_close_up_to_what_kernels_differ_by():
    x = torch.randn(4, 7)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, -torch.inf, torch.inf
    assert are_close(x.clone(), x) and are_close(x * (1 + 1e-4), x)
    assert not are_close(x * 1.1, x) and not are_close(x.nan_to_num(nan=0.0), x) and not are_close(x, x.nan_to_num())


def test_a_copy_has_no_recordings(model):
    passes = OnCPU(model)
    for _ in range(2):
        passes(model, rows(2))
    copied = copy.deepcopy(passes)
    assert not copied._recordings and copied.model is not model and len(passes._recordings) == 1
    assert torch.equal(copied(copied.model, rows(2)), model(*rows(2)))


def test_nothing_is_recorded_without_a_gpu(model):
    passes = Replayed(model)
    assert not passes.is_usable and not is_recordable(torch.nn.Linear(2, 2, device="meta"))
    for _ in range(3):
        assert torch.equal(passes(model, rows(2)), model(*rows(2)))
    assert not passes._seen
