"""
Every family of causal language models that transformers can build, tiny, against the definition in float64: with full
weights, with LoRA, and with both kinds of gradient checkpointing.

`python -m tests.gradients.architectures` examines all of them, and those of [`vision_families`], and writes the tables
in `docs/architectures.md`; given names of families, it examines those and writes their lines.

For the rule `none`, what is expected needs nothing but autograd: each sequence is run alone, and each parameter's
gradients are added up with the advantages. For `fisher`, every module with trained parameters is called again on each
position alone, as in [`mixtures`], and the formulas follow. What is taken per sequence (`any module`) has the
gradients of the sequences as samples. A module that cannot be called on one position (its output depends on where the
position stands) is held against the coefficients that ISOPO reports; the table says so.
"""

import contextlib
import inspect
import signal
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import isopo_trl
from isopo_trl import ISOPO
from isopo_trl.layers.experts import is_dense, is_experts
from tests import oracle
from tests.gradients import mixtures


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOLERANCE = 1e-9
LARGEST = 12_000_000  # parameters of a model that counts as tiny
SECONDS = 60  # that a family may take

# Lengths that are no size of a model: an axis of that many is one of positions
RAGGED = ([3, 5, 4], [8, 6, 3])
EQUAL = ([5, 5, 5], [6, 6, 6])

# What a field of a configuration is set to, where there is one of that name
SIZES = {
    32: "hidden_size d_model n_embd dim_model embed_dim word_embed_proj_dim hidden_dim emb_dim embedding_size "
    "d_embed lru_width shared_expert_intermediate_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff ffn_hidden_size dim_ff d_inner "
    "feed_forward_size mlp_hidden_size attention_hidden_size",
    24: "moe_intermediate_size expert_ffn_hidden_size intermediate_size_mlp shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_decoder_layers "
    "num_global_key_value_heads swa_num_key_value_heads linear_num_key_heads num_kv_heads n_kv_heads "
    "num_encoder_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads "
    "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank index_n_heads "
    "swa_num_attention_heads n_mamba_heads num_ngram_heads",
    8: "head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank mamba_chunk_size "
    "chunk_size linear_key_head_dim linear_value_head_dim index_head_dim kv_channels global_head_dim swa_head_dim "
    "dim_head o_lora_rank attention_head_dim adapter_rank hidden_size_per_layer_input swa_v_head_dim "
    "index_topk",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups moe_layer_freq n_shared_experts num_shared_experts "
    "o_groups num_nextn_predict_layers_",
    64: "mamba_d_ssm max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions "
    "original_max_position_embeddings",
    16: "mamba_d_head mamba_head_dim mamba_headdim",
    100: "vocab_size n_vocab vocab_size_per_layer_input",
    0: "pad_token_id first_k_dense_replace num_nextn_predict_layers num_kv_shared_layers image_token_id "
    "audio_token_id video_token_id image_token_index boi_token_id eoi_token_id",
}
VALUES = {name: value for value, names in SIZES.items() for name in names.split()}
VALUES |= {"bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "decoder_start_token_id": 1}

# What else a family needs to be tiny, and to have each of its kinds of layers
_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict] = {
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "qwen4_exp": {"text_config": {f"indexer_{name}": value for name, value in _INDEXER.items()}},
    "qwen4_exp_text": {f"indexer_{name}": value for name, value in _INDEXER.items()},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 16},
    "moshi": {"audio_vocab_size": 50},
    "nemotron_h": {"layer_types": ["mamba", "attention", "moe"], "num_hidden_layers": 3},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 2],
    },
    "zaya": {"num_experts_per_tok": 1},
}


class NotTiny(Exception):
    """The configuration has sizes that are not known here."""


def shrunk(config_class, own=None, known=VALUES):
    """
    A configuration of the `known` small sizes, with one layer of each type; those of a model's parts (text, vision) as
    well. `own` is what is set beside, by name, that of a part under the part's name.
    """
    default = config_class()
    fields = {}
    for cls in config_class.__mro__:
        if issubclass(cls, PreTrainedConfig):
            fields |= dict.fromkeys(inspect.signature(cls.__init__).parameters)
            fields |= dict.fromkeys(getattr(cls, "__annotations__", {}))
    values = {name: value for name, value in known.items() if name in fields}
    for name in fields:
        drops = "dropout" in name or name.endswith(("pdrop", "layerdrop", "jitter_noise", "drop_path_rate"))
        if drops and not isinstance(getattr(default, name, None), bool):
            values[name] = 0 if type(getattr(default, name, None)) is int else 0.0
    if "qk_nope_head_dim" in values:  # latent attention: a key per head
        latent = {"head_dim": values.get("qk_rope_head_dim"), "num_key_value_heads": 4, "qk_head_dim": 12}
        values |= {name: value for name, value in latent.items() if name in fields}
    if "layer_types" in fields and getattr(default, "layer_types", None):
        types = list(dict.fromkeys(default.layer_types))
        values["layer_types"] = types * 2 if len(types) == 1 else types
        values["num_hidden_layers"] = len(values["layer_types"])
        if getattr(default, "mlp_layer_types", None):
            kinds = list(dict.fromkeys(default.mlp_layer_types))
            values["mlp_layer_types"] = (kinds * len(types) * 2)[: values["num_hidden_layers"]]
    for name in getattr(config_class, "sub_configs", {}):
        of_default = getattr(default, name, None)
        part = type(of_default) if of_default is not None else config_class.sub_configs[name]
        if of_default is None and name not in known:
            continue
        if inspect.isclass(part) and issubclass(part, PreTrainedConfig):
            values[name] = shrunk(part, (own or {}).get(name), known)
    own = {name: value for name, value in (own or {}).items() if not isinstance(values.get(name), PreTrainedConfig)}
    return config_class(**{**values, **own})


def build(family):
    """A tiny model of a family."""
    return from_config(AutoModelForCausalLM, shrunk(CONFIG_MAPPING[family], OWN.get(family)))


def from_config(auto_class, config):
    """A tiny model in float64 whose numbers are all random; raises [`NotTiny`] before it makes a large one."""
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class.from_config(config).parameters())
    if size > LARGEST:
        raise NotTiny(f"{size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(config).to(torch.float64)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(Exception):  # families that have no choice
            model.set_experts_implementation("eager")  # the grouped product has no float64 on a CPU
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def loss_of(model, ids, mask, weights, **inputs):
    """The summed log-probability of the last tokens, each with its weight, `[B, C]`."""
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
    logps = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logps[:, -weights.shape[1] :] * weights).sum()


@dataclass
class Alone:
    """Sequence by sequence, each without the others and without padding."""

    losses: list[float]
    gradients: list[dict]  # of each parameter that is reached, by its name
    calls: list[dict]  # by unit: (args, kwargs, outputs) of its calls


def alone(model, batch, weights, columns_as_positions=False, further=None):
    """`further(s, columns)` are the inputs of sequence `s`, in those columns of the batch, beside its tokens."""
    found = Alone([], [], [])
    # The model itself stands for what it holds alone
    called = {name: unit.called for name, unit in mixtures.units(model).items() if name}
    P = batch.prompt_ids.shape[1]
    for s in range(len(weights)):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        scored = (columns >= P)[1:]
        here = torch.zeros(1, len(columns) - 1, dtype=torch.float64)
        here[0, scored] = weights[s, (columns[1:] - P)[scored]]
        inputs = {"position_ids": columns.unsqueeze(0)} if columns_as_positions else {}
        inputs |= {} if further is None else further(s, columns)
        model.zero_grad()
        with oracle.remembered(called) as seen:
            loss = loss_of(model, ids, torch.ones_like(ids), here, **inputs)
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        found.calls.append(seen)
    model.zero_grad()
    return found


def fisher(model, batch, single, isopo):
    """What `fisher` must give, by name, and the modules whose coefficients are ISOPO's own."""
    names = {p: name for name, p in model.named_parameters()}
    multipliers = isopo.multipliers()
    B = len(batch.advantages)
    expected, trusted, done, of_uses = {}, [], set(), {}

    def gradients_of(parameters):  # [B, numbers]
        return torch.stack(
            [
                torch.cat([single.gradients[s].get(names[p], torch.zeros_like(p)).flatten() for p in parameters])
                for s in range(B)
            ]
        )

    def add(parameters, total):
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            expected[names[p]] = expected.get(names[p], 0) + part.view_as(p)

    for layer in isopo.layers:
        if layer.kind == "any module" and layer.entry_names()[0] in multipliers:  # else a second name, never used
            parameters = [holder.get_parameter(name) for holder, name in layer.places]
            if any(_shared(model, p) for p in parameters):
                raise NotImplementedError(f"{layer.name} shares a parameter, and autograd gives the sum of its uses")
            V = gradients_of(parameters)
            add(parameters, oracle.coefficients(V, V, batch.advantages, "fisher") @ V)
            done |= set(parameters)
    for name, unit in mixtures.units(model).items():
        parameters = list(unit.parameters.values())
        inside = {p for child in unit.called.children() for p in child.parameters()}
        second = inside.intersection(unit.called.parameters(recurse=False))  # that a module inside has as well
        if done.issuperset(parameters) or second.issuperset(parameters):
            continue
        V = None
        try:
            stack = getattr(unit.called, "get_base_layer", lambda unit=unit: unit.called)()
            experts = stack.num_experts if is_dense(stack) else 1
            lengths = batch.attention_mask.sum(1).tolist()
            per_sequence = [
                oracle.at_positions(unit.called, parameters, single.calls[s].get(name, []), lengths[s], experts)
                for s in range(B)
            ]
            V = torch.stack([G.sum(0) for G in per_sequence])
            if not any(_shared(model, p) for p in parameters):
                torch.testing.assert_close(V, gradients_of(parameters), rtol=1e-8, atol=1e-12)
            for p, part in zip(parameters, V.split([p.numel() for p in parameters], dim=1), strict=True):
                of_uses[p] = of_uses.get(p, 0) + part
            samples = torch.cat(per_sequence)
        except Exception:
            if any(_shared(model, p) for p in parameters):
                raise
            V, samples = gradients_of(parameters), None
            trusted.append(name)
        total = torch.empty_like(V[0])
        layers = int(unit.labels.max()) + 1
        for number in range(layers):
            here = unit.labels == number
            if samples is not None:
                c = oracle.coefficients(V[:, here], samples[:, here], batch.advantages, "fisher")
            else:
                first = next(iter(unit.parameters))
                c = batch.advantages * multipliers[first].double()
            total[here] = c @ V[:, here]
        add(parameters, total)
    for p, V in of_uses.items():
        if _shared(model, p):
            torch.testing.assert_close(V, gradients_of([p]), rtol=1e-8, atol=1e-12)
    return expected, trusted


def _shared(model, parameter):
    return sum(parameter is p for _, p in model.named_parameters(remove_duplicate=False)) > 1


def worst_error(found, expected, names):
    """
    Relative to each parameter's gradient, or to a ten-thousandth of the largest where one is next to zero: it is then
    a difference of large numbers, whose rounding is another on each machine.
    """
    errors = {}
    floor = 1e-4 * max(gradient.norm().item() for gradient in expected.values())
    for name in names:
        right = expected.get(name)
        mine = found.get(name)
        right = torch.zeros_like(mine) if right is None else right
        mine = torch.zeros_like(right) if mine is None else mine
        errors[name] = (mine - right).norm().item() / max(right.norm().item(), floor)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


@dataclass
class Outcome:
    verdict: str  # "exact", "refused", "fails" (an error that is not ISOPO's), "not examined", "WRONG", "" (has none)
    reason: str = ""
    kinds: set = field(default_factory=set)


def row(name, outcomes):
    """A line of the table: the verdict of each way of training, the kinds of layers, and what is to be said."""
    first, *others = outcomes.items()
    said = {first[1].reason: []} if first[1].reason else {}
    for way, outcome in others:
        if outcome.reason and outcome.reason != first[1].reason:
            said.setdefault(outcome.reason, []).append(way)
    notes = [f"{' and '.join(ways)}: {reason}" if ways else reason for reason, ways in said.items()]
    kinds = ", ".join(sorted(f"`{kind}`" for kind in first[1].kinds))
    cells = [name, *(outcome.verdict for outcome in outcomes.values()), kinds, "; ".join(notes).replace("|", ",")]
    return f"| {' | '.join(cells)} |"


@dataclass
class Case:
    """A model, a batch for it, and what the sequences alone give."""

    model: torch.nn.Module
    batch: oracle.Batch
    weights: torch.Tensor
    counted: bool  # whether positions are the columns of the padded batch
    single: Alone
    notes: list[str]

    def backward(self):
        """The gradients of the whole batch, by name."""
        self.model.zero_grad()
        batch = self.batch
        loss_of(self.model, batch.input_ids, batch.attention_mask, self.weights, **batch.extra).backward()
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found


LAYOUTS = ((RAGGED, False), (RAGGED, True), (EQUAL, False))


def prepared(model, layouts=LAYOUTS):
    """
    The [`Case`] of a model with a layout of the batch in which a sequence alone has the loss that it has in the batch;
    what the loss does not reach is frozen. An [`Outcome`] where there is none.
    """
    idle = []
    for lengths, counted in layouts:
        batch = oracle.random_batch(*lengths, 100)
        case = Case(model, batch, oracle.token_weights(batch), counted, Alone([], [], []), [])
        try:
            with limits():
                reached = case.backward()
                for name, p in model.named_parameters():
                    if p.requires_grad and name not in reached:
                        idle.append(name)
                        p.requires_grad_(False)
                case.single = alone(model, batch, case.weights, counted)
                whole = loss_of(model, batch.input_ids, batch.attention_mask, case.weights).item()
        except Exception as error:
            failure = Outcome("not examined", f"its small configuration does not run: {told(error)}")
            continue
        if abs(sum(case.single.losses) - whole) <= 1e-10 * max(abs(whole), 1):
            break
        failure = Outcome("not examined", "a sequence alone has another loss than in a batch")
    else:
        return failure
    if lengths is EQUAL:
        case.notes.append("with sequences of equal length, since padding changes its loss")
    if idle:
        case.notes.append(f"{len(idle)} parameters take no part in the loss and are frozen: {places(idle)}")
    return case


def compared(case, expected=None):
    """
    What ISOPO does with a case, and what it was held against, by rule; that may be given, where the case is another
    way to compute the same.
    """
    kinds, notes, known = set(), list(case.notes), {}
    for rule in ("none", "fisher"):
        try:
            with limits():
                isopo = ISOPO(case.model, rule, fisher_samples=10_000)
                try:
                    with isopo.microbatch(case.batch.advantages, attention_mask=case.batch.attention_mask):
                        found = case.backward()
                finally:
                    isopo.detach()
        except Exception as error:
            own = str(Path(isopo_trl.__file__).parent)
            ours = (
                isinstance(error, (ValueError, RuntimeError))
                and own in traceback.extract_tb(error.__traceback__)[-1].filename
            )
            return Outcome("refused" if ours else "fails", "; ".join([told(error), *notes])), {}
        kinds |= {layer.kind for layer in isopo.layers}
        try:
            with limits():
                if expected:
                    known[rule] = expected[rule]
                elif rule == "none":
                    known[rule] = weighted_sum(case.single.gradients, case.batch.advantages)
                else:
                    known[rule], trusted = fisher(case.model, case.batch, case.single, isopo)
                    if trusted:
                        notes.append(f"{TRUSTED} {places(trusted)}")
        except Exception as error:
            return Outcome("not examined", f"what {rule} must give cannot be computed here: {told(error)}"), {}
        trained = [name for name, p in case.model.named_parameters() if p.requires_grad]
        error, name = worst_error(found, known[rule], trained)
        if not error < TOLERANCE:
            return Outcome("WRONG", "; ".join([f"{rule}, {name}: {error:.1e}", *notes])), {}
    return Outcome("exact", "; ".join(notes), kinds), known


def weighted_sum(gradients, weights):
    """`sum_s weights[s] gradients[s]` by name; a sequence may not reach every parameter."""
    total = {}
    for weight, of_sequence in zip(weights, gradients, strict=True):
        for name, gradient in of_sequence.items():
            total[name] = total.get(name, 0) + weight * gradient
    return total


def checkpointed(case, expected, reentrant):
    """The same with gradient checkpointing."""
    model = case.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return Outcome("")
    try:
        with limits():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            plain = case.backward()
        error, name = worst_error(plain, weighted_sum(case.single.gradients, torch.ones(3)), plain)
        if not error < TOLERANCE:
            return Outcome("not examined", f"its own gradient is another with checkpointing ({name}: {error:.0e})")
    except Exception as error:
        return Outcome("not examined", f"it does not run with checkpointing: {told(error)}")
    else:
        outcome, _ = compared(case, expected)
        outcome.reason = "" if outcome.verdict == "exact" else outcome.reason
        return outcome
    finally:
        model.gradient_checkpointing_disable()


def with_lora(make):
    """LoRA on all linear layers and stacks of experts of the model that `make` makes; no B is zero."""
    model = make()
    excluded = [  # more than a product: PEFT would add to a tuple
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and isinstance(module(module.weight.new_zeros(1, module.in_features)), tuple)
    ]
    if "mamba" in str(model).lower():  # PEFT refuses these where a model has Mamba's mixers
        excluded += ["out_proj", "conv1d"]
    settings = {"r": 2, "target_modules": "all-linear", "exclude_modules": excluded or None, "task_type": "CAUSAL_LM"}
    stacks = {n for m in model.modules() if is_experts(m) for n, p in m.named_parameters() if p.dim() == 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**settings))
        if stacks and not any(isinstance(module, ParamWrapper) for module in model.modules()):
            # PEFT takes those of some families for linear layers, and must be told of others
            targets = [f"experts.{name}" for name in sorted(stacks)]
            model = get_peft_model(make(), LoraConfig(**settings, target_parameters=targets))
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.3 * torch.randn_like(p))
    return model.to(torch.float64).train()


TRUSTED = "`fisher` held against its own coefficients at"
WAYS = ("full", "LoRA", "reentrant", "not reentrant")


def examine(family, ways=WAYS):
    """What becomes of a family, by the way in which it is trained: both rules each."""
    outcomes = {}
    try:
        with limits():
            model = build(family)
    except Exception as error:
        outcomes["full"] = Outcome("not examined", f"its small configuration is not built: {told(error)}")
        return {way: outcomes.get(way, Outcome("")) for way in ways}
    case = prepared(model)
    if isinstance(case, Outcome):
        return {way: case if way == "full" else Outcome("") for way in ways}
    outcomes["full"], expected = compared(case)
    if "LoRA" in ways:
        try:
            with limits():
                adapted = prepared(
                    with_lora(lambda: build(family)), [layout for layout in LAYOUTS if _is(layout, case)]
                )
        except Exception as error:
            outcomes["LoRA"] = Outcome("not examined", f"PEFT does not adapt it: {told(error)}")
        else:
            outcomes["LoRA"] = adapted if isinstance(adapted, Outcome) else compared(adapted)[0]
            if outcomes["LoRA"].verdict == "exact":  # the rest is said of the full weights
                parts = outcomes["LoRA"].reason.split("; ")
                outcomes["LoRA"].reason = "; ".join(part for part in parts if part.startswith(TRUSTED))
    for way, reentrant in (("reentrant", True), ("not reentrant", False)):
        if way in ways and expected:
            outcomes[way] = checkpointed(case, expected, reentrant)
    return {way: outcomes.get(way, Outcome("")) for way in ways}


def _is(layout, case):
    lengths, counted = layout
    return counted == case.counted and len(case.batch.prompt_ids[0]) == max(lengths[0])


def told(error):
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"


def places(names):
    """The last parts of names, each once: layers repeat themselves."""
    found = sorted({".".join(part for part in name.split(".")[-2:] if not part.isdigit()) for name in names})
    return ", ".join(f"`{name}`" for name in found[:4]) + (" ..." if len(found) > 4 else "")


@contextlib.contextmanager
def limits():
    """No more than so many seconds, and in float64 also what models make themselves."""

    def stop(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    previous, dtype = signal.signal(signal.SIGALRM, stop), torch.get_default_dtype()
    signal.alarm(SECONDS)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        torch.set_default_dtype(dtype)


def _marks(name):
    return f"<!-- {name}: written by `python -m tests.gradients.architectures` -->", f"<!-- end of {name} -->"


def table(name):
    """The lines of a table of the page."""
    begin, end = _marks(name)
    return PAGE.read_text().split(begin)[1].split(end)[0].splitlines()


def write(name, lines):
    begin, end = _marks(name)
    text = PAGE.read_text()
    PAGE.write_text("\n".join([text.split(begin)[0] + begin, "", *lines, "", end]) + text.split(end)[1])


def cells(line):
    """Those of a line of a table: the family, a verdict for each way of training, the rest."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def write_rows(name, title, ways, rows):
    """Put lines, by family, in the place of those that the table has, and count how they all came out."""
    rows = {cells(line)[0]: line for line in table(name) if line.startswith("| ")} | rows
    rows.pop("family", None)
    counts = []
    for number, way in enumerate(ways, 1):
        verdicts = Counter(cells(line)[number] for line in rows.values())
        counts.append(f"{way}: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common() if verdict))
    head = [f"| family | {' | '.join(ways)} | kinds of layers | |", "|---" * (len(ways) + 3) + "|"]
    said = f"{len(rows)} families of {title}. {'; '.join(counts)}."
    write(name, [said, "", *head, *(rows[family] for family in sorted(rows))])


def main(names):
    from tests.gradients import vision_families  # which is made of what is here

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    vision = vision_families
    sweeps = {
        "causal": ("causal language models", WAYS, FAMILIES, examine),
        "vision": ("vision-language models", vision.WAYS, vision.FAMILIES, vision.examine),
    }
    with oracle.float64_throughout():
        for name, (title, ways, families, examined) in sweeps.items():
            rows = {}
            for family in families:
                if not names or family in names:
                    rows[family] = row(family, examined(family))
                    print(rows[family], flush=True)
            if rows:
                write_rows(name, title, ways, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
