"""The bench: structure and honesty of what it writes and draws. Nothing here asserts a time."""

import contextlib
import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from fastconv.bench import (
    cudnn,
    environment,
    layer_group,
    layer_suite,
    layers,
    ours,
    peers,
    report,
    results,
    soak,
    timing,
)  # fmt: skip
from fastconv.bench.layers import LAYERS, SETS, Layer, select
from fastconv.bench.supervise import supervise

# The published set: C -> K @HxW.
_PUBLISHED = """
vgg1_1 3->64@224  vgg1_2 64->64@224   vgg2_1 64->128@112 vgg2_2 128->128@112 vgg3_1 128->256@56  vgg3_2 256->256@56
vgg4_1 256->512@28 vgg4_2 512->512@28 vgg5 512->512@14   res1 64->64@56      res2 128->128@28    res3 256->256@14
res4 512->512@7   yolo1 32->64@208    yolo2 64->128@104  yolo3 128->256@52   yolo4 256->512@26   yolo5 512->1024@13
dense1 192->48@56 dense2 192->48@28   dense3 192->48@14  dense4 192->48@7
"""


def test_layer_set_is_the_published_one():
    words = _PUBLISHED.split()
    names, shapes = words[0::2], words[1::2]
    assert [layer.layer for layer in LAYERS] == names
    assert [f"{layer.c}->{layer.k}@{layer.h}" for layer in LAYERS] == shapes
    for layer in LAYERS:
        assert (layer.h, layer.p, layer.r, layer.s, layer.stride) == (layer.w, layer.q, 3, 3, 1)
        assert (layer.padding, layer.dilation, layer.groups) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "accuracy", "expected"),
    [
        ("vgg1_1", "fp32", 191),
        ("vgg1_2", "fp32", 365),
        ("vgg4_2", "fp32", 225),
        ("yolo5", "fp32", 147),
        ("vgg1_2", "fp16", 183),
        ("vgg2_2", "fp16", 91),
        ("yolo5", "fp16", 49),
        ("dense3", "fp32", 3),
    ],
)
def test_floor_is_the_published_one(name, accuracy, expected):
    (layer,) = select([name])
    assert round(layer.floor_us(64, accuracy)) == expected


def test_select_by_prefix_and_unknown_name():
    assert [layer.layer for layer in select("res4,dense")] == ["res4", "dense1", "dense2", "dense3", "dense4"]
    with pytest.raises(ValueError, match="'alexnet' matches none of vgg1_1"):
        select("alexnet")


def test_layer_sets():
    for name, its in SETS.items():
        assert select(None, name) == its
        assert len({layer.layer for layer in its}) == len(its), f"a name twice in {name}"
        for layer in its:
            assert (layer.c % layer.groups, layer.k % layer.groups) == (0, 0)
            assert min(layer.p, layer.q) > 0
            assert layer.floor_us(64, "fp32") > 0
    assert [layer.layer for layer in select("res2", "pointwise")] == ["res2_in", "res2_out"]
    with pytest.raises(ValueError, match="layer_set is 'alexnet'; expected one of layers, pointwise"):
        select(None, "alexnet")
    assert [(layer.p, layer.q) for layer in SETS["lenet5"]] == [(80, 80), (34, 34)]
    assert layers.batches_of("lenet5") == (10000, 1000, 100)
    assert layers.batches_of("layers") == layers.batches_of("stems") == (64, 1)
    with pytest.raises(ValueError, match="'vgg' matches none of lenet1"):
        select("vgg", "lenet5")


def test_another_layer_set_is_a_suite_of_its_own(tmp_path):
    document = layer_suite.run([1], layers="lenet2", layer_set="lenet5", algorithms=["direct", "im2col_gemm"], rounds=1,
                               device="cpu", out=tmp_path / "lenet.json")  # fmt: skip
    assert document["suite"] == "layers_lenet5_cpu"
    assert {(row["layer"], row["k"], row["layout"]) for row in document["rows"]} == {
        ("lenet2", 16, "nchw"),
        ("lenet2", 16, "nhwc"),
    }


def test_timing_structure_on_the_cpu():
    calls = {"one": 0, "two": 0}

    def count(name):
        calls[name] += 1

    def broken():
        raise ValueError("no such kernel\nsecond line")

    contenders = {"one": lambda: count("one"), "two": lambda: count("two"), "broken": broken}
    measured = timing.measure(contenders, device="cpu", rounds=20, few_rounds=["two"], flush=False)
    assert set(measured.timings) == {"one", "two"}
    assert measured.failures == {"broken": "ValueError: no such kernel"}
    for name, rounds in (("one", 20), ("two", 3)):
        result = measured.timings[name]
        assert result.rounds == rounds
        assert calls[name] == rounds + 1  # and the warm-up
        assert 0 < result.q25 <= result.us <= result.q75
        assert not result.graph


def test_the_monitor_runs_while_the_rounds_do_and_not_before():
    events = []

    @contextlib.contextmanager
    def monitor():
        events.append("begin")
        yield
        events.append("end")

    timing.measure({"one": lambda: events.append("run")}, device="cpu", rounds=3, flush=False, monitor=monitor())
    assert events == ["run", "begin", "run", "run", "run", "end"]


def test_error_metrics_see_noise_and_bias():
    layer = Layer("small", 3, 7, 5, 4)
    x, weight = torch.randn(3, 3, 7, 5), torch.randn(4, 3, 3, 3)
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    reference = layer_group.Reference(x, weight, layer)
    assert reference.error(exact)["l2"] < 1e-15
    grown = reference.error(exact * 1.25)
    assert math.isclose(grown["l2"], 0.25, rel_tol=1e-9)
    assert math.isclose(grown["bias"], 0.25, rel_tol=1e-9)
    assert math.isclose(reference.error(exact * 0.75)["bias"], -0.25, rel_tol=1e-9)
    last_image_wrong = exact.clone()
    last_image_wrong[2] = 0
    assert reference.error(last_image_wrong)["l2"] > 0.1
    exact[0, 0, 0, 0] = math.nan
    assert reference.error(exact)["l2"] == 1e30


@pytest.fixture
def library():
    try:
        return cudnn.library()
    except cudnn.CudnnUnavailable as missing:
        pytest.skip(f"cuDNN: {missing}")


def test_cudnn_symbols_resolve_in_the_library_torch_uses(library):
    for name in cudnn._PROTOTYPES:
        assert getattr(library, name)
    if torch.backends.cudnn.version() is not None:
        assert library.cudnnGetVersion() == torch.backends.cudnn.version()


def test_cudnn_descriptors_take_the_constants_and_refuse_wrong_ones(library):
    tensor = cudnn.Descriptor("Tensor")
    for dtype in cudnn.DATA_TYPES.values():
        for form in cudnn.FORMATS.values():
            cudnn.call("cudnnSetTensor4dDescriptor", tensor.pointer, form, dtype, 2, 3, 5, 7)
    with pytest.raises(cudnn.CudnnError, match="cudnnSetTensor4dDescriptor: CUDNN_STATUS_BAD_PARAM"):
        cudnn.call("cudnnSetTensor4dDescriptor", tensor.pointer, 0, 0, -1, 3, 5, 7)
    convolution = cudnn.Descriptor("Convolution")
    cudnn.call("cudnnSetConvolution2dDescriptor", convolution.pointer, 1, 1, 1, 1, 1, 1, cudnn.CROSS_CORRELATION, 0)
    for math_type in (cudnn.FMA_MATH, cudnn.DEFAULT_MATH, cudnn.TENSOR_OP_MATH):
        cudnn.call("cudnnSetConvolutionMathType", convolution.pointer, math_type)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: legacy cuDNN algorithms and CUDA graphs"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_cudnn_peer_that_runs_is_right(dtype):
    layer = Layer("small", 32, 14, 14, 48)
    x = torch.randn(2, 32, 14, 14, device="cuda", dtype=dtype)
    weight = torch.randn(48, 32, 3, 3, device="cuda", dtype=dtype)
    orders = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
    inputs = {name: x.contiguous(memory_format=order) for name, order in orders.items()}
    weights = {name: weight.contiguous(memory_format=order) for name, order in orders.items()}
    calls, refused = peers.peers(peers.Operands(inputs, weights, layer, tf32=False))
    others = 2 * len(("torch", "torch_all", "cudnn_graph", "cublas")) + (dtype == torch.float32)
    assert len(calls) + len(refused) == others + 2 * len(cudnn.ALGORITHMS["forward"])
    reference = layer_group.Reference(x, weight, layer)
    accuracy = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    measured = timing.measure(calls, device="cuda", rounds=3)
    expected = {f"{name}_{layout}" for name in ("torch", "cudnn_graph", "cublas") for layout in inputs}
    assert expected | {f"torch_{layout}_all" for layout in inputs} <= set(measured.timings)
    for name in measured.timings:
        assert reference.error(calls[name]())["l2"] < layer_group.CLASS_ERROR[accuracy], name


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_ours_runs_every_algorithm_that_fits(layout):
    layer = Layer("small", 5, 7, 9, 3)
    x, weight = torch.randn(2, 5, 7, 9), torch.randn(3, 5, 3, 3)
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    reference = layer_group.Reference(x, weight, layer)
    rows = [row for row in ours.candidates(layer, 2, "fp32", layout, torch.device("cpu")) if row["ok"]]
    assert {"direct", "torch"} <= {row["algorithm"] for row in rows}
    for row in rows:
        y = ours.contender(row["algorithm"], x, weight, layer, "fp32")()
        assert reference.error(y)["l2"] < 1e-5, row["algorithm"]


def test_suite_on_the_cpu_writes_a_file_that_keeps_the_contract(tmp_path, monkeypatch):
    small = [Layer("tiny1", 3, 8, 8, 4), Layer("tiny2", 64, 4, 4, 8)]
    table = {layer.layer: layer for layer in small}
    monkeypatch.setattr(layer_suite, "select", lambda names, *_: [table[name] for name in names or table])
    monkeypatch.setenv("FASTCONV_COMMIT", "0123abc")
    path = tmp_path / "layers_cpu.json"
    arguments = {"batch_sizes": (2,), "classes": ["fp32", "ieee"], "rounds": 2, "out": path, "device": "cpu"}
    layer_suite.run(**arguments)
    document = results.read(path)
    assert document["suite"] == "layers_cpu"
    assert document["commit"] == "0123abc"
    assert len(document["rows"]) == 2 * 2 * 2  # layers, classes, layouts
    for row in document["rows"]:
        assert row["algorithm"] == row["auto"]
        assert row["us"] == row["algorithms"][row["algorithm"]]
        assert row["error"] < 1e-5
        assert set(row["peers"]) == {"torch_nchw", "torch_nhwc"}
        assert row["best_peer_us"] == min(row["peers"].values())
    # A second run of one layer replaces its rows and keeps the others; another commit starts afresh.
    layer_suite.run(**{**arguments, "classes": ["fp32"]}, layers=["tiny2"])
    assert len(results.read(path)["rows"]) == 8
    monkeypatch.setenv("FASTCONV_COMMIT", "4567def")
    layer_suite.run(**{**arguments, "classes": ["fp32"]}, layers=["tiny2"])
    assert {row["layer"] for row in results.read(path)["rows"]} == {"tiny2"}


def test_suite_records_a_failing_algorithm_and_goes_on(tmp_path, monkeypatch):
    real = ours.contender

    def contender(algorithm, *arguments):
        if algorithm == "direct":
            raise RuntimeError("launch failed")
        return real(algorithm, *arguments)

    monkeypatch.setattr(layer_suite, "select", lambda *_: [Layer("tiny", 3, 8, 8, 4)])
    monkeypatch.setattr(ours, "contender", contender)
    document = layer_suite.run(batch_sizes=(1,), classes=["fp32"], rounds=2, out=tmp_path / "l.json", device="cpu")
    for row in document["rows"]:
        assert row["algorithms"]["direct"] is None
        assert row["notes"]["direct"] == "RuntimeError: launch failed"
    assert results.problems(document) == []


def test_suite_in_its_own_process_writes_the_same_file(tmp_path):
    path = tmp_path / "l.json"
    arguments = {"batch_sizes": (1,), "classes": ["fp32"], "layers": "dense4", "out": path, "device": "cpu"}
    document = layer_suite.run(**arguments, algorithms=["direct_tiled"], rounds=2, isolate=True)
    assert results.read(path) == document
    assert [(row["layer"], row["layout"]) for row in document["rows"]] == [("dense4", "nchw"), ("dense4", "nhwc")]
    assert [file.name for file in tmp_path.iterdir()] == ["l.json"]


# Stands in for a suite of three items: item 0 passes; `bad` kills or blocks the process at item 1 until it is banned;
# item 2 dies in its timed run, where nobody is to blame.
WORKER = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[5])  # supervise.py by itself: without importing torch
from supervise import Marker
folder, index, banned, how = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
marker = Marker(folder / "marker")
for item in range(index, 3):
    marker.set(item, "good")
    if item == 1 and "bad" not in banned:
        marker.set(item, "bad")
        if how == "crash":
            os.abort()
        if how == "lost":
            marker.accuse("illegal memory access")
            sys.exit(3)
        time.sleep(60)
    marker.set(item, "")
    if item == 2:
        os._exit(7)
    with open(folder / "log", "a") as log:
        log.write(f"{item} ")
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [("crash", "ended with code -6"), ("lost", "illegal memory access"), ("hang", "hung for more than 1 s")],
)
def test_supervisor_goes_on_without_the_culprit(tmp_path, how, message):
    def command(index, banned):
        where = str(Path(supervise.__code__.co_filename).parent)
        return [sys.executable, "-c", WORKER, str(tmp_path), str(index), json.dumps(banned), how, where]

    said = []
    banned, failed = supervise(command, tmp_path / "marker", lambda index: f"item {index}", said.append, step_s=1.0)
    assert banned == {"bad": f"not run: at item 1 the process {message}"}
    assert failed == ["item 2: ended with code 7"]
    assert (tmp_path / "log").read_text().split() == ["0", "1"]
    assert len(said) == 2


def test_supervisor_raises_if_no_work_ever_begins(tmp_path):
    with pytest.raises(RuntimeError, match="ended with code 5 before it began"):
        supervise(lambda *_: [sys.executable, "-c", "raise SystemExit(5)"], tmp_path / "marker", str, print)


def layer_row(name, accuracy, us, peer_us, n=64, **changes):
    (layer,) = select([name])
    row = {
        **layer.fields(),
        **{"n": n, "class": accuracy, "layout": "nhwc", "pass": "forward", "algorithm": "winograd_f4"},
        **{"us": us, "us_q25": us, "us_q75": us, "error": 1e-6, "max_error": 2e-6},
        **{"algorithms": {"winograd_f4": us, "direct": None}, "peers": {"torch_nhwc": peer_us, "cudnn_winograd": None}},
        **{"best_peer": "torch_nhwc", "best_peer_us": peer_us, "peer_error": 2e-6, "floor_us": 10.0},
    }
    return row | changes


HEAD = {"schema": 1, "suite": "layers", "gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11"}
HEAD |= {"cudnn": "9.19.0", "commit": "0123456789abcdef", "date": "2026-01-02T03:04:05Z"}


@pytest.fixture
def project(tmp_path):
    rows = [
        layer_row("vgg1_1", "fp32", 100.0, 50.0),
        layer_row("vgg4_2", "fp32", 100.0, 400.0),
        layer_row("res1", "fp32", 200.0, 100.0),
        layer_row("res1", "fp16", None, 100.0, error=None),
        layer_row("res1", "fp32", 10.0, 30.0, n=1),
    ]
    results.write(tmp_path / "benchmarks/results/h200/layers.json", {**HEAD, "rows": rows})
    network = {"network": "resnet50", "batch": 64, "class": "fp32", "mode": "eager", "us": 9000.0, "swapped": 50}
    network |= {"peers": {"torch_eager": 18000.0, "compile_default": 20000.0, "cudnn_best_layers": 6000.0}, "total": 53}
    network |= {"top1_agreement": 1.0, "logits_error": 1e-6, "ours": 40, "peak_bytes": 3 << 20, "layers_us": 7000.0}
    network |= {"peer_groups": {"torch_eager_nchw": {"convolution": 14000.0, "other": 4000.0}}}
    network |= {"failures": {"frozen_default_nchw": "not ready", "fastconv_compile_nchw": "ours"}}
    networks = {**HEAD, "suite": "networks", "rows": [network, network | {"mode": "compile", "us": 36000.0}]}
    results.write(tmp_path / "benchmarks/results/h200/networks.json", networks)
    return tmp_path


def test_layer_table_shows_a_lost_layer_as_lost(project):
    document = results.read(project / "benchmarks/results/h200/layers.json")
    table = report.layer_table(document, "fp32", 64)
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("|")}
    assert "**0.50x**" in lines["vgg1_1"]
    assert "4.00x" in lines["vgg4_2"]
    assert "**" not in lines["vgg4_2"]
    # C >= 64 alone: sqrt(4 * 0.5), not the cube root with vgg1_1's 0.5.
    assert "1.41x" in lines["geometric mean"]
    assert "Slower than the best peer: vgg1_1 (0.50x, `winograd_f4`), res1 (0.50x, `winograd_f4`)." in table
    assert "TF32" not in table
    document["rows"].append(layer_row("vgg4_2", "tf32", 70.0, 80.0))
    both = report.layer_table(document, "fp32", 64).splitlines()
    assert both[0].endswith("| speedup over TF32 |")
    assert next(line for line in both if line.startswith("| vgg4_2")).endswith("| 10.0 | **0.80x** |")
    document["rows"].pop()
    document["rows"][0]["auto"] = "implicit_gemm"
    assert "`winograd_f4` (`auto`: `implicit_gemm`)" in report.layer_table(document, "fp32", 64)
    document["rows"][1]["error"] = 1e30
    wrong = report.layer_table(document, "fp32", 64)
    assert "Wrong: vgg4_2." in wrong
    assert "4.00x" not in wrong
    document["rows"][1]["error"] = 1e-6
    assert "Failed: res1." in report.layer_table(document, "fp16", 64)
    assert "| `fp32` | 64 | 1.41x | 1.00x | res1 **0.50x** | 2 of 3 |" in report.layer_summary(document)


def test_layer_table_says_which_times_are_of_few_rounds_and_which_rivals_were_refused():
    note = {"cudnn_winograd_nonfused": "not timed: error 7.1e-05 is beyond the class (5e-05)"}
    rows = [
        layer_row("vgg1_2", "fp32", 1.0, 2.0, notes=note, few_rounds=["direct"]),
        layer_row("res1", "fp32", 1.0, 2.0, few_rounds=["torch_nhwc"]),
    ]
    table = report.layer_table({**HEAD, "rows": rows}, "fp32", 64)
    assert "Of fewer than 20 rounds: res1." in table
    assert "beyond the class: `cudnn_winograd_nonfused` on vgg1_2 (7.1e-05)." in table
    rows[0] |= {"peers": {"cudnn_winograd_nonfused": 41.6}}
    assert "on vgg1_2 (7.1e-05, 42 us)." in report.layer_table({**HEAD, "rows": rows}, "fp32", 64)


def test_report_fills_regions_draws_plots_and_is_deterministic(project):
    names = ["layers/summary", "layers/fp32/64", "layers/algorithms/fp32/64", "networks/fp32", "machine/layers"]
    regions = [f"<!-- results:h200/{name} -->\nold\n<!-- /results -->\n" for name in names]
    readme = project / "README.md"
    readme.write_text("before\n" + "between\n".join(regions) + "after\n")
    changed = report.main(project)
    text = readme.read_text()
    assert readme in changed
    assert "\nold\n" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, cuDNN 9.19.0, commit 0123456789ab, 2026-01-02." in text
    line = (
        "| resnet50 | 64 | eager | 50 of 53 | 40 of 53 | 9.00 | 18.00 | `torch_eager` | 2.00x | 1.0e-06 | - | 100.0% |"
    )
    assert f"{line} - | 3 | - |" in text
    assert "**0.50x**" in text
    drawn = {path: path.read_bytes() for path in changed if path.suffix == ".svg"}
    assert {path.name for path in drawn} == {
        *("h200_layers_fp32_n64.svg", "h200_layers_fp16_n64.svg", "h200_layers_fp32_n1.svg"),
        *("h200_layers_channels_n64.svg", "h200_layers_channels_n1.svg", "h200_networks.svg"),
    }
    assert readme not in report.main(project)
    for path, content in drawn.items():
        assert path.read_bytes() == content, path
    assert report.main(project, check=True) == []
    assert report.LOSS.encode() in drawn[project / "docs/figures/h200_layers_fp32_n64.svg"]


@pytest.mark.parametrize("name", ["h200/layers/fp64/64", "h200/nothing", "b100/layers/summary", "h200/sweep/fp32"])
def test_report_refuses_a_region_it_cannot_draw(project, name):
    with pytest.raises(ValueError, match=name):
        report.fill(f"<!-- results:{name} --><!-- /results -->", project / "benchmarks/results")


def test_schema_names_what_is_wrong():
    good = {**HEAD, "rows": [layer_row("res1", "fp32", 1.0, 2.0)]}
    assert results.problems(good) == []
    del good["rows"][0]["floor_us"]
    good["rows"][0] |= {"class": "fp64", "us": "fast", "best_peer": "nobody"}
    text = "\n".join(results.problems({**good, "schema": 2}))
    for expected in ("schema is 2", "floor_us is missing", "class is 'fp64'", "us is 'fast'", "best_peer is 'nobody'"):
        assert expected in text


def test_a_written_file_is_valid_json_with_rounded_numbers(tmp_path):
    path = tmp_path / "gpu" / "layers.json"
    results.write(path, {**HEAD, "rows": [layer_row("res1", "fp32", 123.456789, None, best_peer=None)]})
    assert json.loads(path.read_text())["rows"][0]["us"] == 123.46
    results.write(path, {**HEAD, "rows": []})
    assert results.read(path)["rows"] == []


def test_result_folder_is_named_after_the_device():
    assert environment.slug("NVIDIA H200") == "h200"
    head = {"gpu": "NVIDIA GeForce RTX 4090", "cuda": "13.0", "suite": "layers"}
    assert results.default_path(head).as_posix() == "benchmarks/results/geforce-rtx-4090/layers.json"
    assert results.default_path(head | {"cuda": "", "suite": "layers_cpu"}).parts[-2:] == ("cpu", "layers_cpu.json")


def test_network_summary_tells_what_pytorch_does_and_what_cudnn_could(project):
    document = results.read(project / "benchmarks/results/h200/networks.json")
    table = report.network_summary(document, "fp32").splitlines()
    # Ours eager 9 ms, compiled 36; PyTorch eager 18, its other form 20; what nobody can run is no form of PyTorch.
    assert table[2] == ("| resnet50 | 64 | 18.00 | 18.00 | `torch_eager` | 6.00 | 9.00 | 36.00 | 2.00x | **0.67x** |")
    assert "| `fp32` |" in report.network_summary(document)
    peers_table = report.network_peers(document, "fp32")
    assert "| resnet50 | 64 | **18.00** | 20.00 | 6.00 |" in peers_table
    assert peers_table.endswith("- resnet50, `frozen_default_nchw`: not ready")


def test_rows_of_another_commit_are_loudly_named(project):
    row = layer_row("res1", "fp16", 2000.0, 1000.0)
    document = {**HEAD, "commit": "a" * 40, "rows": [row, row | {"layer": "res2"}]}
    assert "commit" not in report.layer_table(document, "fp16", 64)
    document["rows"][1] |= {"commit": "b" * 40}
    loud = "**Of several commits, not to be compared row by row: 1 rows of aaaaaaaaaaaa, 1 rows of bbbbbbbbbbbb.**"
    assert report.layer_table(document, "fp16", 64).endswith(loud)
    assert report.layer_summary(document).endswith(loud)
    document["rows"][0] |= {"commit": "b" * 40}
    assert report.layer_table(document, "fp16", 64).endswith("Of commit bbbbbbbbbbbb.")

    path = project / "benchmarks/results"
    assert report.region("h200/commits", path) == "All of commit 0123456789ab."
    networks = {**results.read(path / "h200/networks.json"), "commit": "c" * 40}
    results.write(path / "h200/networks.json", networks)
    assert report.region("h200/commits", path) == (
        "**Of several commits: 0123456789ab: layers; cccccccccccc: networks.**"
    )
    assert report.region("h200/commits/short", path) == "**Of several commits**: docs/results.md says which."


def test_what_a_smaller_limit_on_the_error_costs(project):
    path = project / "benchmarks/results/h200/layers.json"
    assert report.region("h200/layers/within", path.parents[1]) == "The file has no such rows."
    document = results.read(path)
    within = {"max_error": 1.5, "auto": "direct", "us": 200.0, "error": 1e-6}
    document["rows"] = [row | {"within": within} for row in document["rows"] if row["us"] == 100.0]
    results.write(path, document)
    table = report.region("h200/layers/within", path.parents[1])
    assert table.startswith("`max_error` 1.5:")
    assert "| `fp32` | 64 | 2.00x | **0.71x** | vgg1_1 **0.25x** | 1 of 2 | 0.50 | 0.50 |" in table  # 50 and 400 to 200


def test_sets_table(project):
    folder = project / "benchmarks/results"
    rows = [layer_row("res1", "fp16", 100.0, us) for us in (200.0, 50.0)] + [layer_row("res1", "fp16", 1.0, 9.0, n=1)]
    results.write(folder / "h200/layers_stems.json", {**HEAD, "suite": "layers_stems", "rows": rows})
    slower = [layer_row("res1", "fp32", 200.0, 100.0)]
    document = {**HEAD, "suite": "layers_backward_weight", "commit": "d" * 40, "rows": slower}
    results.write(folder / "h200/layers_backward_weight.json", document)
    table = report.region("h200/sets", folder)
    assert "| first layers, 5x5 and 7x7 | 64 | - | - | 1.00 (0.50 to 2.00) | - |" in table
    assert "| weight gradient, 3x3 | 64 | **0.50 (0.50 to 0.50)** | - | - | - |" in table
    assert table.endswith("**Of several commits: 0123456789ab: layers_stems; dddddddddddd: layers_backward_weight.**")


def test_times_at_batch_one_say_what_a_replay_costs_and_what_packing_does():
    row = layer_row("res1", "fp32", 10.0, 30.0, n=1, timer_us=4.5, us_with_packing=15.0)
    table = report.layer_table({**HEAD, "rows": [row]}, "fp32", 1)
    assert "| 15.0 | 2.00x |" in table
    assert "holds the replay of a CUDA graph: 4.5 us" in table
    assert "replay" not in report.layer_table({**HEAD, "rows": [row | {"n": 64}]}, "fp32", 64)


def test_numbers_within_a_sentence(project):
    folder = project / "benchmarks/results"
    document = results.read(folder / "h200/layers.json")
    document["rows"].append(layer_row("vgg4_2", "tf32", 70.0, 80.0))
    document["rows"] = [row | {"timer_us": 4.0, "sm_mhz": 1980.0} for row in document["rows"]]
    document["rows"][0] |= {"sm_mhz": 1500.0, "few_rounds": ["torch_nhwc"]}
    results.write(folder / "h200/layers.json", document)
    expected = {
        "speedup/layers/fp32/64": "1.00",
        "range/layers/fp32/64": "0.50 to 4.00",
        "tf32/64": "0 of 1 layers are faster, 0.80 times in geometric mean",
        "clocks/layers": "1980 MHz in the median, below 97% of the highest (1980) in 1 of 6 rows",
        "replay/layers": "4.0 us",
        "few_rounds/layers": "1 of 6",
        "network/resnet50/fp32/compile": "0.50",
        "network/vgg16/fp32/compile": "(not measured)",
        "best_network/fp32": "2.00 to 2.00",
        "convolutions/fp32": "ResNet-50 7.0 ms instead of 14.0",
        "speedup/layers/bf16/64": "(not measured)",
    }
    for name, words in expected.items():
        text = f"We are <!-- results:h200/said/{name} -->old<!-- /results --> times faster."
        assert report.fill(text, folder) == text.replace("old", words)
    with pytest.raises(ValueError, match="h200/said/nothing"):
        report.region("h200/said/nothing", folder)


ROOT = Path(report.__file__).parents[2]


def test_readme_and_docs_are_what_the_result_files_say():
    assert report.main(ROOT, check=True) == []


# Facts of the hardware and definitions; everything else that is a number of ours or a rival's comes from a file.
FACTS = ("4.5 TB/s", "67 TFLOP/s", "4 times PyTorch's own error")


def claims(text):
    """Numbers with the unit of a measurement, outside of marked parts and code."""
    text = re.sub(r"```.*?```", "", report.REGION.sub("", text), flags=re.DOTALL)
    for fact in FACTS:
        text = text.replace(fact, "")
    units = r"(?:x\b|%|(?:ms|us|MHz|[TG]B/s|TFLOP/s)\b|times\b|of \d+ (?:layers|networks))"
    return re.findall(rf"(?<![\w.])\d+(?:\.\d+)?(?: to \d+(?:\.\d+)?)? ?{units}", text)


def test_readme_makes_no_claim_that_no_row_backs():
    assert claims((ROOT / "README.md").read_text()) == []
    assert layers.BANDWIDTH == 4.5e12
    assert round(layers.FFMA_FLOPS / 1e12) == 67
    marked = "a <!-- results:h200/said/replay/layers -->5 us<!-- /results --> b"
    assert claims(f"{marked} is 1.34 times faster, 0.92x, 12 of 22 layers; `3x3` 64 and 5e-5 are no claims") == [
        "1.34 times", "0.92x", "12 of 22 layers",
    ]  # fmt: skip


def test_soak_layers_are_convolutions_and_the_same_for_a_seed():
    for (layer, n), again in zip(itertools.islice(soak.random_layers(3), 200), soak.random_layers(3), strict=False):
        assert (layer, n) == again
        assert n > 0
        assert layer.p > 0
        assert layer.q > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_soak_counts_launches_and_sees_other_bits(tmp_path, monkeypatch):
    document = soak.run(["winograd_f4"], ["fp32"], launches=100, layers=2, out=tmp_path / "soak.json")
    assert results.read(tmp_path / "soak.json")["rows"]
    assert [(row["launches"], row["mismatches"]) for row in document["rows"]] == [(50, 0), (50, 0)]
    contender = ours.contender

    def random_bits(*arguments):
        call = contender(*arguments)
        return lambda: call() * torch.rand((), device="cuda").add(1.0)

    monkeypatch.setattr(ours, "contender", random_bits)
    (row,) = soak.run(["direct"], ["fp32"], launches=50, layers=1, out=tmp_path / "soak.json")["rows"]
    assert row["mismatches"] == 50
