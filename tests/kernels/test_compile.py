"""Every Triton kernel compiles for the GPUs that it is meant for, and fits their shared memory; no GPU is needed."""

import itertools
import os
import re
import types

import pytest
import torch

from isopo_trl.geometry.routing import Routing
from isopo_trl.geometry.sequences import SampleRows, Samples, Sequences
from isopo_trl.kernels import divergence, elementwise, experts, fisher_rows, gated, halves, linear, rms_norm, rotary, v
from isopo_trl.kernels import launch as launching
from isopo_trl.kernels.coefficients import Entry, KernelLedger, rule_is_in_kernels
from isopo_trl.kernels.launch import INTERPRET, NOTHING
from isopo_trl.rules import make_rule
from isopo_trl.rules.running import RunningStatistics


triton = pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("under TRITON_INTERPRET=1 nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


MODULES = (linear, v, elementwise, rms_norm, rotary, gated, experts, fisher_rows, halves, divergence)
# Compute capability and what a block may have of shared memory: A100, H100
MEMORY = {80: 163 * 1024, 90: 227 * 1024}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
RULES = {
    "fisher": make_rule("fisher"),
    "fig4": make_rule("fig4", regularization=0.1, keep_small=True, scale="paper"),
    "interacting": make_rule("interacting"),
}


def has_assembler():
    """Whether Triton comes with what makes a program for a GPU."""
    try:
        from triton import knobs

        return os.access(knobs.nvidia.ptxas.path, os.X_OK)
    except (ImportError, AttributeError, RuntimeError):  # another layout of Triton, or no assembler
        return False


pytestmark = pytest.mark.skipif(not has_assembler(), reason="Triton has no assembler for NVIDIA GPUs here")


# Of an H200
PROCESSORS = 132

# Compiling takes seconds a kernel: a few combinations every time, the others with `-m slow`
QUICK = {(90, "fisher", torch.bfloat16), (80, "interacting", torch.float32)}
COMBINATIONS = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
    for case in itertools.product(MEMORY, RULES, (torch.bfloat16, torch.float32))
]


@pytest.fixture
def gpu(capability, monkeypatch):
    """There seems to be a GPU of this compute capability."""
    major, minor = divmod(capability, 10)
    memory = MEMORY.get(capability, 2**16)
    properties = types.SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    forget()
    yield
    forget()


@pytest.fixture
def compiled(gpu, capability, monkeypatch):
    """Runs what is called on a GPU that is not there: `{name of a kernel: its program}` of what it launches."""
    found = {}
    pipeline = linear._pipeline
    monkeypatch.setattr(linear, "_pipeline", lambda dtype, _, rows: pipeline(dtype, torch.device("cuda"), rows))
    monkeypatch.setattr(linear, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(v, "shared_memory", lambda _: launching.shared_memory(torch.device("cuda")))
    monkeypatch.setattr(v, "has_warp_groups", lambda _: launching.has_warp_groups(torch.device("cuda")))

    def launch(kernel, plan, tensors, numbers, fixed=NOTHING):
        tensors += fixed.tensors
        assert all(0 < size < 2**31 for size in plan.grid) and len(plan.grid) == 3
        assert all(size < 2**16 for size in plan.grid[1:])
        constants = plan.constants
        names = kernel.arg_names
        given = len(tensors) + len(numbers)
        assert len(names) == given + len(constants)
        there = {place: TYPES[x.dtype] for place, x in enumerate(tensors) if x is not None}
        kinds = [there.get(place, "constexpr") for place in range(len(tensors))]
        signature = dict(zip(names, [*kinds, *["i32"] * len(numbers)], strict=False))
        signature |= dict.fromkeys(names[given:], "constexpr")
        absent = {(place,): None for place in range(len(tensors)) if place not in there}
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs=absent | {(given + place,): value for place, value in enumerate(constants)},
            attrs={(place,): [["tt.divisibility", 16]] for place in there},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=plan.options)
        assert made.metadata.shared <= MEMORY[capability], f"{names[0]}: {made.metadata.shared} bytes"
        found[kernel.__name__] = made

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
    return found


def forget():
    """What was found out about another device, and planned for it."""
    launching._is_new_enough.cache_clear()
    for module in MODULES:
        for name, plan in vars(module).items():
            if name.endswith(("_plan", "_tiling_of")):
                plan.cache_clear()


class OnGPU(torch.Tensor):
    """A tensor without data that says it is on a GPU."""

    is_cuda = True


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype).as_subclass(OnGPU)


def microbatch(rule, m, T, n, named=False):
    running = RunningStatistics(2, 0.9, rule, torch.device("meta"))
    samples = Samples(tensor(n, dtype=torch.int64), tensor(n, dtype=torch.bool))
    names = tensor(n + m, dtype=torch.int64) if named else None
    return Sequences.regular(m, T), samples, KernelLedger(running.open(tensor(m)), names)


@pytest.mark.parametrize(("capability", "rule", "dtype"), COMBINATIONS)
def test_kernels_compile_and_fit(compiled, rule, dtype):
    rule = RULES[rule]
    m, T, p, d, n = 8, 1024, 1024, 3072, 64
    sequences, samples, ledger = microbatch(rule, m, T, n)
    expected = {"_scale_kernel", "_elementwise_kernel"}
    g, a = tensor(m * T, p, dtype=dtype), tensor(m * T, d, dtype=dtype)
    overlap = None
    explicit = rule.needs.norm or rule.needs.ntk
    if rule.needs.overlap:
        overlap = linear.overlaps(g, a, True, sequences, samples, Entry(ledger, 0), finish=not explicit)
        expected |= {"_overlap_kernel"}
    if explicit:
        V = tensor(m, p, d)
        v.v_coefficients(V, Entry(ledger, 0), overlap)
        v.combined(V, Entry(ledger, 0), dtype)
        expected |= {"_ntk_kernel" if rule.needs.ntk else "_norm_kernel", "_combine_kernel"}
    linear.scaled(g, sequences, Entry(ledger, 0))
    linear.scaled(g, sequences, Entry(ledger, 0), plus=g)
    elementwise.elementwise_gradient(g, sequences, samples if rule.needs.overlap else None, Entry(ledger, 0), dtype)
    assert set(compiled) == expected


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (80, torch.float32),  # the least memory, the largest numbers
        pytest.param(90, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(80, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(90, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_steps_under_way_over_the_features_fit_with_the_largest_block_of_samples(compiled, dtype):
    sequences, samples, ledger = microbatch(RULES["fig4"], 2, 64, 128)
    g = tensor(128, 4096, dtype=dtype)
    linear.overlaps(g, g, False, sequences, samples, Entry(ledger, 0))
    assert compiled["_overlap_kernel"].metadata.shared > 2**15  # there is something under way


@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, torch.bfloat16), pytest.param(80, torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_overlaps_of_many_rows_compile_and_fit(compiled, dtype):
    shared = []
    for m in (8, PROCESSORS // 4):  # the more there are, the more at once
        sequences, samples, ledger = microbatch(RULES["fisher"], m, 512, 64)
        g = tensor(m * 512, 4096, dtype=dtype)
        linear.overlaps(g, g, False, sequences, samples, Entry(ledger, 0), finish=True)
        shared.append(compiled["_overlap_kernel"].metadata.shared)
    assert shared[0] != shared[1]


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_the_steps_under_way_over_gradients_fit_with_the_most_sequences(compiled):
    ledger = microbatch(RULES["interacting"], 64, 8, 0)[2]
    v.v_coefficients(tensor(64, 896, 896), Entry(ledger, 0))
    assert compiled["_ntk_kernel"].metadata.shared > 2**15


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fig4", "interacting"])
@pytest.mark.parametrize("capability", MEMORY)
def test_kernels_of_many_sequences_compile_and_fit(compiled, rule):
    rule = RULES[rule]
    m = 64  # the most that `usable` allows with 128 samples, and for the kernel
    sequences, samples, ledger = microbatch(rule, m, 64, 128)
    g, V = tensor(m * 64, 96), tensor(m, 96, 64)
    assert rule_is_in_kernels(g, m, 128, rule)
    overlap = None
    if rule.needs.overlap:
        overlap = linear.overlaps(g, g, False, sequences, samples, Entry(ledger, 0))
    v.v_coefficients(V, Entry(ledger, 0), overlap)
    v.VSums(rule).add(V)
    elementwise.elementwise_gradient(
        g, sequences, samples if rule.needs.overlap else None, Entry(ledger, 0), torch.float32
    )
    assert "_elementwise_kernel" in compiled


@pytest.mark.parametrize(
    ("capability", "rule", "m"),
    [
        (90, "proma", 8),
        pytest.param(80, "spring", 64, marks=pytest.mark.slow),  # the least memory, the most sequences
        pytest.param(80, "proma", 64, marks=pytest.mark.slow),
        pytest.param(90, "spring", 64, marks=pytest.mark.slow),  # warps that multiply together
        pytest.param(90, "spring", 8, marks=pytest.mark.slow),
        pytest.param(90, "proma", 17, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_with_a_direction_compile_and_fit(compiled, rule, m):
    """Of a weight, of one with a bias, of one that is transposed; in other types than gradients; and without one."""
    p, d, E, k = 1024, 3072, 16, 4
    sequences, _, ledger = microbatch(make_rule(rule), m, 64, 0)
    entry, programs = Entry(ledger, 0), set()
    weight, bias = tensor(p, d, dtype=torch.bfloat16), tensor(p)
    for direction in ((weight,), (weight, bias), (tensor(d, p).t(),), None):
        v.v_coefficients(tensor(m, p, d + (direction is not None and len(direction) > 1)), entry, direction=direction)
        programs.add(compiled["_ntk_kernel"].asm["ptx"])
    assert len(programs) == 4
    g = tensor(m * 64, 2 * p, dtype=torch.bfloat16)
    elementwise.elementwise_gradient(g, sequences, None, entry, torch.bfloat16, direction=(bias, bias))
    integers = dict.fromkeys(("choices", "keys", "order"), tensor(m * 64 * k, dtype=torch.int64))
    routing = Routing(experts=E, sequences=m, **{**integers, "choices": tensor(m * 64, k, dtype=torch.int64)})
    experts.expert_coefficients(tensor(m * 64 * k, p), tensor(m * 64 * k, d), True, routing, None, entry, tensor(E, m))
    kernels = {"_ntk_kernel", "_elementwise_kernel", "_expert_products_kernel", "_expert_coefficients_kernel"}
    assert set(compiled) == kernels


def arrangement(program):
    """How gradients `[32, 64]`, which a `program` fetches 16 bytes at a time, lie in shared memory."""
    assert "0x10" in re.findall(r"cp\.async\.c.*?(0x\w+)", program.asm["ptx"])
    (kind,) = set(re.findall(r"async_copy.*> -> <32x64xf32, (#\w+)", program.asm["ttgir"]))
    (found,) = re.findall(rf"^{kind} = (.*)$", program.asm["ttgir"], re.MULTILINE)
    return found


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_a_direction_leaves_gradients_in_shared_memory_as_products_of_matrices_read_them(compiled):
    """Of any layout and type. What is arranged otherwise is read from one bank by many threads."""
    arranged, entry, p, d = [], Entry(microbatch(make_rule("spring"), 32, 64, 0)[2], 0), 1024, 3072
    for dtype in (torch.bfloat16, torch.float32):
        weight, bias = tensor(p, d, dtype=dtype), tensor(p, dtype=dtype)
        for direction in ((weight,), (weight, bias), (tensor(d, p, dtype=dtype).t(),), None):
            v.v_coefficients(tensor(32, p, d + (direction is not None and len(direction) > 1)), entry, None, direction)
            arranged.append(arrangement(compiled["_ntk_kernel"]))
    assert set(arranged) == {arranged[-1]}


@pytest.mark.parametrize("capability", [90])
@pytest.mark.parametrize("rule", ["spring", "proma"])
def test_elementwise_parameters_with_a_direction_compile_and_fit(compiled, rule):
    sequences, _, ledger = microbatch(make_rule(rule), 8, 1024, 0)
    rows, direction = tensor(8 * 1024, 1024, dtype=torch.bfloat16), (tensor(1024, dtype=torch.bfloat16),)
    elementwise.elementwise_gradient(rows, sequences, None, Entry(ledger, 0), rows.dtype, direction=direction)
    assert set(compiled) == {"_elementwise_kernel"}


@pytest.mark.parametrize("capability", [80])
def test_without_a_direction_spring_is_the_program_of_interacting(compiled):
    made = []
    for rule in (make_rule("spring"), make_rule("interacting", scale="paper")):
        ledger = microbatch(rule, 3, 64, 0)[2]
        v.v_coefficients(tensor(3, 64, 64), Entry(ledger, 0))
        made.append(compiled["_ntk_kernel"].asm["ptx"])
    assert made[0] == made[1]


ON_BOTH = pytest.mark.parametrize(("capability", "dtype"), [(80, torch.float32), (90, torch.bfloat16)], ids=str)


@ON_BOTH
def test_rms_norm_compiles_and_fits(compiled, dtype):
    m, T, d = 8, 1024, 1024
    sequences, samples, ledger = microbatch(RULES["interacting"], m, T, 64)
    x, weight = tensor(m, T, d, dtype=dtype), tensor(d, dtype=dtype)
    flavour = rms_norm.Flavour(1e-6, 0.0, True)
    y, scale = rms_norm.forward(x, weight, flavour)
    _, sums, of_samples = rms_norm.backward(x, y, weight, scale, flavour, sequences, samples)
    elementwise.elementwise_gradient(of_samples, sequences, None, Entry(ledger, 0), dtype, sums)
    assert set(compiled) == {"_forward_kernel", "_backward_kernel", "_elementwise_kernel"}


def loads_of_one(program):
    """How many instructions of a `program` read one number in bf16."""
    return program.asm["ptx"].count("ld.global.b16")


@ON_BOTH
def test_rotary_embeddings_compile_and_are_read_eight_at_a_time(compiled, dtype):
    q, k = (tensor(8, 1024, heads, 128, dtype=dtype).transpose(1, 2) for heads in (16, 8))
    for back, angles in ((False, 1), (True, 8)):
        cos = tensor(angles, 1024, 128, dtype=dtype)
        rotary.rotated(q, k, cos, cos, dtype, back)
        assert loads_of_one(compiled["_rotary_kernel"]) == 0
    assert set(compiled) == {"_rotary_kernel"}


@ON_BOTH
def test_gated_activations_compile_and_are_read_eight_at_a_time(compiled, dtype):
    x = tensor(8, 1024, 3072, dtype=dtype)
    gated.forward(x, x)
    gated.backward(x, x, x)
    assert set(compiled) == {"_forward_kernel", "_backward_kernel"}
    assert all(loads_of_one(program) == 0 for program in compiled.values())


@pytest.mark.parametrize("capability", [90])
def test_gradients_of_norms_are_read_eight_at_a_time_where_they_are_aligned(compiled):
    x, weight, scale = tensor(8, 64, 1024, dtype=torch.bfloat16), tensor(1024, dtype=torch.bfloat16), tensor(512)
    loads = []
    for width in (1024, 1025):
        g = tensor(8, 64, width, dtype=torch.bfloat16)[..., :1024]
        rms_norm.backward(x, g, weight, scale, rms_norm.Flavour(1e-6, 0.0, True), Sequences.regular(8, 64), None)
        loads.append(loads_of_one(compiled["_backward_kernel"]))
    assert loads[0] < loads[1]


@pytest.mark.parametrize(
    ("capability", "rule", "dtype"),
    [
        pytest.param(*case, marks=[] if case == (90, "fisher", torch.bfloat16) else pytest.mark.slow, id=f"{case}")
        for case in itertools.product(MEMORY, RULES, (torch.bfloat16, torch.float32))
    ],
)
def test_kernels_of_experts_compile_and_fit(compiled, rule, dtype):
    rule = RULES[rule]
    m, T, E, k, p, d, n = 8, 1024, 128, 8, 1536, 2048, 64
    _, samples, ledger = microbatch(rule, m, T, n)
    integers = dict.fromkeys(("choices", "keys", "order"), tensor(m * T * k, dtype=torch.int64))
    routing = Routing(experts=E, sequences=m, **{**integers, "choices": tensor(m * T, k, dtype=torch.int64)})
    g, a = tensor(m * T * k, p, dtype=dtype), tensor(m * T * k, d, dtype=dtype)
    expected = {"_expert_coefficients_kernel", "_expert_scale_kernel"}
    expected |= {"_expert_overlap_kernel"} if rule.needs.overlap else set()
    expected |= {"_expert_products_kernel"} if rule.needs.norm or rule.needs.ntk else set()
    experts.expert_coefficients(g, a, True, routing, samples, Entry(ledger, 0))
    experts.scaled(g, routing, Entry(ledger, 0))
    experts.scaled(g, routing, Entry(ledger, 0), plus=g)
    assert set(compiled) == expected


@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, torch.bfloat16), pytest.param(80, torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_kernels_for_rows_from_before_compile_and_fit(compiled, dtype):
    m, T, p, d, n = 8, 1024, 1024, 3072, 64
    sequences, _, ledger = microbatch(RULES["fisher"], m, T, n, named=True)
    g, a = tensor(m * T, p, dtype=dtype), tensor(m * T, d, dtype=dtype)
    samples = SampleRows(tensor(n, p, dtype=dtype), tensor(n, d, dtype=dtype))
    source = tensor(n, dtype=torch.int64)
    into = samples.g, samples.inputs, source
    linear.overlaps(g, a, True, sequences, samples, Entry(ledger, 0), into, finish=True)
    fisher_rows.put({"g": samples.g, "a": samples.inputs}, {"g": g, "a": a}, source)
    fisher_rows.put({"g": tensor(n, p)}, {"g": g}, source)
    E, k = 16, 4
    choices = tensor(m * T, k, dtype=torch.int64)
    rows = {"g": tensor(m * T * k, p, dtype=dtype), "a": tensor(m * T * k, d, dtype=dtype)}
    of_experts = {"g": tensor(n, k, p, dtype=dtype), "a": tensor(n, k, d, dtype=dtype), "choices": choices[:n]}
    places = tensor(m * T * k, dtype=torch.int64)
    fisher_rows.put_routed(of_experts, *rows.values(), choices, places, source)
    routing = Routing(choices, E, m, places, places)
    experts.expert_coefficients(*rows.values(), True, routing, SampleRows(**of_experts), Entry(ledger, 0))
    elementwise.elementwise_gradient(g, sequences, SampleRows(tensor(n, p)), Entry(ledger, 0), dtype)
    entry = Entry(microbatch(RULES["fig4"], m, T, n, named=True)[2], 0)
    overlaps = linear.overlaps(g, a, True, sequences, samples, entry)
    v.v_coefficients(tensor(m, p, d + 1), entry, overlaps)
    kernels = {"_overlap_with_rows_kernel", "_put_kernel", "_put_routed_kernel", "_elementwise_kernel", "_norm_kernel"}
    assert set(compiled) == kernels | {"_expert_overlap_kernel", "_expert_coefficients_kernel"}


@pytest.mark.parametrize("capability", MEMORY)
def test_bf16_is_multiplied_before_it_is_rounded_to_float16(compiled, monkeypatch):
    """As float32, in which nothing is lost: LLVM takes the liberty to change the order."""
    made, compile = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **kwargs: made.append(compile(*args, **kwargs)) or made[-1])
    halves.halved(tensor(64, 64, dtype=torch.bfloat16), 16.0, 65504.0)
    (kernel,) = made
    assert "mul.f32" in kernel.asm["ptx"] and "mul.f16" not in kernel.asm["ptx"]


@pytest.mark.parametrize("capability", MEMORY)
def test_numbers_in_float16_compile(compiled):
    for shape in ((1024, 3072), (7, 33)):
        halves.in_halves(tensor(*shape), 16.0, 65504.0, 2048.0)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            halves.halved(tensor(*shape, dtype=dtype), 16.0, 65504.0)
    assert {name: made.metadata.shared for name, made in compiled.items()} == {"_halves_kernel": 0}


@pytest.mark.parametrize("capability", MEMORY)
def test_divergences_compile(compiled):
    for size in (151936, 50257, 90):
        for dtype in (torch.float32, torch.bfloat16):
            divergence.divergences(tensor(4, size, dtype=dtype), tensor(4, size, dtype=dtype))
    assert set(compiled) == {"_divergence_kernel"}


def test_every_kernel_is_tried_here():
    """A kernel added to the package is to be added to this file."""
    tried = {"_scale_kernel", "_elementwise_kernel", "_overlap_kernel", "_ntk_kernel", "_norm_kernel"}
    tried |= {"_combine_kernel", "_forward_kernel", "_backward_kernel", "_put_kernel"}
    tried |= {"_overlap_with_rows_kernel", "_put_routed_kernel", "_halves_kernel", "_divergence_kernel"}
    tried |= {"_rotary_kernel"} | {
        f"_expert_{what}_kernel" for what in ("overlap", "products", "coefficients", "scale")
    }
    there = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
    assert there == tried


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_kernels_are_for_gpus_from_ampere_on_and_for_as_many_sequences_as_fit(gpu, capability):
    new_enough = capability >= 80
    for rule in RULES.values():
        assert rule_is_in_kernels(tensor(4096, 96), 64, 128, rule) == new_enough
        assert not rule_is_in_kernels(tensor(8192, 96), 65, 128, rule)
        assert not rule_is_in_kernels(tensor(4096, 96, dtype=torch.float64), 2, 2, rule)


def test_on_a_cpu_the_kernels_are_left_alone():
    assert not rule_is_in_kernels(torch.ones(2, 2), 2, 2, RULES["fisher"])
