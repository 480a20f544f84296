"""Trackers: loggers for W&B and MLflow, on one contract; see :mod:`dalsegno.callbacks.trackers.tracker`."""
