"""GEMM of bf16 or decoded NVFP4 activations with a packed NVFP4 weight: `reference` defines it, `mosaic` is for Hopper.

tests/fp4_gemm_*test.py check all of it that runs without a GPU, `bench.py --prove` the kernel on one.
"""
