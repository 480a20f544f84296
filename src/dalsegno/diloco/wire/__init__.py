"""What travels between workers and their server, and its form."""
