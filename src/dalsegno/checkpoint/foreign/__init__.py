"""Runs of other programs: import their checkpoints, and export checkpoints for them. One file for each kind of files.

Each reads to, and writes from, a RunState (``run_state.py``). ``own_checkpoint.py`` converts a RunState to a checkpoint
and back. No program needs to be installed.
"""
