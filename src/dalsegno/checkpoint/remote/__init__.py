"""Runs whose ``output_dir`` is a URL: written locally, uploaded in the background, downloaded by a new host."""
