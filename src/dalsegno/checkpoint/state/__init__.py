"""Sharded state: model, optimizer and callbacks' tensors, as tensors by FQN and a small non-tensor rest."""
