"""Quantities that several callbacks report: FLOPs, memory and spectral norms."""
