"""Policies: when to save, and which checkpoints to keep."""
