"""The prototype's setting on one GPU: six recipes, each with the trainer's and the rollout's own old log-probs."""

from __future__ import annotations

import dataclasses

from experiments import common, gpu_list
from quads_jax.config import EvalConfig, RolloutConfig, TrainConfig, WarmStartConfig
from quads_jax.models.config import ModelConfig
from quads_jax.tasks.chain_sum import ChainSum

TASK = ChainSum(operands=6, digits=3, modulus=1000)
MODEL = ModelConfig(  # 20.1 M parameters
    vocab_size=TASK.tokenizer.vocab_size,
    d_model=256,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=32,
    experts=16,
    top_k=2,
    d_expert=256,
)
WARM_START = WarmStartConfig(
    task=TASK,
    model=MODEL,
    optim=dataclasses.replace(WarmStartConfig().optim, learning_rate=1e-3, warmup_steps=100),
    batch=512,
    eval_every=25,
    steps=6000,
    target=0.6,
)
RL = TrainConfig(
    task=TASK,
    steps=500,
    rollout=RolloutConfig(prompts=64, group_size=16),
    optim=dataclasses.replace(TrainConfig().optim, learning_rate=1e-5),
    eval=EvalConfig(prompts=1024, every=20),
)
# BF16 and FP8 come last: they differ least between the old log-probs
RECIPES = ("QUADS:0.5", "NAIVE", "QUADS:1", "QAT", "BF16", "FP8")
FULL = gpu_list.Study(train=RL, recipes=RECIPES, warm_start=WARM_START)
SMOKE = gpu_list.Study(  # from the shipped checkpoint
    train=TrainConfig(steps=2, rollout=RolloutConfig(prompts=4, group_size=4), eval=EvalConfig(prompts=16)),
    recipes=RECIPES,
)


def run() -> None:
    gpu_list.execute_fixed("prototype", FULL, SMOKE)


if __name__ == "__main__":
    common.main(run)
