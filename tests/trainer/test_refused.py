"""
The table of what stays refused (docs/from_grpo.md): each row is refused, and each refusal has a row.

To let go of a refusal, delete its row and, where it is described in words, its case here.
"""

import ast
import re
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import isopo_trl
from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.integrations import deepspeed
from isopo_trl.integrations.engines import refuse_sharding
from isopo_trl.narrow_weights import choice
from isopo_trl.token_weights import ratio_loss, refusals
from tests import tiny, training
from tests.documentation.test_docs import table


ROWS = [row[0] for row in table("from_grpo.md", "What stays refused")]
SOURCE = Path(isopo_trl.__file__).parent


def trained(model="qwen3", peft=None, **settings):
    def build(folder):
        training.build(folder, model, options={"peft_config": peft}, **settings)

    return build


def core(change):
    """The core alone, without a trainer, on a model to which something was done."""

    def build(folder):
        model = tiny.model("llama")
        change(model)
        ISOPO(model, "fisher")

    return build


def per_token(folder):
    class PerToken(ISOPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "advantages": batch["advantages"].unsqueeze(1)}

    training.build(folder, kind=PerToken, max_steps=1).train()


def too_few_prompts(folder):
    training.build(folder, data=tiny.prompts(3), gradient_accumulation_steps=4).train()


def with_a_batch_norm(model):
    model.model.norm = nn.Sequential(model.model.norm, nn.BatchNorm1d(1))


def own_gradient(name, value):
    return core(lambda model: setattr(model.model.embed_tokens, name, value))


def other_experts(folder):
    model = tiny.model("qwen3_moe")
    model.config._experts_implementation = "deepgemm"
    ISOPO(model, "fisher")


def parallel_experts(folder):
    model = tiny.model("qwen3_moe")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    ISOPO(model, "fisher")


def adapters_of_a_bare_parameter(folder):
    settings = LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight"])
    model = get_peft_model(tiny.model("qwen3_moe"), settings)
    model.add_adapter("second", settings)
    model.base_model.set_adapter(["default", "second"])
    ISOPO(model, "fisher")


def with_a_split_convolution(model):
    model.model.norm = nn.Sequential(model.model.norm, nn.Conv1d(1, 1, 1))
    model.model.norm[1].weight.ds_id = 0  # as DeepSpeed marks what it has split


def under_deepspeed(**settings):
    return lambda folder: deepspeed.refuse_settings({"zero_optimization": settings}, "target_kl", True)


def in_bf16(processes=1, deepspeed_plugin=None, fsdp=0, mixed="no"):
    """Weights in bf16, under an engine of accelerate's."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp) if fsdp else None
    state = SimpleNamespace(deepspeed_plugin=deepspeed_plugin, fsdp_plugin=plugin)
    accelerator = SimpleNamespace(state=state, mixed_precision=mixed, num_processes=processes)
    args = SimpleNamespace(bf16_updates="exact", float32_gradients=processes > 1)
    return lambda folder: choice.refuse(args, tiny.model("qwen3", dtype=torch.bfloat16), None, accelerator)


def shards(rule, **plugins):
    """A rule that needs a direction, under an engine of accelerate's that shards gradients."""
    args = ISOPOConfig("unused", rule=rule, use_cpu=True, bf16=False, report_to=[])
    return lambda folder: refuse_sharding(args, SimpleNamespace(state=SimpleNamespace(**plugins)))


def under_fsdp1(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model.model.norm = FullyShardedDataParallel(model.model.norm, device_id=torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()


def with_a_tool(folder):
    def again(text: str) -> str:
        """Says it again.

        Args:
            text: what to say.
        """
        return text

    options = {"tools": [again]}
    training.build(folder, data=tiny.conversational_prompts(6), options=options, advantage_transform="empg")


def under_fsdp(**settings):
    class Sharded(ISOPOTrainer):
        def _refuse_transforms(self, given):
            self.is_fsdp_enabled = True
            super()._refuse_transforms(given)

    return lambda folder: training.build(folder, kind=Sharded, **settings)


def compiled_by_accelerate(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")  # as `accelerate launch --dynamo_backend eager` does
        training.build(folder)


# What a row in words stands for: all of these are refused
WORDS = {
    "`target_kl` under DeepSpeed with NVMe, partial or super offload, ZenFlow, hpZ, or a scheduler of its own": [
        under_deepspeed(offload_optimizer={"device": "nvme"}),
        under_deepspeed(offload_optimizer={"device": "cpu", "ratio": 0.5}),
        under_deepspeed(offload_optimizer={"device": "cpu", "super_offload": True}),
        under_deepspeed(zenflow={}),
        under_deepspeed(zero_hpz_partition_size=8),
        lambda folder: deepspeed.refuse_settings({"scheduler": {"type": "WarmupLR"}}, "target_kl", True),
    ],
    "`bf16_updates` with weights in float32, under DeepSpeed, FSDP1, or FSDP2 with `bf16=True`": [
        trained(bf16_updates="exact"),
        in_bf16(deepspeed_plugin=object()),
        in_bf16(fsdp=1),
        in_bf16(fsdp=2, mixed="bf16"),
    ],
    "`float32_gradients=True` in several processes, or without `bf16_updates`": [
        in_bf16(processes=2),
        trained(float32_gradients=True),
    ],
    "`beta` with a `peft_config` of PiSSA, OLoRA, CorDA, LoftQ or LoRA-GA": [
        trained(peft=LoraConfig(r=2, init_lora_weights=name, target_modules=["q_proj"]), beta=0.1)
        for name in ("pissa", "olora")
    ],
    '`rule="spring"` or `"proma"` under FSDP2 or DeepSpeed': [
        shards("spring", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)),
        shards("proma", deepspeed_plugin=object()),
    ],
    "FSDP1 (`fsdp_version: 1`, accelerate's default)": [
        shards("fisher", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)),
        core(under_fsdp1),
    ],
    '`advantage_transform="empg"` with `tools` or an `environment_factory`': [with_a_tool],
    '`advantage_transform="g2rl"` under FSDP or ZeRO-3': [under_fsdp(advantage_transform="g2rl", g2rl_lambda=1.0)],
    "prefix tuning under gradient checkpointing": [
        trained(peft=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), gradient_checkpointing=True)
    ],
    "a trained batch norm": [core(with_a_batch_norm)],
    "a trained embedding with `max_norm`, `sparse` or `scale_grad_by_freq`": [
        own_gradient("max_norm", 1.0),
        own_gradient("sparse", True),
        own_gradient("scale_grad_by_freq", True),
    ],
    "experts of which `experts_implementation` is not one of transformers' three": [other_experts],
    "experts under expert parallelism": [parallel_experts],
    "several trained adapters of one bare parameter (`target_parameters`)": [adapters_of_a_bare_parameter],
    "a module without a kind of its own ([`any module`](inside.md#any-module)) under DeepSpeed ZeRO-3": [
        core(with_a_split_convolution)
    ],
    "a model that is compiled": [core(lambda model: model.compile())],
    "accelerate's `dynamo_backend`, unless it is `no`": [compiled_by_accelerate],
    "a model spread over devices (`device_map`)": [core(lambda model: model.lm_head.to("meta"))],
    "an advantage per token": [per_token],
    "a `train_dataset` with fewer prompts than one generation takes": [too_few_prompts],
}


def cases(row):
    if row in WORDS:
        return WORDS[row]
    (settings,) = re.findall(r"^`(.*)`$", row)
    call = ast.parse(f"f({settings})", mode="eval").body
    return [trained(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_lists_is_refused(row, tmp_path):
    assert row in WORDS or row.startswith("`"), (
        f"{row!r} is described in words and needs a case in tests/trainer/test_refused.py"
    )
    for number, build in enumerate(cases(row)):
        try:
            build(tmp_path)
        except ValueError as error:
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            assert Path(raised_in).is_relative_to(SOURCE), f"{row!r} (case {number}) is refused by another: {error}"
            continue
        pytest.fail(f"{row!r} (case {number}) is accepted now: delete the row in docs/from_grpo.md, and its case here")


def test_no_case_is_left_without_its_row():
    assert sorted(set(WORDS) - set(ROWS)) == [], "delete these cases, or add their rows to docs/from_grpo.md"


# Each refusal has a row


# Fields whose refusals are of values that have no meaning, or of settings that contradict each other
MEANINGLESS = (
    r"(kpo|dppo|m2po|pspo|bapo|capo|redit|pacs|empg|g2rl|cppo|simpletir)_\w+|advantage_transform|vllm_importance_sampling_\w+|top_entropy_quantile|token_weights|kl_in_reward|group_microbatches"
    r"|behaviour_kl|step_kl_share|target_kl_offload"
)


def test_every_refused_setting_is_in_the_table():
    listed = set(re.findall(r"(\w+)=", " ".join(ROWS)))
    args = ISOPOConfig("unused", use_cpu=True, bf16=False, report_to=[])
    for _, message in (*refusals(args), *ratio_loss.refusals(args), *args._refusals()):
        fields = [word for word in re.findall(r"\w+", message) if word in ISOPOConfig.__dataclass_fields__]
        known = [field for field in fields if field in listed or re.fullmatch(MEANINGLESS, field)]
        assert known or not fields, f"add a row to docs/from_grpo.md: {message}"


# Words of each refusal in these files: a row of the table, or an error of the user's
OF_ROWS = [
    "off_policy_mask_threshold",
    "virtual tokens",
    "a part of the weights",
    "acts on even without an advantage",
    "go back through the model twice",
    "takes a completion for one turn",
    "reads the rows of the LM head",
    "leaves sequences out of the loss",
    "one advantage per sequence",
    "ISOPO cannot train",
    "is compiled",
    "is to compile",
    "split over",
    "liger_kernel_config",
    "in DeepSpeed's settings",
    "take ZeRO stage 1, 2 or 3",
    "Take another optimizer",
    "needs a learning rate that it can multiply",
    "a direction of all its weights",
    "FSDP1",
    "Let it go without, or leave target_kl out",
]
OF_USE = [
    "must be an `ISOPOConfig`",
    "leaves out every reward",
    "other token weights",
    "no trainable parameter",
    "attached to this model already",
]
FILES = ["trainer.py", "layers/plan.py", "step_size/optimizers.py"]
FILES += [f"integrations/{name}.py" for name in ("checkpointing", "deepspeed", "engines", "liger", "peft_reference")]


@pytest.mark.parametrize("name", FILES)
def test_every_refusal_of_a_model_is_in_the_table(name):
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        if getattr(node.exc.func, "id", "") not in ("ValueError", "TypeError"):
            continue
        strings = (part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant))
        message = "".join(part for part in strings if isinstance(part, str))
        if len(message) > 10 and not any(words in message for words in (*OF_ROWS, *OF_USE)):
            pytest.fail(f"{name}, line {node.lineno}: add a row to docs/from_grpo.md for {message!r}")
