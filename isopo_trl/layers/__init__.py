"""
Kinds of layers: how the gradients of a module's parameters are taken per sequence, one file for each kind.

[`register_layer`] adds one from outside.
"""

from .layer import Inseparable, Layer, LayerFunction, Unsupported, layer_backward
from .linear import rescaled_linear
from .registry import register_layer


__all__ = ["Inseparable", "Layer", "LayerFunction", "Unsupported"]
__all__ += ["layer_backward", "register_layer", "rescaled_linear"]
