"""Norms, spectra and histograms of weights and gradients."""
