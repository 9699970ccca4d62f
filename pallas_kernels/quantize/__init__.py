"""NVFP4 quantizer of activations to packed bytes, one kernel a file. The contract of every file's `quantize`:

    quantize(x f32 or bf16 [M, K], amax f32 [] or [M, 1] or None)
        -> codes u8 [M, K/2], block scales u8 [M, K/16], global scales f32 [M, 1]

are those of `quads_jax.quant.tensor.quantize(x, NVFP4, unit="token", amax=amax)`, bit for bit where that arithmetic is
defined. tests/quantize_kernel_test.py checks it.
"""
