"""
Trained weights in bf16 that really move: optimizers whose steps are made in float32 and kept in 16 bits, by rounding
at random or beside a remainder, and a warning where rounding to nearest loses them.
"""
