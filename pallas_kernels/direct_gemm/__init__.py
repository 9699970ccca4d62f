"""GEMM of FP8 or bf16 weights, a matrix a block of rows. `reference` defines it; `mosaic` runs on Hopper."""
