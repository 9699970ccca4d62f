"""The figures on fixed weights: gap measures against numpy, known gaps, and every figure on a tiny model."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.paper import common, main, residuals
from quads_jax.checkpoints import save_weights
from quads_jax.gaps import fixed_sequences, gap_figures, log_probs
from quads_jax.precision import recipe
from tests.tiny import MODEL, TASK, params

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("start") / "weights.msgpack"
    save_weights(path, params(), MODEL, {})
    return common.PaperConfig(inits=(str(path),), task=TASK, rows=16, sequences=8)


def test_gap_figures_against_numpy():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 50, 60)).astype(np.float32)
    mask = rng.random((50, 60)) < 0.7
    gap = np.abs(one - other)[mask]
    figures = gap_figures(one, other, mask)
    assert figures["tokens"] == mask.sum() and figures["max"] == gap.max()
    assert figures["mean"] == pytest.approx(gap.mean(), rel=1e-6)
    for name, share in (("p99", 0.99), ("p99.9", 0.999)):
        assert figures[name] == np.quantile(gap, share, method="inverted_cdf")
    with pytest.raises(ValueError, match="no token is kept"):
        gap_figures(one, other, np.zeros_like(mask))


def test_equal_arithmetic_has_no_gap_and_compensation_closes_it(config):
    s, weights = common.load(config, config.inits[0])
    sequences = fixed_sequences(s, weights, config.sequences)
    assert sequences.mask.any() and not sequences.mask[:, : s.shape[1]].any()

    def gap(name, **options):
        made = recipe(name, **options)
        scored = (log_probs(s, weights, {}, side, sequences) for side in (made.rollout, made.trainer))
        return gap_figures(*scored, sequences.mask)["mean"]

    assert gap("BF16") == gap("SYM") == 0
    assert 0 < gap("QUADS", ratio=1.0, policy="token") < 0.3 * gap("QAT")
    assert gap("QUADS", ratio=0.0, policy="token") == gap("QAT") > 0


def test_more_sequences_than_rows_are_refused(config, tmp_path):
    s, weights = common.load(config, config.inits[0])
    with pytest.raises(ValueError, match="17 sequences, but a step has 16 rows"):
        fixed_sequences(s, weights, 17)
    for change, message in (
        ({"inits": ()}, "inits is empty"),
        ({"rows": 6}, "rows=6 must be a positive multiple of 4"),
        ({"sequences": 32}, r"sequences=32 must be in 1..rows=16"),
        ({"text": __file__}, "has an effect on figure 4 of Hugging Face folders"),
    ):
        with pytest.raises(ValueError, match=message):
            common.check(dataclasses.replace(config, **change))
    folder = dataclasses.replace(config, inits=(str(tmp_path),))
    common.check(folder)
    with pytest.raises(ValueError, match="is a folder: give text=FILE"):
        common.check(folder, reads_text=True)


def test_held_share():
    squared = np.array([[1.0] * 12 + [5.0] * 4 + [1.0] * 16])
    assert residuals._held(squared, 1 / 8, 1) == pytest.approx(20 / 48)
    assert residuals._held(squared, 1 / 2, 16) == pytest.approx(32 / 48)
    assert residuals._held(np.ones((3, 64)), 1 / 4, 1) == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", main.FIGURES)
def test_every_figure_gives_rows_a_table_and_pictures(name, config, tmp_path):
    figure = main.FIGURES[name]
    rows = list(figure.measure(config, few=True))
    assert rows and all(row["init"] == config.inits[0] for row in rows)
    assert "nan" not in figure.markdown(rows)
    for picture in figure.draw(tmp_path, rows):
        assert (tmp_path / picture).stat().st_size > 5000


def test_a_figure_that_trains_runs_as_a_smoke(tmp_path):
    """The other training figures' smokes are this one but for an option of the loss."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "launch.py", "--experiment=paper", "--figure=1", "--smoke", f"--workdir={folder}"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (folder / "COMPARISON.md").read_text()
    assert "2 points: 2 finished." in text and "QUADS:0.5" in text and "teacher-forced" in text
