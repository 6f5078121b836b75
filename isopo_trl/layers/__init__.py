"""One file per kind of layer: the autograd function that stands in for the layer's own forward.

Each computes the same output and input gradient as the layer does. What differs is the parameters' gradient: `sum_s
c_s V_s` in place of `sum_s V_s`, with `c_s` from the layer's statistics and [`~microbatch.Microbatch`].
"""

from .elementwise import ElementwiseLayer
from .embedding import EmbeddingLayer
from .layer import Layer, Unsupported, full_shape
from .layer_norm import LayerNormLayer
from .linear import LinearLayer
from .lm_head import LMHeadLayer
from .lora import lora_linears
from .rms_norm import RMSNormLayer, frozen_norms


# In the order in which they are asked; the first that accepts a module takes it
KINDS: tuple[type[Layer], ...] = (LinearLayer, EmbeddingLayer, LayerNormLayer, RMSNormLayer, ElementwiseLayer)

__all__ = ["KINDS", "LMHeadLayer", "Layer", "Unsupported", "frozen_norms", "full_shape", "lora_linears"]
