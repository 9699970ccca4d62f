"""Quantization: formats, block-scaled tensors, straight-through gradients, residual compensation, error measures."""
