"""Tiny models, a tokenizer and datasets, built in memory: no download, the same on every run.

Every model family shares one tokenizer (105 tokens: special tokens and printable ASCII), so a test can
exchange the family and nothing else.
"""

import functools
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.masking_utils import eager_mask


PAD, BOS, EOS = "<pad>", "<s>", "</s>"
ROLES = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
CALL = ["<call>", "</call>"]
# The byte-level alphabet of BPE, cut to printable ASCII: a space is written \u0120 and a line break \u010a.
CHARACTERS = ["\u010a", "\u0120", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
VOCABULARY = {token: index for index, token in enumerate([PAD, BOS, EOS, *ROLES, *CALL, *CHARACTERS])}

# One message is `<|role|>content</s>`. Earlier messages read the same whatever follows them, as TRL's tool loop needs.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|system|>
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{ function.name }}({{ function.parameters.properties | join(',') }})
{%- endfor -%}
</s>
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
<call>{"name": {{ function.name | tojson }}, "arguments": {{ function.arguments | tojson }}}</call>
{%- endfor -%}
</s>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""

# The inverse of the template above, for completions that call a tool.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": EOS, "content": "text"},
    },
}

IDS = {"pad_token_id": VOCABULARY[PAD], "bos_token_id": VOCABULARY[BOS], "eos_token_id": VOCABULARY[EOS]}
SIZE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
# Both kinds of attention, with a window shorter than the test sequences.
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    **{"vocab_size": len(VOCABULARY), "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 32},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}

# family: (model class, config class, settings of the config)
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, SIZE),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SIZE),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**SIZE, "head_dim": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**SIZE, **GEMMA}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**SIZE, **GEMMA}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "mistral": (MistralForCausalLM, MistralConfig, {**SIZE, "head_dim": 8, "sliding_window": 8}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**SIZE, "original_max_position_embeddings": 256}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**SIZE, **MOE, "head_dim": 8}),
}

# More mixtures of experts: biases; shared experts and groups of experts; low-rank attention
GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"num_key_value_heads": 2, "head_dim": 4},
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**SIZE, **LOCAL}),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {**SIZE, **LOCAL, **WINDOW, "swiglu_limit": 0.5}),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {**SIZE, **MOE, **GROUPS, "head_dim": 8}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**SIZE, **MOE, **GROUPS, **LATENT}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one per special token; pads on the left."""
    # Byte-level BPE without merges: the one form that AutoTokenizer reads back unchanged for every family
    # (it gives some of them, such as qwen2, their own tokenizer class whatever was saved).
    backend = Tokenizer(models.BPE(VOCABULARY, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(CALL)
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=PAD,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=ROLES,
        padding_side="left",
        model_max_length=256,
    )
    result.chat_template = CHAT_TEMPLATE
    result.response_template = RESPONSE_TEMPLATE
    return result


def capped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gemma2's attention, all of it in the dtype of its inputs, which are [batch, heads, tokens, head_dim].

    The one in transformers takes the softmax in float32. There the float64 mask overflows to minus infinity, and the
    rows of left padding become NaN.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = softcap * torch.tanh(query @ key.mT * scaling / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("capped_attention", capped_attention)
AttentionMaskInterface.register("capped_attention", eager_mask)


def model(
    family: str, *, tie: bool | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A two-layer model of the family; `tie` ties embedding and head, or unties them (None: the family's own default).

    The global random stream is left where it was.
    """
    model_class, config_class, settings = {**FAMILIES, **MIXTURES}[family]
    tied = {} if tie is None else {"tie_word_embeddings": tie}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some families begin with random biases
        result = model_class(config_class(**settings, **IDS, **tied))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in result.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # Norm scales and biases start at one or zero: stay near, so that neither is a special value.
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.2 * noise)
    result.to(dtype)
    if dtype == torch.float64 and family == "gemma2":
        result.set_attn_implementation("capped_attention")
    if dtype == torch.float64 and family in ("qwen3_moe", *MIXTURES):
        # The default, a grouped matrix product, has no float64.
        result.set_experts_implementation("eager")
    return result


def save(folder: str | os.PathLike, family: str, **options) -> str:
    """Saves `model(family, **options)` and the tokenizer; the path returned can be given as `model=` to a trainer."""
    model(family, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return os.fspath(folder)


def _questions(n: int) -> list[str]:
    # Operands of one to three digits, so that a batch of questions is ragged.
    return [f"What is {7 ** (i % 4)} + {3 * i}?" for i in range(n)]


@functools.cache  # a fingerprint takes longer than the rows
def prompts(n: int) -> Dataset:
    """n questions of different lengths, as text."""
    return Dataset.from_dict({"prompt": _questions(n)})


@functools.cache
def conversational_prompts(n: int) -> Dataset:
    """The same n questions, each as a conversation of one user message."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in _questions(n)]})


def reward(completions: list, **_: object) -> list[float]:
    """The mean character code over 128: different for nearly any two completions, text or conversation."""
    texts = [
        text if isinstance(text, str) else "".join(message["content"] for message in text) for text in completions
    ]
    return [sum(map(ord, text)) / (128 * max(len(text), 1)) for text in texts]
