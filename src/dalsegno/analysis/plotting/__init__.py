"""Pictures of curves: with matplotlib, in a terminal, as SVG."""
