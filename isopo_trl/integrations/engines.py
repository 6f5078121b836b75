"""What is refused of accelerate's engines: a compiled model, and gradients that are not whole on a rank."""

from typing import Any

from accelerate.utils import DynamoBackend


def refuse_compiled(accelerator: Any) -> None:
    """Raise where accelerate is to compile the model."""
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise ValueError(
            f"accelerate is to compile the model (dynamo_backend={backend.value.lower()}), which is not supported "
            "with ISOPO's layers, as torch_compile=True is not: set dynamo_backend to no in its configuration or "
            "on its command line, and leave ACCELERATE_DYNAMO_BACKEND unset."
        )


def refuse_sharding(args: Any, accelerator: Any) -> None:
    """
    Raise under FSDP1, and for a rule that needs a direction where whole gradients are on no rank, or out of sight.
    """
    state = accelerator.state
    fsdp, deepspeed_plugin = (getattr(state, f"{name}_plugin", None) for name in ("fsdp", "deepspeed"))
    if fsdp is not None and fsdp.fsdp_version == 1:
        raise ValueError(
            "FSDP1 (fsdp_version=1) flattens the weights of several layers into one, in which ISOPO's layers do not "
            "find theirs: set fsdp_version to 2 in accelerate's configuration."
        )
    if args._rule().needs.direction and (fsdp is not None or deepspeed_plugin is not None):
        raise ValueError(
            f"rule={args.rule!r} measures each layer's gradients against a direction of all its weights, which it "
            "takes from gradients that are whole on every rank, and "
            + ("FSDP shards them" if fsdp is not None else "DeepSpeed keeps them where no layer sees them")
            + ": train under DDP, or take another rule ('interacting' is the nearest)."
        )
