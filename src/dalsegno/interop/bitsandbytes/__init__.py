"""bitsandbytes: quantized weights, saved with the scales they are quantized by. Its optimizers have plain tensors."""
