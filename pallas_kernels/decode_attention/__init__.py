"""Attention of one new token a sequence over the KV cache of all layers, read where it lies.

`jax.nn.dot_product_attention`, and cuDNN behind it, take the keys of one layer: a copy of them in every step. Here the
layer is a number.
"""
