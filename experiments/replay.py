"""Repeats a step that met NaN or infinity: --workdir=RUN/repro-step<k>, as the failed run names it."""

from __future__ import annotations

from pathlib import Path

from absl import app

from experiments import common
from quads_jax.guards import replay


def run() -> None:
    common.refuse_unused("workdir")
    if common.FLAGS.workdir is None:
        raise app.UsageError("--experiment=replay needs --workdir=FOLDER, the repro-step<k> of a failed run")
    with common.usage_errors():
        found = replay(Path(common.FLAGS.workdir))
    print("\n".join(found) or "nothing is non-finite this time")


if __name__ == "__main__":
    common.main(run)
