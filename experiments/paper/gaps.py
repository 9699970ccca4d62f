"""Figure 2: the gap of every rollout arithmetic against every trainer arithmetic, on the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import common
from quads_jax.gaps import fixed_sequences, gap_figures, log_probs
from quads_jax.plots import COLOURS, canvas, save
from quads_jax.precision import Precision, recipe
from quads_jax.programs import pack_program, rollout_program
from quads_jax.step import Setup, calibrate, group_prompts

ROLLOUTS = {  # by what quantization touches; the compensated ones need channel orders
    "BF16": recipe("BF16").rollout,
    "FP8": recipe("FP8").rollout,
    "W16A4": recipe("W16A4").rollout,
    "W4A16": recipe("W4A16").rollout,
    "W4A4": recipe("NAIVE").rollout,
    "W4A4+RAC 50 %": recipe("QUADS", ratio=0.5).rollout,
    "W4A4+RAC 100 %": recipe("QUADS", ratio=1.0).rollout,
}
TRAINERS = {
    "BF16": recipe("BF16").trainer,
    "weights (W4A16)": recipe("QAT").trainer,
    "activations (W16A4)": recipe("W16A4").rollout,
    "both (W4A4)": recipe("SYM").trainer,
}
KINDS = {"teacher-forced": "the same BF16 answers scored twice", "sampled": "the rollout's own answers"}


def measure(config: common.PaperConfig, few: bool) -> Iterator[dict[str, Any]]:
    """Rows: the gap's figures (nats) by weights, kind of tokens, rollout and trainer arithmetic."""
    for init in config.inits:
        s, params = common.load(config, init)
        quant = calibrate(s._replace(recipe=recipe("QUADS")), params)
        sequences = fixed_sequences(s, params, config.sequences)
        trainers = dict(itertools.islice(TRAINERS.items(), 2 if few else None))
        trained = {name: log_probs(s, params, quant, p, sequences) for name, p in trainers.items()}
        for name, precision in itertools.islice(ROLLOUTS.items(), 5 if few else 0, None):
            forced = log_probs(s, params, quant, precision, sequences)
            sampled = _sample(s, params, quant, precision)
            for trainer, trainer_precision in trainers.items():
                about = {"init": init, "rollout": name, "trainer": trainer}
                yield about | {"kind": "teacher-forced"} | gap_figures(forced, trained[trainer], sequences.mask)
                theirs = log_probs(s, params, quant, trainer_precision, sampled)
                mask = np.asarray(sampled.mask)
                yield about | {"kind": "sampled"} | gap_figures(np.asarray(sampled.behaviour_logp), theirs, mask)


def _sample(s: Setup, params: Any, quant: Any, precision: Precision) -> Any:
    """The `RolloutBatch` of the first step's prompts under `precision`."""
    packed = pack_program(s.model, precision)(params, quant)
    program = rollout_program(s.model, precision, s.sampling, s.cfg.task.tokenizer.pad_id, s.shape)
    prompts, valid, _ = group_prompts(s, 0)
    return program(packed, quant, prompts, valid, jax.random.key(s.cfg.seed), jnp.int32(0))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table a file of weights and kind of tokens: mean / p99 / maximum."""
    parts = []
    for init in dict.fromkeys(row["init"] for row in rows):
        for kind, meaning in KINDS.items():
            cells = {(r["rollout"], r["trainer"]): r for r in rows if (r["init"], r["kind"]) == (init, kind)}
            tokens = next(iter(cells.values()))["tokens"]
            rollouts, trainers = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
            table = common.table(
                ["rollout", *(f"trainer: {name}" for name in trainers)],
                [[name, *(_cell(cells[name, trainer]) for trainer in trainers)] for name in rollouts],
            )
            parts += [f"### {common.short(init)}, {kind}: {meaning} ({tokens:,} tokens)", table]
    return "\n\n".join(["Gap in nats: mean / p99 / maximum.", *parts])


def _cell(row: dict[str, Any]) -> str:
    return f"{row['mean']:.4f} / {row['p99']:.3f} / {row['max']:.2f}"


def draw(workdir: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """gaps.png: mean gap, a panel a file of weights and kind of tokens, a group of bars a rollout."""
    inits = list(dict.fromkeys(row["init"] for row in rows))
    figure, axes = canvas(len(inits) * len(KINDS), width=7.5, height=3.6, columns=len(KINDS))
    for line, init in zip(np.reshape(axes, (len(inits), len(KINDS))), inits, strict=True):
        for ax, kind in zip(line, KINDS, strict=True):
            chosen = {(r["rollout"], r["trainer"]): r for r in rows if (r["init"], r["kind"]) == (init, kind)}
            rollouts, trainers = (list(dict.fromkeys(names)) for names in zip(*chosen, strict=True))
            for i, trainer in enumerate(trainers):
                values = [chosen[rollout, trainer]["mean"] for rollout in rollouts]
                at = np.arange(len(rollouts)) + 0.2 * (i - 1.5)
                ax.bar(at, np.maximum(values, 1e-5), 0.2, color=COLOURS[i], label=f"trainer: {trainer}")
            ax.set(yscale="log", ylabel="mean gap (nats)", title=f"{common.short(init)}, {kind}")
            ax.set_xticks(range(len(rollouts)), rollouts, rotation=25, ha="right")
    save(figure, workdir / "gaps.png")
    return ["gaps.png"]
