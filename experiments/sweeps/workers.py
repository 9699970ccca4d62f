"""Where points run: processes of this machine, or jobs of SLURM through submitit. They go on when the sweep dies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments import common
from experiments.sweeps import point
from experiments.sweeps.ledger import History, Ledger
from experiments.sweeps.point import Task
from experiments.sweeps.spec import split_values
from quads_jax import config_tree

MEMORY = 0.92  # of a GPU's, shared equally by the points on it
TIMEOUT_MIN = 1440
_COMMON = ("name", "timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")  # submitit's for every cluster


class Handle(Protocol):
    """A started point."""

    def alive(self) -> bool: ...

    def stop(self, history: History) -> None:
        """Asks it to stop; the second time, to stop at once."""


class Workers(Protocol):
    """Something that runs `parallel` points at once; `resubmits`: a point that stopped unasked is started again."""

    parallel: int
    resubmits: bool

    def start(self, task: Task, slot: int) -> Handle: ...

    def attach(self, history: History) -> Handle | None:
        """The point as an earlier sweep has started it, where that says more than the point's lock."""


def terminate(history: History) -> bool:
    """Sends SIGTERM to the process that the ledger says runs the point; False where it names none of this machine's."""
    if history.state != "started" or history.last["host"] != socket.gethostname():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(history.last["pid"], signal.SIGTERM)
    return True


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Processes started within find this project, whatever folder they start in."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(common.ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


# This machine ---------------------------------------------------------------------------------------------------------


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may hold, an entry a GPU; asks nvidia-smi, since JAX would take memory of each."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


def place(slot: int, parallel: int, gpus: list[str], cores: list[int]) -> tuple[dict[str, str], list[int]]:
    """(environment, cores) of one of `parallel` places: a GPU each while there are enough, else a share of one's memory
    each; without GPUs a share of the cores. Points that share a GPU take turns on it, unless its owner has started
    NVIDIA's MPS, which they then use.
    """
    if gpus:
        sharing = -(-parallel // len(gpus))
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / sharing:.4f}"}
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)], **memory}, []
    if parallel >= len(cores):
        return {}, [cores[slot % len(cores)]]
    return {}, cores[slot * len(cores) // parallel : (slot + 1) * len(cores) // parallel]


@dataclasses.dataclass
class _Process:
    process: subprocess.Popen

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, history: History) -> None:
        self.process.terminate()


class LocalWorkers:
    """Processes of this machine, each around a point's own (`point`)."""

    resubmits = False

    def __init__(self, parallel: int):
        self.parallel = parallel
        self._gpus, self._cores = visible_gpus(), sorted(os.sched_getaffinity(0))

    def start(self, task: Task, slot: int) -> Handle:
        environment, cores = place(slot, self.parallel, self._gpus, self._cores)
        task = dataclasses.replace(task, environment=environment, cores=cores, slot=slot)
        with importable(), open(task.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.sweeps.point", task.text()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone
            )
        return _Process(process)

    def attach(self, history: History) -> Handle | None:
        return None  # the lock says it


# SLURM ----------------------------------------------------------------------------------------------------------------


def parse_slurm(text: str) -> dict[str, Any]:
    """{"cluster": "slurm" or "local", and parameters as submitit names them} of "name=value,...". Raises ValueError."""
    parameters: dict[str, Any] = {"cluster": "slurm", "timeout_min": TIMEOUT_MIN}
    seen = set()
    with config_tree.located("--slurm"):
        pairs = split_values(text)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value) or name in seen:
            raise ValueError(f"--slurm: {pair!r} must be name=value, each name once, e.g. partition=gpu")
        seen.add(name)
        if name in ("nodes", "tasks_per_node", "stderr_to_stdout", "signal_delay_s"):
            raise ValueError(f"--slurm: {name} is fixed: a point is one process")
        known = name in ("cluster", *_COMMON)
        parameters[name if known else f"slurm_{name}"] = _value(value)
    if parameters["cluster"] not in ("slurm", "local"):
        raise ValueError(f"--slurm: cluster={parameters['cluster']} must be slurm or local")
    return parameters


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class SlurmWorkers:
    """A job a point: submitit's executor for SLURM, or its local stand-in. Jobs are named in the ledger, so another
    sweep in the folder finds them. A job that is preempted, or runs into its time limit, stops as for a signal.
    """

    resubmits = True

    def __init__(self, folder: Path, parallel: int, parameters: Mapping[str, Any]):
        try:
            import submitit
        except ImportError as error:
            raise ValueError("--slurm needs the package submitit: pip install submitit") from error
        self.parallel = parallel
        self._cluster = parameters["cluster"]
        self._folder = folder.absolute()
        self._job_class = submitit.SlurmJob if self._cluster == "slurm" else submitit.LocalJob
        try:
            self._executor = submitit.AutoExecutor(folder=self._folder, cluster=self._cluster)
            self._executor.update_parameters(**{k: v for k, v in parameters.items() if k != "cluster"})
        except (AssertionError, NameError, RuntimeError, ValueError) as error:
            raise ValueError(f"--slurm: {error}") from error

    def start(self, task: Task, slot: int) -> Handle:
        with importable():
            job = self._executor.submit(point.run_as_job, dataclasses.asdict(task))
        Ledger(task.ledger).submit(task.point, job.job_id)
        return _Job(job, self._cluster)

    def attach(self, history: History) -> Handle | None:
        if history.open_job is None:
            return None
        return _Job(self._job_class(folder=self._folder, job_id=history.open_job), self._cluster)


@dataclasses.dataclass
class _Job:
    job: Any
    cluster: str
    asked: bool = False

    def alive(self) -> bool:
        return not self.job.done()

    def stop(self, history: History) -> None:
        started = history.state == "started" and history.last.get("job_id") == self.job.job_id
        if not started or (self.asked and self.cluster == "slurm"):
            self.job.cancel(check=False)
        elif self.cluster == "slurm":
            subprocess.run(["scancel", "--signal=TERM", self.job.job_id], check=False)
        else:
            terminate(history)
        self.asked = True
