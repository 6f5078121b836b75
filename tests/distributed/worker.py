"""Run by a launcher on one or two ranks: train on batches made by hand and write what came out.

worker.py OUTPUT MODE-RULE-WEIGHTS... with the mode one of trainer, zero2, zero3, loop, fsdp2, resumed, grouped,
overflow, overflow2, overflow3, overflowfsdp, and the weights full, lora or dora, or those of a mixture of experts,
experts or expertslora

Microbatch k of the run is the same whether two ranks take one each or one rank accumulates two, so the weights must be
the same too. `trainer` is a real `ISOPOTrainer.train()`, under DDP on two ranks, `zero2` and `zero3` the same
under DeepSpeed; `loop` and `fsdp2` are a loop of one's own with the core, the latter with every decoder layer sharded.
`resumed` generates, uses completions twice, and goes on from a checkpoint in between; `grouped` generates for two
microbatches at a time, with `group_microbatches`.
In `overflow`, 2 and 3 under DeepSpeed, the trainer's last rank has a gradient that overflows in the second step.
"""

import sys
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback
from trl.trainer import add_fused_lm_head

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from tests import oracle, tiny
from tests.distributed.process_group import RANK, WORLD, Sharded, full_weights, save_runs


STEPS = 3


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
    model = tiny.model("qwen3_moe" if "experts" in weights else "qwen3", tie=True)
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


def deepspeed_config(stage):
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 // WORLD,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def trainer(output, rule, weights, stage=None, kind=ByHand, **settings):
    args = ISOPOConfig(
        f"{output}.trainer",
        rule=rule,
        fisher_samples=9,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if WORLD == 1 or torch.cuda.is_available() else "gloo",
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 // WORLD,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if "save_steps" in settings else "no",
        router_aux_loss_coef=0.0,
        deepspeed=None if stage is None else deepspeed_config(stage),
        **settings,
    )
    return kind(build(weights), tiny.reward, args, tiny.prompts(64), processing_class=tiny.tokenizer())


def train(output, rule, weights, stage=None):
    run = trainer(output, rule, weights, stage)
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    return run.model, run.isopo, {"logs": logs, "wrapped": type(run.model_wrapped).__name__}


def resumed(output, rule, weights):
    """The weights of a run that was resumed between two uses of its completions, and of one that was not."""
    settings = {"kind": ISOPOTrainer, "num_iterations": 2, "save_steps": 1}
    whole = trainer(output, rule, weights, **settings)
    whole.train()
    torch.distributed.barrier()  # the checkpoint is the other rank's, too
    run = trainer(output, rule, weights, **settings)
    run.train(resume_from_checkpoint=f"{output}.trainer/checkpoint-1")
    return {"weights": full_weights(run.model), "whole": full_weights(whole.model)}


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


def loop(output, rule, weights, shard):
    if WORLD > 1 and not torch.distributed.is_initialized():  # which a trainer leaves behind
        torch.distributed.init_process_group("gloo")
    model = build(weights)
    base = model.get_base_model() if weights.endswith(("lora", "dora")) else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    isopo = ISOPO(model, rule, fisher_samples=9)
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
                batch.advantages, attention_mask=batch.attention_mask, completion_mask=batch.completion_mask
            ):
                output = model(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels, fused_lm_head=True
                )
                # FSDP averages over ranks
                (-output.log_probs.sum() * WORLD / batch.extra["num_items_in_batch"]).backward()
        isopo.step()
        optimizer.step()
    return model, isopo, {"wrapped": type(model).__name__}


def run(output, mode, rule, weights):
    if mode == "resumed":
        return resumed(output, rule, weights)
    if mode == "grouped":
        return grouped(output, rule, weights)
    if mode.startswith("overflow"):
        return overflow(output, rule, weights, mode.removeprefix("overflow"))
    if mode in ("trainer", "zero2", "zero3"):
        stage = None if mode == "trainer" else int(mode[-1])
        model, isopo, result = train(output, rule, weights, stage)
    else:
        model, isopo, result = loop(output, rule, weights, shard=mode == "fsdp2")
    running = isopo.state_dict()["running"]
    return {**result, "weights": full_weights(model), "mean": running["mean"], "moments": running["moments"]}


def main(output, *runs):
    save_runs(partial(run, output), runs, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
