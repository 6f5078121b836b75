"""Phases of a step add up to the step, whichever way they lie inside one another."""

import json
import random

import pytest
from trl.extras.profiling import ProfilingContext

from tests import tiny


@pytest.fixture(scope="module")
def phases(importable):
    import phases

    return phases


@pytest.fixture
def ticking(phases):
    """A clock of phases, and what moves its time on."""
    now = [0.0]
    return phases.PhaseClock(lambda: now[0]), lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_phase_is_what_remains_without_those_inside_of_it(phases, ticking):
    clock, wait = ticking
    wait(1)
    with phases.at_trls_marks(clock), ProfilingContext("GRPOTrainer._prepare_inputs", []):
        wait(2)
        for name, seconds in (("sync_weights", 4), ("_get_per_token_logps_and_entropies", 5)):
            with ProfilingContext(f"GRPOTrainer.{name}", []):
                wait(seconds)
        with ProfilingContext("GRPOTrainer._calculate_rewards", []), ProfilingContext("GRPOTrainer.reward", []):
            wait(8)
        with ProfilingContext("GRPOTrainer.compute_loss", []):
            wait(3)
            with ProfilingContext("GRPOTrainer._get_per_token_logps_and_entropies", []):
                wait(7)
            with clock.phase("backward"):
                wait(11)
    wait(1)
    with ProfilingContext("GRPOTrainer.vLLM.generate", []):  # not told of it any more
        wait(1)
    expected = {"weight sync": 4, "old policy": 5, "scoring": 8, "forward": 10, "backward": 11, "other": 5}
    assert clock.cut() == {**dict.fromkeys(phases.PHASES, 0), **expected}
    assert not any(clock.cut().values())


def test_phases_add_up_to_the_whole_step(phases, ticking):
    rng, (clock, wait) = random.Random(0), ticking
    steps, wholes = [], []
    for _ in range(7):
        under_way, seconds = [], [rng.random() for _ in range(40)]
        for second in seconds:
            wait(second)
            if under_way and rng.random() < 0.5:
                clock.leave(under_way.pop())
            else:
                under_way.append(rng.choice(phases.PHASES))
                clock.enter(under_way[-1])
        while under_way:
            clock.leave(under_way.pop())
        steps.append(clock.cut())
        wholes.append(sum(seconds))
    assert [sum(step.values()) for step in steps] == pytest.approx(wholes)
    # Behind a warm-up of 3 steps, in cycles of 2: steps 4 and 5 (counted from 0); 6 is half of a cycle
    figures = phases.by_cycles(steps, 2, 3)
    assert figures["seconds"] == pytest.approx((wholes[4] + wholes[5]) / 2) == sum(figures["phases"].values())
    assert figures["measured_steps"] == 2 and figures["range"] == pytest.approx([figures["seconds"]] * 2)
    # Of several cycles the median one
    cycles = [(wholes[first] + wholes[first + 1]) / 2 for first in (0, 2, 4)]
    figures = phases.by_cycles(steps, 2, 0)
    assert figures["seconds"] == pytest.approx(sorted(cycles)[1]) == sum(figures["phases"].values())
    assert figures["range"] == pytest.approx([min(cycles), max(cycles)]) and figures["measured_steps"] == 6
    with pytest.raises(ValueError, match="no cycle of 4"):
        phases.by_cycles(steps, 4, 5)


def test_the_figure_is_made_of_the_file_alone(phases, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    of_phase = {phase: 0.5 + number for number, phase in enumerate(phases.PHASES)}
    figures = {"phases": of_phase, "seconds": sum(of_phase.values()), "range": [30.0, 34.0]}
    report = {"title": "a title", "methods": {"grpo": figures, "fisher+skip": figures}}
    (tmp_path / "phases.json").write_text(json.dumps(report))
    phases.main(["--from", str(tmp_path / "phases.json"), "--plot", str(tmp_path / "phases.png")])
    assert (tmp_path / "phases.png").stat().st_size > 1000
    table = capsys.readouterr().out
    assert f"{figures['seconds']:.3f}" in table and "30.000 to 34.000" in table
    # What the file holds stays there when others are run
    options = phases.parse(["--output", str(tmp_path / "phases.json")])
    options.methods = []
    assert phases.run(options, []) == report


@pytest.fixture
def small(tmp_path):
    """Arguments of a run with a tiny model and problems."""
    tiny.save(tmp_path / "model", "qwen3")
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(9)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = ["--completions", "4", "--generations", "2", "--microbatch", "2", "--max-tokens", "4"]
    where = ["--model", str(tmp_path / "model"), "--data", str(tmp_path), "--no-vllm"]
    return [*where, *sizes, "--steps", "2", "--warm-up", "0", "--steps-per-generation", "2"]


def test_methods_that_start_together_train_in_turns(phases, small, tmp_path, capfd):
    phases.main([*small, "--methods", "none+lora", "grpo", "--together", "--output", str(tmp_path / "phases.json")])
    steps = [line.split(":")[0] for line in capfd.readouterr().out.splitlines() if ", step " in line]
    assert steps == [f"{method}, step {step}" for method in ("none+lora", "grpo") for step in (1, 2)]
    methods = json.loads((tmp_path / "phases.json").read_text())["methods"]
    assert {name: of["settings"]["lora"] for name, of in methods.items()} == {"none+lora": 32, "grpo": 0}


def test_methods_are_held_against_the_first_that_trains_as_much(phases):
    seconds = {"grpo:liger": 2.0, "fisher": 1.0, "grpo:liger+lora": 4.0, "fisher+lora": 3.0}
    methods = {name: {"seconds": of} for name, of in seconds.items()}
    assert phases.ratios(methods) == {"fisher": 0.5, "fisher+lora": 0.75}


def test_every_phase_of_a_run_is_found(phases, small):
    options = phases.parse(small)
    figures = phases.train("grpo", options)
    first, second = figures["steps"]
    without_vllm = set(phases.PHASES) - {"weight sync"}
    assert {phase for phase, seconds in first.items() if seconds > 0} == without_vllm
    assert {phase for phase, seconds in second.items() if seconds > 0} == without_vllm - {
        *("generation", "scoring", "old policy")
    }
    assert figures["measured_steps"] == 2 and figures["seconds"] == pytest.approx(
        (sum(first.values()) + sum(second.values())) / 2
    )
