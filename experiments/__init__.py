"""Experiments: one scientific question a script, with absl flags. Each runs through launch.py or alone, as python -m
experiments.NAME.
"""
