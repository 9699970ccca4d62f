"""NVFP4 activations and their residual compensation in one pass, decoded to bf16 in the order that the FP4 GEMM reads.

Every file's `quantize` gives, bit for bit where that arithmetic is defined, the numbers of `quads_jax.quant.residual`:
values, residual, scale = compensate(x, NVFP4, mask, unit="token"), and without a residual those of `quantize_values`.
With an RMSNorm or SwiGLU in front they are those of the activation that it can also return.
tests/quantize_residual_test.py checks it; `prove.py` has them in numpy, for the GPU.
"""
