"""Figure 7: how far the trainer's forward pass is from the rollout's, layer by layer, for symmetric and asymmetric
quantization-aware training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import common
from quads_jax.gaps import Sequences, fixed_sequences
from quads_jax.inspection import gemm_inputs
from quads_jax.models.config import ModelConfig
from quads_jax.pack import leaf_name
from quads_jax.plots import canvas, look, save
from quads_jax.precision import Precision, recipe
from quads_jax.step import calibrate

RECIPES = {
    "NAIVE (BF16 trainer)": recipe("NAIVE"),
    "QAT, asymmetric (W4A16 trainer)": recipe("QAT"),
    "SYM, symmetric (W4A4 trainer)": recipe("SYM"),
    "QUADS 50 %": recipe("QUADS", ratio=0.5),
    "QUADS 100 %": recipe("QUADS", ratio=1.0),
}
# Two engines differ by the rounding of their sums. `drift` stands for that: relative Gaussian noise of this deviation
# on the rollout's embedding. 2**-9 is half a unit in the last place of bf16.
DRIFTS = (0.0, 2.0**-9)


def measure(config: common.PaperConfig, few: bool) -> Iterator[dict[str, Any]]:
    """Rows: relative error of the input of every layer's attention projection (the residual stream, normalised) and of
    the other GEMMs, trainer against rollout, on the same BF16 answers.
    """
    for init in config.inits:
        s, params = common.load(config, init)
        sequences = fixed_sequences(s, params, config.sequences)
        for drift in DRIFTS:
            disturbed = _disturbed(params, drift)
            for label, chosen in itertools.islice(RECIPES.items(), 2 if few else None):
                quant = calibrate(s._replace(recipe=chosen), params)
                one = _inputs(disturbed, quant, s.model, chosen.rollout, sequences)
                other = _inputs(params, quant, s.model, chosen.trainer, sequences)
                for (layer, site), value in _errors(s.model, one, other).items():
                    about = {"init": init, "drift": drift, "recipe": label, "layer": layer, "site": site}
                    yield about | {"relative_error": value}


def _disturbed(params: Any, drift: float) -> Any:
    """The masters with relative Gaussian noise of deviation `drift` on the embedding."""
    if not drift:
        return params
    table = params["embedding"]
    return params | {"embedding": table * (1 + drift * jax.random.normal(jax.random.key(0), table.shape))}


def _inputs(params: Any, quant: Any, model: ModelConfig, precision: Precision, sequences: Sequences) -> Any:
    tokens, valid = jnp.asarray(sequences.tokens), jnp.asarray(sequences.valid)
    return gemm_inputs(params, quant, tokens, valid, model=model, precision=precision)


def _errors(model: ModelConfig, one: Any, other: Any) -> dict[tuple[int, str], float]:
    """||a - b|| / ||b|| of every GEMM input whose rows are tokens in both (experts sort theirs by choice), by layer."""
    errors = {}
    is_site = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    both = zip(
        jax.tree_util.tree_leaves_with_path(one, is_leaf=is_site),
        jax.tree_util.tree_leaves(other, is_leaf=is_site),
        strict=True,
    )
    for (path, (a, sizes)), (b, _) in both:
        names = leaf_name(path)
        if sizes is not None or names[0] == "head":
            continue
        start = model.first_layer(names[0])
        for i, (x, y) in enumerate(zip(np.asarray(a, np.float32), np.asarray(b, np.float32), strict=True)):
            errors[start + i, "/".join(names[-2:])] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return errors


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table a file of weights and drift: error of the input of attention by layer."""
    parts = ["Relative error (%) of the input of each layer's attention, trainer's forward pass against the rollout's."]
    for init, drift in dict.fromkeys((row["init"], row["drift"]) for row in rows):
        chosen = [r for r in rows if (r["init"], r["drift"], r["site"]) == (init, drift, "attention/qkv")]
        layers = sorted({row["layer"] for row in chosen})
        value = {(row["recipe"], row["layer"]): row["relative_error"] for row in chosen}
        parts += [
            f"### {common.short(init)}, drift {drift:g}",
            common.table(
                ["recipe", *(f"layer {layer}" for layer in layers)],
                [
                    [label, *(f"{100 * value[label, layer]:.2f}" for layer in layers)]
                    for label in dict.fromkeys(row["recipe"] for row in chosen)
                ],
            ),
        ]
    return "\n\n".join(parts)


def draw(workdir: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """layers.png: error by layer, a panel a file of weights and drift, a line a recipe."""
    cases = list(dict.fromkeys((row["init"], row["drift"]) for row in rows))
    figure, axes = canvas(len(cases), width=5, height=4)
    for ax, case in zip(axes, cases, strict=True):
        for i, label in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
            points = sorted(
                (row["layer"], 100 * row["relative_error"])
                for row in rows
                if (row["init"], row["drift"], row["recipe"], row["site"]) == (*case, label, "attention/qkv")
            )
            ax.plot(*zip(*points, strict=True), **look(i), marker="o", markersize=3, label=label)
        ax.set(
            xlabel="layer", ylabel="error of attention's input (%)", title=f"{common.short(case[0])}, drift {case[1]:g}"
        )
    save(figure, workdir / "layers.png")
    return ["layers.png"]
