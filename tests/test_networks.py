"""Whole networks: the definitions, the photographs, the bound, swapped against unswapped, and the bench's rows."""

import contextlib
import functools
import math
import time
import types

import processes
import pytest
import torch
from test_benchmarks import layer_row

import fastconv
from benchmarks.harness import results, runs
from benchmarks.networks import forms, parts
from benchmarks.networks import suite as bench
from fastconv import demo, environment
from fastconv.models import MAIN_NETWORKS, NETWORKS, YOLOv3, build, class_scores, flatten_output, network, photographs
from fastconv.models.compare import CLASS_DTYPE, agreement, bound, precision_of, pytorch_class
from fastconv.models.yolov3 import ConvBlock

pytest.importorskip("torchvision", reason="torchvision is not installed: no networks to run")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: no photographs to feed")


# ---------------------------------------------------------------------------------------------------------- YOLOv3


def darknet_parameters(classes: int) -> int:
    """YOLOv3's parameters counted from the paper's table, independently of the modules."""

    def block(c, k, size):  # convolution without bias, scale and shift of the norm
        return c * k * size * size + 2 * k

    total = block(3, 32, 3)
    for channels, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        total += block(channels // 2, channels, 3)
        total += blocks * (block(channels, channels // 2, 1) + block(channels // 2, channels, 3))
    outputs = 3 * (5 + classes)
    for features, channels in ((1024, 512), (256 + 512, 256), (128 + 256, 128)):
        total += block(features, channels, 1)
        total += 2 * block(2 * channels, channels, 1) + 3 * block(channels, 2 * channels, 3)
        total += 2 * channels * outputs + outputs
    return total + block(512, 256, 1) + block(256, 128, 1)


def test_yolov3_parameter_count():
    with torch.device("meta"):
        model = YOLOv3()
    assert sum(parameter.numel() for parameter in model.parameters()) == darknet_parameters(80) == 61_949_149


def test_yolov3_layers():
    with torch.device("meta"):
        model = YOLOv3()
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 75  # 52 of the body, 23 behind it
    assert len([module for module in model.body.modules() if isinstance(module, ConvBlock)]) == 52
    assert [len(stage.blocks) for name, stage in model.body.named_children() if name != "stem"] == [1, 2, 8, 8, 4]


@pytest.mark.parametrize("classes", [80, 3])
def test_yolov3_shapes(classes):
    with torch.device("meta"):
        outputs = YOLOv3(classes).eval()(torch.empty(2, 3, 416, 416))
    channels = 3 * (5 + classes)
    assert [tuple(y.shape) for y in outputs] == [(2, channels, 13, 13), (2, channels, 26, 26), (2, channels, 52, 52)]


def test_yolov3_activations_are_sane():
    """75 layers of the initialisation alone neither explode nor vanish, FP16's range included."""
    torch.manual_seed(0)
    model = YOLOv3().eval()
    with torch.inference_mode():
        output = flatten_output(model(torch.randn(1, 3, 64, 64)))
    assert 1e-2 < output.std().item() < 1e3


# ---------------------------------------------------------------------------------------------- networks, photographs


def test_build_is_deterministic_and_leaves_the_random_state():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = build("resnet18", image=64), build("resnet18", image=64)
    assert torch.equal(torch.rand(3), expected)
    other = build("resnet18", image=64, seed=1)
    state, same, different = first.state_dict(), second.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not torch.equal(state["conv1.weight"], different["conv1.weight"])
    assert not first.training


def test_calibration_normalises_what_the_first_norm_sees():
    model = build("resnet18", image=64)
    seen = []
    # A copy: the ReLU behind it works in place.
    model.bn1.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    with torch.inference_mode():
        model(photographs(4, 64, seed=1))  # the pictures that build() calibrates on
    mean, std = seen[0].mean((0, 2, 3)), seen[0].std((0, 2, 3))
    assert mean.abs().max() < 1e-3
    assert (std - 1).abs().max() < 1e-2
    assert model.bn1.momentum == 0.1


def test_unknown_network():
    with pytest.raises(ValueError, match=r"network is 'lenet'; expected one of vgg16"):
        network("lenet")


def test_the_papers_inputs():
    sizes = {name: (NETWORKS[name].image, NETWORKS[name].batch) for name in MAIN_NETWORKS}
    assert sizes == {"vgg16": (224, 64), "resnet50": (224, 64), "densenet161": (224, 48), "yolov3": (416, 64)}


def test_photographs():
    pictures = photographs(9, 40)
    assert pictures.shape == (9, 3, 40, 40)
    assert pictures.dtype == torch.float32
    assert torch.equal(pictures, photographs(9, 40))
    assert torch.equal(pictures[:4], photographs(4, 40))
    assert not torch.equal(pictures, photographs(9, 40, seed=1))
    distances = torch.cdist(pictures.flatten(1), pictures.flatten(1)) + 1e9 * torch.eye(9)
    assert distances.min() > 1.0  # no two alike
    # Of a picture's own numbers, undone: inside [0, 1], and no flat colour.
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    restored = pictures * std.view(3, 1, 1) + mean.view(3, 1, 1)
    assert restored.min() > -1e-5
    assert restored.max() < 1 + 1e-5
    assert restored.std((2, 3)).min() > 0.02


# ------------------------------------------------------------------------------------------------------ comparing


def test_class_scores_of_a_detector():
    outputs = tuple(torch.randn(2, 3 * (5 + 4), size, size) for size in (1, 2))
    scores = class_scores(outputs)
    assert scores.shape == (2, 3 * (1 + 4), 4)
    # Anchor 1, cell (1, 0) of the second scale, behind the 3 decisions of the first.
    assert torch.equal(scores[:, 3 + 4 + 2], outputs[1][:, 9 + 5 : 18, 1, 0])


def test_agreement():
    reference = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    same = agreement(reference, reference)
    assert (same.relative_l2, same.maximum, same.top1) == (0.0, 0.0, 1.0)
    other = agreement(torch.tensor([[5.0, 4.0], [0.0, 12.0]]), reference)
    assert other.relative_l2 == pytest.approx(2 / 13)
    assert other.maximum == pytest.approx(2 / 12)
    assert other.top1 == 0.5
    broken = agreement(torch.tensor([[math.nan, 4.0], [0.0, 12.0]]), reference)
    assert math.isnan(broken.relative_l2)
    with pytest.raises(ValueError, match=r"output has shape \[1, 2\]"):
        agreement(reference[:1], reference)


def test_bound():
    assert bound(1e-5, "fp32", 50) == pytest.approx(4e-5)
    assert bound(1e-3, "fp16", 1, multiple=12) == pytest.approx(1.2e-2)
    assert bound(0.0, "fp32", 6) == pytest.approx(2.0**-23)
    assert bound(0.0, "fp16", 24) == pytest.approx(2.0**-9)


@pytest.mark.parametrize("api", ["old", "new", "mixed"])
def test_pytorch_class_restores_the_switches(api):
    cudnn, conv, matmul = torch.backends.cudnn, torch.backends.cudnn.conv, torch.backends.cuda.matmul

    def state():
        return conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark

    original = state()
    try:
        if api != "new":
            cudnn.allow_tf32 = matmul.allow_tf32 = True
        if api != "old":
            conv.fp32_precision = matmul.fp32_precision = "ieee"
        before = state()
        with pytorch_class("tf32"):
            assert state() == ("tf32", "tf32", True)
        with contextlib.suppress(KeyError), pytorch_class("fp32", benchmark=False):
            assert state() == ("ieee", "ieee", False)
            raise KeyError
        assert state() == before
        if api == "old":
            assert cudnn.allow_tf32
            assert matmul.allow_tf32
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = True, False  # PyTorch's defaults, in both APIs
        conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark = original


def test_precision_of():
    assert [precision_of(cls) for cls in CLASS_DTYPE] == ["ieee", "fp32", "tf32", None, None]
    with pytest.raises(ValueError, match="class is 'fp8'"):
        precision_of("fp8")


# -------------------------------------------------------------------------------------------- swapped and unswapped


@pytest.mark.parametrize(("name", "image"), [("resnet18", 32), ("squeezenet1_1", 48), ("yolov3", 32)])
def test_swapped_equals_unswapped(name, image):
    """Through `direct`, which is ours wherever it runs and takes every convolution of these networks."""
    (item,) = demo.run([name], device="cpu", batch=1, image=image, algorithms=["direct"])
    assert item.problem is None
    assert item.swapped == item.total
    assert item.ran == {"direct": item.total}
    assert 0 < item.difference <= item.bound  # another order of summation: it was not PyTorch that ran
    assert 0 < item.error < 1e-4


def test_swapped_equals_unswapped_through_every_algorithm():
    names = [row.name for row in fastconv.algorithms()]
    passes = demo.run(["squeezenet1_1"], device="cpu", batch=1, image=48, algorithms=["auto", *names])
    assert [item.algorithm for item in passes] == ["auto", *names]
    for item in passes:
        assert not item.swapped or item.problem is None
    assert passes[0].swapped == passes[0].total


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_swapped_equals_unswapped_in_half(precision):
    (item,) = demo.run(["squeezenet1_1"], device="cpu", batch=1, image=48, precision=precision, algorithms=["direct"])
    assert item.problem is None
    assert item.ran == {"direct": item.total}


def test_a_wrong_swap_is_found(monkeypatch):
    """The demo fails where one layer is off by a little more than rounding."""
    forward = fastconv.Conv2d.forward

    def wrong(self, input):
        return forward(self, input) * (1 + 1e-3)

    monkeypatch.setattr(fastconv.Conv2d, "forward", wrong)
    (item,) = demo.run(["resnet18"], device="cpu", batch=1, image=32, algorithms=["auto"])
    assert "differ by" in item.problem


def test_demo_arguments():
    with pytest.raises(ValueError, match="algorithm is 'magic'"):
        demo.run(["resnet18"], device="cpu", algorithms=["magic"])
    with pytest.raises(ValueError, match="class is 'fp8'"):
        demo.run(["resnet18"], device="cpu", precision="fp8")
    with pytest.raises(ValueError, match="image is 48; yolov3 expected a multiple of 32"):
        demo.run(["resnet18", "yolov3"], device="cpu", image=48)
    assert demo.default_algorithms()[0] == "auto"


# ------------------------------------------------------------------------------------------------------- the bench


def bench_one(modes, peers, out=None, classes=("fp32",), rounds=2, network="resnet18", **more):
    """One small network on the CPU; the rows."""
    options = {"batch": 2, "image": 32, "peers": peers} | more
    return bench.run([network], classes, modes, rounds, "cpu", out, **options)["rows"]


def test_bench_rows(tmp_path):
    out, lines = tmp_path / "networks.json", []
    bench_one(["eager", "fused"], ["torch_eager", "folded_eager"], out, report=lines.append)
    document = results.read(out)
    row, fused = document["rows"]
    assert (row["network"], row["batch"], row["class"], row["mode"]) == ("resnet18", 2, "fp32", "eager")
    assert (row["swapped"], row["fused"], row["total"]) == (20, 0, 20)
    assert (fused["mode"], fused["swapped"], fused["fused"], fused["total"]) == ("fused", 20, 20, 20)
    assert fused["logits_error"] != row["logits_error"]  # other weights: it was the fused network that ran
    for each in (row, fused):  # whatever ours is, the rivals are the same
        assert set(each["peers"]) == {"torch_eager", "folded_eager"}
        assert set(each["peer_layouts"]["folded_eager"]) == {"nchw", "nhwc"}
        assert each["peers"] == {name: min(its.values()) for name, its in each["peer_layouts"].items()}
        assert each["best_peer_us"] == each["peers"][each["best_peer"]] == min(each["peers"].values())
        assert each["us"] == min(each["layouts"].values()) == each["layouts"][each["layout"]]
        assert each["us_q25"] <= each["us"] <= each["us_q75"]
        assert 0 < each["logits_error"] < 1e-4
        assert 0 < each["peer_error"] < 1e-4
        assert each["top1_agreement"] == each["peer_top1_agreement"] == 1.0
        assert each["groups"]["convolution"] == each["layers_us"] > each["groups"]["linear"] > 0
        assert each["layers_us_of"].keys() == {"nchw", "nhwc"}
        assert each["layers_us_of"][each["layout"]] == each["layers_us"]
        assert "image" in each  # another one than the network's own was asked for
        faster = {form: min(its, key=its.get) for form, its in each["peer_layouts"].items()}
        assert set(each["peer_groups"]) == {f"{form}_{layout}" for form, layout in faster.items()}
        assert each["failures"] == {}
    assert lines[-2].startswith("resnet18 fp32 eager: ")

    # The same machine and commit: rows are replaced, not repeated; or, resumed, not measured again.
    again = bench_one(["eager"], ["torch_eager"], out, ["fp32", "ieee"], layouts=["nchw"])
    assert [(row["class"], row["mode"]) for row in again] == [("fp32", "eager"), ("fp32", "fused"), ("ieee", "eager")]
    assert again[0]["peer_layouts"]["torch_eager"].keys() == {"nchw"}
    lines.clear()
    again = results.read(out)["rows"]
    assert bench_one(["eager"], ["torch_eager"], out, ["fp32", "ieee"], resume=True, report=lines.append) == again
    assert lines == ["resnet18: passed over, the file has its rows"]


@pytest.mark.parametrize(("algorithm", "ours"), [("torch", 0), ("direct", 20)])
@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_bench_counts_the_layers_that_ran_on_ours(mode, algorithm, ours):
    """A layer can be swapped, and PyTorch's convolution run in it all the same."""
    (row,) = bench_one([mode], ["torch_eager"], rounds=1, layouts=["nchw"], algorithm=algorithm)
    assert (row["swapped"], row["ours"], row["total"]) == (20, ours, 20)


def test_compiled_peers(monkeypatch):
    """Each form compiles its own network: with other options it is other code."""
    forked = types.SimpleNamespace(get_context=lambda method: processes.FORKS)  # begins with torch imported
    monkeypatch.setattr(forms, "multiprocessing", forked)
    peers = ["torch_eager", "compile_default", "frozen_default"]
    (row,) = bench_one(["eager"], peers, network="lenet5", image=28, layouts=["nchw"], compile_workers=1)
    assert row["failures"] == {}
    assert row["peer_layouts"]["compile_default"].keys() == {"nchw"}  # class fp32
    assert row["peer_groups"]["frozen_default_nchw"] != row["peer_groups"]["compile_default_nchw"]


def test_compiled_modes_have_one_whose_memory_and_kernels_can_be_told():
    """What a graph replays is one launch, and its memory is the graph's."""
    told = [name for name in forms.MODES if not forms.Contender(True, name, "nhwc").has_graph]
    assert told == ["eager", "compile_default", "fused"]
    (row,) = bench_one(["compile_default"], ["torch_eager"], network="lenet5", image=28, layouts=["nchw"])
    assert row["failures"] == {}
    assert row["layout"] == "nhwc"
    assert row["layers_us_of"] == {"nhwc": row["layers_us"]} == {"nhwc": row["groups"]["convolution"]}
    assert row["groups"]["convolution"] > 0
    # The code that `compile_graph` captures is not compiled again.
    case = forms.Case(torch.nn.Conv2d(1, 4, 3).eval(), "fp32", "auto", torch.zeros(1, 1, 8, 8), torch.device("cpu"))
    with torch.inference_mode():
        codes = [case.compiled(forms.MODES[name], "nhwc") for name in ("compile_default", "compile_graph")]
    assert codes[0] is codes[1]


def test_compiler_options():
    options = {name: forms.compiler_options(form, "nhwc") for name, form in forms.PEERS.items() if form.mode}
    assert options["compile_default"] == {"freezing": False, "layout_optimization": True}
    assert options["frozen_default"] == {"freezing": True, "layout_optimization": True}
    assert options["compile_reduce_overhead"].items() >= {("triton.cudagraphs", True)}
    assert options["frozen_max_autotune"].items() >= {("max_autotune", True), ("triton.cudagraphs", True)}
    assert not forms.compiler_options(forms.PEERS["compile_default"], "nchw")["layout_optimization"]


def test_what_takes_too_long_to_compile_is_given_up(monkeypatch):
    # Not PyTorch's compiler: interrupted anywhere, one in a thousand times it leaves something for the next test.
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: time.sleep(30))
    (row,) = bench_one(["eager"], ["torch_eager", "compile_max_autotune"], layouts=["nchw"], compile_limit_s=0.01)
    assert row["peers"]["compile_max_autotune"] is None
    assert "TimeoutError: not ready within" in row["failures"]["compile_max_autotune_nchw"]
    assert row["best_peer"] == "torch_eager"


def test_behind_the_deadline_nothing_is_begun_that_takes_long(monkeypatch):
    """Rows say so, and are for the next run."""
    early = iter([False, False])
    monkeypatch.setattr(bench, "is_past", lambda deadline: next(early, True))
    peers = ["torch_eager", "folded_graph_all_plans", "compile_default"]
    (row,) = bench_one(["eager"], peers, network="lenet5", image=28, layouts=["nchw"], budget_s=600.0, energy_s=1.0)
    late = ("folded_graph_all_plans_nchw", "compile_default_nchw", "energy")
    assert row["failures"] == dict.fromkeys(late, f"not begun: {runs.SPENT}")
    assert row["best_peer"] == "torch_eager"
    assert bench.held_of({"rows": [row]}) == set()


def test_compiling_ahead_ends_in_time(tmp_path):
    job = forms.Job("resnet18", "fp32", forms.Contender(False, "compile_default", "nchw"), "auto", 1, 32, "cpu", None)
    lines = []
    begin = time.perf_counter()
    forms.compile_ahead([job, job], 1, 0.5, lines.append)
    assert lines == ["compiling ahead: the time is spent"]
    assert time.perf_counter() - begin < 60


def cudnn_best(us):
    """Of a row: cuDNN's fastest takes `us`; others are faster, and none of its or refused."""
    its = {"torch_nhwc": 2 * us, "cudnn_winograd": us, "cudnn_fft": us / 2, "cublas_nhwc": us / 3, "cudnn_gemm": None}
    return {"peers": its, "best_peer": "cublas_nhwc", "best_peer_us": us / 3, "notes": {"cudnn_fft": "not a rival: no"}}


def test_the_best_layers_of_cudnn(tmp_path, monkeypatch):
    """The sum over all layers, each with its own count, plus what is not a convolution; known layers are not timed."""
    measured = []

    def rows(group, algorithms, rounds, seed):
        assert algorithms == []
        measured.append(group.layer)
        assert group.admits("cudnn_graph_nhwc")
        assert not group.admits("cutlass_3xtf32")
        row = layer_row("res1", group.classes[0], 1.0, 1000.0) | group.layer.fields()
        return [row | {"n": group.n, "algorithms": {}, "us": None} | cudnn_best(1000.0 + len(measured))]

    monkeypatch.setattr(parts.layer_group, "measure", rows)
    out = tmp_path / "networks.json"
    head = environment.describe("layers", "cpu")
    known = layer_row("res1", "fp32", 1.0, 1.0) | {"n": 2, "c": 3, "h": 32, "w": 32, "k": 64, "r": 7, "s": 7}
    known |= {"stride": 2, "padding": 3, "pass": "forward"} | cudnn_best(5e6)
    mine = {**head, "commit": "earlier", "rows": [known, known | {"h": 1, "w": 1}]}  # cuDNN is what it was
    results.write(tmp_path / "layers.json", mine)
    other = {**head, "torch": "another", "rows": [known | cudnn_best(7e7)]}
    results.write(tmp_path / "layers_stems.json", {**other, "suite": "layers_stems"})
    peers = ["torch_eager", "cudnn_best_layers"]
    (row,) = bench_one(["eager"], peers, out, layouts=["nchw"])
    layers = parts.convolutions(build("resnet18", image=32), (2, 3, 32, 32))
    assert sum(layers.values()) == 20
    assert len(measured) == len(layers) - 1 == len(set(measured))
    counts = [layers[layer] for layer in measured]
    expected = 5e6 + sum(count * (1000.0 + i) for i, count in enumerate(counts, 1))
    its = row["peer_groups"]["torch_eager_nchw"]
    rest = sum(its.values()) - its["convolution"]
    assert row["peers"]["cudnn_best_layers"] == pytest.approx(expected + rest)
    assert row["best_peer"] == "torch_eager"  # nobody can run the other
    # The file that it keeps answers for all of them next time; without time left there is no number.
    assert results.problems(results.read(tmp_path / "network_layers.json")) == []
    again = parts.BestLayers(tmp_path / "network_layers.json", head, torch.device("cpu"))
    assert again.sum_us(layers, 2, "fp32", lambda: False) == (pytest.approx(expected), "")
    assert len(measured) == len(layers) - 1
    total, why = again.sum_us(layers, 2, "tf32", lambda: True)
    assert total is None
    # Then the next run measures the row again.
    assert len(bench.held_of({"rows": [row]})) == 1
    assert bench.held_of({"rows": [row | {"failures": {parts.NAME: why}}]}) == set()
    assert bench.held_of({"rows": [row | {"commit": "another"}]}) == set()


def test_convolutions_of_a_network():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, (3, 1), groups=2))
    found = parts.convolutions(torch.nn.Sequential(model, torch.nn.Conv2d(8, 8, 1, 2)), (5, 3, 9, 7))
    names = ["3->8 @9x7 3x3", "8->8 @9x7 3x1 p0 g2", "8->8 @7x7 1x1 s2"]
    assert [layer.layer for layer in found] == names
    assert [(layer.p, layer.q) for layer in found] == [(9, 7), (7, 7), (4, 4)]
    twice = torch.nn.Sequential(*[torch.nn.Conv2d(64, 64, 1)] * 2)
    moved = 2 * (2 * 5 * 64 * 56 * 56) * 4  # two layers, each with its input and output
    assert parts.floor_us(twice, (5, 64, 56, 56), "fp32", "h100") == pytest.approx(moved / 3.0e12 * 1e6)
    with pytest.raises(ValueError, match=r"stride is \(1, 2\)"):
        parts.convolutions(torch.nn.Conv2d(3, 8, 1, (1, 2)), (1, 3, 9, 9))


def test_kernel_groups():
    x, weight = torch.randn(8, 32, 24, 24), torch.randn(32, 32, 3, 3)
    convolution = functools.partial(torch.nn.functional.conv2d, x, weight)
    mine = functools.partial(fastconv.conv2d, x, weight, algorithm="direct")
    for call, group in ((convolution, "convolution"), (mine, parts.OWN), (x.exp, "other")):
        found = parts.kernel_groups(call, torch.device("cpu"))
        assert found.keys() == {"convolution", parts.OWN, "linear", "other"}
        assert found[group] > 0.9 * sum(found.values())
    with pytest.raises(RuntimeError, match="no kernel"):
        parts.kernel_groups(lambda: None, torch.device("cpu"))


def test_bench_says_what_failed():
    common = {"layouts": ["nchw"], "batch": 1, "image": 32}
    document = bench.run(["resnet18"], ["fp32"], ["eager"], 1, "cpu", budget_s=0, **common)
    assert document["rows"] == []  # nothing is begun once the time is spent
    document = bench.run(["resnet18"], ["fp32"], ["graph"], 1, "cpu", peers=["torch_eager", "torch_graph"], **common)
    (row,) = document["rows"]
    assert row["us"] is None
    for name in ("fastconv_graph_nchw", "torch_graph_nchw"):
        assert "CUDA graphs need a CUDA device" in row["failures"][name]
    assert row["peers"]["torch_graph"] is None
    assert row["best_peer"] == "torch_eager"


def test_bench_arguments():
    with pytest.raises(ValueError, match="network is 'lenet'"):
        bench.run(["lenet"])
    with pytest.raises(ValueError, match="class is 'fp8'"):
        bench.run(["resnet18"], ["fp8"])
    with pytest.raises(ValueError, match="mode is 'fast'"):
        bench.run(["resnet18"], ["fp32"], ["fast"])
    with pytest.raises(ValueError, match=r"peer is 'tuned'; expected one of torch_eager, .*cudnn_best_layers"):
        bench.run(["resnet18"], ["fp32"], ["eager"], peers=["tuned"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: demo and bench run on the CPU alone")
def test_on_the_gpu(tmp_path):
    passes = demo.run(["resnet18"], device="cuda", batch=8, image=64)
    assert [item.problem for item in passes] == [None] * len(passes)
    document = bench.run(
        ["resnet18"], ["fp32", "fp16"], ["eager", "graph", "fused", "fused_graph"], 3, "cuda", tmp_path / "n.json",
        peers=["torch_eager", "torch_graph", "folded_graph", "folded_graph_all_plans", "cudnn_best_layers"],
        batch=8, image=64,
    )  # fmt: skip
    assert results.problems(document) == []
    for row in document["rows"]:
        assert row["failures"] == {}
        assert row["us"] > 0
