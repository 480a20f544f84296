"""The engine: from ``Trainer.train`` through session, step and step boundary down to the checkpointer."""
