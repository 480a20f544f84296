"""A run whose ``output_dir`` is a URL: written here first, sent there in the background, found there by a new host."""

from .mirror import Mirror, NoMirror, StoreMirror, mirror_of

__all__ = ["Mirror", "NoMirror", "StoreMirror", "mirror_of"]
