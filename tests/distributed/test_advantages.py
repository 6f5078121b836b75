"""Transforms of advantages see the completions of all ranks, and come to the same on each."""

import numpy as np
import pytest
import torch

from tests.advantages import definition
from tests.distributed.process_group import load_runs


RUNS = ("dcpo+cppo", "redit+empg")

pytestmark = pytest.mark.distributed


def groups(folder):
    return [(2, "advantages_worker.py", folder / "advantages-2.pt", *RUNS)]


@pytest.fixture(scope="module")
def results(launched):
    """What each run left on each rank."""
    return load_runs(launched / "advantages-2.pt")


def ranks(results, name):
    for result in results[name]:
        assert "error" not in result, result["error"]
    first, second = results[name]
    assert first["rewards"] == second["rewards"] and len(first["rewards"]) == 2
    assert torch.equal(first["weights"], second["weights"])
    return first, second, [a + b for a, b in zip(first["advantages"], second["advantages"], strict=True)]


def test_visits_of_a_prompt_are_those_of_all_ranks(results):
    first, second, found = ranks(results, "dcpo+cppo")
    visits = {}
    for number, rewards in enumerate(first["rewards"]):
        prompts, expected = first["prompts"][number] + second["prompts"][number], []
        for place in range(0, 6, 2):
            assert prompts[place] == prompts[place + 1]
            seen = visits.setdefault(tuple(prompts[place]), [])
            seen.append(rewards[place : place + 2])
            expected += definition.dcpo(seen)
        assert found[number] == pytest.approx(definition.cppo(expected, 2, 0.5), rel=1e-4, abs=1e-5)
        assert sum(map(bool, found[number])) == 3
    assert [len(seen) for seen in visits.values()] == [2, 2, 2]
    for result in (first, second):
        assert sorted(result["state"]["dcpo"]["visits"][:, 0].tolist()) == [2, 2, 2]
    for name, value in first["state"]["dcpo"].items():
        assert torch.equal(value, second["state"]["dcpo"][name]), name


def test_noise_is_the_same_and_the_batch_is_that_of_all_ranks(results):
    first, second, found = ranks(results, "redit+empg")
    assert first["state"] == second["state"] == {"redit": {"generations": 2}, "empg": {}}
    noise = np.random.default_rng([42, 0]).uniform(-0.05, 0.05, 6)
    noisy = definition.grpo([r + e for r, e in zip(first["rewards"][0], noise, strict=True)], 2)
    expected = definition.empg(first["rewards"][0], noisy, first["entropies"] + second["entropies"], 1.0)
    assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
