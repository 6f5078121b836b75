"""Settings: their types, and the ranges of GRPO's own."""
