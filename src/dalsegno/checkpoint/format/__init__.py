"""The files of a checkpoint: manifest, index, tensors in safetensors, everything else as JSON."""
