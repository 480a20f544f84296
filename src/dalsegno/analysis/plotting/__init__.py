"""Plots of metrics: with matplotlib, in a terminal, as SVG."""
