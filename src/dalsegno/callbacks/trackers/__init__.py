"""Trackers: loggers for W&B, MLflow, Comet and Trackio, on one contract; see :mod:`.tracker`."""
