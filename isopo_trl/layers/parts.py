"""What part of a model a layer is, as a reader of the log would call it."""

from .layer import Layer


# A layer is the first of these that its kind, or a piece of its module's name, tells of
_KINDS = {"rms norm": "norm", "layer norm": "norm", "embedding": "embedding", "lm head": "head", "experts": "mlp"}
_PIECES = {
    "head": ("lm_head", "embed_out", "output_layer"),
    "norm": ("norm", "ln_"),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "experts", "moe"),
    "embedding": ("embed", "wte", "wpe"),
}


def part_of(layer: Layer) -> str:
    """`"attention"`, `"mlp"`, `"norm"`, `"embedding"`, `"head"` or `"other"`."""
    if layer.kind in _KINDS:
        return _KINDS[layer.kind]
    pieces = layer.name.lower().split(".")
    for part, words in _PIECES.items():
        if any(word in piece for word in words for piece in pieces):
            return part
    return "other"
