"""quads_jax: a reference JAX implementation of QUADS, NVFP4 reinforcement learning for MoE language models."""

__version__ = "0.1.0"
