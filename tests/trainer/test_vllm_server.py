"""vLLM's server mode: TRL's own client against a server that speaks its protocol (`tests/trainer/vllm_server.py`)."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl.generation import vllm_client, vllm_generation

from isopo_trl.trl_seam.generation import Progress, generate_completions
from tests import tiny, training
from tests.trainer.vllm_server import Server


SETTINGS = {"temperature": 0.7, "learning_rate": 1e-2, "max_steps": 3, "optim": "sgd", "rule": "fisher"}
SETTINGS |= {"vllm_importance_sampling_mode": "token_truncate"}


@pytest.fixture
def server(monkeypatch):
    with Server(tiny.model("qwen3")) as server:
        # TRL asks whether vLLM is there; in server mode it then uses nothing of it but NCCL, which needs a GPU
        engine = SimpleNamespace(trainer_send_weights=lambda iterator, trainer_args: server.receive(iterator))
        for module in (vllm_client, vllm_generation):
            monkeypatch.setattr(module, "is_vllm_available", lambda **_: True)
        monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
        monkeypatch.setattr(vllm_client, "NCCLWeightTransferEngine", engine, raising=False)
        monkeypatch.setattr(vllm_client, "NCCLTrainerSendWeightsArgs", SimpleNamespace, raising=False)
        yield server
        server.shutdown()


class Synchronised(TrainerCallback):
    """Compares the server's weights with those that the step began with, adapters merged."""

    def __init__(self, server):
        self.server, self.expected, self.errors = server, [], []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.expected = merged(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.errors.append(training.distance(self.server.received, self.expected))


def merged(model):
    if not hasattr(model, "merge_adapter"):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        weights = {}
        for name, p in model.base_model.model.named_parameters():
            if "lora_" in name:
                continue
            own, _, adapted = name.partition(".base_layer")
            layer = model.base_model.model.get_submodule(own) if adapted else None
            weights[own + adapted] = (p if layer is None else p + layer.get_delta_weight("default")).clone()
        return weights


@pytest.mark.parametrize("peft", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_run_with_a_server_is_that_of_a_rollout_with_its_completions(server, peft, tmp_path):
    options = {"peft_config": peft}
    torch.manual_seed(3)
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    run = training.build(tmp_path, options=options, **vllm, **SETTINGS)
    assert run.args.token_weights == "sampler"
    begun = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    synchronised = Synchronised(server)
    run.add_callback(synchronised)
    # TRL merges the adapter for the server and takes it out again
    lines = training.train(run, still=("lora_A", "base_layer"))
    # The sampler's log-probabilities are taken as they come, and no pass is made for an old policy's
    (batch,) = Progress(run).batches
    assert "sampling_per_token_logps" in batch and "old_per_token_logps" not in batch
    # Every generation is of the step's own weights, so the ratio to the sampler is 1
    assert len(synchronised.errors) == 3 and max(synchronised.errors) < 1e-6
    assert server.requests.count("/update_weights") == server.requests.count("/reset_prefix_cache") == 3
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["off_policy/ess"] == pytest.approx(1, abs=1e-4)

    rows = iter(server.completions)

    def replayed(prompts, trainer):
        prompt_ids, completion_ids, logprobs = map(list, zip(*(next(rows) for _ in prompts), strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    options = {**options, "rollout_func": replayed}
    again = training.build(tmp_path, options=options, token_weights="sampler", **SETTINGS)
    with torch.no_grad():
        for name, p in again.model.named_parameters():
            p.copy_(begun[name])
    again.train()
    assert next(rows, None) is None
    trained = [{name: p.detach() for name, p in one.model.named_parameters()} for one in (run, again)]
    assert training.distance(*trained) < 1e-5


def test_after_the_best_checkpoint_is_loaded_the_server_generates_with_it(server, tmp_path):
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    run = training.build(tmp_path, **vllm, **{**SETTINGS, "max_steps": 2, "save_strategy": "steps", "save_steps": 1})
    run.train()
    generate_completions(run, [{"prompt": "1 + 1?"}])  # with the last weights
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    run._load_best_model()
    assert training.distance(server.received, merged(run.model)) > 1e-4
    generate_completions(run, [{"prompt": "1 + 1?"}])
    assert training.distance(server.received, merged(run.model)) < 1e-6
