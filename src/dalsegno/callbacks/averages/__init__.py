"""Averages of the weights: EMA and ModelMerge."""
