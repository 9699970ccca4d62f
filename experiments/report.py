"""Redraws the report of a run folder, or the comparison of a sweep's: --workdir=FOLDER."""

from __future__ import annotations

from pathlib import Path

from absl import app

from experiments import common
from quads_jax.comparison import write_comparison
from quads_jax.report import write_report


def run() -> None:
    common.refuse_unused("workdir")
    if common.FLAGS.workdir is None:
        raise app.UsageError("--experiment=report needs --workdir=FOLDER of an earlier job")
    if not Path(common.FLAGS.workdir).is_dir():
        raise app.UsageError(f"--workdir={common.FLAGS.workdir} is not a folder")
    workdir = Path(common.FLAGS.workdir)
    try:
        with common.usage_errors():
            print(write_comparison(workdir) if (workdir / "sweep.json").exists() else write_report(workdir))
    except OSError as error:
        raise app.UsageError(
            f"the report cannot be written: {error}; make room, or a copy that can be written"
        ) from error


if __name__ == "__main__":
    common.main(run)
