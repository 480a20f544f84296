"""How a checkpoint is written: planned, captured, streamed to disk, beside the training or before it continues."""
