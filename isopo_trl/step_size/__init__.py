"""An optimizer step: its gradient, and how long it is (`target_kl`): measured, shortened, and learned from."""
