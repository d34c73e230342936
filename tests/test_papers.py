"""The sources' experiments: what they run, that a run goes on where it ended, what is drawn. Nothing asserts a time."""

import fcntl
import json
import threading
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cli, papers
from benchmarks.harness import launches, results, turns
from benchmarks.layers import group as layer_group
from benchmarks.papers import cuconv, lenet5, megakernel, megakernel_model, single_image, textbook
from benchmarks.reports.papers import SOURCES
from fastconv import timing
from fastconv.models.layers import Layer

TINY = [Layer("3->4 @6x6 3x3", 3, 6, 6, 4), Layer("8->4 @5x5 1x1", 8, 5, 5, 4, 1, 1, 1, 0)]


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCONV_COMMIT", "0123abc")
    return papers.Options(folder=tmp_path, rounds=2, report=lambda line: None)


def test_the_survey_has_the_sources_configurations():
    counts = {name: len(its) for name, its in cuconv.NETWORKS.items()}
    assert counts == {"googlenet": 42, "squeezenet": 21, "alexnet": 4, "vgg19": 9, "resnet50": 13}
    assert len(cuconv.LAYERS) * len(cuconv.BATCHES) == 616
    assert len({layer.layer for layer in cuconv.LAYERS}) == len(cuconv.LAYERS)
    for layer in cuconv.LAYERS:
        assert (layer.stride, layer.p, layer.q) == (1, layer.h, layer.w)


def test_the_networks_have_these_layers():
    """AlexNet's and SqueezeNet's differ from torchvision's in width or size; the others' are all there."""
    from torchvision.models import get_model

    from benchmarks.networks.parts import convolutions

    for name in ("vgg19", "resnet50"):
        with torch.device("meta"):
            model = get_model(name, weights=None)
        own = {(x.c, x.h, x.k, x.r) for x in convolutions(model, (1, 3, 224, 224)) if x.stride == 1}
        listed = {(x.c, x.h, x.k, x.r) for x in cuconv.NETWORKS[name]}
        assert listed <= own
        # torchvision's ResNet strides in the 3x3 layer, so that the 1x1 before it is one more with stride 1.
        assert own - listed <= {(256, 56, 128, 1), (512, 28, 256, 1), (1024, 14, 512, 1)}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("forked_workers")
def test_a_survey_goes_on_where_it_ended(options, monkeypatch, workers):
    monkeypatch.setattr(cuconv, "LAYERS", TINY)
    options = replace(options, batches=[1, 2], workers=workers)
    papers.run("cuconv", options)
    document = results.read(options.out("papers/cuconv/survey"))
    assert document["suite"] == "papers/cuconv/survey_cpu"
    keys = [(row["layer"], row["n"], row["class"], row["layout"]) for row in document["rows"]]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 2
    for row in document["rows"]:
        assert set(row["peers"]) <= {"torch_default_nchw", "torch_default_nhwc"}  # nobody searches
        assert row["us"] == row["algorithms"][row["algorithm"]]
        assert row["auto"] == "torch" or row["us_with_packing"] > 0
        assert row["error"] < 1e-5
        assert row["workspace_bytes"] >= 0
        assert row["packed_bytes"] >= 0
    monkeypatch.setattr(layer_group, "enter", lambda *arguments: pytest.fail("measured again"))
    again = papers.run("cuconv", replace(options, workers=1, resume=True))["survey"]
    assert again["rows"] == document["rows"]


def entrants_of(times):
    error = {"l2": 0.0, "max": 0.0, "bias": 0.0}
    return {name: layer_group._Entrant(lambda: torch.zeros(()), us, error) for name, us in times.items()}


def test_a_survey_drops_who_is_far_behind_its_side_and_the_rivals():
    group = layer_group.Group(TINY[0], 1, torch.float32, False, ["ieee"], ["nchw"], torch.device("cpu"), survey=True)
    times = {"cudnn_gemm": 1000.0, "cudnn_fft": 1600.0, "cudnn_direct": 3100.0}
    times |= {"ieee/nchw/direct": 200.0, "ieee/nchw/two_stage": 700.0, "ieee/nchw/im2col_gemm": 3100.0}
    group.entrants = entrants_of(times | {"ieee/nchw/torch": 9000.0})
    slow, rounds = layer_group._drop_hopeless(group, {"ieee/nchw/torch"}, 10)
    assert set(group.once_us) == {"cudnn_direct", "ieee/nchw/im2col_gemm"}
    assert "ieee/nchw/two_stage" in group.entrants  # behind `direct`, but faster than every rival
    assert slow == ["cudnn_fft"]
    assert rounds == max(layer_group.SURVEY_ROUNDS, int(layer_group.SURVEY_S * 1e6 / (10900 + 4 * 130)))
    group.keeps_named = True
    group.entrants = entrants_of(times)
    group.once_us.clear()
    layer_group._drop_hopeless(group, set(), 10)
    assert set(group.once_us) == {"cudnn_direct"}  # what was asked for by name is timed
    assert layer_group._drop_hopeless(group, set(), 2)[1] == 3


def test_who_prepares_patiently_lets_those_who_wait_to_time_go_first(monkeypatch):
    """Threads stand for processes: a lock is of the file that was opened, not of the process."""
    log, begun, asked, enough = [], threading.Event(), threading.Event(), threading.Event()

    def first():
        with turns.preparing():
            log.append("prepares")
            begun.set()
            assert enough.wait(60)
            log.append("prepared")

    def timer():
        with turns.timing():
            log.append("timed")

    def second():
        with turns.preparing(patient=True):
            log.append("patient")

    real = turns._Turn._lock

    def lock(turn, file, kind):
        if kind == fcntl.LOCK_EX and file is turn._file:
            asked.set()  # has the queue's lock, and waits for the turn
        if kind == fcntl.LOCK_EX and file is turn._queue:
            enough.set()
        real(turn, file, kind)

    monkeypatch.setattr(turns._Turn, "_lock", lock)
    with turns.sharing():
        workers = [threading.Thread(target=run, daemon=True) for run in (first, timer, second)]
        for worker, before in zip(workers, (None, begun, asked), strict=True):
            assert before is None or before.wait(60)
            worker.start()
        for worker in workers:
            worker.join(60)
    assert log == ["prepares", "prepared", "timed", "patient"]


def test_expansion_is_the_books_and_what_unfold_makes():
    assert textbook.expansion(Layer("book", 1, 3, 3, 1, 2, 2, 1, 0)) == pytest.approx(16 / 9)
    for layer in (*textbook.LAYERS, Layer("strided", 3, 9, 7, 5, 3, 5, 2, 1)):
        x = torch.zeros(1, layer.c, layer.h, layer.w)
        unrolled = torch.nn.functional.unfold(x, (layer.r, layer.s), padding=layer.padding, stride=layer.stride)
        assert textbook.expansion(layer) == pytest.approx(unrolled.numel() / x.numel())
        assert textbook.unrolled_bytes(layer, 3) == 3 * unrolled.numel() * 4


def test_what_each_rung_moves():
    layer = Layer("book", 2, 20, 20, 3, 3, 3, 1, 1)
    x, y, filters, macs = 2 * 400, 3 * 400, 3 * 2 * 9, 3 * 400 * 2 * 9
    assert textbook.roofline(layer, 1, "direct").bytes == 4 * (2 * macs + y)
    assert textbook.roofline(layer, 1, "direct").intensity == pytest.approx(0.25, rel=0.03)  # the book's
    assert textbook.roofline(layer, 1, "direct_tiled").bytes == 4 * (4 * (2 * 18 * 18 + filters) + y)
    assert textbook.roofline(layer, 1, "im2col_gemm").bytes == 4 * (x + 2 * 2 * 9 * 400 + filters + y)
    assert textbook.roofline(layer, 1, "fused_unroll").bytes == 4 * (x + filters + y)
    assert textbook.roofline(layer, 1, "direct").bound == "memory"
    assert textbook.roofline(textbook.LAYERS[1], 64, "fused_unroll").bound == "arithmetic"
    # Of the own product of 16 x 16: 25 tiles of pixels and one of filters read 16 lines of both operands.
    assert textbook.roofline(layer, 1, textbook.OWN_UNROLL).bytes == 4 * (x + 2 * 2 * 9 * 400 + 25 * filters + y)
    assert textbook.roofline(layer, 1, textbook.OWN_CONSTANT).bytes == 4 * (macs + filters + y)
    slower = textbook.roofline(layer, 1, "direct", 1e12)
    assert slower.us == pytest.approx(slower.bytes / 1e12 * 1e6)
    assert textbook.Roofline(30e12, 1e12, 3e12).bound == "arithmetic"
    assert textbook.Roofline(30e12, 1e12, 2e12).bound == "memory"
    moved = {rung: textbook.roofline(layer, 64, rung).bytes for rung in textbook.RUNGS}
    assert moved["direct"] == moved[textbook.OWN_BLOCK] == moved[textbook.OWN_DIRECT] > moved[textbook.OWN_CONSTANT]
    assert moved[textbook.OWN_CONSTANT] > moved[textbook.OWN_UNROLL] > moved["im2col_gemm"] > moved["fused_unroll"]
    assert moved["fused_unroll"] == moved["implicit_gemm"]


def test_the_megakernels_stages_are_counted_as_the_source_has_them():
    layer, n = Layer("small", 3, 8, 6, 5), 2  # 2 * 2 tiles of 4 x 4 an image, some of them beyond the edge
    its = megakernel_model.stages(layer, n)
    u, v, m, x, y = 3 * 5, 8 * 3, 8 * 5, 2 * 3 * 48, 2 * 5 * 48
    assert its["filter"] == megakernel_model.Stage(72 * u, 4 * (9 + 36) * u)
    assert its["input"] == megakernel_model.Stage(156 * v, 4 * (x + 36 * v))
    assert its["gemm"] == megakernel_model.Stage(2 * 36 * 8 * 3 * 5, 4 * 36 * (u + v + m))
    assert its["output"] == megakernel_model.Stage(90 * m, 4 * (36 * m + y))
    moved, computed = (its["input"] + its["output"]).bytes, its["gemm"].flops
    # Arithmetic so slow, or memory, that it alone counts; in series transforms move bytes all the same.
    found = megakernel_model.predicted(layer, n, memory=1e12, flops=1e6)
    assert found.series == pytest.approx((moved / 1e12 + computed / 1e6) * 1e6)
    assert found.mixed == pytest.approx((its["input"] + its["gemm"] + its["output"]).flops / 1e6 * 1e6)
    assert found.on_chip == found.mixed
    found = megakernel_model.predicted(layer, n, memory=1e6, flops=1e15)
    assert found.series == pytest.approx(found.mixed)
    assert found.mixed == pytest.approx(moved + its["gemm"].bytes)
    assert found.on_chip == pytest.approx(4 * (x + y))
    # Values of half the size: input and output stay what they are. Tensor cores compute the products alone.
    half = megakernel_model.predicted(layer, n, memory=1e6, flops=1e15, stored=2)
    assert half.mixed == pytest.approx((found.mixed + 4 * (x + y)) / 2)
    assert half.on_chip == found.on_chip
    tensor = megakernel_model.predicted(layer, n, memory=1e15, flops=1e6, products=2e6)
    transforms = (its["input"] + its["output"]).flops
    assert tensor.mixed == pytest.approx(max(computed / 2, transforms))


def event(name, start, threads, registers, shared):
    args = {"grid": [4, 2, 1], "block": [threads, 1, 1], "registers per thread": registers, "shared memory": shared}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": 3.5, "args": args}


def test_launches_are_read_from_a_trace():
    trace = {"traceEvents": [event("b", 20, 256, 128, 0), {"cat": "cpu_op", "name": "c"}, event("a", 10, 128, 32, 99)]}
    first, second = launches.parse(trace)
    assert (first.kernel, first.blocks, first.threads, first.registers, first.shared_bytes) == ("a", 8, 128, 32, 99)
    assert (second.kernel, second.us) == ("b", 3.5)


def test_distinct_launches_are_counted():
    found = [launches.Launch("copy", 1, 32, 8, 0, 1.0)]
    found += [launches.Launch("product", blocks, 256, 40, 2048, us) for blocks, us in ((9, 5.0), (4, 2.5))]
    product, copy = launches.distinct(found, launches.Multiprocessor())
    assert (product["kernel"], product["launches"], product["us"], product["blocks"]) == ("product", 2, 7.5, 9)
    assert (copy["launches"], copy["us"], copy["occupancy"]) == (1, 1.0, 0.5)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (256, 32, 0, 1.0),  # threads
        (256, 128, 0, 0.25),  # registers: 16 warps
        (384, 168, 0, 12 * 32 / 2048),  # 12 of the 12 warps that registers allow
        (128, 32, 100 << 10, 2 * 128 / 2048),  # shared memory: two blocks of 101 KiB in 228
        (32, 16, 0, 32 * 32 / 2048),  # the number of blocks
        (1024, 65, 0, 0.0),  # too many registers for one block
    ],
)
def test_occupancy_is_what_cudas_calculator_says(threads, registers, shared, expected):
    launch = launches.Launch("k", 1, threads, registers, shared, 1.0)
    assert launch.occupancy(launches.Multiprocessor()) == pytest.approx(expected)


def test_single_image_runs_on_the_cpu(options, monkeypatch):
    monkeypatch.setattr(single_image, "LAYERS", TINY[1:])
    options = replace(options, classes=["ieee"], parts=["layers", "kernels", "blocks"])
    found = papers.run("single_image", options)
    for part, document in found.items():
        suite = f"papers/single_image/{part}"
        assert document["suite"] == f"{suite}_cpu"
        assert results.read(options.out(suite))["rows"]
    assert {row["pass"] for row in found["layers"]["rows"]} == {"bias_relu"}
    for row in found["kernels"]["rows"]:
        assert row["largest"] < 1e-5
        assert row["beyond"] == 0
    assert {"direct", "two_stage"} <= {row["algorithm"] for row in found["kernels"]["rows"]}
    assert {row["mode"] for row in found["blocks"]["rows"]} == set(single_image.CPU_MODES)
    for row in found["blocks"]["rows"]:
        assert row["logits_error"] < 1e-5
        assert set(row["peers"]) == set(single_image.CPU_PEERS)
    monkeypatch.setattr(timing, "measure", lambda *arguments, **more: pytest.fail("measured again"))
    monkeypatch.setattr(single_image, "_kernel_rows", lambda *arguments: pytest.fail("measured again"))
    held = results.read(options.out("papers/single_image/blocks"))
    again = papers.run("single_image", replace(options, resume=True))
    assert again["blocks"]["rows"] == held["rows"]
    assert len(again["kernels"]["rows"]) == len(found["kernels"]["rows"])
    held["rows"][0]["failures"]["compile_nchw"] = single_image.network_suite.NOT_BEGUN
    results.write(options.out("papers/single_image/blocks"), held)
    with pytest.raises(pytest.fail.Exception):  # there was no time for a part of it
        papers.run("single_image", replace(options, resume=True, parts=["blocks"]))


def test_the_parts_of_a_source_share_the_time(options, monkeypatch):
    left = []

    def part(options):
        left.append(options.budget_s)
        return {"rows": []}

    monkeypatch.setattr(textbook, "PARTS", {"ladder": part, "kernels": part})
    papers.run("textbook", replace(options, budget_s=60.0))
    assert 0 < left[1] < left[0] < 60
    papers.run("textbook", options)
    assert left[2:] == [None, None]
    monkeypatch.undo()
    monkeypatch.setattr(textbook, "LAYERS", TINY)
    monkeypatch.setattr(single_image, "LAYERS", TINY)
    monkeypatch.setattr(lenet5, "trained", lambda size, epochs: lenet5.LeNet5(size))
    for name in ("textbook", "single_image", "lenet5"):
        for document in papers.run(name, replace(options, budget_s=-1.0)).values():
            assert document["rows"] == []


def test_the_statistic_counts_what_is_wrong(monkeypatch):
    layer = TINY[1]

    def wrong(algorithm, x, weight, layer, accuracy, bias, **options):
        y = torch.nn.functional.conv2d(x, weight, bias).relu_()
        y[0, 0, 0, 0] += 1.0
        return lambda: y

    monkeypatch.setattr(single_image.ours, "contender", wrong)
    rows = single_image._kernel_rows(layer, 1, "ieee", torch.device("cpu"), launches.Multiprocessor())
    for row in rows:
        assert row["largest"] == pytest.approx(1.0, rel=1e-5)
        assert row["beyond"] == 1 / (layer.k * layer.p * layer.q)


def test_a_block_is_convolution_norm_and_relu():
    module, x = single_image.block(TINY[1])
    assert not module.training
    convolution, norm, _ = module
    y = torch.nn.functional.conv2d(x, convolution.weight)
    y = (y - norm.running_mean.view(1, -1, 1, 1)) / (norm.running_var.view(1, -1, 1, 1) + norm.eps).sqrt()
    assert torch.allclose(module(x), y.relu(), atol=1e-5)
    assert norm.running_mean.abs().max() > 0
    assert torch.equal(single_image.block(TINY[1])[1], x)


def test_lenet5_classifies_alike_on_every_rung(options):
    pytest.importorskip("sklearn")
    document = lenet5.network(replace(options, image=22), epochs=1)
    assert {row["mode"] for row in document["rows"]} == set(lenet5.RUNGS) - {"implicit_gemm"}  # offers no `ieee`
    for row in document["rows"]:
        assert row["swapped"] == row["total"] == 2
        assert row["logits_error"] < 1e-5
        assert row["accuracy"] == row["torch_accuracy"] == row["float64_accuracy"]
        assert row["batch"] == lenet5.TEST_IMAGES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lenet5, "trained", lambda *arguments: pytest.fail("trained again"))
        held = results.read(options.out("papers/lenet5/network"))["rows"]
        assert lenet5.network(replace(options, image=22, resume=True), epochs=1)["rows"] == held
    images, labels = lenet5.digits(22)
    assert images.shape == (1797, 1, 22, 22)
    assert images.min() >= 0
    assert images.max() == pytest.approx(1)
    assert labels.unique().tolist() == list(range(10))
    shapes = [module.out_channels for module in lenet5.LeNet5().modules() if isinstance(module, torch.nn.Conv2d)]
    assert shapes == [4, 16]
    assert lenet5.LeNet5()(torch.zeros(2, 1, 86, 86)).shape == (2, 10)


def test_lenet5_and_the_ladder_time_every_rung(options):
    document = papers.run("lenet5", replace(options, batches=[1], parts=["layers"]))["layers"]
    assert {row["layer"] for row in document["rows"]} == {"lenet1", "lenet2"}
    for row in document["rows"]:
        assert {name for name, us in row["algorithms"].items() if us} >= set(lenet5.RUNGS) - {"implicit_gemm"}
        assert row["algorithm"] == row["auto"]  # whether or not it is a rung
        own = {name: us for name, us in row["algorithms"].items() if name != "torch"}
        assert set(own) == set(row["bytes"]) - {"torch"}
        assert row["with_packing"][min(own, key=lambda name: own[name])] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textbook, "LAYERS", TINY)
        found = papers.run("textbook", replace(options, batches=[1], classes=["fp32"]))
    for row in found["ladder"]["rows"]:
        assert {name for name, us in row["algorithms"].items() if us} >= {"direct", "direct_tiled", "im2col_gemm"}
        assert all(row["errors"][name]["l2"] < 1e-5 for name, us in row["algorithms"].items() if us)
    assert {row["algorithm"] for row in found["kernels"]["rows"]} >= {"direct", "direct_tiled", "fused_unroll"}
    for row in found["kernels"]["rows"]:
        assert row["error"] < 1e-5
        assert row["kernels"] == []  # no GPU, no launches
        assert row["packed_bytes"] > 0
        assert row["workspace_bytes"] >= 0


def test_the_megakernel_is_exchanged_for_3x3_layers_alone(options):
    arguments = {"parts": ["networks"], "networks": ["resnet18"], "batches": [1], "image": 32}
    (row,) = papers.run("megakernel", replace(options, rounds=1, **arguments))["networks"]["rows"]
    assert row["algorithm"] == "winograd_megakernel"
    assert (row["swapped"], row["total"]) == (13, 20)  # 7x7, three 3x3 with stride 2 and three 1x1 stay
    assert 0 < row["own_us"] < row["layers_us"]
    with pytest.raises(ValueError, match="device is 'cpu'; part layers of the megakernel needs cuda"):
        papers.run("megakernel", replace(options, parts=["layers"]))


def test_unknown_names_are_refused(options):
    with pytest.raises(ValueError, match="name is 'resnet'; expected one of megakernel, textbook, cuconv"):
        papers.run("resnet", options)
    with pytest.raises(ValueError, match="part is 'all'; expected one of survey"):
        papers.run("cuconv", replace(options, parts=["all"]))
    assert set(papers.NAMES) == set(SOURCES)


def test_the_command_writes_into_a_folder_and_fails_on_an_unknown_source(tmp_path, monkeypatch):
    monkeypatch.setattr(cuconv, "LAYERS", TINY[1:])
    arguments = ["paper", "cuconv", "--device", "cpu", "--batch", "1", "--rounds", "1", "--folder", str(tmp_path)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert results.files(tmp_path) == {"papers/cuconv/survey_cpu": tmp_path / "papers/cuconv/survey_cpu.json"}
    assert [path.name for path in tmp_path.rglob("*")] == ["papers", "cuconv", "survey_cpu.json"]
    assert CliRunner().invoke(cli.app, ["paper", "nobody", "--device", "cpu"]).exit_code != 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a survey by several processes")
def test_a_survey_on_the_gpu_has_every_algorithm_of_cudnn(options):
    options = replace(options, device="cuda", batches=[1], layers="64->64 @56", workers=2)
    document = papers.run("cuconv", options)["survey"]
    assert len(document["rows"]) == 2 * 2 * 2  # layers, classes, layouts
    for row in document["rows"]:
        assert {"cudnn_implicit_gemm", "torch_default_nchw"} <= {*row["peers"], *row["once_us"]}
        assert row["us"] > 0
    assert json.loads(options.out("papers/cuconv/survey").read_text())["suite"] == "papers/cuconv/survey"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: kernels' attributes")
def test_kernels_have_their_attributes(options):
    options = replace(options, device="cuda", layers="1x1 512", classes=["ieee"])
    for row in papers.run("single_image", replace(options, parts=["kernels"]))["kernels"]["rows"]:
        assert row["notes"] == {}
        assert row["kernels"]
        for kernel in row["kernels"]:
            assert 0 < kernel["occupancy"] <= 1
            assert kernel["threads"] > 0


def test_the_megakernels_series_is_the_study_of_all_layers(options, monkeypatch):
    asked = []
    monkeypatch.setattr(megakernel.study, "run", lambda *parts, **more: asked.append((parts, more)) or {"rows": []})
    papers.run("megakernel", replace(options, device="cuda", parts=["layers"], batches=[64, 1], resume=True))
    assert [(more["batch"], more["classes"]) for _, more in asked] == [
        (64, megakernel.CLASSES), (1, megakernel.CLASSES), (64, megakernel.HALF_CLASSES),
    ]  # fmt: skip
    for parts, more in asked:
        assert parts == (("layers",),)
        assert len(megakernel.study.select(more["layers"])) == 22
        assert (more["suite"], more["resume"]) == ("papers/megakernel/layers", True)
