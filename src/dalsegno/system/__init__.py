"""This process and its files: all writes to disk, the lock of a run, URLs, lazy imports, worker threads."""
