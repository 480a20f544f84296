"""Inspect checkpoints without a model: listing, contents, differences, and why each is kept."""
