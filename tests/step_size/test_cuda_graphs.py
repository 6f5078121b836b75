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
    recording, room, kept = Again, True, 0

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

    @property
    def sizes(self):
        """How many rows each of the recorded passes has."""
        return [recording.output.size(0) for recording in self._recordings.values()]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).eval().requires_grad_(False)


@pytest.fixture
def passes(model, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SEEN_BEFORE", 1)
    return OnCPU(model)


def rows(number, value=1.0):
    return (torch.full((number, 3), value),)


def make(passes, *numbers, **how):
    """Passes over so many rows, one after the other, each as it would be without."""
    for place, number in enumerate(numbers):
        inputs = rows(number, 1.0 + place)
        assert torch.equal(passes(passes.model, inputs, **how), passes.model(*inputs))


def test_a_pass_is_recorded_when_its_shapes_come_again_and_reads_inputs_and_weights_anew(model):
    passes = OnCPU(model)
    make(passes, 2, 1, 2)
    assert not passes.has_recorded  # as often as one step needs it
    make(passes, 2)
    (recording,) = passes._recordings.values()
    number = recording.replays
    model[0].weight.add_(1)
    make(passes, 2)
    assert recording.replays == number + 1 and passes.sizes == [2]


def test_nothing_is_recorded_while_memory_is_short_nor_what_takes_too_much_of_it(passes):
    passes.room = False
    make(passes, 2, 2, 2)
    assert not passes.has_recorded
    passes.room, passes.kept = True, cuda_graphs.MOST_KEPT
    make(passes, 2)
    assert passes.has_recorded
    passes.kept += 1
    make(passes, 3, 3)
    assert not passes.has_recorded and not passes.is_usable


def test_dtypes_and_settings_have_recordings_of_their_own(passes, model):
    def scaled(setting):
        return lambda x: model(x.float()) * setting

    for setting in (1.0, 2.0):
        for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long)):
            for _ in range(3):
                assert torch.equal(passes(scaled(setting), (x,), setting), setting * model(x.float()))
    assert len(passes.sizes) == 4


def test_the_output_stays_in_its_place_unless_it_is_wanted(passes, model):
    eager = passes(model, rows(2))
    assert passes.own(eager) is eager
    first = passes(model, rows(2))
    kept, expected = passes.own(first), first.clone()
    second = passes(model, rows(2, 9.0))
    assert second.data_ptr() == first.data_ptr() and not torch.equal(first, expected)
    assert torch.equal(kept, expected)
    make(passes, 1, 1, 4, 4)  # a larger one takes the place of all
    assert passes.sizes == [4]
    make(passes, 2, 4)


def test_the_recording_that_was_used_longest_ago_makes_room_and_there_is_an_end_to_that(passes, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_AT_A_TIME", 3)
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDED", 5)
    make(passes, 4, 4, 3, 3, 2, 2, 4, 1, 1)
    assert passes.sizes == [2, 4, 1]  # 3 is gone
    make(passes, 3, 2, 3, 2)  # one more is recorded, and then no other, however often it comes
    assert passes.sizes == [4, 1, 3]


@pytest.mark.parametrize("again", [False, True])
def test_recordings_are_dropped_when_a_tensor_has_moved_and_given_up_when_that_goes_on(again, passes, model, caplog):
    with caplog.at_level(logging.INFO):
        for move in range(3):
            make(passes, 2, 2)
            assert passes.has_recorded and passes.is_usable
            owner, name = (model[1], "running_mean") if move else (model[0], "weight")  # a buffer as well
            getattr(owner, name).data = getattr(owner, name) + 1
            make(passes, 2, again=again)
            assert not passes.has_recorded
    assert not passes.is_usable and len(caplog.records) == 1
    make(passes, 2, 2, 2)
    assert not passes.has_recorded


def test_other_adapters_are_another_state():
    model = get_peft_model(tiny.model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    state = State.of(model)
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
    def __init__(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing")


class Differs(Again):
    def replay(self, inputs):
        return super().replay(inputs).mul_(1.1)


class Moves(Again):
    """A pass leaves the model with a buffer out of the recording, as some rotary embeddings do."""

    def __init__(self, function, inputs, output):
        super().__init__(function, inputs, output)
        function[1].running_var = function[1].running_var.clone()


@pytest.mark.parametrize("recording", [Fails, Differs, Moves])
def test_what_cannot_be_recorded_is_done_as_usual_and_said_once(recording, passes, caplog):
    passes.recording = recording
    with caplog.at_level(logging.INFO):
        make(passes, 2, 2, 2, 2)
    assert not passes.is_usable and passes._output is None  # and no memory is kept
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if recording is Differs else logging.INFO)


def test_an_error_of_the_model_itself_is_raised(passes, model):
    for _ in range(2):
        with pytest.raises(RuntimeError):
            passes(model, (torch.ones(2, 4),))


def test_outputs_are_close_up_to_what_kernels_differ_by():
    x = torch.randn(4, 7)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, -torch.inf, torch.inf
    assert are_close(x.clone(), x) and are_close(x * (1 + 1e-4), x)
    assert not are_close(x * 1.1, x) and not are_close(x.nan_to_num(nan=0.0), x) and not are_close(x, x.nan_to_num())


def test_a_copy_has_no_recordings(passes, model):
    make(passes, 2, 2)
    copied = copy.deepcopy(passes)
    assert not copied.has_recorded and copied.model is not model and passes.has_recorded
    make(copied, 2)


def test_nothing_is_recorded_without_a_gpu(model):
    passes = Replayed(model)
    make(passes, 2, 2, 2, 2)
    assert not passes.is_usable and not is_recordable(torch.nn.Linear(2, 2, device="meta"))
