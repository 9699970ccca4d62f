"""Two small sweeps on one GPU: the prototype of QUADS on sums of six numbers, and four tasks at once."""

from __future__ import annotations

import dataclasses

from experiments.sweeps.spec import Sweep
from quads_jax.config import EvalConfig, RolloutConfig, TrainConfig, WarmStartConfig
from quads_jax.models.config import ModelConfig
from quads_jax.tasks.chain_sum import ChainSum
from quads_jax.tasks.mixture import Mixture

OLD_LOGP = ("trainer", "behaviour")

# The prototype's setting on one GPU: six recipes, with the trainer's and with the rollout's own old log-probs --------

PROTOTYPE_TASK = ChainSum(operands=6, digits=3, modulus=1000)
PROTOTYPE_MODEL = ModelConfig(  # 20.1 M parameters
    vocab_size=PROTOTYPE_TASK.tokenizer.vocab_size,
    d_model=256,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=32,
    experts=16,
    top_k=2,
    d_expert=256,
)
# BF16 and FP8 come last: they differ least between the old log-probs
PROTOTYPE_AXES = {"update.old_logp": OLD_LOGP, "recipe": ("QUADS:0.5", "NAIVE", "QUADS:1", "QAT", "BF16", "FP8")}
PROTOTYPE = Sweep(
    name="prototype",
    train=TrainConfig(
        task=PROTOTYPE_TASK,
        steps=500,
        rollout=RolloutConfig(prompts=64, group_size=16),
        optim=dataclasses.replace(TrainConfig().optim, learning_rate=1e-5),
        eval=EvalConfig(prompts=1024, every=20),
    ),
    grid=PROTOTYPE_AXES,
    baseline={"recipe": "BF16"},
    warm_start=WarmStartConfig(
        task=PROTOTYPE_TASK,
        model=PROTOTYPE_MODEL,
        optim=dataclasses.replace(WarmStartConfig().optim, learning_rate=1e-3, warmup_steps=100),
        batch=512,
        eval_every=25,
        steps=6000,
        target=0.6,
    ),
)
PROTOTYPE_SMOKE = dataclasses.replace(  # from the shipped checkpoint
    PROTOTYPE,
    train=TrainConfig(steps=2, rollout=RolloutConfig(prompts=4, group_size=4), eval=EvalConfig(prompts=16)),
    warm_start=None,
)

# Four tasks at once on one GPU: BF16, NAIVE and QUADS 50 % on a mixture, with both old log-probs, on three seeds -----

MIXTURE_TASK = Mixture()
MIXTURE_MODEL = ModelConfig(  # 6.5 M parameters
    vocab_size=MIXTURE_TASK.tokenizer.vocab_size,
    d_model=192,
    layers=5,
    heads=6,
    kv_heads=3,
    head_dim=32,
    experts=8,
    top_k=2,
    d_expert=256,
)
MIXTURE = Sweep(
    name="mixture",
    train=TrainConfig(
        task=MIXTURE_TASK,
        steps=200,
        rollout=RolloutConfig(prompts=64, group_size=16),
        optim=dataclasses.replace(TrainConfig().optim, learning_rate=1e-5),
        eval=EvalConfig(prompts=1024, every=20),
    ),
    grid={"update.old_logp": OLD_LOGP, "recipe": ("BF16", "NAIVE", "QUADS:0.5")},
    seeds=(0, 1, 2),
    baseline={"recipe": "BF16"},
    warm_start=WarmStartConfig(
        task=MIXTURE_TASK,
        model=MIXTURE_MODEL,
        optim=dataclasses.replace(WarmStartConfig().optim, learning_rate=1e-3, warmup_steps=100),
        batch=512,
        eval_every=10,
        eval_prompts=512,
        final_prompts=2048,
        steps=6000,
        target=0.3,
        ceiling=0.8,
    ),
)
MIXTURE_SMOKE_TASK = dataclasses.replace(MIXTURE_TASK, weights=(1.0, 0.0, 0.0, 1.0))  # what a tiny model learns quickly
MIXTURE_SMOKE = dataclasses.replace(
    MIXTURE,
    train=TrainConfig(
        task=MIXTURE_SMOKE_TASK,
        steps=2,
        min_start=0.0,
        rollout=RolloutConfig(prompts=8, group_size=4),
        eval=EvalConfig(prompts=64),
    ),
    grid={"update.old_logp": ("trainer",), "recipe": ("BF16", "QUADS:0.5")},
    seeds=(0,),
    warm_start=WarmStartConfig(
        task=MIXTURE_SMOKE_TASK,
        model=ModelConfig(
            vocab_size=MIXTURE_TASK.tokenizer.vocab_size,
            d_model=64,
            layers=2,
            heads=2,
            kv_heads=1,
            experts=4,
            d_expert=64,
        ),
        eval_every=20,
        eval_prompts=128,
        final_prompts=256,
        target=0.005,
    ),
)
