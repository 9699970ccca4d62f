"""Figure 4: where the activation residual lies: its mean size by channel and layer, and how much the largest hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.paper import common
from quads_jax.checkpoints import load_weights
from quads_jax.gaps import fixed_sequences
from quads_jax.models.config import ModelConfig
from quads_jax.pack import leaf_name
from quads_jax.plots import COLOURS, canvas, save
from quads_jax.precision import recipe
from quads_jax.programs import statistics_program
from quads_jax.quant.residual import ChannelStatistics

TEXT_TOKENS = 128  # a row of a text
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


def measure(config: common.PaperConfig, few: bool) -> Iterator[dict[str, Any]]:
    """Rows: a layer and GEMM input: "residual", the mean |R| of each channel divided by their mean, in natural order
    (experts with inputs of their own are averaged), "held": the share of the squared residual in the largest SHARES
    of the channels, and "blocks", the same for whole blocks of 16.
    """
    for init in config.inits:
        params, model, tokens, valid = _text(config, init) if Path(init).is_dir() else _answers(config, init)
        program = statistics_program(model, recipe("NAIVE").rollout, tokens.shape)
        for (layer, site), stats in _sites(model, program(params, tokens, valid)).items():
            residual = stats.residual.mean(0)
            yield {
                "init": init,
                "layer": layer,
                "site": site,
                "residual": (residual / residual.mean()).tolist(),
                "held": [_held(stats.residual_sq, share, 1) for share in SHARES],
                "blocks": [_held(stats.residual_sq, share, 16) for share in SHARES],
            }


def _answers(config: common.PaperConfig, init: str) -> tuple[Any, ModelConfig, np.ndarray, np.ndarray]:
    """(f32 masters, model, tokens, valid): BF16 answers to the task's held-out prompts."""
    s, params = common.load(config, init)
    sequences = fixed_sequences(s, params, config.sequences)
    return params, s.model, sequences.tokens, sequences.valid


def _text(config: common.PaperConfig, folder: str) -> tuple[Any, ModelConfig, np.ndarray, np.ndarray]:
    """The same of a Hugging Face folder with tokenizer.json: the first TEXT_TOKENS of each part of the text file."""
    from tokenizers import Tokenizer

    params, model, _ = load_weights(folder)
    ids = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).encode(Path(config.text).read_text()).ids
    rows = min(config.sequences, len(ids) // TEXT_TOKENS)
    if not rows:
        raise ValueError(f"text={config.text} has {len(ids)} tokens: give at least {TEXT_TOKENS}")
    tokens = np.array(ids[: rows * TEXT_TOKENS], np.int32).reshape(rows, TEXT_TOKENS)
    return params, model, tokens, np.ones(tokens.shape, bool)


def _sites(model: ModelConfig, statistics: Any) -> dict[tuple[int, str], ChannelStatistics]:
    """Statistics f32[E,K] by layer and GEMM input; E = 1 where experts share it."""
    sites = {}
    is_site = lambda node: isinstance(node, ChannelStatistics)  # noqa: E731
    for path, stats in jax.tree_util.tree_leaves_with_path(statistics, is_leaf=is_site):
        names = leaf_name(path)
        start = model.first_layer(names[0])
        for i in range(len(stats.residual)):
            one = jax.tree.map(lambda a, i=i: np.asarray(a[i], np.float64).reshape(-1, a.shape[-1]), stats)
            sites[start + i, "/".join(names[-2:])] = one
    return dict(sorted(sites.items()))


def _held(squared: np.ndarray, share: float, block: int) -> float:
    """Share of the sum of f64[E,K] in the largest `share` of blocks of so many channels, chosen for each of E; part of
    a block counts as that part of its sum.
    """
    blocks = np.sort(squared.reshape(len(squared), -1, block).sum(-1), axis=1)[:, ::-1].sum(0)
    cumulative = np.concatenate([[0.0], np.cumsum(blocks)]) / blocks.sum()
    return float(np.interp(share, np.linspace(0, 1, len(cumulative)), cumulative))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table a file of weights: a line a GEMM input, means over layers and the range."""
    parts = [
        "Share (%) of the squared activation residual that the largest channels hold: single channels / whole blocks "
        "of 16; mean over layers. Alike channels would hold the share itself. Peak: the mean residual of the largest "
        "channel of any layer, over the mean of its layer's channels."
    ]
    for init in dict.fromkeys(row["init"] for row in rows):
        lines = []
        for site in dict.fromkeys(row["site"] for row in rows if row["init"] == init):
            chosen = [row for row in rows if (row["init"], row["site"]) == (init, site)]
            held, blocks = (np.mean([row[key] for row in chosen], axis=0) for key in ("held", "blocks"))
            cells = [f"{100 * a:.0f} / {100 * b:.0f}" for a, b in zip(held, blocks, strict=True)]
            lines.append([site, *cells, f"{max(max(row['residual']) for row in chosen):.1f}"])
        titles = ["input of", *(f"{100 * share:g} %" for share in SHARES), "peak"]
        parts += [f"### {common.short(init)}", common.table(titles, lines)]
    return "\n\n".join(parts)


def draw(workdir: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """concentration.png; residuals<i>.png, a picture a file of weights: a heat map a GEMM input (layers down)."""
    from matplotlib.colors import LogNorm

    files = [_concentration(workdir, rows)]
    for i, init in enumerate(dict.fromkeys(row["init"] for row in rows)):
        sites = list(dict.fromkeys(row["site"] for row in rows if row["init"] == init))
        figure, axes = canvas(len(sites), width=4, height=3.4)
        largest = max(max(row["residual"]) for row in rows if row["init"] == init)
        colours = {"cmap": "cividis", "norm": LogNorm(0.5, max(2.0, largest))}
        for ax, site in zip(axes, sites, strict=True):
            chosen = [row for row in rows if (row["init"], row["site"]) == (init, site)]
            values = [sorted(row["residual"], reverse=True) for row in chosen]
            image = ax.imshow(values, aspect="auto", interpolation="nearest", **colours)
            shown = range(0, len(chosen), 1 + len(chosen) // 12)
            ax.set(title=site, xlabel="channel, the largest first")
            ax.set_yticks(shown, [chosen[i]["layer"] for i in shown])
        axes[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(axes), label="mean |residual|, over the mean of channels")
        figure.suptitle(common.short(init))
        figure.savefig(workdir / f"residuals{i}.png", dpi=130)
        files.append(f"residuals{i}.png")
    return files


def _concentration(workdir: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Share of the squared residual in the largest channels, a panel a file of weights, a line a GEMM input: the mean
    over layers, of single channels and, thin, of whole blocks.
    """
    inits = list(dict.fromkeys(row["init"] for row in rows))
    figure, axes = canvas(len(inits), width=4.6, height=4)
    at = (0, *SHARES, 1)
    for ax, init in zip(axes, inits, strict=True):
        for i, site in enumerate(dict.fromkeys(row["site"] for row in rows if row["init"] == init)):
            chosen = [row for row in rows if (row["init"], row["site"]) == (init, site)]
            colour = COLOURS[i % len(COLOURS)]
            for key, width in (("held", 1.8), ("blocks", 0.8)):
                mean = np.mean([row[key] for row in chosen], axis=0)
                text = f"{site}{', blocks of 16' if key == 'blocks' else ''}"
                ax.plot(at, (0, *mean, 1), color=colour, linewidth=width, label=text)
        ax.plot((0, 1), (0, 1), color="#999999", linestyle=":", label="all alike")
        ax.set(title=common.short(init), xlabel="share of channels, the largest first")
    axes[0].set_ylabel("share of the squared residual")
    save(figure, workdir / "concentration.png")
    return "concentration.png"
