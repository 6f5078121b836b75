"""Checkpoints: which one a run resumes from, what is in it, and what the model card says."""
