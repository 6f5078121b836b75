"""
Triton versions of what `geometry` and `rules` compute, for padded batches on a GPU.

At the sizes of language models the arithmetic of ISOPO is small, and what costs time is launching it: some thirty
small operations per layer. Here a layer takes two launches beside its own products.

- `launch`: which tensors the kernels can take, and how a kernel is started.
- `coefficients`: statistics to coefficients, inside a kernel; the layout of what kernels read and write.
- `linear`: overlaps of a linear layer, and the scaling of its rows.
- `experts`: all that a mixture's stack of matrices needs, for all of its experts at once.
- `v`: norms and neural tangent kernel of explicit gradients, and their sum.
- `elementwise`, `rms_norm`: parameters that act feature by feature, and the norm itself.
- `rotary`, `gated`: rotary embeddings and gated activations, which hold no parameter.
- `divergence`: of distributions over the vocabulary, for the length of a step.
- `halves`: numbers in float16, and what that leaves out, for passes that measure a step.
"""
