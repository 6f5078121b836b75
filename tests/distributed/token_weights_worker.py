"""Run by a launcher on one or two ranks: train on off-policy batches made by hand and write what came out.

token_weights_worker.py OUTPUT MODE-RULE-WEIGHTS-TOKENS[-OPTION]...

Modes: ddp, fsdp2, zero2 and zero3 are a real `ISOPOTrainer.train()` with `token_weights=TOKENS`; loop and shard are a
loop of one's own with the core, with a KL term that carries no advantage where TOKENS is kl, the latter with every
decoder layer sharded. Where TOKENS is terms, the trainer has no token weights, but a KL term and an adaptive entropy
bonus, and finds its reference model in the folder `reference` beside OUTPUT; where it is one of [`RATIO`], it has that
loss of the ratio instead. Option `stored` is without gradient checkpointing; with `silent`, no token of every other
microbatch is scored.

Microbatch k of the run is the same whether two ranks take one each or one rank accumulates two. P3O's effective sample
size is not: the first of two microbatches does not know the second's tokens. So one rank is told: in
[`WithForesight`] they are counted before their turn. Option `joined` makes one microbatch of the two instead.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from trl.trainer import add_fused_lm_head

from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.token_weights import ratio_sums
from tests import oracle, tiny, training
from tests.distributed.process_group import RANK, WORLD, Sharded, full_weights, save_runs
from tests.distributed.worker import STEPS, build, deepspeed_config, microbatch


REGULARIZATION = 1.0  # without it, three steps make 1e-4 of a difference of 1e-7 (DeepSpeed sums in its own order)
KPO = {"epsilon": 0.1, "epsilon_high": 0.2}
TERMS = {"beta": 0.3, "use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 10.0}
BAPO = {"bapo_target": 0.45, "token_weights_scope": "microbatch"}
CAPO = {"capo_tau_h": 0.5, "capo_tau_f": 1.0}
SAMPLER = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2}
# Losses of the ratio
RATIO = {
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "epsilon": 0.05, "importance_sampling_level": "sequence"},
}


def scored(model, batch):
    """Log-probabilities `[B, C]` of a batch's completions, one sequence after the other; 0 where there is no token."""
    logps = torch.zeros(batch.completion_ids.shape)
    for s, (p, c) in enumerate(torch.stack([batch.prompt_mask.sum(1), batch.completion_mask.sum(1)], 1).tolist()):
        prompt, completion = batch.prompt_ids[s, len(batch.prompt_ids[s]) - p :], batch.completion_ids[s, :c]
        logps[s, :c] = training.log_probabilities(model, prompt.tolist(), completion.tolist()).float()
    return logps


def off_policy(number, weights):
    """Microbatch `number`, drawn by a policy that is the one at the start but for noise."""
    # A prompt of one token has a key whose gradient is zero or rounding, and counts or does not
    batch = microbatch(number, shortest=2)
    logps = scored_at_the_start(number, weights)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1000 + number))
    batch.extra["sampling_per_token_logps"] = (logps + 0.4 * noise) * batch.completion_mask
    return batch


@functools.cache
def scored_at_the_start(number, weights):
    return scored(build(weights), microbatch(number, shortest=2))


def joined(one, two):
    """The sequences of two batches as one."""

    def cat(left, right, before):
        width = max(left.shape[1], right.shape[1])
        pads = [(width - x.shape[1], 0) if before else (0, width - x.shape[1]) for x in (left, right)]
        return torch.cat([torch.nn.functional.pad(x, pad) for x, pad in zip((left, right), pads, strict=True)])

    logps = [batch.extra["sampling_per_token_logps"] for batch in (one, two)]
    return oracle.Batch(
        cat(one.prompt_ids, two.prompt_ids, before=True),
        cat(one.prompt_mask, two.prompt_mask, before=True),
        cat(one.completion_ids, two.completion_ids, before=False),
        cat(one.completion_mask, two.completion_mask, before=False),
        torch.cat([one.advantages, two.advantages]),
        extra={**one.extra, "sampling_per_token_logps": cat(*logps, before=False)},
    )


class ByHand(ISOPOTrainer):
    """Takes its microbatches from a list instead of generating them; everything else is real."""

    def _prepare_inputs(self, generation_batch):
        inputs = self.batches[self._step * WORLD + RANK].for_trl()
        return {name: value.to(self.accelerator.device) for name, value in inputs.items()}


class ShardedByHand(ByHand, Sharded):
    """The same under FSDP2."""


class WithForesight(ByHand):
    """Counts the step's later tokens before their turn. Keeps what the effective sample sizes should be."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ess = []

    def _compute_loss(self, model, inputs):
        step, place = divmod(self._step, 2)
        pair, ratios, sums = self.batches[2 * step : 2 * step + 2], [], []
        for batch in pair:
            log_ratio = scored(self.model, batch) - batch.extra["sampling_per_token_logps"]
            ratios.append(log_ratio[batch.completion_mask.bool()].double().exp())
            sums.append(ratio_sums(log_ratio, batch.completion_mask))
        if place == 0:
            r = torch.cat(ratios)
            self.ess.append((r.sum() ** 2 / (len(r) * r.square().sum())).item())
        self.weighting.sums = sums[1 - place]
        return super()._compute_loss(model, inputs)


def train(output, mode, rule, weights, tokens, option=None):
    batches = [off_policy(number, weights) for number in range(2 * STEPS)]
    accumulation = 2 // WORLD
    if option == "joined":
        batches = [joined(*batches[number : number + 2]) for number in range(0, 2 * STEPS, 2)]
        accumulation = 1
    for number, batch in enumerate(batches) if tokens == "terms" else ():
        batch.extra["ref_per_token_logps"] = batch.extra.pop("sampling_per_token_logps")
        if option == "silent" and number % 2:  # the terms vanish on one rank, and not on the other
            batch.extra["tool_mask"] = torch.zeros_like(batch.completion_mask)
    kind = ShardedByHand if mode == "fsdp2" else ByHand
    if tokens == "p3o" and WORLD == 1 and option != "joined":
        kind = WithForesight
    args = ISOPOConfig(
        f"{output}.trainer",
        rule=rule,
        regularization=None if rule == "none" else REGULARIZATION,
        fisher_samples=9,
        token_weights="none" if tokens in ("terms", *RATIO) else tokens,
        use_cpu=True,
        ddp_backend=None if WORLD == 1 else "gloo",
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=option != "stored",
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        deepspeed=deepspeed_config(int(mode[-1]) if mode.startswith("zero") else None, accumulation),
        **{"kpo": KPO, "bapo": BAPO, "capo": CAPO, "sampler": SAMPLER, "terms": TERMS, **RATIO}.get(tokens, {}),
    )
    model = build(weights)
    # Where the reference model is loaded from, with full weights
    model.config._name_or_path = str(Path(output).with_name("reference"))
    trainer = kind(model, tiny.reward, args, tiny.prompts(64), processing_class=tiny.tokenizer())
    trainer.batches = batches
    trainer.train()
    result = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "logs": [log for log in trainer.state.log_history if "loss" in log],
    }
    if kind is WithForesight:
        result["ess"] = trainer.ess
    return trainer.model, trainer.isopo, result


def loop(mode, rule, weights, term):
    model = build(weights)
    batches = [off_policy(number, weights) for number in range(2 * STEPS)]
    base = model.get_base_model() if weights == "lora" else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    isopo = ISOPO(model, rule, regularization=REGULARIZATION, fisher_samples=9, fisher_scope="microbatch")
    if mode == "shard":
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
            batch = batches[number]
            labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
            labels[:, : batch.prompt_ids.shape[1]] = -100
            with isopo.microbatch(
                batch.advantages, attention_mask=batch.attention_mask, completion_mask=batch.completion_mask
            ):
                output = model(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels, fused_lm_head=True
                )
                share = WORLD / batch.extra["num_items_in_batch"]  # FSDP averages over ranks
                logps = output.log_probs[:, -batch.completion_mask.shape[1] :]
                if term == "kl":
                    log_ratio = (logps - batch.extra["sampling_per_token_logps"]) * batch.completion_mask
                    isopo.unscaled((log_ratio.exp() * log_ratio).sum() * share)
                (-output.log_probs.sum() * share).backward()
        isopo.step()
        optimizer.step()
    return model, isopo, {"wrapped": type(model).__name__}


def run(output, mode, *settings):
    if mode in ("loop", "shard"):
        model, isopo, result = loop(mode, *settings)
    else:
        model, isopo, result = train(output, mode, *settings)
    return {**result, "weights": full_weights(model), "means": isopo.state_dict()["running"]["mean"]}


if __name__ == "__main__":
    _, output, *runs = sys.argv
    save_runs(functools.partial(run, output), runs, output)
