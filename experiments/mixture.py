"""Four tasks at once on one GPU: BF16, NAIVE and QUADS 50 % on a mixture, with both old log-probs, on several seeds."""

from __future__ import annotations

import dataclasses

from experiments import common, gpu_list
from quads_jax.config import EvalConfig, RolloutConfig, TrainConfig, WarmStartConfig
from quads_jax.models.config import ModelConfig
from quads_jax.tasks.mixture import Mixture

TASK = Mixture()
MODEL = ModelConfig(  # 6.5 M parameters
    vocab_size=TASK.tokenizer.vocab_size,
    d_model=192,
    layers=5,
    heads=6,
    kv_heads=3,
    head_dim=32,
    experts=8,
    top_k=2,
    d_expert=256,
)
WARM_START = WarmStartConfig(
    task=TASK,
    model=MODEL,
    optim=dataclasses.replace(WarmStartConfig().optim, learning_rate=1e-3, warmup_steps=100),
    batch=512,
    eval_every=10,
    eval_prompts=512,
    final_prompts=2048,
    steps=6000,
    target=0.3,
    ceiling=0.8,
)
RL = TrainConfig(
    task=TASK,
    steps=200,
    rollout=RolloutConfig(prompts=64, group_size=16),
    optim=dataclasses.replace(TrainConfig().optim, learning_rate=1e-5),
    eval=EvalConfig(prompts=1024, every=20),
)
FULL = gpu_list.Study(train=RL, recipes=("BF16", "NAIVE", "QUADS:0.5"), seeds=(0, 1, 2), warm_start=WARM_START)
SMOKE_TASK = dataclasses.replace(TASK, weights=(1.0, 0.0, 0.0, 1.0))  # the two that a tiny model learns in seconds
SMOKE = gpu_list.Study(
    train=TrainConfig(
        task=SMOKE_TASK,
        steps=2,
        min_start=0.0,
        rollout=RolloutConfig(prompts=8, group_size=4),
        eval=EvalConfig(prompts=64),
    ),
    recipes=("BF16", "QUADS:0.5"),
    old_logps=("trainer",),
    warm_start=WarmStartConfig(
        task=SMOKE_TASK,
        model=ModelConfig(
            vocab_size=TASK.tokenizer.vocab_size, d_model=64, layers=2, heads=2, kv_heads=1, experts=4, d_expert=64
        ),
        eval_every=20,
        eval_prompts=128,
        final_prompts=256,
        target=0.005,
    ),
)


def run() -> None:
    gpu_list.execute_fixed("mixture", FULL, SMOKE)


if __name__ == "__main__":
    common.main(run)
