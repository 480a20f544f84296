"""Callbacks that show and write what is logged."""
