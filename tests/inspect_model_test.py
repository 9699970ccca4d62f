"""The experiment `inspect`: its files from a tiny model, and its tables on figures that are easy to average by hand."""

import json
import math

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import common, inspect_model
from quads_jax.checkpoints import save_weights
from quads_jax.inspection import RATIOS
from quads_jax.models.config import ModelConfig
from quads_jax.models.decoder import init_params
from tests.tiny import TASK

pytestmark = pytest.mark.quick

PNG = b"\x89PNG\r\n\x1a\n"


def cells(text, first="projection"):
    """{first cell: {title: cell}} of the Markdown table in `text` whose first title is `first`."""
    table = text[text.index(f"| {first} ") :].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    titles, _, *rows = lines
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def test_the_files_of_a_tiny_model(tmp_path, capsys):
    sizes = dict(d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=0, d_mlp=32)
    model = ModelConfig(vocab_size=TASK.tokenizer.vocab_size, **sizes)
    save_weights(tmp_path / "weights.msgpack", init_params(model, jax.random.key(0)), model, {})
    folder = tmp_path / "out"
    with flagsaver.flagsaver():
        common.FLAGS(["test", f"--workdir={folder}", f"--set=init={tmp_path / 'weights.msgpack'}", "--set=rows=3"])
        inspect_model.run()
    rows = json.loads((folder / "inspect.json").read_text())
    names = ["attention/qkv", "attention/out", "mlp/gate_up", "mlp/down"]
    assert [(row["layer"], row["projection"]) for row in rows] == [(i, name) for i in range(2) for name in names]
    # QUADS is the default: compensation removes a part of the error
    assert all(0 < row["output/error"] < row["output/error_uncompensated"] < 0.3 for row in rows)
    report = (folder / "REPORT.md").read_text()
    memory = cells(report, "tensors")  # 2 layers of attention 64 x 32 and 32 x 32, MLP 64 x 32 and 32 x 32
    assert (memory["mlp"]["parameters"], memory["mlp"]["BF16 (bytes)"]) == ("6,144", "12,288")
    nvfp4 = 6144 // 2 + 6144 // 16 + 4 * 4  # codes, block scales, a global scale a matrix
    assert memory["mlp"]["W4A4+RAC 0.5 block (bytes)"] == f"**{nvfp4:,}**"
    assert "W4A4+RAC 0.5 block" in report and list(cells(report)) == names
    shown = cells(capsys.readouterr().out)
    assert list(shown) == [f"{i} {name}" for i in range(2) for name in names]
    for i, name in enumerate(names):
        mean = 100 * (rows[i]["output/error"] + rows[i + 4]["output/error"]) / 2
        assert float(cells(report)[name]["by both"]) == pytest.approx(mean, abs=0.006)
        assert float(shown[f"1 {name}"]["by both"]) == pytest.approx(100 * rows[i + 4]["output/error"], abs=0.006)
    config = json.loads((folder / "config.json").read_text())
    assert config["rows"] == 3 and config["recipe"]["name"] == "QUADS"
    for picture in ("heat_maps.png", "residual.png"):
        assert f"({picture})" in report and (folder / picture).read_bytes().startswith(PNG)


def row(layer, projection, error, **figures):
    return {"layer": layer, "projection": projection, "output/error": error} | figures


def test_a_line_shows_means_and_the_worst():
    residual = {key: [0.5] * len(RATIOS) for key in inspect_model.RESIDUALS.values()}
    residual["activation/residual_in_channels"][RATIOS.index(1 / 4)] = 0.75
    group = [
        row(0, "experts/down", 0.1, **{"output/worst_expert": 2, "output/worst_error": 0.3, "weight/sqnr_db": 20.0}),
        row(3, "experts/down", 0.2, **{"output/worst_expert": 5, "output/worst_error": 0.25, "weight/sqnr_db": 21.0}),
    ]
    table = cells(inspect_model.table({"a": group, "b": [row(1, "attention/qkv", 0.4, **residual)]}))
    assert table["a"]["by both"] == "15.00" and table["a"]["weights dB"] == "20.50"
    assert table["a"]["worst %"] == "layer 3, expert 5: 25.0" and table["b"]["worst %"] == "layer 1: 40.0"
    assert table["b"]["residual in 1/8, 1/4, 1/2 of channels %"] == "50 / 75 / 50"
    assert table["b"]["weights dB"] == table["a"]["residual in 1/8, 1/4, 1/2 of channels %"] == "-"
    assert "dead zone %" not in table["a"]  # no row has it


def test_a_model_without_quantization_has_pictures_and_no_residual(tmp_path):
    rows = [row(i, "mlp/down", 0.0, **{"output/error_of_activations": 0.0}) for i in range(2)]
    assert inspect_model.draw(tmp_path, rows) == {"Error by layer and projection": "heat_maps.png"}
    assert [file.name for file in tmp_path.iterdir()] == ["heat_maps.png"]


def test_non_finite_figures_are_text_in_json(tmp_path):
    exact = row(0, "mlp/down", 0.0, **{"weight/sqnr_db": math.inf, "output/error_of_activations": 0.0})
    assert inspect_model._finite(exact)["weight/sqnr_db"] == "inf"
    assert cells(inspect_model.table({"a": [exact]}))["a"]["weights dB"] == "inf"
    assert "heat_maps.png" in inspect_model.draw(tmp_path, [exact]).values()


def test_heat_maps_hold_each_figure_in_its_place():
    key = "output/error_of_activations"
    rows = [
        row(0, "mlp/down", 0.1, **{key: 0.1}),
        row(2, "mlp/down", 0.2, **{key: 0.2}),
        row(2, "head", 0.3, **{key: 0.3}),
    ]
    (image,) = (image for ax in inspect_model._heat_maps(rows).axes for image in ax.images[:1])
    np.testing.assert_allclose(np.ma.filled(image.get_array(), -1), [[10, -1], [20, 30]])
