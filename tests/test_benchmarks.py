"""The bench: structure and honesty of what it writes and draws. Nothing here asserts a time."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.harness import ours, results, turns
from benchmarks.harness.supervise import supervise
from benchmarks.layers import group as layer_group
from benchmarks.layers import sets as layers
from benchmarks.layers import suite as layer_suite
from benchmarks.layers.reference import Reference
from benchmarks.layers.sets import floor_us
from benchmarks.peers import cudnn
from benchmarks.soaks import algorithms as soak
from benchmarks.studies import builds
from fastconv import timing  # fmt: skip
from fastconv.models.layers import LAYERS, SETS, Layer, select

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
    assert round(floor_us(layer, 64, accuracy, "h200")) == expected


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
            assert floor_us(layer, 64, "fp32", "h200") > 0
    assert [layer.layer for layer in select("res2", "pointwise")] == ["res2_in", "res2_out"]
    with pytest.raises(ValueError, match="layer_set is 'alexnet'; expected one of layers, pointwise"):
        select(None, "alexnet")
    assert [(layer.p, layer.q) for layer in SETS["lenet5"]] == [(80, 80), (34, 34)]
    assert [(layer.p, layer.q) for layer in SETS["sequences"]][:4] == [(1, 3199), (1, 1599), (1, 99), (1, 4096)]
    for layer in SETS["transposed"]:  # what PyTorch's module makes of the output of the convolution
        module = torch.nn.ConvTranspose2d(layer.k, layer.c, layer.r, layer.stride, layer.padding, device="meta")
        y = module(torch.empty(1, layer.k, layer.p, layer.q, device="meta"))
        assert y.shape == (1, layer.c, layer.h, layer.w)
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
    reference = Reference(x, weight, layer)
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
    reference = Reference(x, weight, layer)
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
    reference = Reference(x, weight, layer)
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

    def contender(algorithm, *arguments, **options):
        if algorithm == "direct":
            raise RuntimeError("launch failed")
        return real(algorithm, *arguments, **options)

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


def test_a_build_against_itself(tmp_path):
    """Two processes, each with this checkout: one choice, the same bits."""
    root = Path(__file__).resolve().parents[1]
    out = tmp_path / "builds.json"
    document = builds.run(root, ["fp32"], [1], ["dense3"], out, "abc", 2, 1, device="cpu", say=lambda line: None)
    (row,) = document["rows"]
    assert (row["layer"], row["n"], row["class"]) == ("dense3", 1, "fp32")
    choice = ours.auto_choice(select("dense3")[0], 1, "fp32", "nhwc", torch.device("cpu"))
    assert row["old_algorithm"] == row["new_algorithm"] == choice
    assert row["same_bits"]
    assert row["ratio"] == row["old_us"] / row["new_us"] > 0.0
    found = results.read(out)
    assert (found["old_commit"], [each["layer"] for each in found["rows"]]) == ("abc", ["dense3"])


@pytest.mark.usefixtures("forked_workers")
def test_suite_by_two_workers_has_every_row_once(tmp_path):
    path = tmp_path / "l.json"
    arguments = {"classes": ["fp32"], "layers": "res4,dense4", "out": path, "device": "cpu", "layouts": ["nhwc"]}
    first = layer_suite.run(batch_sizes=(1,), algorithms=["direct_tiled"], rounds=1, workers=2, **arguments)
    assert results.read(path) == first
    assert [row["layer"] for row in first["rows"]] == ["res4", "dense4"]
    # What the file holds of other batches stays, whichever worker finds it there.
    both = layer_suite.run(batch_sizes=(2,), algorithms=["direct_tiled"], rounds=1, workers=2, **arguments)
    assert both["rows"][:2] == first["rows"]
    assert [(row["layer"], row["n"]) for row in both["rows"][2:]] == [("res4", 2), ("dense4", 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["l.json"]


TURN = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from benchmarks.harness import turns
log = Path(sys.argv[1]) / "log"
def note(text):
    with log.open("a") as file:
        file.write(text)
with turns.preparing():
    note("p")
    time.sleep(0.3)
    note("q")
with turns.timing():
    note("<")
    time.sleep(0.1)
    note(">")
    with turns.aside():
        time.sleep(0.2)
    note("<")
    time.sleep(0.1)
    note(">")
"""


def test_who_times_is_alone(tmp_path):
    root = str(Path(supervise.__code__.co_filename).parents[2])
    with turns.sharing():
        workers = [subprocess.Popen([sys.executable, "-c", TURN, str(tmp_path), root]) for _ in range(3)]
        assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    log = (tmp_path / "log").read_text()
    assert sorted(log) == sorted("pq" * 3 + "<>" * 6)
    timed = log
    while "<>" in timed:  # nothing of the others between the two ends of a timed part
        timed = timed.replace("<>", "", 1)
    assert sorted(timed) == sorted("pq" * 3)
    assert turns.VARIABLE not in os.environ


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
    if item == 0 and marker.hand_over(1):
        sys.exit(0)
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
    assert (tmp_path / "log").read_text().split() == ["0", "1"]  # after item 0 by another process, nobody to blame
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
    assert results.slug("NVIDIA H200") == "h200"
    assert results.slug("NVIDIA H100 80GB HBM3") == "h100"
    assert results.slug("NVIDIA H100 PCIe") == "h100-pcie"
    head = {"gpu": "NVIDIA GeForce RTX 4090", "cuda": "13.0", "suite": "layers"}
    assert results.default_path(head).as_posix() == "benchmarks/results/geforce-rtx-4090/layers.json"
    assert results.default_path(head | {"cuda": "", "suite": "layers_cpu"}).parts[-2:] == ("cpu", "layers_cpu.json")


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
