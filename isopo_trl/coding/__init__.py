"""Functions written in Python."""
