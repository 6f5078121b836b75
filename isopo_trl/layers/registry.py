"""Kinds of layers that are added from outside."""

from typing import TypeVar

from .layer import Layer


_REGISTERED: dict[tuple[str, str], type[Layer]] = {}
K = TypeVar("K", bound=type[Layer])


def register_layer(kind: K) -> K:
    """
    Let a kind of layer take the modules that it `accepts`: class decorator. It is asked before those of the package,
    and before what was registered earlier.

    Example:

    ```python
    @register_layer
    class ProjectionLayer(Layer):
        kind = "projection"

        @classmethod
        def accepts(cls, module, trainable):
            return isinstance(module, Projection)

        def forward(self, module, microbatch, x):
            return rescaled_linear(x, module.kernel.t(), None, self, microbatch)
    ```
    """
    if not (isinstance(kind, type) and issubclass(kind, Layer) and isinstance(getattr(kind, "kind", None), str)):
        raise TypeError(
            f"register_layer takes a subclass of `isopo_trl.layers.Layer` with a `kind`, its name in the coverage "
            f"table, got {kind!r}."
        )
    # The same class again is a cell of a notebook that was run again
    _REGISTERED.pop((kind.__module__, kind.__qualname__), None)
    _REGISTERED[kind.__module__, kind.__qualname__] = kind
    return kind


def registered_kinds() -> list[type[Layer]]:
    """The kinds that were added, the last one first."""
    return list(reversed(_REGISTERED.values()))
