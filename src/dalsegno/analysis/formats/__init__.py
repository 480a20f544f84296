"""Log formats: read a file of any program as records."""
