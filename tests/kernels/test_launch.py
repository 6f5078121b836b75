"""Launching without Triton's inspection of the arguments, where what was compiled must fit."""

import inspect
import itertools

import pytest
import torch

from isopo_trl.geometry.routing import Routing
from isopo_trl.kernels import elementwise, experts, linear, rms_norm, v
from isopo_trl.kernels.coefficients import Entry
from isopo_trl.kernels.launch import NOTHING, Direct, Fixed, Plan, Scratch, launch
from isopo_trl.rules import make_rule
from tests.kernels.batches import DEVICE, EUCLIDEAN, FIG4, FISHER, INTERACTING, Run, batch, needs_kernels


class FakeKernel:
    """Stands in for a kernel: notes how often it is compiled, and for which types it is launched."""

    def __init__(self):
        self.compiled, self.given, self.launched = 0, [], []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps):
            self.compiled += 1
            self.given.append(arguments)
            return FakeCompiled(self)

        return compile_and_launch


class FakeCompiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))


def test_a_plan_launches_what_was_compiled_with_the_arguments_of_the_moment():
    kernel, plan = FakeKernel(), Plan((3, 1, 1), ("constant",))
    x, y = torch.zeros(4), torch.ones(4)
    launch(kernel, plan, (x, x), (7,))
    launch(kernel, plan, (x, y), (8,))
    assert kernel.compiled == 1
    assert kernel.launched == [((3, 1, 1), x.data_ptr(), y.data_ptr(), 8, "constant")]


def test_tensors_that_many_launches_share_follow_their_own():
    kernel, plan = FakeKernel(), Plan((1, 1, 1), ("constant",))
    x, y, z = torch.zeros(4), torch.ones(4), torch.ones(8)
    for _ in range(2):
        launch(kernel, plan, (x,), (7,), Fixed((y, z)))
    assert kernel.given == [(x, y, z, 7, "constant")]
    assert kernel.launched == [((1, 1, 1), x.data_ptr(), y.data_ptr(), z.data_ptr(), 7, "constant")]
    launch(kernel, plan, (x,), (7,), Fixed((y, z[1:])))
    assert len(kernel.given) == 2 and len(kernel.launched) == 1


def test_a_tensor_that_is_not_there_stays_nothing():
    kernel, plan = FakeKernel(), Plan((1, 1, 1), ("constant",))
    x = torch.zeros(4)
    for _ in range(2):
        launch(kernel, plan, (x, None), (7,))
    assert kernel.given == [(x, None, 7, "constant")]
    assert kernel.launched == [((1, 1, 1), x.data_ptr(), None, 7, "constant")]


def test_a_kernel_compiled_for_aligned_pointers_is_not_launched_for_others():
    kernel, plan = FakeKernel(), Plan((1, 1, 1), ())
    x = torch.zeros(8)
    launch(kernel, plan, (x[1:],), ())
    launch(kernel, plan, (x,), ())
    launch(kernel, plan, (x, x[1:]), ())
    assert kernel.compiled == 3 and kernel.launched == []
    launch(kernel, plan, (x[4:],), ())
    assert kernel.compiled == 3 and len(kernel.launched) == 1


def test_memory_is_that_of_its_use_shape_and_type():
    memory, x = Scratch(), torch.zeros(2)
    first = memory.scratch(x, "sums", 3, 4)
    assert first.shape == (3, 4) and memory.scratch(x, "sums", 3, 4) is first
    others = [
        memory.scratch(x, "overlap", 3, 4),
        memory.scratch(x, "sums", 12),
        memory.scratch(x.double(), "sums", 3, 4),
    ]
    others += [memory.scratch(x.to("meta"), "sums", 3, 4), Scratch().scratch(x, "sums", 3, 4)]
    assert all(other is not first for other in others)
    assert [other.dtype for other in others[1:3]] == [torch.float32, torch.float64] and others[3].is_meta


class Launcher:
    """Launches as that of Triton 3.6 does: hooks, if they are given, before and behind."""

    def __init__(self):
        self.launched = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        metadata, of_launch, enter, leave, *arguments = args
        self.launched.append(("direct", gridX, gridY, gridZ, stream, function, metadata, *arguments))
        assert of_launch is None and enter is None and leave is None


class NewerLauncher(Launcher):
    """The same as that of Triton 3.7 on has it."""

    def __call__(
        self,
        gridX,
        gridY,
        gridZ,
        stream,
        function,
        kernel_metadata,
        launch_metadata,
        launch_enter_hook,
        launch_exit_hook,
        *args,
    ):
        of_hooks = (launch_metadata, launch_enter_hook, launch_exit_hook)
        super().__call__(gridX, gridY, gridZ, stream, function, kernel_metadata, *of_hooks, *args)


class WithScratch(Launcher):
    """In the words of Triton 3.6, which gives a kernel memory that it asks for, and goes on in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, "pdl"

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        global_scratch = "memory" if self.global_scratch_size else None
        profile_scratch = None
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                    global_scratch, profile_scratch, *args)  # fmt: skip

    def launch(self, *given):
        self.launched.append(given)


class OtherLauncher(Launcher):
    def __call__(self, grid, stream, function, *args):
        raise AssertionError("a launcher that takes other arguments was called")


class Driver:
    """Of a device whose current stream changes with every launch."""

    def __init__(self):
        self.streams = itertools.count(100)

    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        return (device, next(self.streams))


@pytest.fixture
def driver():
    driver = pytest.importorskip("triton").runtime.driver
    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before


def compiled_with(launcher):
    """A kernel that compiles to what has that launcher, and which notes launches the usual way beside direct ones."""
    kernel = FakeKernel()
    kernel.launched = launcher.launched

    class Compiled(FakeCompiled):
        run, function, packed_metadata = launcher, "function", "metadata"

    def compile_and_launch(*arguments, num_warps):
        kernel.compiled += 1
        return Compiled(kernel)

    return type("Kernel", (), {"__getitem__": lambda *_: compile_and_launch})()


@pytest.mark.parametrize("kind", [Launcher, NewerLauncher])
def test_a_known_launcher_is_called_directly_on_the_stream_of_the_moment(driver, kind):
    launcher, plan = kind(), Plan((3, 2, 1), ("constant",))
    kernel = compiled_with(launcher)
    x, y = torch.zeros(4), torch.ones(8)
    for number in (7, 8, 9):
        launch(kernel, plan, (x,), (number,), Fixed((y,)))
    arguments = (x.data_ptr(), y.data_ptr())
    assert launcher.launched == [
        ("direct", 3, 2, 1, (3, 100), "function", "metadata", *arguments, 8, "constant"),
        ("direct", 3, 2, 1, (3, 101), "function", "metadata", *arguments, 9, "constant"),
    ]


@pytest.mark.parametrize("size", [0, 8])
def test_what_a_launcher_does_in_python_is_left_out_unless_a_kernel_asks_for_memory(driver, size):
    launcher, plan = WithScratch(), Plan((3, 2, 1), ("constant",))
    launcher.global_scratch_size = size
    kernel = compiled_with(launcher)
    x = torch.zeros(4)
    for _ in range(2):
        launch(kernel, plan, (x,), (7,))
    given = ("function", False, "pdl", "memory" if size else None, None, "metadata", None, None, None)
    assert launcher.launched == [(3, 2, 1, (3, 100), *given, x.data_ptr(), 7, "constant")]
    assert (plan.direct.run == launcher.launch) == (size == 0)


def test_a_launcher_that_takes_other_arguments_is_left_to_triton(driver):
    launcher, plan = OtherLauncher(), Plan((3, 2, 1), ())
    kernel = compiled_with(launcher)
    x = torch.zeros(4)
    for _ in range(2):
        launch(kernel, plan, (x,), (7,))
    assert launcher.launched == [((3, 2, 1), x.data_ptr(), 7)]


def test_hooks_of_a_profiler_are_called_while_they_are_set(driver):
    runtime = pytest.importorskip("triton").knobs.runtime
    launcher, plan = Launcher(), Plan((1, 1, 1), ())
    kernel = compiled_with(launcher)
    x = torch.zeros(4)

    def ways():
        launcher.launched.clear()
        launch(kernel, plan, (x,), ())
        return [launched[0] for launched in launcher.launched]

    launch(kernel, plan, (x,), ())
    assert ways() == ["direct"]
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(print)
        try:
            assert ways() == [(1, 1, 1)]  # Triton's own way, in which it calls them
        finally:
            chain.remove(print)
        assert ways() == ["direct"]


def test_the_launcher_of_the_triton_that_is_installed_is_known(driver):
    """If this fails, Triton has changed what its launcher takes: read it, and add it to those that are known."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "launch"):
        setattr(launcher, name, 0)  # as it would find them out about a kernel
    compiled = type("Compiled", (), {"run": launcher, "function": 1, "packed_metadata": ()})
    assert Direct.of(compiled) is not None, inspect.signature(launcher)


@needs_kernels
def test_no_two_combinations_of_types_and_constants_share_a_plan(monkeypatch):
    """A plan remembers what was compiled for it: all that a compiled kernel depends on must tell plans apart."""
    seen = {}

    def noted(kernel, plan, tensors, numbers, fixed=NOTHING):
        tensors += fixed.tensors
        assert all(type(number) is int and abs(number) < 2**31 for number in numbers)
        types = tuple(None if x is None else x.dtype for x in tensors)
        key = (kernel, plan.constants, types, tuple(plan.options.items()), plan.grid)
        assert seen.setdefault(id(plan), (plan, key))[1] == key

    for module in (linear, v, elementwise, rms_norm, experts):
        monkeypatch.setattr(module, "launch", noted)
    types = [torch.float32, torch.float16, torch.bfloat16]
    for rule, m, T, d in itertools.product(
        (FISHER, FIG4, EUCLIDEAN, INTERACTING, *map(make_rule, ("none", "spring"))), (1, 3), (7, 70), (5, 16)
    ):
        given = batch(m, T, d, 2 * d, 6, dtype=torch.float32)
        ledger = Run.of(given, rule).ledger
        samples = given.samples if rule.needs.overlap else None
        routing = Routing.of(torch.zeros(m * T, 1, device=DEVICE, dtype=torch.int64), 1, given.sequences)
        for dtype, out in itertools.product(types, types):
            g, a = given.g.to(dtype), given.a.to(dtype)
            overlap = None
            for bias in (True, False):
                if rule.needs.overlap:
                    arguments = (given.sequences, given.samples, Entry(ledger, 0))
                    linear.overlaps(g, a, bias, *arguments, finish=True)
                    overlap = linear.overlaps(g, a, bias, *arguments)
            V = torch.zeros(m, d, 3, device=DEVICE)
            if rule.needs.norm or rule.needs.ntk:
                v.v_coefficients(V, Entry(ledger, 0), overlap)
                v.VBlocks([V[0].numel()] * 2, Entry(ledger, 0), overlap).add(V)
                v.VSums(rule).add(V)
            if rule.needs.direction:
                D, projection = (torch.zeros(shape, device=DEVICE, dtype=out) for shape in ((d, 3), (1, m)))
                for direction in ((D,), (D.t().contiguous().t(),), (D[:, 1:], D[:, 0]), (D[:, 1:], D[:, 0].to(dtype))):
                    v.v_coefficients(V, Entry(ledger, 0), direction=direction)
                experts.expert_coefficients(g, a, True, routing, None, Entry(ledger, 0), projection)
                elementwise.elementwise_gradient(g, given.sequences, None, Entry(ledger, 0), out, direction=(D[:, 0],))
            v.combined(V, Entry(ledger, 0), out)
            linear.scaled(a, given.sequences, Entry(ledger, 0))
            for bias in (True, False):
                experts.expert_coefficients(g, a, bias, routing, samples, Entry(ledger, 0))
            experts.scaled(a, routing, Entry(ledger, 0))
            elementwise.elementwise_gradient(g, given.sequences, samples, Entry(ledger, 0), out)
            x, weight = g.view(m, T, d), torch.ones(d, device=DEVICE, dtype=out)
            for flavour in (rms_norm.Flavour(1e-6, 0.0, True), rms_norm.Flavour(1e-6, 1.0, False)):
                y, scale = rms_norm.forward(x, weight, flavour)
                _, sums, by_position = rms_norm.backward(x, y, weight, scale, flavour, given.sequences, samples)
                elementwise.elementwise_gradient(by_position, given.sequences, samples, Entry(ledger, 0), out, sums)
    assert len(seen) > 100
