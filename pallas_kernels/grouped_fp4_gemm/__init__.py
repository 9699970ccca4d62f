"""The FP4 GEMM over experts: rows sorted by group against one packed matrix a group. `sorted_rows` gives the tasks to a
kernel of `fp4_gemm`; `prove` and `bench` are for the GPU.
"""
