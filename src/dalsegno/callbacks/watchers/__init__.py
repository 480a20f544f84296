"""Callbacks that look for what goes wrong in a run."""
