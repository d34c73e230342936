"""The bench: that every time, error and verdict is the one of whom it is said of."""

import random
import re
import statistics
import time
from pathlib import Path

import pytest
import torch
from test_benchmarks import HEAD, layer_row

from benchmarks import peers
from benchmarks.harness import ours, results
from benchmarks.layers import sets as layers
from benchmarks.layers import suite as layer_suite
from benchmarks.layers.sets import floor_us
from benchmarks.networks import suite as network_suite
from benchmarks.networks.forms import Contender
from benchmarks.reports import layers as layer_tables
from benchmarks.reports import networks as network_tables
from benchmarks.studies import floors
from fastconv import _C, timing
from fastconv.models.layers import Layer, select


class Stopwatch:
    """Stands in for a clock: of each contender, a series of times that are its own."""

    def __init__(self, series):
        self.series, self.samples, self.order = {name: iter(values) for name, values in series.items()}, [], []

    def prepare(self, name, call, result):
        return lambda: name

    def sample(self, run):
        self.order.append(run())
        self.samples.append(next(self.series[run()]))

    def collect(self):
        samples, self.samples = self.samples, []
        return samples


def test_an_estimate_is_the_least_of_three_calls_and_one_of_a_long_call(monkeypatch):
    times = {"fast": iter((90.0, 30.0, 40.0)), "long": iter((2 * timing.SLOW_US,)), "broken": iter(())}
    monkeypatch.setattr(timing, "once", lambda call, device: (None, next(times[call()])))
    contenders = {name: lambda name=name: name for name in times}
    contenders["broken"] = lambda: contenders["nothing"]
    found = timing.estimate(contenders, torch.device("cpu"))
    assert {name: (its.us, its.rounds) for name, its in found.timings.items()} == {
        "fast": (30.0, 3), "long": (2 * timing.SLOW_US, 1),
    }  # fmt: skip
    assert found.failures == {"broken": "KeyError: 'nothing'"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the host's gaps between launches")
def test_an_estimate_has_no_gap_of_the_host_in_it():
    x, pause_s = torch.zeros(8, device="cuda"), 200e-6

    def call():
        x.add_(1)
        time.sleep(pause_s)
        return x.add_(1)

    call()
    (its,) = timing.estimate({"paused": call}, torch.device("cuda")).timings.values()
    assert its.us < pause_s * 1e6 / 2 < timing.once(call, torch.device("cuda"))[1]


def test_times_are_medians_of_each_contenders_own_samples_in_changing_order():
    draw = random.Random(0)
    series = {name: [draw.uniform(base, 2 * base) for _ in range(40)] for name, base in (("a", 1), ("b", 10), ("c", 9))}
    orders = []
    for seed in (0, 0, 1):
        clock = Stopwatch(series)
        measured = timing._measure(clock, dict.fromkeys(series, lambda: None), 40, ["c"], seed)
        for name, values in series.items():
            kept = values[:3] if name == "c" else values
            quartiles = statistics.quantiles(kept, n=4, method="inclusive")
            found = measured.timings[name]
            assert (found.q25, found.us, found.q75) == pytest.approx(quartiles)
            assert found.rounds == len(kept)
        orders.append(clock.order)
    assert orders[0] == orders[1] != orders[2]
    pairs = list(zip(orders[0][9::2], orders[0][10::2], strict=True))  # the rounds of a and b alone
    assert {("a", "b"), ("b", "a")} == set(pairs)


@pytest.fixture
def two_peers(monkeypatch):
    """A layer whose rivals are a slow exact one, and a fast one that adds `error`, relative to the output."""

    def rows(error, **arguments):
        real = peers.torch_convolution

        def rivals(operands, *_):
            exact = real(operands.inputs["nchw"], operands.weights["nchw"], operands.layer, operands.tf32)
            noise = exact * error * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))

            def slow():
                time.sleep(0.02)
                return exact

            return {"torch_slow": slow, "torch_fast": lambda: exact + noise}, {}

        monkeypatch.setattr(peers, "peers", rivals)
        monkeypatch.setattr(layer_suite, "select", lambda *_: [Layer("tiny", 3, 8, 8, 4)])
        fixed = {"batch_sizes": (1,), "classes": ["fp32"], "rounds": 20, "device": "cpu", "layouts": ["nhwc"]}
        return layer_suite.run(**fixed | arguments)["rows"]

    return rows


def test_the_best_peer_is_shown_with_its_own_error(two_peers, tmp_path):
    (row,) = two_peers(1e-5, out=tmp_path / "l.json")
    assert row["best_peer"] == "torch_fast"
    assert row["peer_error"] == row["peer_errors"]["torch_fast"] == pytest.approx(1e-5, rel=0.2)
    assert row["peer_errors"]["torch_slow"] < 1e-6


def test_a_peer_that_is_wrong_is_refused_however_fast(two_peers, tmp_path):
    (row,) = two_peers(1e-3, out=tmp_path / "l.json")
    assert row["best_peer"] == "torch_slow"
    assert 0 < row["peers"]["torch_fast"] < row["best_peer_us"]  # said, but not compared with
    assert "beyond the class" in row["notes"]["torch_fast"]


def test_what_auto_takes_and_the_best_peer_have_all_rounds(two_peers, tmp_path):
    (row,) = two_peers(1e-6, out=tmp_path / "l.json", algorithms=["direct", "torch", "im2col_gemm", "direct_tiled"])
    assert not {row["auto"], row["best_peer"]} & set(row["few_rounds"])


def test_a_loss_by_little_is_a_loss():
    rows = [layer_row("res1", "fp32", 100.0, 99.7), layer_row("res2", "fp32", 100.0, 100.0)]
    document = {**HEAD, "rows": rows}
    table = layer_tables.layer_table(document, "fp32", 64)
    assert "**1.00x**" in table
    assert "Slower than the best peer: res1 (1.00x, `winograd_f4`)." in table
    assert "| 1 of 2 |" in layer_tables.layer_summary(document)


@pytest.mark.parametrize("name", ["gpu", "driver", "cuda", "torch", "cudnn", "commit", "suite", "measured_choices"])
def test_rows_of_another_machine_or_version_are_not_merged(name, tmp_path):
    path = tmp_path / "layers.json"
    results.write(path, {**HEAD, "rows": [layer_row("res1", "fp32", 1.0, 2.0)]})
    assert len(results.merge(path, HEAD, layer_suite.ROW_KEY)["rows"]) == 1
    assert results.merge(path, {**HEAD, name: "another"}, layer_suite.ROW_KEY)["rows"] == []


def test_committed_files_keep_the_contract_and_lie_where_their_heads_say():
    root = Path(__file__).parents[1] / "benchmarks/results"
    paths = sorted(root.rglob("*.json"))
    assert len(paths) > 50
    for path in paths:
        document = results.read(path)  # which raises
        own = results.default_path(document, root)
        assert path.parent == own.parent
        # regret_fit.json, and a CPU's files by instruction set, are of a suite and what they are named for.
        assert path.stem == own.stem or (own.stem == "regret" and path.stem.startswith("regret_"))


def test_floors_of_the_other_classes_and_of_strides():
    (vgg,), (down,) = select(["vgg4_2"]), select(["res2_down"], "strided")
    multiplies = 2.0 * 36 * 64 * 7 * 7 * 512 * 512
    assert floor_us(vgg, 64, "tf32", "h200") == pytest.approx(1e6 * multiplies / layers.TENSOR_FLOPS)
    assert floor_us(vgg, 64, "ieee", "h200") == pytest.approx(1e6 * multiplies / layers.FFMA_FLOPS)
    assert floor_us(down, 64, "fp32", "h200") == pytest.approx(1e6 * 3 * down.direct_flops(64) / layers.TENSOR_FLOPS)
    assert down.direct_flops(64) == 2.0 * 64 * 128 * 28 * 28 * 128 * 9


def test_the_byte_model_of_a_training_step_is_the_measured_one():
    lines = []
    floors.training(Path(__file__).parents[1] / "benchmarks/results/h100", lines.append)
    for cls in ("fp32", "tf32", "amp_fp16"):
        first = next(index for index, line in enumerate(lines) if line.startswith(f"resnet50 {cls}, batch 64"))
        measured = float(re.search(r"measured ([0-9.]+) ms", lines[first])[1])
        by_bytes = float(re.search(r"PyTorch, eager: ([0-9.]+) ms", lines[first + 1])[1])
        assert by_bytes == pytest.approx(measured, rel=0.05)
    with pytest.raises(ValueError, match=r"folder is results; expected one of benchmarks/results"):
        floors.run(Path("results"), lines.append)


def test_memory_stands_beside_the_compiled_form_whose_memory_is_known():
    names = "torch_eager", "compile_default", "frozen_default", "frozen_reduce_overhead"
    found = object.__new__(network_suite.Measured)
    found.contenders = [Contender(False, name, layout) for name in names for layout in ("nhwc", "nchw")]
    found.contenders.append(Contender(True, "fused", "nhwc"))
    found.peak_bytes = {c.name: 1 for c in found.contenders if not c.has_graph}
    us = {
        "torch_eager": 1.0,
        "compile_default": 3.0,
        "frozen_default": 4.0,
        "frozen_reduce_overhead": 2.0,
        "fused": 0.5,
    }
    found.times = {
        c.name: timing.Timing(us[c.form_name] + (c.layout == "nchw"), 0.0, 0.0, 20, False) for c in found.contenders
    }
    assert found._peer_of_memory().name == "compile_default_nhwc"
    del found.peak_bytes["compile_default_nhwc"], found.times["compile_default_nchw"]
    assert found._peer_of_memory().name == "frozen_default_nhwc"
    for name in ("frozen_default_nhwc", "frozen_default_nchw"):
        del found.peak_bytes[name]
    assert found._peer_of_memory().name == "torch_eager_nhwc"
    found.peak_bytes = {"fastconv_fused_nhwc": 1}
    assert found._peer_of_memory() is None


def test_overhead_is_a_graph_over_the_convolutions_of_its_layout():
    """Kernel by kernel the host can make the other layout the faster one, in which other kernels run."""
    row = {"network": "vgg16", "batch": 64, "class": "fp16", "us": 220.0, "logits_error": 1e-3, "layers_us": None}
    row |= {"layout": "nhwc"}
    rows = [row | {"mode": "fused_graph"}, row | {"mode": "fused", "us": 300.0, "layers_us": 200.0}]
    other = [rows[0], rows[1] | {"layout": "nchw", "layers_us": 300.0}]
    eager = row | {"mode": "eager", "us": 400.0, "layers_us": 150.0}
    table = network_tables.overhead_table({**HEAD, "rows": [*other, eager]})
    assert "| VGG-16 | 64 | 1.10 | - |" in table
    other[1] |= {"layers_us_of": {"nchw": 300.0, "nhwc": 250.0}}
    assert "| VGG-16 | 64 | 1.10 | 0.88 |" in network_tables.overhead_table({**HEAD, "rows": [*other, eager]})
    other[1] |= {"us": None, "layers_us": None, "layers_us_of": {}}  # `fuse` cannot trace it
    compiled = row | {"mode": "compile_default", "us": 350.0, "layers_us": 215.0, "layers_us_of": {"nhwc": 215.0}}
    its = [*other, eager, compiled]
    assert "| VGG-16 | 64 | 1.10 | 1.02 |" in network_tables.overhead_table({**HEAD, "rows": its})
    rows += [dict(each, **{"class": "fp32", "us": 221.0}) for each in rows]
    rows += [dict(each, **{"class": "bf16", "logits_error": float("nan")}) for each in rows[:2]]
    table = network_tables.overhead_table({**HEAD, "rows": rows})
    assert "| VGG-16 | 64 | 1.10 | **1.10** | 1.10 | not finite |" in table


def test_tf32_stands_beside_fp32_in_one_run(monkeypatch):
    """Of that class alone, and computed with PyTorch's switches on; it is no peer."""
    seen = set()
    forward = torch.nn.Conv2d.forward

    def spy(self, x):
        seen.add(torch.backends.cudnn.conv.fp32_precision)
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", spy)
    monkeypatch.setattr(network_suite, "TF32_PEERS", ("folded_eager", "torch_eager"))
    arguments = {"device": "cpu", "batch": 2, "image": 28, "peers": ["torch_eager"], "energy_s": None}
    rows = network_suite.run(["lenet5"], ["fp32", "tf32"], ["eager"], 2, **arguments)["rows"]
    assert seen == {"ieee", "tf32"}
    assert [set(row.get("tf32_peers", ())) for row in rows] == [{"torch_eager"}, set()]
    full, tf32 = rows
    assert (full["best_tf32_peer"], full["best_tf32_peer_us"]) == ("torch_eager", full["tf32_peers"]["torch_eager"])
    assert full["peers"] == {"torch_eager": full["best_peer_us"]}
    document = {**HEAD, "rows": rows}
    assert network_tables.over_tf32(document) == {("lenet5", 2): full["best_tf32_peer_us"] / full["us"]}
    for name in ("tf32_peers", "best_tf32_peer", "best_tf32_peer_us"):  # an older file has them not
        del full[name]
    assert network_tables.over_tf32(document) == {("lenet5", 2): tf32["best_peer_us"] / full["us"]}


def test_the_choice_of_a_fused_pass_counts_what_pytorch_does_behind_the_convolution(monkeypatch):
    """Its bias and its ReLU are passes over memory of their own; ours are in the kernel."""
    monkeypatch.setattr(ours.ops, "device_info", lambda device: _C.h200_device())
    layer = Layer("yolo2", 64, 104, 104, 128)

    def choice(direction):
        return ours.auto_choice(layer, 64, "fp16", "nhwc", torch.device("cpu"), None, direction)

    assert choice("forward") == "torch"
    for direction in layers.FUSED:
        assert choice(direction) != "torch"
        rows = ours.candidates(layer, 64, "fp16", "nhwc", torch.device("cpu"), direction)
        least = min((row for row in rows if row["auto_eligible"]), key=lambda row: row["cost_us"])
        assert least["algorithm"] == choice(direction)
