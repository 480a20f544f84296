"""Looking into checkpoints without a model: contents, differences, and why a checkpoint is kept."""
