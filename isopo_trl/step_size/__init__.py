"""How long a step is (`target_kl`): measured, shortened, and learned from."""
