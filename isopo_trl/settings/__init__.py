"""Settings: their types, the ranges of GRPO's own, and names that users may add to."""
