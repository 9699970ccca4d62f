"""What the figures measured on fixed weights share: their config, tables and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads_jax.checkpoints import load_weights
from quads_jax.config import SHIPPED_TASK, EvalConfig, RolloutConfig, TrainConfig
from quads_jax.step import Setup, setup
from quads_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """Weights, and the answers on which two arithmetics are compared."""

    inits: tuple[str, ...] = ("shipped",)  # weights files or Hugging Face folders: before RL, after RL, ...
    task: Task = SHIPPED_TASK
    sequences: int = 256  # BF16 answers to held-out prompts
    rows: int = 512  # answers a sampled comparison draws, of the first step's prompts
    temperature: float = 1.0
    text: str | None = None  # figure 4 of a Hugging Face folder: the text file that it reads
    seed: int = 0


def check(config: PaperConfig, reads_text: bool = False) -> None:
    """Raises ValueError on a config that cannot run. reads_text: the figure reads `text` with Hugging Face folders."""
    if not config.inits:
        raise ValueError("inits is empty: name weights files, or shipped")
    folders = [init for init in config.inits if Path(init).is_dir()]
    if reads_text and folders and config.text is None:
        raise ValueError(f"inits: {folders[0]} is a folder: give text=FILE, which the model reads")
    if config.text is not None and not (reads_text and folders and Path(config.text).is_file()):
        raise ValueError(
            f"text={config.text} must be a file, and has an effect on figure 4 of Hugging Face folders in inits only"
        )
    if config.rows < 4 or config.rows % 4:
        raise ValueError(f"rows={config.rows} must be a positive multiple of 4")
    if not 1 <= config.sequences <= config.rows:
        raise ValueError(f"sequences={config.sequences} must be in 1..rows={config.rows}")


def load(config: PaperConfig, init: str) -> tuple[Setup, Any]:
    """(setup of the BF16 recipe, f32 masters) of one weights file. Raises ValueError where they do not fit the task."""
    params, model, _ = load_weights(init)
    run = TrainConfig(
        init=init,
        task=config.task,
        seed=config.seed,
        rollout=RolloutConfig(prompts=config.rows // 2, group_size=2, temperature=config.temperature),
        eval=EvalConfig(prompts=config.rows, seed=config.seed),
    )
    return setup(run, model), params


def short(init: str) -> str:
    """A weights file's name for tables: its run, or what holds it."""
    path = Path(init)
    if path.is_dir():
        return path.name
    return init if path.suffix == "" else "/".join(path.parts[-3:-1]) or path.name


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns."""
    rows = [list(titles), ["---"] * len(titles), *(list(line) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in padded)
