"""Rewards: what reward functions may return, and the KL divergence to the reference model as one of them."""
