"""The mathematics of ISOPO on plain tensors: no modules, no trainer.

One layout serves every function here. A layer's input and its cotangent are *rows*, one row per token position:

- `a` `[N, d]`: the layer's input, `g` `[N, p]`: the gradient of the (advantage-free) loss at its output;
- a [`~geometry.sequences.Sequences`] says which of the `N` rows belong to which of the `m` sequences;
- the gradient of sequence `s` at a linear layer is `V_s = sum_{t in s} g_t a_t^T`, `[p, d]`;
- [`~geometry.sequences.Samples`] are the positions `j` at which the Fisher metric is taken.

`statistics` turns rows into the overlaps behind the Fisher norm, the Euclidean norm and the neural tangent kernel;
`cost` says by which route; `guarded` is the arithmetic that leaves out what has no gradient.
"""
