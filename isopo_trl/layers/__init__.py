"""One file per kind of layer: the autograd function that stands in for the layer's own forward.

Each computes the same output and input gradient as the layer does. What differs is the parameters' gradient: `sum_s
c_s V_s` in place of `sum_s V_s`, with `c_s` from the layer's statistics and [`~microbatch.Microbatch`]. `plan` says
which kind takes which parameter.
"""
