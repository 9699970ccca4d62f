"""Table 3, without training: the teacher-forced gap of QUADS by share of compensated channels and policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.paper import common
from quads_jax.gaps import fixed_sequences, gap_figures, log_probs
from quads_jax.plots import canvas, look, save
from quads_jax.precision import recipe
from quads_jax.quant.residual import POLICIES
from quads_jax.step import calibrate

RATIOS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
PLAIN = ("online", 0.0)  # policy and ratio of plain W4A4


def measure(config: common.PaperConfig, few: bool) -> Iterator[dict[str, Any]]:
    """Rows: the gap's figures (nats) by weights, policy and ratio, on BF16 answers scored by both sides."""
    for init in config.inits:
        s, params = common.load(config, init)
        sequences = fixed_sequences(s, params, config.sequences)
        for policy, ratio in itertools.product(POLICIES[:2] if few else POLICIES, RATIOS[::3] if few else RATIOS):
            chosen = recipe("QUADS", ratio=ratio, policy=policy)
            quant = calibrate(s._replace(recipe=chosen), params)
            one = log_probs(s, params, quant, chosen.rollout, sequences)
            other = log_probs(s, params, quant, chosen.trainer, sequences)
            yield {"init": init, "policy": policy, "ratio": ratio} | gap_figures(one, other, sequences.mask)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table a file of weights: a line a policy, a column a ratio, mean gap and its share of the gap at ratio 0."""
    parts = [
        "Mean gap in nats, teacher-forced; in brackets its ratio to plain W4A4's (policy online, 0 %). Static at 0 % "
        "compensates nothing either, but permutes the channels of both sides."
    ]
    ratios = sorted({row["ratio"] for row in rows})
    for init in dict.fromkeys(row["init"] for row in rows):
        chosen = {(r["policy"], r["ratio"]): r for r in rows if r["init"] == init}
        plain = chosen[PLAIN]["mean"]
        lines = []
        for policy in dict.fromkeys(policy for policy, _ in chosen):
            means = [chosen[policy, ratio]["mean"] for ratio in ratios]
            lines.append([policy, *(f"{mean:.4f} ({mean / plain:.2f})" for mean in means)])
        tokens = chosen[PLAIN]["tokens"]
        parts += [
            f"### {common.short(init)} ({tokens:,} tokens)",
            common.table(["policy", *(f"{100 * r:g} %" for r in ratios)], lines),
        ]
    return "\n\n".join(parts)


def draw(workdir: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """policies.png: mean gap by ratio, a panel a file of weights, a line a policy; sqrt(1 - ratio) for orientation."""
    inits = list(dict.fromkeys(row["init"] for row in rows))
    figure, axes = canvas(len(inits), width=5.5, height=4.2)
    for ax, init in zip(axes, inits, strict=True):
        chosen = [row for row in rows if row["init"] == init]
        for i, policy in enumerate(dict.fromkeys(row["policy"] for row in chosen)):
            points = [(row["ratio"], row["mean"]) for row in chosen if row["policy"] == policy]
            ax.plot(*zip(*points, strict=True), **look(i), marker="o", markersize=3, label=policy)
        plain = next(row["mean"] for row in chosen if (row["policy"], row["ratio"]) == PLAIN)
        line = [plain * (1 - ratio) ** 0.5 for ratio in RATIOS]
        ax.plot(RATIOS, line, color="#999999", linestyle=":", label="sqrt(1 - ratio): alike channels")
        ax.set(
            xlabel="share of compensated channels", ylabel="mean gap (nats)", title=common.short(init), ylim=(0, None)
        )
    save(figure, workdir / "policies.png")
    return ["policies.png"]
