"""Quantities that several callbacks report: FLOPs and spectral norms."""
