"""What is looked at before anything long starts: a run that cannot end well should not begin."""

import os
import socket
import tempfile
from importlib.util import find_spec
from urllib.parse import urlparse

import torch
import transformers
from accelerate import PartialState
from huggingface_hub import HfApi
from transformers import AutoConfig, GenerationConfig
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig


def device() -> tuple[str, tuple[int, int] | None]:
    """The kind of this machine's accelerator, `"cpu"` if there is none, and the compute capability of NVIDIA's."""
    if not torch.accelerator.is_available():
        return "cpu", None
    kind = torch.accelerator.current_accelerator().type
    nvidia = kind == "cuda" and torch.version.hip is None
    return kind, torch.cuda.get_device_capability() if nvidia else None


def precision(kind: str, capability: tuple[int, int] | None) -> tuple[dict[str, bool], str]:
    """
    Settings for what [`device`] returns, where TRL's, which are those of bf16, will not do; and what they are, in a
    sentence. PyTorch calls bf16 supported on NVIDIA's GPUs before Ampere, too, where it is only emulated.
    """
    if kind == "cpu":
        return {"use_cpu": True, "bf16": False}, "Trains in float32, on the CPU."
    if capability is not None and capability < (8, 0):
        return {"bf16": False}, "Trains in float32: this GPU has no bf16, and ISOPO takes no fp16."
    return {}, "Trains in bf16."


def check_machine(args: GRPOConfig) -> None:
    """Raise if the machine lacks what the arguments ask for."""
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()
    except OSError as error:
        raise ValueError(
            f"--output_dir {args.output_dir} cannot be written to ({error.strerror}): choose another folder."
        ) from error
    missing = [
        tracker for tracker in args.report_to if tracker not in (*get_available_reporting_integrations(), "flyte")
    ]
    if missing:
        raise ValueError(f"--report_to {missing[0]}: there is no such tracker, or its package is not installed.")
    if args.push_to_hub and PartialState().is_main_process:
        try:
            HfApi().whoami(args.hub_token)
        except Exception as error:  # the Hub's client raises many kinds
            raise ValueError(
                f"--push_to_hub needs a Hub that can be reached and an account (`hf auth login`): {in_short(error)}"
            ) from error
    if args.use_vllm and args.vllm_mode == "server":
        find_vllm_server(args)
    elif args.use_vllm and find_spec("vllm") is None:
        raise ValueError("--use_vllm needs the package vllm: pip install vllm, or leave --use_vllm out.")


def check_model(name: str, trust_remote_code: bool, saved: bool) -> None:
    """
    Raise if a model is to come from a folder that is not there, or that describes none; weights are not read.

    Args:
        name (`str`): a folder, or a name on the Hub, which is not looked up here.
        trust_remote_code (`bool`): whether code in the folder may be run.
        saved (`bool`): whether the model is saved in the end, not an adapter. transformers then looks more closely at
            how it should generate.
    """
    if not os.path.isdir(name):
        if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:  # none of them a name on the Hub
            raise ValueError(
                f"--model_name_or_path {name} is not a folder: give that of a model, or a name on the Hub."
            )
        return
    if not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(f"The folder {name} has no config.json: it should be that of a whole model.")
    read = "config.json"
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not config.architectures:
            raise ValueError("it names no architecture")
        kind = getattr(transformers, config.architectures[0], None)
        if kind is None and not getattr(config, "auto_map", None):
            raise ValueError(f"transformers has no {config.architectures[0]}")
        if kind is not None:
            with torch.device("meta"):
                kind(config)
        read = "generation_config.json"
        if os.path.isfile(os.path.join(name, read)):
            GenerationConfig.from_pretrained(name).validate(strict=saved)
    except Exception as error:  # of many kinds
        raise ValueError(
            f"The model in the folder {name} cannot be built from its {read}, which needs mending: {in_short(error)}"
        ) from error


def find_vllm_server(args: GRPOConfig) -> None:
    host, port, remedy = args.vllm_server_host, args.vllm_server_port, ""
    url = args.vllm_server_base_url
    if url:
        try:
            address = urlparse(url)
            host, port = address.hostname, address.port
        except ValueError:  # of a port that is no number, or too large
            host = None
        if not host or address.scheme not in ("http", "https"):
            raise ValueError(f"--vllm_server_base_url {url} is not an address such as http://localhost:8000.")
        if port is None:  # as TRL takes it, too
            port = {"http": 80, "https": 443}[address.scheme]
            remedy = f" ({url} names no port; unless told otherwise, vLLM serves at 8000)"
    try:
        socket.create_connection((host, port), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"No vLLM server answers at {host}:{port}{remedy}: start one (see docs/distributed.md), or use "
            "--vllm_mode colocate."
        ) from error


def checkpoint(args: GRPOConfig) -> str | bool | None:
    """Where to go on from: a folder, or `True` for the last one in the output folder."""
    name = args.resume_from_checkpoint
    if name is None or name.lower() in ("false", "no"):
        return None
    if name.lower() == "true":
        if get_last_checkpoint(args.output_dir) is None:
            raise ValueError(f"--resume_from_checkpoint true: there is no checkpoint in {args.output_dir}.")
        return True
    if not os.path.isfile(os.path.join(name, "trainer_state.json")):
        kind = "has no trainer_state.json" if os.path.isdir(name) else "is not a folder"
        raise ValueError(
            f"--resume_from_checkpoint {name} {kind}: give a checkpoint such as {args.output_dir}/checkpoint-100, or "
            "true for the last one there."
        )
    return name


def in_short(error: Exception) -> str:
    """The beginning of what a library says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__} {text}".strip()
