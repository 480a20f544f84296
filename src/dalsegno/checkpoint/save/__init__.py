"""Save a checkpoint: plan, capture, and stream to disk, in the background or while training waits."""
