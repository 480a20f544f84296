"""Runs of other programs: import their checkpoints, and export checkpoints for them; see ``programs``."""
