"""Run by a launcher on one or two ranks: train on batches made by hand and write what came out.

worker.py OUTPUT MODE-RULE-WEIGHTS... with the mode one of trainer, zero2, zero3, loop, fsdp2, resumed, grouped,
skipped, skippedfsdp, skipped2, skipped3, overflow, overflow2, overflow3, overflowfsdp, target, targetfsdp, target0 to
target3, scheduled, scheduled2, scheduled3, resumedtarget2, resumedtarget3, refused, kept, undone, narrow, narrowfsdp,
shards, direction, and the weights full, lora, dora or bf16, or those of a mixture of experts, experts or expertslora

Microbatch k of the run is the same whether two ranks take one each or one rank accumulates two, so the weights must be
the same too. `trainer` is a real `ISOPOTrainer.train()`, under DDP on two ranks, `zero2` and `zero3` the same under
DeepSpeed; `loop` and `fsdp2` are a loop of one's own with the core, the latter with every decoder layer sharded.
`resumed` generates, uses completions twice, and goes on from a checkpoint in between; `grouped` generates for two
microbatches at a time, with `group_microbatches`. `skipped` has sequences without an advantage, in unequal shares, and
leaves them out (`skip_zero_advantage`); `skippedfsdp` under FSDP2, `skipped2` and `skipped3` under DeepSpeed. In
`target` plain steps have a length to keep to; `targetfsdp` under FSDP2, `target0` and so on under DeepSpeed, where
they are taken back from a copy, as in `targetcopied`, the first being far too long; `scheduled` is the same with a
schedule, and `scheduled2` and `scheduled3` with an optimizer of DeepSpeed's, which makes the schedule's step as well;
`resumedtarget2` and `resumedtarget3` are resumed under it; `refused` has settings of DeepSpeed's with which that
cannot be. `kept` and `undone` are the same with AdamW, on two ranks under FSDP2: a copy of the weights is kept, or
former ones are computed from AdamW's moments. `narrow` is `resumed` with weights in bf16, a target and `bf16_updates`,
`narrowfsdp` the same under FSDP2; `shards` are single steps with given gradients there. In `steptrainer`, `stepzero2`,
`steploop`, `stepfsdp2` all is as without `step`, but for `fisher_scope="step"`; `step` is a loop in float64, for the
oracle. `direction` is a loop under DDP with a rule that looks at a direction, beside one whose gradients are averaged
by hand. In `overflow`, 2 and 3 under DeepSpeed, the trainer's last rank has a gradient that overflows in the second
step.
"""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from trl.trainer import add_fused_lm_head

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.geometry.reservoir import content_keys
from isopo_trl.narrow_weights.optimizers import NarrowAdamW, NarrowSGD
from isopo_trl.step_size import taken_back
from tests import oracle, tiny
from tests.distributed.process_group import RANK, WORLD, Sharded, full_weights, save_runs
from tests.fisher_rows import test_step_scope as step_scope


STEPS = 3
WHOLE = StateDictOptions(full_state_dict=True)  # as FSDP2's checkpoint in one file
NARROW = {NarrowSGD: {"momentum": 0.5}, NarrowAdamW: {"weight_decay": 0.1}}


def microbatch(number, shortest=1):
    """Microbatch `number` of the run, and the number of scored tokens in its optimizer step."""
    pair = []
    for seed in (number - number % 2, number - number % 2 + 1):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, 9, (2, 4), generator=generator).tolist()
        pair.append(oracle.random_batch(*lengths, 100, seed=seed))
        pair[-1].advantages = pair[-1].advantages.float()
    batch = pair[number % 2]
    batch.extra["num_items_in_batch"] = sum(half.completion_mask.sum() for half in pair)
    return batch


def build(weights):
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model = tiny.model("qwen3_moe" if "experts" in weights else "qwen3", tie=True, dtype=dtype)
    if weights.endswith(("lora", "dora")):
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=weights == "dora"))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:  # DoRA's magnitudes stay near the norms they begin with
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p if p.dim() == 1 else 0))
    return model


class ByHand(ISOPOTrainer):
    """Takes its microbatches from a list instead of generating them; everything else is real."""

    def _prepare_inputs(self, generation_batch):
        inputs = microbatch(self._step * WORLD + RANK).for_trl()
        inputs["prompt_numbers"] = torch.tensor([0, 0, 1, 1])
        return {name: value.to(self.accelerator.device) for name, value in inputs.items()}


class Overflowing(ByHand):
    """On the last rank, the advantages of the second step are more than its gradient can carry."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.state.global_step == 1 and RANK == WORLD - 1:
            inputs["advantages"] = 3e38 * inputs["advantages"].sign()
        return inputs


class OverflowingShards(Overflowing, Sharded):
    """The same under FSDP2."""


class ShardsByHand(ByHand, Sharded):
    """Given microbatches under FSDP2."""


def deepspeed_config(stage, accumulation, **more):
    """
    DeepSpeed's settings at this stage of ZeRO; none without a stage. Asked for by every run, so that how it is asked
    for is tested where DeepSpeed is not installed.
    """
    if stage is None:
        return None
    return {
        # Without which all weights of a tiny model would stay gathered
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 64},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **more,
    }


def trainer(output, rule, weights, stage=None, kind=ByHand, deepspeed=(), **settings):
    settings = {"gradient_accumulation_steps": 2 // WORLD, "max_steps": STEPS, "optim": "sgd", **settings}
    accumulation = settings["gradient_accumulation_steps"]
    args = ISOPOConfig(
        f"{output}.trainer",
        rule=rule,
        fisher_samples=9,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if WORLD == 1 or torch.cuda.is_available() else "gloo",
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="steps" if "save_steps" in settings else "no",
        router_aux_loss_coef=0.0,
        deepspeed=deepspeed_config(stage, accumulation, **dict(deepspeed)),
        **{"learning_rate": 0.05, "lr_scheduler_type": "constant", "bf16": False, **settings},
    )
    return kind(build(weights), tiny.reward, args, tiny.prompts(64), processing_class=tiny.tokenizer())


def train(output, rule, weights, stage=None, **settings):
    run = trainer(output, rule, weights, stage, **settings)
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    result = {"logs": logs, "wrapped": type(run.model_wrapped).__name__}
    if run.step_control is not None:
        result["bytes_kept"] = run.step_control._way_back.bytes
    return run.model, run.isopo, result


def resumed(output, rule, weights, stage=None, **more):
    """The weights of a run that was resumed between two uses of its completions, and of one that was not."""
    settings = {"kind": ISOPOTrainer, "num_iterations": 2, "save_steps": 1, **more}
    output = f"{output}.{stage}"
    whole = trainer(output, rule, weights, stage, **settings)
    whole.train()
    torch.distributed.barrier()  # the checkpoint is the other rank's, too
    run = trainer(output, rule, weights, stage, **settings)
    run.train(resume_from_checkpoint=f"{output}.trainer/checkpoint-1")
    lines = [line for line in whole.state.log_history if "loss" in line]
    return {"weights": full_weights(run.model), "whole": full_weights(whole.model), "logs": lines}


def narrow(output, rule, weights, under):
    """As `resumed`, with weights in bf16: rounded at random under DDP, and with remainders under FSDP2."""
    settings = {"target_kl": 1e-3, "step_kl_share": 1.0, "save_only_model": False}
    if under == "fsdp":
        settings |= {"kind": Sharded, "bf16_updates": "exact", "optim": "adamw_torch", "learning_rate": 0.01}
    else:
        settings |= {"bf16_updates": "stochastic", "learning_rate": 1.0}
    return resumed(output, rule, weights, **settings)


def shards():
    """
    Weights after steps with given gradients, on shards and on the whole; before the last step the state is saved as a
    whole, and loaded. And the remainders, which only the first rank is given.
    """
    mesh = torch.distributed.init_device_mesh("cpu", (WORLD,))
    result = {}
    for updates, (kind, settings) in product(("stochastic", "exact"), NARROW.items()):
        ends = result[f"{kind.__name__}, {updates}"] = []
        for sharded in (False, True):
            generator = torch.Generator().manual_seed(0)
            shapes = {"rows": (5, 6), "row": (1, 3), "bias": (7,)}  # no two ranks have equal parts of them
            module = torch.nn.ParameterDict(
                {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
            )
            if sharded:
                fully_shard(module, mesh=mesh)
            optimizer = kind(module.parameters(), updates=updates, lr=1e-3, **settings)
            for step in range(3):
                if step == 2:
                    state = get_optimizer_state_dict(module, optimizer, options=WHOLE)
                    optimizer = kind(module.parameters(), updates=updates, lr=1e-3, **settings)
                    module.zero_grad()
                    set_optimizer_state_dict(module, optimizer, state, options=WHOLE)
                for p in module.parameters():
                    gradient = torch.randn(p.shape, generator=generator).bfloat16()
                    p.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient
                optimizer.step()
            state = get_optimizer_state_dict(module, optimizer, options=WHOLE)["state"]
            kept = {name: of["remainder"].view(torch.int16) for name, of in state.items() if "remainder" in of}
            ends.append({**full_weights(module), **{f"remainder of {name}": values for name, values in kept.items()}})
    return result


def grouped(output, rule, weights):
    """Prompt and its number of the sequences in each microbatch of this rank; the numbers of generated sequences."""
    prompts, generated = [], []

    class Watched(ISOPOTrainer):
        def _generate_and_score_completions(self, inputs):
            generated.append(len(inputs))
            return super()._generate_and_score_completions(inputs)

        def _compute_loss(self, model, inputs):
            rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], inputs["prompt_numbers"].tolist(), strict=True)
            prompts.append([(tuple(ids[mask != 0].tolist()), number) for ids, mask, number in rows])
            return super()._compute_loss(model, inputs)

    trainer(output, rule, weights, kind=Watched, group_microbatches=True, steps_per_generation=2).train()
    return {"prompts": prompts, "generated": generated}


# Of the generations of the run, how many sequences of each rank's carry an advantage; no rank has any in the second
WITH_ADVANTAGE = [(7, 1), (0, 0), (2, 5), (0, 4)]


class Uneven(ISOPOTrainer):
    """
    Generations by hand, of 8 sequences per rank. One rank has those of both, one after the other, as microbatches of
    one step.
    """

    def __init__(self, *args, **kwargs):
        self.generations = self.passes = 0
        super().__init__(*args, **kwargs)
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.passes += 1

    def _generate_and_score_completions(self, inputs):
        number, self.generations = self.generations, self.generations + 1
        parts = []
        for share in (0, 1):
            generator = torch.Generator().manual_seed(10 * number + share)
            lengths = torch.randint(2, 9, (2, 8), generator=generator).tolist()
            parts.append(oracle.random_batch(*lengths, 100, seed=10 * number + share))
            parts[-1].advantages = parts[-1].advantages.float()
            parts[-1].advantages[WITH_ADVANTAGE[number][share] :] = 0
        total = sum(part.completion_mask.sum() for part in parts)
        shares = parts if WORLD == 1 else [parts[RANK]]
        width = [max(part.prompt_ids.shape[1] for part in parts), max(part.completion_ids.shape[1] for part in parts)]
        batch = {}
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
            rows = [getattr(part, name) for part in shares]
            missing = [width["completion" in name] - x.shape[1] for x in rows]
            sides = [(0, n) if "completion" in name else (n, 0) for n in missing]
            batch[name] = torch.cat([torch.nn.functional.pad(x, side) for x, side in zip(rows, sides, strict=True)])
        batch["advantages"] = torch.cat([part.advantages for part in shares])
        return {**batch, "num_items_in_batch": total}


class UnevenShards(Uneven, Sharded):
    """The same under FSDP2."""


def skipped(output, rule, weights, under="", skip=True):
    """Weights, running means and passes of this rank; a step is two microbatches per share, four on one rank."""
    accumulation = 4 // WORLD
    settings = {"skip_zero_advantage": skip, "max_steps": len(WITH_ADVANTAGE), "steps_per_generation": accumulation}
    settings |= {"gradient_accumulation_steps": accumulation, "optim": "adamw_torch", "adam_epsilon": 1e-3}
    if rule != "none":
        settings |= {"scale": "paper", "regularization": 0.0}  # which do not see how a batch is cut
    if rule == "fisher":  # which sees it in the first step, that has no effect then; the second has no advantage
        settings |= {"optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}
    kind = UnevenShards if under == "fsdp" else Uneven
    run = trainer(output, rule, weights, int(under) if under.isdigit() else None, kind, **settings)
    run.train()
    fractions = [line["isopo/skipped_fraction"] for line in run.state.log_history if "isopo/skipped_fraction" in line]
    result = {"weights": full_weights(run.model), "passes": run.passes, "fractions": fractions}
    return {**result, "mean": run.isopo.state_dict()["running"]["mean"], "wrapped": type(run.model_wrapped).__name__}


class Keep(TrainerCallback):
    """Keeps the weights as they are after the first step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.weights = full_weights(model)


def overflow(output, rule, weights, under):
    """What the trainer says of the gradient, and the weights before and after."""
    kind = OverflowingShards if under == "fsdp" else Overflowing
    run, kept = trainer(output, rule, weights, int(under) if under.isdigit() else None, kind), Keep()
    run.add_callback(kept)
    try:
        run.train()
        said = None
    except FloatingPointError as error:
        said = str(error)
    return {"said": said, "step": run.state.global_step, "before": kept.weights, "weights": full_weights(run.model)}


def refused(output, rule, weights):
    """What the trainer says, when it is made, to a target for steps beside a scheduler of DeepSpeed's own."""
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    try:
        trainer(output, rule, weights, 2, deepspeed=scheduler, target_kl=1e-3)
    except ValueError as error:
        return {"said": str(error)}
    return {"said": None}


def loop(output, rule, weights, shard, **settings):
    if WORLD > 1 and not torch.distributed.is_initialized():  # which a trainer leaves behind
        torch.distributed.init_process_group("gloo")
    model = build(weights)
    base = model.get_base_model() if weights.endswith(("lora", "dora")) else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    isopo = ISOPO(model, rule, fisher_samples=9, **settings)
    if shard:
        mesh = torch.distributed.init_device_mesh("cpu", (WORLD,))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2 * step, 2 * step + 2):
            if WORLD > 1 and number % WORLD != RANK:
                continue
            batch = microbatch(number)
            labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
            labels[:, : batch.prompt_ids.shape[1]] = -100
            with isopo.microbatch(
                batch.advantages,
                attention_mask=batch.attention_mask,
                completion_mask=batch.completion_mask,
                sequence_keys=content_keys(batch.input_ids, batch.attention_mask),
            ):
                output = model(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels, fused_lm_head=True
                )
                # FSDP averages over ranks
                (-output.log_probs.sum() * WORLD / batch.extra["num_items_in_batch"]).backward()
        isopo.step()
        optimizer.step()
    return model, isopo, {"wrapped": type(model).__name__}


def direction(rule, weights):
    """The gradients of the last of three steps of two microbatches on each rank, under DDP and without it."""
    if not torch.distributed.is_initialized():  # which a trainer leaves behind
        torch.distributed.init_process_group("gloo")
    models = [build(weights), build(weights)]
    isopos = [ISOPO(model, rule) for model in models]
    wrapped = DistributedDataParallel(models[0])
    for number in range(2 * STEPS):
        batch, last = microbatch(2 * number + RANK), number % 2 == 1
        for model, isopo in zip((wrapped, models[1]), isopos, strict=True):
            if not last:
                model.zero_grad()
            with nullcontext() if last or model is not wrapped else wrapped.no_sync():
                with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask, loss_scale=0.5):
                    logps = oracle.token_logps(model, batch) * oracle.token_weights(batch, "grpo", 2).float()
                    (-logps.sum()).backward()
        if last:
            for p in models[1].parameters():
                if p.requires_grad:
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= WORLD
            for isopo in isopos:
                isopo.step()
    return {"gradients": [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in models]}


def step(rule, weights):
    """The gradients of the last of three steps of eight sequences, four on each rank, in float64."""
    if WORLD > 1 and not torch.distributed.is_initialized():  # which a trainer leaves behind
        torch.distributed.init_process_group("gloo")
    with oracle.float64_throughout():
        model = step_scope.build("qwen3", weights == "lora")
        isopo = ISOPO(model, rule, seed=42, fisher_samples=step_scope.SAMPLES, fisher_scope="step")
        for number in range(step_scope.STEPS):
            batch = step_scope.batch_of(number)
            own = slice(RANK * step_scope.SEQUENCES // WORLD, (RANK + 1) * step_scope.SEQUENCES // WORLD)
            weights_of_tokens = step_scope.WEIGHTS(batch)[own]
            # The ranks' own ways to cut
            cut = [2, 2] if RANK == 0 else [1, 3]
            step_scope.run_step(model, isopo, batch.part(own), cut, weights=weights_of_tokens)
        rows = isopo.state_dict()["rows"]["rows"]
        isopo.detach()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    return {"gradients": gradients, "rows": rows}


def run(output, mode, rule, weights):
    if mode == "step":
        return step(rule, weights)
    if mode == "direction":
        return direction(rule, weights)
    settings = {"fisher_scope": "step"} if mode.startswith("step") else {}
    mode = mode.removeprefix("step")
    if mode == "resumed":
        return resumed(output, rule, weights)
    if mode.startswith("resumedtarget"):
        length = {"target_kl": 1e-3, "behaviour_kl": 1.1e-3, "step_kl_share": 1.0, "learning_rate": 1.0}
        return resumed(output, rule, weights, int(mode[-1]), **length)
    if mode.startswith("narrow"):
        return narrow(output, rule, weights, mode.removeprefix("narrow"))
    if mode == "shards":
        return shards()
    if mode == "grouped":
        return grouped(output, rule, weights)
    if mode.startswith("skipped"):
        return skipped(output, rule, weights, mode.removeprefix("skipped"))
    if mode.startswith("overflow"):
        return overflow(output, rule, weights, mode.removeprefix("overflow"))
    if mode == "refused":
        return refused(output, rule, weights)
    if mode.startswith("target"):
        under = mode.removeprefix("target")
        kind, stage = ShardsByHand if under == "fsdp" else ByHand, int(under) if under.isdigit() else None
        settings = {"target_kl": "auto", "step_kl_share": 1.0, "learning_rate": 10.0}
        if under == "copied" or stage is not None:
            settings["weight_decay"] = 0.1  # so that steps are taken back from a copy everywhere
        model, isopo, result = train(output, rule, weights, stage, kind=kind, **settings)
    elif mode.startswith("scheduled"):
        settings = {"target_kl": 1e-3, "step_kl_share": 1.0, "optim": "adamw_torch", "learning_rate": 0.5}
        settings |= {"lr_scheduler_type": "linear"}
        under = mode.removeprefix("scheduled")
        own = {"torch_adam": True, "lr": 0.5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        deepspeed = {"optimizer": {"type": "AdamW", "params": own}}
        model, isopo, result = train(
            output, rule, weights, int(under) if under else None, deepspeed=deepspeed, **settings
        )
    elif mode in ("kept", "undone"):
        settings = {"target_kl": 1e-3, "step_kl_share": 1.0, "optim": "adamw_torch", "weight_decay": 0.3}
        settings |= {"learning_rate": 0.3, "adam_epsilon": 1e-4}
        with MonkeyPatch.context() as patch:
            if mode == "undone":
                patch.setattr(taken_back, "SMALL", 0)
            model, isopo, result = train(output, rule, weights, kind=ShardsByHand if WORLD > 1 else ByHand, **settings)
    elif mode in ("trainer", "zero2", "zero3"):
        stage = None if mode == "trainer" else int(mode[-1])
        model, isopo, result = train(output, rule, weights, stage, **settings)
    else:
        model, isopo, result = loop(output, rule, weights, shard=mode == "fsdp2", **settings)
    state = isopo.state_dict()
    running = {name: state["running"][name] for name in ("mean", "moments")}
    rows = [] if state["rows"] is None else [x for of in state["rows"]["rows"].values() for x in of.values()]
    return {**result, "weights": full_weights(model), **running, "rows": rows}


def main(output, *runs):
    save_runs(partial(run, output), runs, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
