"""
Every family of causal language models that transformers can build, tiny, against the definition in float64.

`python -m tests.architectures` examines all of them and writes the table in `docs/architectures.md`; given names of
families, it examines those and prints their lines.

For the rule `none`, what is expected needs nothing but autograd: each sequence is run alone, and each parameter's
gradients are added up with the advantages. For `fisher`, every module with trained parameters is called again on each
position alone, as in [`~tests.mixtures`], and the formulas follow. What is taken per sequence (`any module`) has the
gradients of the sequences as samples. A module that cannot be called on one position (its output depends on where the
position stands) is held against the coefficients that ISOPO reports; the table says so.
"""

import contextlib
import inspect
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import isopo_trl
from isopo_trl import ISOPO
from tests import mixtures, oracle


PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
BEGIN, END = "<!-- written by `python -m tests.architectures` -->", "<!-- end -->"
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOLERANCE = 1e-9
LARGEST = 8_000_000  # parameters of a model that counts as tiny
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
OWN: dict[str, dict] = {
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


def shrunk(config_class, own=None):
    """A configuration of small sizes, with one layer of each type; those of a model's parts (text, vision) as well."""
    default = config_class()
    fields = {}
    for cls in config_class.__mro__:
        if issubclass(cls, PreTrainedConfig):
            fields |= dict.fromkeys(inspect.signature(cls.__init__).parameters)
            fields |= dict.fromkeys(getattr(cls, "__annotations__", {}))
    values = {name: value for name, value in VALUES.items() if name in fields}
    for name in fields:
        if "dropout" in name or name.endswith(("pdrop", "layerdrop", "jitter_noise")):
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
        if isinstance(of_default, PreTrainedConfig):
            values[name] = shrunk(type(of_default))
    return config_class(**{**values, **(own or {})})


def build(family):
    """A tiny model in float64 whose numbers are all random; raises [`NotTiny`] before it makes a large one."""
    config = shrunk(CONFIG_MAPPING[family], OWN.get(family))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise NotTiny(f"{size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.float64)
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


def alone(model, batch, weights, columns_as_positions=False):
    found = Alone([], [], [])
    every = mixtures.units(model)
    P = batch.prompt_ids.shape[1]
    for s in range(len(weights)):
        seen, handles = {name: [] for name in every}, []
        for name, unit in every.items():

            def remember(module, args, kwargs, output, calls=seen[name]):
                several = isinstance(output, tuple)
                outputs = [y.clone() if isinstance(y, torch.Tensor) else y for y in (output if several else (output,))]
                for y in outputs:
                    if isinstance(y, torch.Tensor) and y.requires_grad:
                        y.retain_grad()
                calls.append(([_detached(x) for x in args], {k: _detached(x) for k, x in kwargs.items()}, outputs))
                # Copies, since some families go on in place
                handed = tuple(y.clone() if isinstance(y, torch.Tensor) else y for y in outputs)
                return handed if several else handed[0]

            if name:  # the model itself stands for what it holds alone
                handles.append(unit.called.register_forward_hook(remember, with_kwargs=True))
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        scored = (columns >= P)[1:]
        here = torch.zeros(1, len(columns) - 1, dtype=torch.float64)
        here[0, scored] = weights[s, (columns[1:] - P)[scored]]
        try:
            model.zero_grad()
            inputs = {"position_ids": columns.unsqueeze(0)} if columns_as_positions else {}
            loss = loss_of(model, ids, torch.ones_like(ids), here, **inputs)
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        found.losses.append(loss.item())
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        found.calls.append(seen)
    model.zero_grad()
    return found


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def position_gradients(unit, calls, positions):
    """`[positions, numbers]` of one unit; raises where it cannot be called on one position."""
    calls = [call for call in calls if any(isinstance(y, torch.Tensor) and y.grad is not None for y in call[2])]
    if len(calls) != 1:
        raise NotImplementedError(f"{len(calls)} calls")
    ((args, kwargs, outputs),) = calls
    parameters = list(unit.parameters.values())
    rows = []
    for t in range(positions):
        ys = unit.called(
            *[_at(x, t, positions) for x in args], **{name: _at(x, t, positions) for name, x in kwargs.items()}
        )
        pairs = [
            (y, _at(whole.grad, t, positions))
            for y, whole in zip(ys if isinstance(ys, tuple) else (ys,), outputs, strict=True)
            if isinstance(whole, torch.Tensor) and whole.grad is not None
        ]
        here, there = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(here, parameters, there, allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)
        ]
        rows.append(torch.cat(flat))
    return torch.stack(rows)


def _at(x, t, positions):
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return x
    axes = [axis for axis, size in enumerate(x.shape) if size == positions]
    if not axes:  # the same for all positions; what is not is noticed by the sum over them
        return x
    if len(axes) != 1:
        raise NotImplementedError(f"positions in shape {list(x.shape)}")
    return x.narrow(axes[0], t, 1)


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
        if layer.kind == "any module":
            parameters = [holder.get_parameter(name) for holder, name in layer.places]
            if any(_shared(model, p) for p in parameters):
                raise NotImplementedError(f"{layer.name} shares a parameter, and autograd gives the sum of its uses")
            V = gradients_of(parameters)
            add(parameters, oracle.coefficients(V, V, batch.advantages, "fisher") @ V)
            done |= set(parameters)
    for name, unit in mixtures.units(model).items():
        parameters = list(unit.parameters.values())
        if done.issuperset(parameters):
            continue
        V = None
        try:
            per_sequence = [
                position_gradients(unit, single.calls[s][name], int(batch.attention_mask[s].sum())) for s in range(B)
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
    """Relative to each parameter's gradient, or to a millionth of the largest where one is zero but for rounding."""
    errors = {}
    floor = 1e-6 * max(gradient.norm().item() for gradient in expected.values())
    for name in names:
        right = expected.get(name)
        mine = found.get(name)
        right = torch.zeros_like(mine) if right is None else right
        mine = torch.zeros_like(right) if mine is None else mine
        errors[name] = (mine - right).norm().item() / max(right.norm().item(), floor)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def unused(model, batch, weights):
    """Names of parameters that the loss does not reach."""
    model.zero_grad()
    loss_of(model, batch.input_ids, batch.attention_mask, weights).backward()
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


@dataclass
class Outcome:
    verdict: str  # "exact", "refused", "fails" (an error that is not ISOPO's), "not examined", "WRONG"
    reason: str = ""
    kinds: str = ""

    def row(self, family):
        return f"| {family} | {self.verdict} | {self.kinds} | {self.reason.replace('|', ',')} |"


def examine(family):
    """What becomes of a family: both rules, full weights."""
    try:
        with _limit():
            model = build(family)
    except Exception as error:
        return Outcome("not examined", f"its small configuration is not built: {_first(error)}")
    notes = []
    for lengths, counted in ((RAGGED, False), (RAGGED, True), (EQUAL, False)):
        batch = oracle.random_batch(*lengths, 100)
        weights = oracle.token_weights(batch)
        try:
            with _limit():
                idle = unused(model, batch, weights)
                single = alone(model, batch, weights, counted)
                whole = loss_of(model, batch.input_ids, batch.attention_mask, weights).item()
        except Exception as error:
            failure = Outcome("not examined", f"its small configuration does not run: {_first(error)}")
            continue
        if abs(sum(single.losses) - whole) <= 1e-10 * max(abs(whole), 1):
            break
        failure = Outcome("not examined", "a sequence alone has another loss than in a batch")
    else:
        return failure
    if lengths is EQUAL:
        notes.append("with sequences of equal length, since padding changes its loss")
    for name, p in model.named_parameters():
        if name in idle:
            p.requires_grad_(False)
    if idle:
        notes.append(f"{len(idle)} parameters take no part in the loss and are frozen: {_places(idle)}")
        single = alone(model, batch, weights, counted)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    kinds = set()
    for rule in ("none", "fisher"):
        try:
            with _limit():
                isopo = ISOPO(model, rule, fisher_samples=10_000)
                try:
                    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
                        loss_of(model, batch.input_ids, batch.attention_mask, weights).backward()
                finally:
                    isopo.detach()
        except Exception as error:
            own = str(Path(isopo_trl.__file__).parent)
            ours = (
                isinstance(error, (ValueError, RuntimeError))
                and own in traceback.extract_tb(error.__traceback__)[-1].filename
            )
            return Outcome("refused" if ours else "fails", "; ".join([_first(error), *notes]))
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        kinds |= {layer.kind for layer in isopo.layers}
        try:
            with _limit():
                if rule == "none":
                    expected = {}
                    for s, gradients in enumerate(single.gradients):
                        for name, gradient in gradients.items():
                            expected[name] = expected.get(name, 0) + batch.advantages[s] * gradient
                else:
                    expected, trusted = fisher(model, batch, single, isopo)
                    if trusted:
                        notes.append(f"`fisher` held against its own coefficients at {_places(trusted)}")
        except Exception as error:
            return Outcome("not examined", f"what {rule} must give cannot be computed here: {_first(error)}")
        error, name = worst_error(found, expected, trained)
        if not error < TOLERANCE:
            return Outcome("WRONG", "; ".join([f"{rule}, {name}: {error:.1e}", *notes]))
    return Outcome("exact", "; ".join(notes), ", ".join(sorted(f"`{kind}`" for kind in kinds)))


def _first(error):
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"


def _places(names):
    """The last parts of names, each once: layers repeat themselves."""
    found = sorted({".".join(part for part in name.split(".")[-2:] if not part.isdigit()) for name in names})
    return ", ".join(f"`{name}`" for name in found[:4]) + (" ..." if len(found) > 4 else "")


@contextlib.contextmanager
def _limit():
    def stop(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def float64_throughout():
    """Models go to float32 in places, whatever they are given; here they cannot."""
    kept = torch.Tensor.float, torch.float, torch.float32
    torch.Tensor.float, torch.float, torch.float32 = torch.Tensor.double, torch.float64, torch.float64
    try:
        yield
    finally:
        torch.Tensor.float, torch.float, torch.float32 = kept


def main(names):
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    with float64_throughout():
        for family in names or FAMILIES:
            rows.append(examine(family).row(family))
            print(rows[-1], flush=True)
    if not names:
        text = PAGE.read_text()
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        table = ["| family | | kinds of layers | |", "|---|---|---|---|", *rows]
        PAGE.write_text("\n".join([head + BEGIN, "", *table, "", END]) + tail)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
