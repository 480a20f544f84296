"""This process and its files: all writes to disk, the lock of a run, its Slurm job, URLs, lazy imports, threads."""
