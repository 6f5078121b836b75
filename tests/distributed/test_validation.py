"""Two ranks, real processes over gloo, validate as one does, and sharded weights come back from a validation."""

import copy
import importlib.util

import pytest
import torch
from peft import get_peft_model

from isopo_trl.validation import ValidationCallback
from tests import tiny, training
from tests.distributed.process_group import load_runs
from tests.distributed.validation_worker import KL_ROWS, ROWS, build


pytestmark = pytest.mark.distributed

RUNS = {"ddp-full": "DistributedDataParallel", "fsdp2-full": "FSDPQwen3ForCausalLM"}
if importlib.util.find_spec("deepspeed") is not None:
    RUNS |= {"zero3-lora": "DeepSpeedEngine", "zero3-full": "DeepSpeedEngine"}


def groups(folder):
    return [(2, "validation_worker.py", folder / "validation.pt", *RUNS)]


@pytest.fixture(scope="module")
def results(launched):
    """What each run left on each of two ranks."""
    return load_runs(launched / "validation.pt")


def ranks(results, run):
    for result in results[run]:
        assert "error" not in result, result["error"]
    return results[run]


def policies(run, record):
    """The policy before training and at this validation, whole, in this process."""
    initial, adapter = build(run.partition("-")[2])
    initial = initial if adapter is None else get_peft_model(initial, adapter)
    policy = copy.deepcopy(initial)
    missing, unexpected = policy.load_state_dict(record["weights"], strict=False)
    assert not unexpected and (adapter is not None or not missing)
    return initial.eval(), policy.eval()


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_finish_with_the_same_figures(run, results):
    one, two = ranks(results, run)
    assert one["wrapped"] == RUNS[run]
    assert [line["step"] for line in one["history"]] == [0, 2] and one["history"] == two["history"]


@pytest.mark.parametrize("run", RUNS)
def test_accuracy_is_that_of_one_rank(run, results, tmp_path):
    one, _ = ranks(results, run)
    for record, line in zip(one["record"], one["history"], strict=True):
        _, policy = policies(run, record)
        trainer = training.build(tmp_path, policy)
        alone = ValidationCallback(trainer, tiny.prompts(ROWS), tiny.reward, kl_prompts=0).validate()
        for name, value in alone.items():
            assert line[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("run", RUNS)
def test_divergence_is_zero_before_training_and_then_that_from_the_initial_policy(run, results):
    both = ranks(results, run)
    for place, line in enumerate(both[0]["history"]):
        initial, policy = policies(run, both[0]["record"][place])
        # Of each rank's completions, after the greedy ones, those of its share; the second's last one is filled up
        share, greedy = -(-KL_ROWS // 2), -(-ROWS // 2)
        sampled = [pair for result in both for pair in result["record"][place]["completed"][greedy : greedy + share]]
        total = 0.0
        for (prompt,), (completion,) in sampled[:KL_ROWS]:
            then, now = (training.log_probabilities(m, prompt, completion) for m in (initial, policy))
            total += ((then - now).exp() - 1 - (then - now)).sum().item()
        if line["step"] == 0:
            assert line["validation/kl"] == 0 and total == 0
        else:
            assert total / KL_ROWS > 0.1
            assert line["validation/kl"] == pytest.approx(total / KL_ROWS, rel=1e-3)


@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("zero3")])
def test_share_of_moved_weights_is_that_of_all_of_them_however_they_are_cut(run, results):
    one, two = ranks(results, run)
    first, last = (torch.cat([p.flatten() for p in record["weights"].values()]) for record in one["record"])
    rounded = last.bfloat16().float() - first.bfloat16().float()
    distances = {"weights/moved": last - first, "weights/moved_bf16": rounded}
    expected = {name: (distance.abs() > 0.001).float().mean().item() for name, distance in distances.items()}
    assert one["moved"] == two["moved"] == pytest.approx(expected) and 0 < expected["weights/moved"] < 1


@pytest.mark.parametrize("run", RUNS)
def test_weights_are_the_same_after_a_validation(run, results):
    for result in ranks(results, run):
        for record in result["record"]:
            assert record["training"]
            for name, before in record["weights"].items():
                assert torch.equal(record["weights_after"][name], before), name
        first, last = (record["weights"] for record in result["record"])
        assert not any(torch.equal(first[name], last[name]) for name in first)  # there was training in between
