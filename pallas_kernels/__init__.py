"""Bytes and tiles: storage contract and GPU kernels. A leaf package: it imports jax and never quads_jax."""
