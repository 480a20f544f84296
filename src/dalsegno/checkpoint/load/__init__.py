"""How a checkpoint is read: verified, compared, then loaded, onto any number of ranks."""
