"""Files on disk: their names, the manifest, the index, tensors as safetensors, all other state as JSON."""
