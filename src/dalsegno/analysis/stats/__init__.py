"""Statistics of metrics: smoothing, spikes, comparison of runs, divergence detection."""
