"""The rivals of the layer suites, as far as they can be had without a GPU, and with one."""

import contextlib
import ctypes
import os
import time

import processes
import pytest
import torch

from benchmarks import peers
from benchmarks.harness import results
from benchmarks.harness.clocks import ClockMonitor
from benchmarks.layers import group as layer_group
from benchmarks.layers import suite as layer_suite
from benchmarks.layers.sets import FUSED, GRADIENTS
from benchmarks.peers import cublas, cudnn, cudnn_graph, cutlass, triton_gemm
from benchmarks.peers.fastest import NoneRuns, fastest
from fastconv import testing, timing
from fastconv.models.layers import Layer

SMALL = Layer("small", 6, 14, 14, 16, 5, 5, 1, 0)

CPU = torch.device("cpu")
PASSES = ("forward", *GRADIENTS)
ORDERS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
LAYERS = [
    Layer("pointwise", 8, 9, 7, 12, 1, 1, 1, 0),
    Layer("wide", 3, 9, 7, 5, 3, 5, 1, 1),
    Layer("grouped", 8, 9, 7, 12, 3, 3, 2, 1, 1, 4),
    Layer("dilated", 4, 9, 7, 6, 3, 3, 1, 2, 2),
]


def operands_of(layer, layout, direction, device=CPU, dtype=torch.float32, n=3):
    """(x, weight, grad or None), dense in the layout."""
    order, options = ORDERS[layout], {"device": device, "dtype": dtype}
    x = torch.randn(n, layer.c, layer.h, layer.w, **options).contiguous(memory_format=order)
    weight = torch.randn(layer.k, layer.c // layer.groups, layer.r, layer.s, **options).contiguous(memory_format=order)
    grad = torch.randn(n, layer.k, layer.p, layer.q, **options).contiguous(memory_format=order)
    return x, weight, None if direction == "forward" else grad


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.layer)
def test_the_matrix_product_is_the_convolution(layer, layout, direction):
    x, weight, grad = operands_of(layer, layout, direction, dtype=torch.float64)
    expected = peers.torch_convolution(x, weight, layer, False, direction, grad)
    found = cublas.convolution(x, weight, layer, False, direction, grad)
    assert found.shape == expected.shape
    assert testing.errors(found, expected).relative_l2 < 1e-14
    assert cublas.is_product(layer) == (layer.layer == "pointwise")


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.layer)
def test_the_matrix_product_ends_with_bias_residual_and_relu(layer, layout):
    x, weight, residual = operands_of(layer, layout, "any", dtype=torch.float64)
    bias = torch.randn(layer.k, dtype=torch.float64)
    for addends in ((bias,), (bias, residual)):
        expected = peers.torch_unfused(lambda: peers.torch_convolution(x, weight, layer, False), *addends)
        found = peers.cublas_fused(x, weight, layer, False, *addends)
        assert found.shape == expected.shape
        assert testing.errors(found, expected).relative_l2 < 1e-14


def test_the_matrix_product_leaves_the_switches_as_they_were():
    allowed = torch.backends.cuda.matmul.allow_tf32
    x, weight, _ = operands_of(LAYERS[0], "nhwc", "forward")
    cublas.convolution(x, weight, LAYERS[0], not allowed)
    assert torch.backends.cuda.matmul.allow_tf32 == allowed


def slow_call(seconds, value):
    def call():
        time.sleep(seconds)
        return torch.tensor(value)

    return call


def test_fastest_takes_the_fastest_that_is_of_the_class():
    def broken():
        raise RuntimeError("no such kernel")

    forms = {"slow": slow_call(0.05, 1.0), "good": slow_call(0.01, 1.0), "wrong": slow_call(0.001, 2.0), "no": broken}
    found = fastest(forms, CPU, lambda y: "" if y == 1 else "error 1.0e+00 is beyond the class (1e-05)")
    assert (found.name, set(found.times)) == ("good", {"slow", "good"})
    assert found.failures[0].startswith("wrong: error 1.0e+00 is beyond the class (1e-05) (")
    assert found.failures[1] == "no: RuntimeError: no such kernel"


def test_fastest_says_why_none_runs():
    with pytest.raises(NoneRuns, match=r"none of 1 runs in the class; wrong: too far"):
        fastest({"wrong": slow_call(0.0, 2.0)}, CPU, lambda y: "too far")
    with pytest.raises(NoneRuns, match="none of 0"):
        fastest({}, CPU, lambda y: "")


def test_a_searched_rival_searches_once():
    searches = []

    def search():
        searches.append(1)
        return slow_call(0.0, 3.0), "tile 3", ["tile 4: no"]

    rival = peers.Searched(search)
    assert (rival().item(), rival().item(), len(searches)) == (3.0, 3.0, 1)
    assert (rival.description, rival.failures) == ("tile 3", ["tile 4: no"])


def test_another_thread_computes_what_this_one_would():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: a stream")
    x, weight, _ = operands_of(LAYERS[1], "nhwc", "forward", device="cuda")
    call = lambda: peers.torch_convolution(x, weight, LAYERS[1], False)  # noqa: E731
    found = peers.over_all_plans(call, x.device)  # each thread may settle for another plan
    assert testing.errors(found, call().double()).relative_l2 < 1e-6


@pytest.fixture
def library():
    try:
        return cudnn.library()
    except cudnn.CudnnUnavailable as missing:
        pytest.skip(f"cuDNN: {missing}")


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.layer)
@pytest.mark.parametrize("layout", ORDERS)
def test_cudnn_takes_the_graph_of_every_pass_and_of_fused_layers(library, layer, layout):
    for direction in PASSES:
        x, weight, grad = operands_of(layer, layout, direction)
        graph = cudnn_graph.Graph(x, weight, layer, layout, direction, grad)
        assert graph.descriptor.get("ENGINE_GLOBAL_COUNT")[0] > 0
        shape = {"forward": (3, layer.k, layer.p, layer.q), "backward_weight": weight.shape, "backward_input": x.shape}
        assert graph.result.shape == shape[direction]
    x, weight, _ = operands_of(layer, layout, "forward")
    bias, residual = torch.randn(layer.k), torch.randn(3, layer.k, layer.p, layer.q)
    for rest in ({"bias": bias}, {"bias": bias, "residual": residual}):
        graph = cudnn_graph.Graph(x, weight, layer, layout, **rest)
        assert graph.descriptor.get("ENGINE_GLOBAL_COUNT")[0] > 0
        assert len(graph.tensors) == 3 + len(rest)


def test_cudnn_descriptors_keep_what_they_were_given(library):
    x = torch.zeros(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    tensor = cudnn_graph._tensor(9, x, "nhwc")
    assert tensor.get("DIMENSIONS", 8) == [2, 3, 5, 7]
    assert tensor.get("STRIDES", 8) == list(x.stride())
    assert tensor.get("UNIQUE_ID") == [9]
    with pytest.raises(cudnn.CudnnError, match="cudnnBackendFinalize: CUDNN_STATUS_BAD_PARAM"):
        cudnn_graph.Descriptor("TENSOR", DIMENSIONS=[1, 1, 1, 1], STRIDES=[1, 1, 1, 1], DATA_TYPE=0)  # no id


def config(*numerical):
    return cudnn_graph.Config(None, 7, ((2, 5), (3, 1)), frozenset(numerical), frozenset({0}))


def test_engines_are_of_the_class_that_their_notes_allow():
    fp32, fp16 = torch.float32, torch.float16
    cases = [(config(), True, True, True), (config(0), False, True, True), (config(1), False, False, False)]
    for found, without_tf32, with_tf32, half in cases:
        assert cudnn_graph.is_of_class(found, fp32, False) == without_tf32
        assert cudnn_graph.is_of_class(found, fp32, True) == with_tf32
        assert cudnn_graph.is_of_class(found, fp16, False) == half
    assert str(config()) == "engine 7 (k2=5 k3=1, compiled at run time)"


def test_cutlass_says_why_it_cannot_be_had(monkeypatch, tmp_path):
    x, weight, _ = operands_of(LAYERS[0], "nhwc", "forward")
    with pytest.raises(cutlass.CutlassUnavailable, match="serve one group"):
        cutlass.forms(x, weight, LAYERS[2], "forward", None)
    with pytest.raises(cutlass.CutlassUnavailable, match="C = 3 and K = 5 are not both multiples of 4"):
        cutlass.forms(x, weight, LAYERS[1], "forward", None)
    monkeypatch.setenv("FASTCONV_CUTLASS", str(tmp_path / "none.so"))
    cutlass.library.cache_clear()
    with pytest.raises(cutlass.CutlassUnavailable, match="build-cutlass"):
        cutlass.library()
    with pytest.raises(FileNotFoundError, match=r"expected a folder that has include/cutlass/cutlass\.h"):
        cutlass.build(tmp_path)


def test_cutlass_splits_the_sum_where_tiles_leave_processors_idle():
    small, large = Layer("small", 512, 7, 7, 512), Layer("large", 64, 224, 224, 64)
    assert cutlass._splits(64, large, "forward", 128, 64, 132) == [(1, 0)]
    slices = cutlass._splits(64, large, "backward_weight", 128, 128, 132)
    assert slices == [(1, 0), (26, 0), (26, 1), (52, 0), (52, 1)]  # 1 x 5 tiles
    assert (16, 1) in cutlass._splits(1, small, "forward", 64, 64, 132)  # 8 tiles
    assert cutlass._splits(1, Layer("short", 4, 7, 7, 8, 1, 1, 1, 0), "forward", 64, 64, 132) == [(1, 0)]


def test_the_clock_is_that_of_the_device_while_it_runs(monkeypatch):
    monitor = ClockMonitor(CPU)
    with monitor:
        time.sleep(0.01)
    assert monitor.found == {}
    values = iter([(1980.0, 500.0), (345.0, 100.0), (1980.0, 700.0)])
    monkeypatch.setattr(ClockMonitor, "_open", lambda self, device: lambda: next(values, (1980.0, 700.0)))
    with ClockMonitor("cuda:0", period_s=0.001) as monitor:
        time.sleep(0.1)
    assert monitor.found["sm_mhz"] == 1980
    assert monitor.found["sm_mhz_min"] == 345
    assert monitor.found["clock_samples"] >= 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_clock_can_be_read():
    with ClockMonitor("cuda") as monitor:
        torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        torch.cuda.synchronize()
        time.sleep(0.05)
    assert 100 < monitor.found["sm_mhz"] < 5000


def test_an_unreadable_clock_is_said(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with ClockMonitor("cuda:0") as monitor:
        pass
    assert monitor.found == {"clock_error": "libnvidia-ml.so.1: cannot open shared object file"}


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    layers = [Layer(f"tiny{index}", 3, 8, 8, 4) for index in range(3)]
    monkeypatch.setattr(layer_suite, "select", lambda *_: layers)
    monkeypatch.setenv("FASTCONV_COMMIT", "0123abc")
    fixed = {"batch_sizes": (1,), "classes": ["fp32"], "rounds": 1, "device": "cpu", "layouts": ["nhwc"]}
    return lambda **rest: layer_suite.run(**fixed, algorithms=["direct"], out=tmp_path / "l.json", **rest)


def test_a_suite_whose_time_is_over_names_what_is_missing_and_is_resumed(tiny, monkeypatch):
    measured = []
    real = layer_group.measure

    def measure(group, *arguments, **named):
        measured.append(group.layer.layer)
        if len(measured) == 1:
            later = time.time() + 3600  # the first layer took an hour
            monkeypatch.setattr(time, "time", lambda: later)
        return real(group, *arguments, **named)

    monkeypatch.setattr(layer_group, "measure", measure)
    document = tiny(budget_s=600)
    assert [row["layer"] for row in document["rows"]] == measured == ["tiny0"]
    expected = [f"{name}, batch 1, fp32: the suite's time was over" for name in ("tiny1", "tiny2")]
    assert document["missing"] == expected
    assert results.problems(document) == []
    document = tiny(resume=True)
    assert measured == ["tiny0", "tiny1", "tiny2"]
    assert "missing" not in document
    assert len(document["rows"]) == 3
    tiny()
    assert len(measured) == 6  # without resume all is measured again


def test_a_layer_whose_turn_comes_behind_the_time_is_missing(tiny, monkeypatch):
    @contextlib.contextmanager
    def waiting(beat):
        later = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: later)
        yield

    monkeypatch.setattr(layer_suite.turns, "timing", waiting)
    document = tiny(budget_s=600)
    assert (len(document["rows"]), len(document["missing"])) == (0, 3)


def test_packing_is_timed_at_batch_one_beside_packed_filters(tmp_path):
    arguments = {"classes": ["fp32"], "rounds": 2, "device": "cpu", "layouts": ["nhwc"], "out": tmp_path / "l.json"}
    for row in layer_suite.run([1, 2], layers=[SMALL], layer_set="lenet5", **arguments)["rows"]:
        assert not any("+" in name for name in row["algorithms"])
        timed = row["us_with_packing"] is not None
        assert timed == (row["n"] == 1 and row["auto"] != "torch")


@pytest.mark.parametrize("direction", FUSED)
def test_a_fused_pass_is_timed_against_the_same_operation(direction, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "HOPELESS", 1e9)  # on a busy machine, or with one thread, `direct` may be
    arguments = {"rounds": 1, "device": "cpu", "layouts": ["nhwc", "nchw"], "out": tmp_path / "l.json"}
    document = layer_suite.run([3], ["fp32"], [SMALL], layer_set="lenet5", direction=direction, **arguments)
    assert document["suite"] == f"layers_lenet5_{direction}_cpu"
    for row in document["rows"]:
        assert set(row["peers"]) == {"torch_nchw", "torch_nhwc"}
        for error in [*row["peer_errors"].values(), *(found["l2"] for found in row["errors"].values())]:
            assert error < 1e-6
        assert {"torch", "direct"} <= set(row["errors"])


def test_cutlass_is_no_rival_of_ieee(monkeypatch, tmp_path):
    def rivals(operands, *_):
        exact = peers.torch_convolution(operands.inputs["nchw"], operands.weights["nchw"], operands.layer, False)

        def slow():
            time.sleep(0.01)
            return exact

        return {"torch_nchw": slow, "cutlass_3xtf32": lambda: exact}, {}

    monkeypatch.setattr(peers, "peers", rivals)
    arguments = {"rounds": 2, "device": "cpu", "layouts": ["nhwc"], "out": tmp_path / "l.json"}
    rows = layer_suite.run([2], ["ieee", "fp32"], layers=[SMALL], layer_set="lenet5", **arguments)["rows"]
    assert {row["class"]: row["best_peer"] for row in rows} == {"ieee": "torch_nchw", "fp32": "cutlass_3xtf32"}
    assert "no rival of class ieee" in rows[0]["notes"]["cutlass_3xtf32"]


TRITON = """
import sys
import torch
from benchmarks.peers import triton_gemm
from fastconv.models.layers import Layer

for layer in (Layer("padded", 20, 9, 8, 33), Layer("dilated", 5, 12, 11, 70, 5, 3, 2, 2, 2)):
    for dtype, products, limit in ((torch.float32, "ieee", 1e-6), (torch.float16, "ieee", 1e-3)):
        generator = torch.Generator().manual_seed(0)
        shapes = (2, layer.c, layer.h, layer.w), (layer.k, layer.c, layer.r, layer.s)
        x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        geometry = layer.stride, layer.padding, layer.dilation
        exact = torch.nn.functional.conv2d(x.double(), weight.double(), None, *geometry)
        arranged = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        forms = triton_gemm.forms(*arranged, layer, products)
        assert len(forms) > 2
        for name, call in list(forms.items())[:1]:
            y = call()
            error = ((y.double() - exact).norm() / exact.norm()).item()
            assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
            assert error < limit, (layer, dtype, name, error)
print("right")
"""


@pytest.mark.skipif(bool(triton_gemm.MISSING), reason=f"needs Triton: {triton_gemm.MISSING}")
def test_the_triton_kernel_is_right_in_tritons_interpreter():
    """In a process of its own: Triton reads the switch when it is imported."""
    done = processes.run(TRITON, environment={**os.environ, "TRITON_INTERPRET": "1"})
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not go together with this NumPy")
    assert done.stdout.endswith("right\n"), done.stderr


def test_triton_says_why_it_cannot_be_had(monkeypatch):
    x, weight, _ = operands_of(LAYERS[2], "nhwc", "forward")
    if not triton_gemm.MISSING:
        with pytest.raises(triton_gemm.TritonUnavailable, match="serves one group"):
            triton_gemm.forms(x, weight, LAYERS[2], "ieee")
    monkeypatch.setattr(triton_gemm, "MISSING", "No module named 'triton'")
    with pytest.raises(triton_gemm.TritonUnavailable, match="No module named 'triton'; Triton comes with PyTorch's"):
        triton_gemm.forms(x, weight, LAYERS[1], "ieee")


@pytest.mark.parametrize(
    ("dtype", "tf32", "names"),
    [
        (torch.float32, False, {"triton_ieee", "triton_tf32x3"}),
        (torch.float32, True, {"triton_tf32"}),
        (torch.float16, False, {"triton_half"}),
    ],
)
def test_triton_is_a_rival_where_it_is_asked_for(monkeypatch, dtype, tf32, names):
    monkeypatch.setattr(cudnn, "contenders", lambda *arguments: ({}, {}))
    monkeypatch.setattr(cudnn, "Problem", lambda *arguments: None)

    def of(**more):
        data = {layout: operands_of(LAYERS[1], layout, "forward", dtype=dtype)[:2] for layout in ORDERS}
        inputs, weights = ({layout: pair[i] for layout, pair in data.items()} for i in (0, 1))
        operands = peers.Operands({name: _OnCuda(x) for name, x in inputs.items()}, weights, LAYERS[1], tf32, **more)
        return {name for name in peers.peers(operands)[0] if name.startswith("triton")}

    assert of() == set()
    assert of(triton=True) == names


class _OnCuda:
    """A tensor that says that it is on a GPU: who is asked is decided before anything runs."""

    def __init__(self, x):
        self.dtype, self.device = x.dtype, torch.device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: Triton's implicit GEMM")
@pytest.mark.parametrize(
    ("accuracy", "peer"), [("fp32", "triton_tf32x3"), ("ieee", "triton_ieee"), ("tf32", "triton_tf32")]
)
def test_triton_is_checked_and_timed_on_the_gpu(tmp_path, accuracy, peer):
    layer, out = Layer("small", 32, 14, 14, 48), tmp_path / "l.json"
    (row,) = layer_suite.run([2], [accuracy], [layer], rounds=2, out=out, triton=True, isolate=False)["rows"]
    assert row["peers"][peer] > 0
    assert row["peer_errors"][peer] < layer_group.CLASS_ERROR[accuracy]
    assert "of 3 that ran" in row["peer_plans"][peer] or "of 4 that ran" in row["peer_plans"][peer]


class FakePlan:
    """A plan of engine N that takes N milliseconds."""

    workspace_bytes = 0

    def __init__(self, graph, config):
        if config.engine == 99:
            raise cudnn.CudnnError("cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED (3000)")
        self.config, self.result = config, graph.result

    def bind(self, workspace):
        assert workspace.numel() >= self.workspace_bytes

    def __call__(self):
        time.sleep(self.config.engine / 1e3)
        return self.result


class FakeGraph:
    device, result = CPU, torch.zeros(3)

    def __init__(self, *engines):
        notes = {8: frozenset({0})}  # engine 8 is on tensor cores
        empty = frozenset()
        self.engines = [cudnn_graph.Config(None, each, (), notes.get(each, empty), empty) for each in engines]

    def configs(self):
        return self.engines

    def label(self, config):
        return f"engine {config.engine}"


@pytest.fixture
def fake_plans(monkeypatch):
    monkeypatch.setattr(cudnn_graph, "Plan", FakePlan)
    monkeypatch.setattr(cudnn_graph, "_hopeless", {})


def test_the_search_for_a_plan_says_what_it_ran_and_what_not(fake_plans):
    announced = []
    graph = FakeGraph(99, 8, 20, 4, 30)
    banned = {"engine 30": "not run: at res1 the process hung"}
    plan, words, failures = cudnn_graph.search(graph, False, lambda y: "", announce=announced.append, banned=banned)
    assert plan.config.engine == 4
    assert words == "engine 4 (); 2 of 5 plans ran, 1 are of another class"
    assert failures[0] == "engine 30 (): not run: at res1 the process hung"
    assert failures[1].startswith("engine 99 (): cudnnBackendFinalize")
    assert announced[:3] == ["engine 99", "engine 20", "engine 4"]  # built one after the other
    assert announced[-1] == "engine 4"
    assert cudnn_graph.search(graph, True, lambda y: "")[1].endswith("4 of 5 plans ran")
    with pytest.raises(cudnn.CudnnError, match="none of 1 engines computes in the class"):
        cudnn_graph.search(FakeGraph(8), False, lambda y: "")


def test_a_search_without_time_counts_what_was_left(fake_plans):
    plans, failures, left = cudnn_graph.build(FakeGraph(4, 20), FakeGraph(4, 20).engines, seconds=-1.0)
    assert (plans, failures, left) == ([], [], 2)


def test_a_hopeless_engine_is_run_once(fake_plans):
    graph = FakeGraph(1, 80)
    assert "2 of 2 plans ran" in cudnn_graph.search(graph, False, lambda y: "")[1]
    _, words, (failure,) = cudnn_graph.search(graph, False, lambda y: "")
    assert "1 of 2 plans ran" in words
    assert failure.startswith("engine 80 (): not run: 8")
    assert "ms in an earlier layer" in failure


def test_a_search_over_all_plans_follows_a_quick_one_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "SEARCH_S", 0.02)

    def rivals(operands, *_):
        exact = peers.torch_convolution(operands.inputs["nchw"], operands.weights["nchw"], operands.layer, False)

        def slow():
            time.sleep(0.05)
            return exact

        quick = lambda: exact  # noqa: E731
        return {"torch_a": slow, "torch_a_all": quick, "torch_b": quick, "torch_b_all": quick}, {}

    monkeypatch.setattr(peers, "peers", rivals)
    arguments = {"rounds": 1, "device": "cpu", "layouts": ["nhwc"], "out": tmp_path / "l.json"}
    (row,) = layer_suite.run([2], ["fp32"], layers=[SMALL], layer_set="lenet5", **arguments)["rows"]
    assert [name for name, us in row["peers"].items() if us is None] == ["torch_a_all"]
    assert "the search of 10 plans took" in row["notes"]["torch_a_all"]
