"""What ranks share: collectives, random generators, sharded tensors and their gradients, ways to spread a model."""
