"""Do two processes that run the same training agree bit for bit, with and without deterministic mode, and at what cost?

    python -m tests.deterministic_process [plain|deterministic ...]      (default: both)

Two fresh processes a mode, one after the other; each trains NAIVE and QUADS for 8 steps, tiny (0.8 M parameters, the
shipped one's shape) and prototype (20 M). SIZES=tiny or SIZES=prototype in the environment leaves the other out.
Rewards are a function of the sampled tokens, so that gradients are not zero at random weights.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 8
TIMED = ("seconds", "tokens_per_s")


def child(mode: str, folder: Path) -> None:
    if mode == "deterministic":
        from quads_jax.device import deterministic

        deterministic()
    import dataclasses

    import jax
    import numpy as np

    from experiments.sweeps.prototype import PROTOTYPE_MODEL, PROTOTYPE_TASK
    from quads_jax import step
    from quads_jax.checkpoints import save_weights
    from quads_jax.config import EvalConfig, RecipeConfig, RolloutConfig, TrainConfig, WarmStartConfig
    from quads_jax.models.decoder import init_params
    from quads_jax.train import train

    def rewards(task, items, batch, prompt_len):
        return (np.asarray(batch.tokens)[:, prompt_len:].sum(1) % 2).astype(np.float32)

    step.rewards = rewards
    settings = {
        "tiny": (TrainConfig().task, WarmStartConfig().model, RolloutConfig(), 256),
        "prototype": (
            PROTOTYPE_TASK,
            PROTOTYPE_MODEL,
            RolloutConfig(prompts=64, group_size=16),
            1024,
        ),
    }
    report = {"device": jax.devices()[0].device_kind, "flags": os.environ.get("XLA_FLAGS", "")}
    for size in os.environ.get("SIZES", "tiny,prototype").split(","):
        task, model, rollout, prompts = settings[size]
        init = folder / f"{size}.msgpack"
        save_weights(init, init_params(model, jax.random.key(0)), model, {"figures": {}})
        for recipe in ("NAIVE", "QUADS"):
            cfg = TrainConfig(
                steps=STEPS,
                init=str(init),
                min_start=0.0,
                task=task,
                recipe=RecipeConfig(name=recipe),
                rollout=rollout,
                optim=dataclasses.replace(TrainConfig().optim, learning_rate=1e-3),
                eval=EvalConfig(every=STEPS, prompts=prompts),
            )
            began = time.perf_counter()
            state = train(cfg, folder / size / recipe)
            params = [np.asarray(a) for a in jax.tree.leaves((state.params, state.opt_state))]
            np.savez(folder / f"{size}-{recipe}.npz", *params)
            report[f"{size}-{recipe}"] = time.perf_counter() - began
    (folder / "report.json").write_text(json.dumps(report))


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(row: dict) -> dict:
    # "init" of the header is the hash of weights made by this process: bf16 bits of a random draw
    return {k: v for k, v in row.items() if not k.startswith(TIMED) and k != "config_hash"}


def seconds(folder: Path) -> float:
    """Median seconds a step, the first two left out."""
    trained = [row for row in rows(folder) if row["kind"] == "train"][2:]
    return statistics.median(sum(v for k, v in row.items() if k.startswith("seconds/")) for row in trained)


def compare(mode: str, pair: list[Path]) -> None:
    import numpy as np

    report = json.loads((pair[0] / "report.json").read_text())
    print(f"== {mode} on {report.pop('device')}, XLA_FLAGS={report.pop('flags')!r}", flush=True)
    for name in report:
        one, two = (rows(folder / name.replace("-", "/")) for folder in pair)
        assert len(one) == len(two) >= STEPS + 5
        apart = [(a["kind"], a["step"]) for a, b in zip(one, two, strict=True) if untimed(a) != untimed(b)]
        metrics = "DIFFERENT from {} row, step {}".format(*apart[0]) if apart else "bitwise equal"
        a, b = (np.load(folder / f"{name}.npz") for folder in pair)
        wrong = sum(int(np.sum(a[k] != b[k])) for k in a.files)
        total = sum(a[k].size for k in a.files)
        state = f"DIFFERENT in {wrong} of {total}" if wrong else f"bitwise equal ({total} values)"
        cost = " / ".join(f"{seconds(folder / name.replace('-', '/')):.4f}" for folder in pair)
        took = report[name]
        print(f"{name:16s} metrics {metrics}; state {state}; {cost} s/step; {took:.0f} s in all", flush=True)


def main(modes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for mode in modes:
            pair = [Path(temporary) / mode / name for name in ("one", "two")]
            environment = os.environ | {"XLA_FLAGS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            for folder in pair:
                folder.mkdir(parents=True)
                subprocess.run(
                    [sys.executable, "-m", "tests.deterministic_process", "--child", mode, str(folder)],
                    env=environment,
                    check=True,
                )
            compare(mode, pair)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:] or ["plain", "deterministic"])
