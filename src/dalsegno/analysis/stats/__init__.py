"""Statistics of curves: smoothing, spikes, comparison of runs, detection of divergence."""
