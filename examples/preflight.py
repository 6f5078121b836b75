"""What `gsm8k.py` looks at before anything long starts: a run that cannot end well should not begin."""

import os
import socket
import tempfile
from importlib.util import find_spec
from urllib.parse import urlparse

from accelerate import PartialState
from huggingface_hub import HfApi
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig


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
