"""Reinforcement learning: batch types, advantages, losses, sampling, rollout and the update step."""
