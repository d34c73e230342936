"""`fastconv bench sweep`: a grid of layers, timed like the layer sets."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.layers.sets import grid
from benchmarks.layers.suite import grid_tables
from fastconv.cli import app
from fastconv.models.layers import Layer


def test_grid_has_every_combination_once():
    layers = grid([8, 16], [4, 8, 12], [7, 14])
    assert {(layer.c, layer.k, layer.h, layer.w) for layer in layers} == {
        (c, k, size, size) for c in (8, 16) for k in (4, 8, 12) for size in (7, 14)
    }
    assert len({layer.layer for layer in layers}) == len(layers) == 12
    assert grid([8], None, [7]) == [Layer("c8_k8_7x7_3x3", 8, 7, 7, 8)]


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (3, 2), (5, 1), (7, 3)])
def test_a_layer_of_the_grid_keeps_its_size_and_names_what_is_unusual(kernel, dilation):
    (layer,) = grid([8], [4], [9], kernel, dilation=dilation)
    assert (layer.p, layer.q) == (9, 9)
    assert layer.layer == f"c8_k4_9x9_{kernel}x{kernel}" + ("" if dilation == 1 else f"_d{dilation}")
    (layer,) = grid([8], [4], [40], kernel, stride=2, padding=0, dilation=dilation, groups=4)
    assert layer.layer.startswith(f"c8_k4_40x40_{kernel}x{kernel}_s2")
    assert layer.layer.endswith("_g4")
    assert layer.padding == 0


def test_a_grid_that_cannot_be():
    with pytest.raises(ValueError, match="groups is 3; expected a divisor of C = 8 and K = 6"):
        grid([8], [6], [7], groups=3)
    with pytest.raises(ValueError, match="sizes: 4 with padding 0 is less than the kernel's extent 5"):
        grid([8], None, [9, 4], kernel=5, padding=0)


def test_command_writes_rows_and_draws_the_grid(tmp_path):
    path = tmp_path / "sweep.json"
    arguments = ["--c", "4,8", "--k", "6", "--hw", "5,6", "--batch", "1", "--rounds", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "sweep", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["suite"] == "sweep_cpu"
    assert {(row["c"], row["k"], row["h"], row["layout"]) for row in document["rows"]} == {
        (c, 6, size, layout) for c in (4, 8) for size in (5, 6) for layout in ("nchw", "nhwc")
    }
    assert all(row["us"] > 0 and row["best_peer_us"] > 0 and "direct" in row["algorithms"] for row in document["rows"])
    for word in ("batch 1, fp32, nhwc", "4->6", "8->6", "5x5", "6x6"):
        assert word in result.output
    again = ["--c", "16", *arguments[2:], "--kernel", "5"]  # the file grows; the table is of what was asked for
    result = CliRunner().invoke(app, ["bench", "sweep", *again, "--json", str(path)])
    assert result.exit_code == 0
    assert "16->6" in result.output
    assert "8->6" not in result.output
    assert len(json.loads(path.read_text())["rows"]) == 12


def test_a_table_leaves_gaps_where_nothing_was_measured():
    row = {"n": 1, "class": "fp32", "layout": "nhwc", "algorithm": "direct", "error": 1e-7, "us": 2.0}
    row |= {"best_peer_us": 3.0, "c": 4, "k": 4, "h": 7}
    (table,) = grid_tables([row, row | {"c": 8, "k": 8, "h": 9, "us": None}])
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["7x7", "9x9"], ["1.50x direct", "-"], ["-", "-"]]
