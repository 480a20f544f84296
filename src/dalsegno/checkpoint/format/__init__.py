"""Directories of memory checkpoints."""
