"""A small training run in a process that kills itself, for `resume_test.py`; by hand, for many kills:

python -m tests.resume_process 50       # half of them at a random call, half at a random time
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from quads_jax.checkpoints import save_weights
from quads_jax.config import CheckpointConfig, EvalConfig, RecipeConfig, RolloutConfig, TrainConfig
from quads_jax.metrics import read_metrics
from quads_jax.rl.optim import OptimConfig
from quads_jax.rl.update import UpdateConfig
from quads_jax.train import train
from tests.tiny import MODEL, TASK, params

ROOT = Path(__file__).resolve().parents[1]
TIMED = ("seconds", "tokens_per_s")


def make_weights(path: Path) -> str:
    save_weights(path, params(), MODEL, {"figures": {}})
    return str(path)


def config(weights: str, **changes) -> TrainConfig:
    defaults = dict(
        steps=4,
        init=weights,
        min_start=0.0,  # random weights
        task=TASK,
        recipe=RecipeConfig(name="NAIVE"),
        rollout=RolloutConfig(prompts=4, group_size=4),
        update=UpdateConfig(minibatches=2),
        # a random model earns no reward, so advantages are 0: weight decay makes every update move the weights
        optim=OptimConfig(learning_rate=1e-2, weight_decay=10.0, warmup_steps=5),
        eval=EvalConfig(every=2, prompts=16),
        checkpoint=CheckpointConfig(every=2),
    )
    return TrainConfig(**(defaults | changes))


def killed_config(weights: str) -> TrainConfig:
    return config(weights, steps=8, checkpoint=CheckpointConfig(every=1))


def rows(folder: Path) -> list[dict]:
    """The metrics of a run, without what a clock measured."""
    found = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in found]


def digest(state) -> str:
    """sha256 of all bits of a state."""
    leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def start(weights: str, folder: Path, kill_at: str = "") -> subprocess.Popen:
    """A process that runs or resumes `killed_config`. It dies of SIGKILL `kill_at` after its first step: a number of
    Python calls ("1200") or of seconds ("1.5").
    """
    command = [sys.executable, "-m", "tests.resume_process", "run", weights, str(folder), kill_at]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True, **pipes)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    return output


def run(weights: str, folder: Path, kill_at: str) -> None:
    calls, began = itertools.count(1), []

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def count(frame, event, argument) -> None:
        if event == "call" and next(calls) == limit:
            kill()

    limit = int(kill_at) if kill_at.isdigit() else 0

    def begin(row) -> None:
        if began:
            return
        began.append(time.perf_counter())
        if "." in kill_at:
            threading.Timer(float(kill_at), kill).start()
        else:
            threading.setprofile(count)  # of threads to come: the checkpoint's
            sys.setprofile(count)

    state = train(killed_config(weights), folder, begin, resume=True)
    sys.setprofile(None)
    if state is not None:
        (folder / "digest").write_text(digest(state))
        print(json.dumps({"calls": next(calls), "seconds": time.perf_counter() - began[0]}))
    os._exit(0)  # without the timer


def results(folder: Path) -> dict[str, bytes]:
    """What a finished run left: its weights, and the digest of its state, unless it was killed between the two."""
    files = (folder / "weights.msgpack", folder / "digest")
    return {file.name: file.read_bytes() for file in files if file.exists() or file.name == "weights.msgpack"}


def main(kills: int) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        weights = make_weights(base / "tiny.msgpack")
        took = json.loads(finish(start(weights, base / "whole")).splitlines()[-1])
        print(f"uninterrupted, after the first step: {took}", flush=True)
        whole, wanted = rows(base / "whole"), results(base / "whole")
        done, number = 0, 0
        while done < kills:
            folder, number = base / f"run{number}", number + 1
            while True:
                moment = (
                    str(draw.randrange(1, took["calls"])) if done % 2 else f"{draw.uniform(0, took['seconds']):.4f}"
                )
                child = start(weights, folder, moment if done < kills else "")
                finish(child)
                if child.returncode == 0:
                    break
                done += 1
                print(f"killed at {moment}, {len(list((folder / 'checkpoints').glob('*')))} checkpoints", flush=True)
            same = rows(folder) == whole and results(folder).items() <= wanted.items()
            print(f"run {number}, {done} kills in all: {'bitwise equal' if same else 'DIFFERENT'}", flush=True)
            assert same


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main(int(sys.argv[1]))
