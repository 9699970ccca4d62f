"""FP8 activations, a scale a row, that the direct GEMM reads, with an RMSNorm or SwiGLU in front.

`pallas_triton.quantize` gives, bit for bit where that arithmetic is defined, the numbers of `quads_jax.quant.tensor`:
values, scale = quantize_values(x, FP8, unit="token"). With something in front they are those of the activation that it
can also return. tests/quantize_fp8_test.py checks it; `prove.py` has them in numpy, for the GPU.
"""
