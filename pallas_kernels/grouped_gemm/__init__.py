"""Grouped GEMM: rows sorted by group against one weight matrix a group. `reference` defines it; the other files compute
it faster.
"""
