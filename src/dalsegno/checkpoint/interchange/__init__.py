"""Checkpoints and weights in the files of other programs: one module for each program's layout.

A layout needs no import of its program. It reads to, and writes from, a RunState (``run_state.py``), which
``own_checkpoint.py`` turns into a checkpoint and back.
"""
