"""Weights in the files that other programs save and load."""
