"""torchao: states of its low-bit optimizers, saved so that any number of ranks can load them."""
