"""Runs an experiment: the main job without arguments, another with --experiment=NAME; --list names them."""

from __future__ import annotations

import importlib
import logging

from absl import app, flags

from experiments import common

EXPERIMENTS = {
    "main": "experiments.main_job",
    "train": "experiments.train",
    "warm_start": "experiments.warm_start",
    "upcycle": "experiments.upcycle",
    "evaluate": "experiments.evaluate",
    "inspect": "experiments.inspect_model",
    "quantizer_speed": "experiments.quantizer_speed",
    "batch_shape": "experiments.batch_shape",
    "engine_check": "experiments.engine_check",
    "throughput": "experiments.throughput",
    "step_time": "experiments.step_time",
    "generate": "experiments.generate",
    "sweep": "experiments.sweep",
    "paper": "experiments.paper.main",
    "export": "experiments.export",
    "report": "experiments.report",
    "replay": "experiments.replay",
}

_EXPERIMENT = flags.DEFINE_string("experiment", "main", f"One of {', '.join(EXPERIMENTS)}.")
flags.adopt_module_key_flags(common)
_LIST = flags.DEFINE_bool("list", False, "Print the experiments and stop.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags start with --, e.g. --experiment=train")
    if _LIST.value:
        for name, module in EXPERIMENTS.items():
            print(f"{name:15s} {importlib.import_module(module).__doc__.splitlines()[0]}")
        return
    if _EXPERIMENT.value not in EXPERIMENTS:
        raise app.UsageError(f"unknown experiment {_EXPERIMENT.value!r}; experiments are {', '.join(EXPERIMENTS)}")
    logging.getLogger("quads_jax").setLevel(logging.INFO)
    importlib.import_module(EXPERIMENTS[_EXPERIMENT.value]).run()


if __name__ == "__main__":
    common.start(main)
