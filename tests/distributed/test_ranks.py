"""Two ranks, real processes over gloo, make the step that one rank makes."""

import importlib.util

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.step_size.completion_length import AUTO_PLAIN
from isopo_trl.step_size.controller import CLOSE
from tests.distributed import worker
from tests.distributed.process_group import launch, load_runs
from tests.fisher_rows import test_step_scope as step_scope


pytestmark = pytest.mark.distributed

RUNS = ["trainer-fisher-full", "trainer-interacting-lora", "fsdp2-fisher-full", "fsdp2-fig4-lora"]
RUNS += ["fsdp2-fig4-experts"]
RUNS += ["fsdp2-fisher-dora"]  # gradients per sequence
RUNS += ["resumed-fisher-full", "grouped-interacting-full"]
RUNS += ["skipped-none-full", "skippedfsdp-euclidean-full", "skipped-fisher-full"]
RUNS += ["overflow-fisher-full", "overflowfsdp-fisher-full"]
RUNS += ["target-fisher-full", "targetfsdp-fisher-full", "undone-fisher-full"]
RUNS += ["narrow-fisher-bf16", "narrowfsdp-fisher-bf16", "shards-none-bf16"]
RUNS += ["step-fig4-full", "steptrainer-fisher-full"]
RUNS += ["direction-spring-full", "direction-proma-lora"]
SLOW = ["stepfsdp2-fisher-full"]
if importlib.util.find_spec("deepspeed") is not None:
    SLOW += ["scheduled2-fisher-full", "scheduled3-fisher-full"]
    SLOW += ["resumedtarget2-fisher-full", "resumedtarget3-fisher-full"]
    SLOW += ["stepzero2-fisher-full", "stepzero3-fisher-full", "zero3-fisher-dora"]
    RUNS += ["zero2-fisher-full", "zero3-fisher-full", "overflow2-fisher-full", "overflow3-fisher-full"]
    RUNS += ["skipped2-none-full", "skipped3-none-full", "target2-fisher-full", "target3-fisher-full"]
    RUNS += ["refused-fisher-full"]
    # After a run under ZeRO-3, which leaves a function of its own in the place of PyTorch's
    RUNS += ["zero2-fisher-experts", "zero2-fisher-expertslora", "zero2-fisher-dora", "zero3-fisher-experts"]


def runs(*modes, names=(*RUNS, *SLOW)):
    """The runs of these modes, as parameters; those of `SLOW` are slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in names
        if name.partition("-")[0] in modes
    ]


def groups(folder):
    return [(2, "worker.py", folder / "ranks.pt", *RUNS)]


@pytest.fixture(scope="module")
def quick_results(launched):
    """What each run left on each of two ranks."""
    return load_runs(launched / "ranks.pt")


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    output = tmp_path_factory.mktemp("slow") / "ranks.pt"
    launch((2, "worker.py", output, *SLOW))
    return load_runs(output)


@pytest.fixture
def results(request):
    """Those of the launch that has the run of which the test has the name."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    return request.getfixturevalue("slow_results" if name in SLOW else "quick_results")


def ranks(results, name):
    for result in results[name]:
        assert "error" not in result, result["error"]
    return results[name]


def assert_same(one, first, second, tolerance):
    assert one["weights"].keys() == first["weights"].keys()
    for name, expected in one["weights"].items():
        error = (first["weights"][name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error}"
        assert torch.equal(first["weights"][name], second["weights"][name]), f"{name} differs between ranks"
    assert torch.equal(first["mean"], second["mean"]), "running statistics differ between ranks"


# One rank is this process


@pytest.mark.parametrize("name", runs("trainer"))
def test_ddp_trains_to_the_weights_of_one_rank(name, results, tmp_path):
    _, rule, weights = name.split("-")
    one, two = worker.run(tmp_path, "trainer", rule, weights), ranks(results, name)
    assert two[0]["wrapped"] == "DistributedDataParallel"
    assert_same(one, *two, 1e-5)
    for left, right in zip(one["logs"], two[0]["logs"], strict=True):
        for name in [name for name in left if name.startswith("isopo/")] + ["grad_norm"]:
            assert left[name] == pytest.approx(right[name], rel=1e-4), name
    # What the noise scale is made of
    assert one["moments"].tolist() == pytest.approx(two[0]["moments"].tolist(), rel=1e-3)
    assert one["moments"].any() == (rule == "interacting")


@pytest.mark.parametrize("name", runs("direction"))
def test_a_direction_under_ddp_is_that_of_the_reduced_gradient_or_of_the_ranks_own(name, results):
    """SPRING's is the same on all ranks; PROMA's is what the rank has accumulated before gradients are reduced."""
    first, second = (result["gradients"] for result in ranks(results, name))
    for parameter, gradient in first[0].items():
        error = (gradient - first[1][parameter]).norm() / first[1][parameter].norm()
        assert error < 1e-4, f"{parameter}: {error}"
        assert torch.equal(gradient, second[0][parameter]), f"{parameter} differs between ranks"


@pytest.mark.parametrize("name", runs("fsdp2"))
def test_fsdp2_trains_to_the_weights_of_one_rank(name, results, tmp_path):
    _, rule, weights = name.split("-")
    one, two = worker.run(tmp_path, "loop", rule, weights), ranks(results, name)
    assert two[0]["wrapped"].startswith("FSDP")
    assert_same(one, *two, 1e-5)


def alone_for(name):
    """The mode in which one rank makes the same steps."""
    return "targetcopied" if name[len("target")].isdigit() else "target"


def assert_steps_of_one_length(two, weights, tmp_path, alone):
    """Each rank sees half of the sequences that a step is measured by."""
    one = worker.run(tmp_path, alone, "fisher", weights)
    first, second, *_ = one["logs"]
    if alone == "target":  # plain steps, of which the first finds its rate
        assert first["step/kl_per_completion"] == pytest.approx(AUTO_PLAIN, rel=CLOSE) and first["learning_rate"] < 10
    else:
        assert first["step/kept"] < 0.1 and second["step/kept"] != first["step/kept"]
    assert_same(one, *two, 1e-4)  # what a step is multiplied by has the rounding of its measurement
    for left, right in zip(one["logs"], two[0]["logs"], strict=True):
        names = [name for name in left if name.startswith("step/")] + ["learning_rate"]
        assert len(names) == 5
        for name in names:
            assert left[name] == pytest.approx(right[name], rel=1e-3), name
    return one


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("target")])
def test_ranks_make_steps_of_one_length(name, results, tmp_path):
    assert_steps_of_one_length(ranks(results, name), "full", tmp_path, alone_for(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name.startswith("scheduled")])
def test_a_schedule_goes_on_from_its_own_rates_where_deepspeed_makes_its_step(name, slow_results, tmp_path):
    one = assert_steps_of_one_length(ranks(slow_results, name), "full", tmp_path, alone="scheduled")
    assert one["logs"][0]["step/kl"] > 3 * one["logs"][2]["step/kl"]  # a third of the target


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name.startswith("resumedtarget")])
def test_runs_with_a_target_resume_with_the_same_numbers_under_deepspeed(name, slow_results):
    two = ranks(slow_results, name)
    assert all("step/stopped_early" in line for line in two[0]["logs"])  # a drift is bounded as well
    assert_unbroken(two)


def test_shards_are_taken_back_by_the_moments_of_adamw_as_from_a_copy(results, tmp_path):
    two = ranks(results, "undone-fisher-full")
    assert two[0]["wrapped"].startswith("FSDP") and two[0]["bytes_kept"] == two[1]["bytes_kept"] == 0
    one = assert_steps_of_one_length(two, "full", tmp_path, alone="kept")
    assert one["bytes_kept"] > 0


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_settings_of_deepspeed_that_have_no_steps_of_a_given_length_are_refused_at_construction(results):
    for result in ranks(results, "refused-fisher-full"):
        assert "target_kl=0.001 does not work with 'scheduler'" in result["said"]


# Under `fisher_scope="step"`


def assert_gradients_of_the_step(two, rule, lora):
    first, second = two
    model = step_scope.build("qwen3", lora)
    expected = step_scope.expectation(lora, rule, by_content=True)[-1]
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = first["gradients"][name]
    step_scope.check(model, step_scope.of(model, expected))
    model = step_scope.build("qwen3", lora)
    isopo = ISOPO(model, rule, seed=42, fisher_samples=step_scope.SAMPLES, fisher_scope="step")
    for step in range(step_scope.STEPS):
        step_scope.run_step(model, isopo, step_scope.batch_of(step), [step_scope.SEQUENCES])
    one = isopo.state_dict()["rows"]["rows"]
    for layer, rows in first["rows"].items():
        for name, x in rows.items():
            assert torch.equal(x, second["rows"][layer][name]), f"{name} of {layer} differs"
            torch.testing.assert_close(x, one[layer][name], rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", runs("step"))
def test_ranks_that_cut_a_step_in_their_own_ways_have_the_gradients_of_the_definition(name, results):
    _, rule, weights = name.split("-")
    assert_gradients_of_the_step(ranks(results, name), rule, weights == "lora")


@pytest.mark.parametrize("name", runs("steptrainer", "stepfsdp2", "stepzero2", "stepzero3"))
def test_all_engines_train_to_the_weights_of_one_rank_with_the_rows_of_the_step(name, results, tmp_path):
    mode, rule, weights = name.split("-")
    one = worker.run(tmp_path, "steploop" if "fsdp" in mode else "steptrainer", rule, weights)
    two = ranks(results, name)
    assert_same(one, *two, 1e-3 if "zero" in mode else 1e-5)
    for mine, other in zip(two[0]["rows"], two[1]["rows"], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", [run for run in runs("zero2", "zero3") if run.values[0] != "zero3-fisher-dora"])
def test_deepspeed_trains_to_the_weights_of_one_rank(name, results, tmp_path):
    _, rule, weights = name.split("-")
    one, two = worker.run(tmp_path, "trainer", rule, weights), ranks(results, name)
    assert two[0]["wrapped"] == "DeepSpeedEngine"
    assert_same(one, *two, 1e-3)  # DeepSpeed clips and sums in an order of its own


@pytest.mark.parametrize("name", runs("zero3", names=[name for name in SLOW if name == "zero3-fisher-dora"]))
def test_gradients_per_sequence_are_refused_under_zero_3(name, results):
    for result in results[name]:
        assert "is not whole when" in result["error"]


def test_ranks_that_resume_inside_a_generation_end_with_the_weights_of_an_unbroken_run(results):
    assert_unbroken(ranks(results, "resumed-fisher-full"))


@pytest.mark.parametrize("name", ["narrow-fisher-bf16", "narrowfsdp-fisher-bf16"])
def test_weights_in_bf16_resume_to_the_last_bit_and_are_rounded_alike_on_all_ranks(name, results):
    two = ranks(results, name)
    assert "fsdp" not in name or two[0]["logs"][0]["step/kept"] < 1
    assert_unbroken(two)
    assert all(weight.dtype == torch.bfloat16 for weight in two[0]["weights"].values())


def test_shards_are_rounded_as_the_whole_is_and_keep_their_remainders(results):
    for rank, result in enumerate(ranks(results, "shards-none-bf16")):
        assert len(result) == 4
        for kind, (whole, sharded) in result.items():
            assert len(whole) == len(sharded) == (6 if "exact" in kind else 3)
            for name, weight in whole.items():
                assert torch.equal(sharded[name], weight), f"{kind}: {name} on rank {rank}"


def assert_unbroken(two):
    first, second = two
    for name, expected in first["whole"].items():
        assert torch.equal(first["weights"][name], expected), name
        assert torch.equal(second["weights"][name], expected), name


def test_the_completions_of_a_prompt_are_one_microbatch_of_one_rank(results):
    two = ranks(results, "grouped-interacting-full")
    for result in two:
        assert result["generated"] == [8, 8] and len(result["prompts"]) == 3
        for microbatch in result["prompts"]:
            assert len(microbatch) == 4 and len(set(microbatch)) == 1, "a group is cut"
    everywhere = [microbatch[0] for result in two for microbatch in result["prompts"]]
    assert len({prompt for prompt, _ in everywhere}) == 6
    # The first two microbatches of both ranks are one generation
    assert len({number for result in two for microbatch in result["prompts"][:2] for _, number in microbatch}) == 4


@pytest.mark.parametrize("name", runs("skipped", "skippedfsdp", "skipped2", "skipped3"))
def test_ranks_with_unequal_shares_of_advantages_make_the_step_of_one_rank(name, results, tmp_path):
    """Two microbatches of each rank are a step; all ranks make as many passes as the one with the most sequences."""
    _, rule, weights = name.split("-")
    # The whole batch without a rule; else statistics are over the sequences with an advantage, on one rank as well
    one, two = worker.skipped(tmp_path, rule, weights, skip=rule != "none"), ranks(results, name)
    deepspeed = name.startswith(("skipped2", "skipped3"))
    assert_same(one, *two, 1e-3 if deepspeed else 1e-5)
    if rule != "none":
        torch.testing.assert_close(two[0]["mean"], one["mean"], rtol=1e-4, atol=0)
    for rank, result in enumerate(two):
        # DeepSpeed's optimizer steps after a backward pass alone, so that the second step has one
        assert result["passes"] == 2 + deepspeed + 2 + 1, f"rank {rank}"
        assert result["fractions"] == pytest.approx([8 / 16, 1, 9 / 16, 12 / 16])


@pytest.mark.parametrize("name", runs("overflow", "overflowfsdp", "overflow2", "overflow3"))
def test_a_gradient_that_overflows_on_one_rank_stops_all_of_them_before_the_optimizer(name, results):
    first, second = ranks(results, name)
    assert "The gradient of this step overflows" in first["said"] and "as they were" in first["said"]
    assert second["said"] == first["said"]
    for result in (first, second):
        assert result["step"] == 1
        for weight, before in result["before"].items():
            assert torch.equal(result["weights"][weight], before), weight
