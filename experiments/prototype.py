"""The prototype's setting on one GPU: six recipes, each with the trainer's and the rollout's old log-probs."""

from __future__ import annotations

from absl import app, flags

from experiments import common, gpu_list
from quads_jax.config import RecipeConfig

FLAGS = flags.FLAGS
TASK = ("--task=chain_sum", "--set=task.operands=6", "--set=task.digits=3", "--set=task.modulus=1000")
MODEL = {"d_model": 256, "layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 32, "experts": 16, "top_k": 2,
         "d_expert": 256}  # 20.1 M parameters
WARM_START = (
    "python", "launch.py", "--experiment=warm_start", "--workdir=runs/prototype_warm_start", *TASK,
    *(f"--set=model.{name}={value}" for name, value in MODEL.items()),
    "--set=optim.learning_rate=1e-3", "--set=optim.warmup_steps=100", "--set=batch=512", "--set=eval_every=25",
    "--steps=6000",
)
RL = ("--set=rollout.prompts=64", "--set=rollout.group_size=16", "--set=optim.learning_rate=1e-5",
      "--set=eval.prompts=1024", "--set=eval.every=20")
SMOKE = ("--steps=2", "--set=rollout.prompts=4", "--set=rollout.group_size=4", "--set=eval.prompts=16")
STEPS = 200  # what fits one call on the GPU, chosen from its step time
# the order decides what is left out when time runs out: BF16 and FP8 differ least between the old log-probs
RECIPES = (
    RecipeConfig(name="QUADS", ratio=0.5),
    RecipeConfig(name="NAIVE"),
    RecipeConfig(name="QUADS", ratio=1.0),
    RecipeConfig(name="QAT"),
    RecipeConfig(name="BF16"),
    RecipeConfig(name="FP8"),
)

flags.DEFINE_string("init", None, f"prototype: weights of the warm start, made by: {' '.join(WARM_START)}")
flags.DEFINE_bool("smoke", False, "prototype: two tiny steps a point from the shipped checkpoint, for a CPU.")


def points() -> list[gpu_list.Point]:
    """The twelve points as the flags say. Raises UsageError without weights to start from."""
    if FLAGS.smoke:
        arguments = SMOKE
    elif FLAGS.init is None:
        raise app.UsageError(f"give --init=FILE, the weights of the warm start; to make them:\n{' '.join(WARM_START)}")
    else:
        steps = STEPS if FLAGS.steps is None else FLAGS.steps
        arguments = (f"--steps={steps}", f"--set=init={FLAGS.init}", *TASK, *RL)
    return gpu_list.make_points(RECIPES, ("trainer", "behaviour"), common.seeds(0), arguments)


def run() -> None:
    common.refuse_unused("workdir", "dry_run", "seeds", *(() if FLAGS.smoke else ("steps",)))
    gpu_list.execute(points(), "prototype")


if __name__ == "__main__":
    common.main(run)
