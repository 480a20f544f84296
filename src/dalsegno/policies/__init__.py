"""When to save, and which checkpoints to keep: rules that are joined with ``|``."""
