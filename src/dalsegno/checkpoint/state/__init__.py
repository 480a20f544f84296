"""What is saved: model and optimizer as named tensors, spread over the ranks, and what callbacks hold of that kind."""
