"""
The Triton kernels on a CPU, under Triton's interpreter.

Triton decides for a whole process, when a kernel is defined, whether it is interpreted. So these tests start a process
that runs others: those of the kernels, and as much of the oracle as is needed to reach every kernel from a model.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isopo_trl.kernels.launch import ENABLED, INTERPRET


pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    not ENABLED or INTERPRET,
    reason="the kernels are turned off, or interpreted in this process already",
)

ROOT = Path(__file__).parents[2]
KERNELS = [
    "tests/kernels/test_coefficients.py",
    "tests/kernels/test_directions.py",
    "tests/kernels/test_elementwise.py",
    "tests/kernels/test_experts.py",
    "tests/kernels/test_fisher_rows.py",
    "tests/kernels/test_gated.py",
    "tests/kernels/test_launch.py",
    "tests/kernels/test_linear.py",
    "tests/kernels/test_own_rules.py",
    "tests/kernels/test_rms_norm.py",
    "tests/kernels/test_rotary.py",
    "tests/kernels/test_halves.py",
    "tests/kernels/test_divergence.py",
    "tests/kernels/test_v.py",
    "tests/layers/test_gated.py",
    "tests/layers/test_head_gradients.py",
    "tests/layers/test_rms_norm.py",
    "tests/layers/test_rotary.py",
    "tests/test_microbatch.py",
]
ORACLE = {
    "test_gradient_is_the_definition": [
        "qwen3-full-fisher",  # norms of heads
        "gemma3-full-interacting",  # norms of another flavour, a soft cap
        "qwen2-lora-fig4",
    ],
    # Biases; Conv1D and LayerNorm
    "test_every_strategy_gives_the_same_gradient": ["qwen2-fig4-ghost", "gpt2-interacting-blocks"],
    "test_gradient_checkpointing_changes_nothing": ["False-interacting-full"],
    "test_packed_sequences_give_the_same_gradient_as_padded_ones": ["fisher"],
}
EXPERTS = {"test_every_expert_and_router_has_the_gradient_of_the_definition": ["gpt_oss-fig4"]}  # with biases
HEAD = {
    "test_the_chunked_head_has_the_gradient_of_the_definition": [
        "interacting-blocks-scored rows-bias",
        "interacting-whole-all rows-",
    ],
}
UNSCALED = {"test_unscaled_term_where_only_some_parameters_are_trained": ["layers.1"]}  # half of a model
KEPT_ROWS = {  # samples from before
    "test_gradient_is_the_definition_with_the_rows_of_the_step_before": [
        f"{layer}-{rule}-[1, 2]-False"
        for layer, rule in (("linear", "fisher"), ("LayerNorm", "fig4"), ("llama's norm", "fisher"))
    ],
}
OWN_RULE = {  # of which the kernels find the statistics alone
    "test_the_trainer_takes_it_by_its_name_and_gives_the_gradient_of_its_formula": [
        "False-tight_fisher-relative",
        "True-capped_fisher-paper",  # with LoRA
    ],
}
STEPS = "test_steps_of_several_microbatches_are_the_definition"
LEFT = "test_the_kernels_find_its_statistics_and_leave_its_formula_to_pytorch"


PARTS = {
    "gradients/test_oracle": ORACLE,
    "layers/test_experts": EXPERTS,
    "layers/test_lm_head": HEAD,
    "gradients/test_unscaled": UNSCALED,
    "rules/test_own_rule": OWN_RULE,
    "rules/test_spring": {
        STEPS: ["trainer, LoRA, checkpointing", "trainer, full, tied"],
        "test_the_head_takes_its_part_of_the_direction_with_each_part_of_the_vocabulary": ["blocks"],
    },
    "rules/test_proma": {STEPS: ["by hand, full, tied"]},
    "layers/test_fisher_rows": KEPT_ROWS,
}
# No kernel that the others do not reach: other rules on the same layers, settings and noise, which the tests of the
# kernels have
MORE = {
    "gradients/test_oracle": {
        "test_gradient_is_the_definition": ["gemma3-lora-fisher", "qwen3-lora-interacting", "gpt2-full-fisher"],
        "test_tied_embedding_and_head_are_two_uses": ["llama-fisher"],
        "test_degenerate_microbatches": ["fig4-empty completion and zero advantage"],
        "test_every_strategy_gives_the_same_gradient": ["qwen2-fig4-blocks"],
        "test_every_setting_enters_as_the_formula_says": ["fig4-0.3-True-paper"],
        "test_running_means_over_microbatches_and_steps": ["interacting"],
    },
    "token_weights/test_gradients": {"test_gradient_is_the_definition": ["p3o-full-npg", "p3o-lora-fig4"]},
    "gradients/test_rounding_noise": {
        "test_gradients_that_are_zero_but_for_rounding_count_nowhere": ["62-torch.float32"],
    },
}


def nodes(parts):
    return [
        f"tests/{file}.py::{test}[{case}]"
        for file, tests in parts.items()
        for test, cases in tests.items()
        for case in cases
    ]


def run_interpreted(*tests, slow=False):
    """
    Run tests in a process of their own, and show its last lines if any fails; returns the names of those that have
    passed. Those that are slow elsewhere are among them, or are left out even where they are named.
    """
    # A process of xdist's would leave its name and its options behind
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_CORE"))}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # on the CPU, whatever there is
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    options = [
        "-q",
        "-rsp",
        *(["-m", "slow or not slow"] if slow else []),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "tests.kernels.interpreter",
        "--color=no",
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stdout:
        pytest.skip("Triton's interpreter is older than this NumPy, which no longer makes numbers of its arrays")
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{tail}"
    lines = done.stdout.strip().splitlines()
    assert "skipped" not in lines[-1] and "failed" not in lines[-1], done.stdout
    return {line.removeprefix("PASSED ") for line in lines if line.startswith("PASSED ")}


def test_interpreted_kernels_agree_with_plain_pytorch_and_with_the_definition():
    """In one process, since another would import everything again."""
    of_models = {*nodes(PARTS), f"tests/rules/test_own_rule.py::{LEFT}"}
    passed = run_interpreted(*KERNELS, *of_models)
    assert passed >= of_models and {node.partition("::")[0] for node in passed - of_models} == {*KERNELS}


@pytest.mark.slow
def test_interpreted_kernels_agree_with_the_definition_under_further_rules():
    assert run_interpreted(*nodes(MORE), slow=True) == {*nodes(MORE)}


@pytest.mark.slow
def test_with_interpreted_kernels_no_gradient_depends_on_how_the_step_is_cut():
    test = "tests/fisher_rows/test_step_scope.py::test_no_gradient_depends_on_how_the_step_is_cut"
    cases = ["fisher-False-ragged", "npg-True-2 x 4", "fig4-False-8 x 1"]  # rule, LoRA, cut
    of_experts = "test_a_sampled_position_is_a_sample_at_every_expert_that_it_was_sent_to"
    mixtures = {
        "layers/test_fisher_rows": {of_experts: ["mixtral-True-fisher-[2, 1, 3]", "qwen3_moe-False-fig4-[2, 1, 3]"]}
    }
    every = [*(f"{test}[{case}]" for case in cases), *nodes(mixtures)]
    assert run_interpreted(*every, slow=True) == {*every}
