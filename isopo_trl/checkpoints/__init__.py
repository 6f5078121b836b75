"""Checkpoints: which one a run resumes from, whether it is whole, and what the model card says."""
