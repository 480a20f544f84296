"""Checkpoints and weights in the files of other programs: one module for each program's layout.

A layout needs no import of its program. ``run_state.py`` is the form between: ``importing.py`` turns it into a
checkpoint.
"""
