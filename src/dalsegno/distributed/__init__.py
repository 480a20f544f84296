"""Distributed training: collectives, random generators, sharded tensors and gradients, and parallel modes."""
