"""Weights as other programs save and load them."""
