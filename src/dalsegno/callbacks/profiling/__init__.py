"""Speed, compute and memory."""
