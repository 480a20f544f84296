"""This process and its files: the one door for every change on disk, the lock of a run, URLs, lazy names, threads."""
