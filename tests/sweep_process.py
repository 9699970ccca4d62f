"""What sweeps run in tests in place of launch.py, and a sweep of it as a process that can be killed.

python -m tests.sweep_process WORKDIR POINTS FAILING SECONDS PARALLEL
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from experiments.sweeps.control import Controller, stop_requests
from experiments.sweeps.spec import Point
from experiments.sweeps.workers import LocalWorkers
from quads_jax.checkpoints import locked
from quads_jax.config import TrainConfig

# Leaves what a run, or a warm start, leaves. Flags: name, label, seed; steps, sleep (seconds a step), fail (the first
# tries), deaf (to SIGTERM), killed and preempted (at that try; with parent: its supervisor).
STUB = """
import json, os, pathlib, signal, sys, time

options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if "=" in a)
init = options.pop("set", "init=").removeprefix("init=")
folder, name = pathlib.Path(options["workdir"]), options["name"]


def note(what):
    with pathlib.Path(__file__).with_name("journal").open("a") as file:
        file.write(f"{what} {name}" + chr(10))


received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
note("start")
tries = sum(line == f"start {name}" for line in pathlib.Path(__file__).with_name("journal").read_text().splitlines())
print("progress of", name, os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0)), flush=True)
if options["experiment"] == "train":
    assert "--resume" in sys.argv
    run = folder / options["label"] / ("seed" + options["seed"])
else:
    run = folder / name
run.mkdir(parents=True, exist_ok=True)
alone = run / "alone"
assert not alone.exists() or "killed" in options, "two at once"
alone.touch()
if init:
    assert pathlib.Path(init).exists(), "started before its warm start was there"
metrics = run / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
steps = int(options.get("steps", 1))
for step in range(done + 1, steps + 1):
    time.sleep(float(options.get("sleep", 0)))
    if options.get("killed") == str(tries):
        os.kill(os.getppid() if "parent" in options else os.getpid(), signal.SIGKILL)
        time.sleep(1)
    if options.get("preempted") == str(tries):
        os.kill(os.getppid(), signal.SIGUSR2)
        time.sleep(0.5)
    with metrics.open("a") as file:
        row = {"kind": "train", "step": step, "reward": 0.5, "gap/mean": 0.1}
        file.write(json.dumps(row) + chr(10))
    if received and "deaf" not in options:
        note("stopped")
        alone.unlink()
        sys.exit(75)
if "fail" in options and tries <= int(options["fail"]):
    alone.unlink()
    sys.exit("out of luck")
if options["experiment"] == "train":
    (run / "config.json").write_text(options["config"])
    (run / "run.json").write_text(json.dumps({"status": "finished"}))
else:
    (run / "weights.msgpack").write_text("large")
alone.unlink()
note("end")
"""
CONFIG = TrainConfig(steps=1)


def stub(folder: Path) -> tuple[str, ...]:
    """The command; its journal lies beside it, a line "start", "stopped" or "end" and the point's name each."""
    path = folder / "stub.py"
    path.write_text(STUB)
    return (sys.executable, str(path))


def journal(folder: Path) -> list[str]:
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def run_point(name: str, *flags: str, seed: int = 0, needs: Path | None = None) -> Point:
    import json

    from quads_jax import config_tree

    config = json.dumps(config_tree.to_json(CONFIG))
    flags = (f"--name={name}", "--label=BF16", f"--seed={seed}", f"--config={config}", *flags)
    return Point(name=name, seed=seed, arguments=flags, label="BF16", setting={"a": name}, config=CONFIG, needs=needs)


def warm_start(store: Path, seed: int, *flags: str) -> Point:
    name = f"start{seed}"
    return Point(name=name, seed=seed, arguments=(f"--name={name}", *flags), makes=store / name / "weights.msgpack")


if __name__ == "__main__":
    workdir, (number, failing, parallel), seconds = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5]
    points = [run_point(f"p{i}", f"--sleep={seconds}", *(["--fail=99"] if i < failing else [])) for i in range(number)]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with locked(workdir), stop_requests() as requests:
        controller = Controller(points, workdir, LocalWorkers(parallel), command=stub(workdir.parent))
        print(*controller.run(requests).items(), sep="\n", flush=True)
