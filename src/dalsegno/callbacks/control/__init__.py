"""Callbacks that stop, steer or change a run."""
