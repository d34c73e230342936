"""The suites of training steps and of the host's time: structure and honesty of what they write and draw. Nothing here
asserts a time."""

import math
import threading
import time

import pytest
import torch
from test_benchmarks import HEAD
from torch import nn

import fastconv
from benchmarks.harness import profile, results, runs
from benchmarks.host import suite as host
from benchmarks.reports import documents
from benchmarks.reports import host as host_tables
from benchmarks.training import suite as training
from benchmarks.training import trainer
from fastconv import models, timing
from fastconv.models.layers import Layer

CPU = torch.device("cpu")
SMALL = Layer("small", 4, 5, 5, 4)


@pytest.fixture
def tiny_network(monkeypatch):
    """A network of two convolutions that every suite can name."""

    class Tiny(nn.Sequential):
        def __init__(self):
            super().__init__(
                nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 1)
            )

    monkeypatch.setitem(models.NETWORKS, "tiny", models.Network("tiny", 8, 2, Tiny))
    return Tiny


# ---------------------------------------------------------------------------------------------------------- training


def test_training_rows_keep_the_contract(tiny_network, tmp_path):
    out, lines = tmp_path / "training.json", []
    arguments = {"rounds": 2, "device": "cpu", "out": out, "report": lines.append}
    training.run(["tiny"], ["fp32", "amp_bf16"], **arguments)
    document = results.read(out)  # raises if it breaks the contract
    assert document["suite"] == "training_cpu"
    full, half = document["rows"]
    for row, cls in ((full, "fp32"), (half, "amp_bf16")):
        assert (row["network"], row["batch"], row["class"], row["mode"]) == ("tiny", 2, cls, "eager")
        assert (row["swapped"], row["total"], row["failures"]) == (2, 2, {})
        assert row["us_q25"] <= row["us"] <= row["us_q75"]
        assert row["best_peer_us"] == row["peers"][row["best_peer"]] == min(row["peers"].values())
        assert row["kernels_us"] == pytest.approx(sum(row["groups"].values()), rel=1e-3)
        assert row["groups"]["convolution"] > 0
        assert row["groups"]["norm"] > 0
        assert row["groups"]["optimizer"] > 0
        assert set(row["groups"]) == {*documents.training.GROUPS}
        assert row["peak_bytes"] is row["peer_peak_bytes"] is None  # the CPU's allocator does not count
    assert set(full["peers"]) == {"torch_eager", "torch_eager_nchw"}
    assert set(full["tf32_peers"]) == {"torch_eager"}
    assert set(half["peers"]) == {"torch_eager"}
    assert max(full["loss_error"], full["gradient_error"]) < 1e-5
    assert 1e-5 < half["gradient_error"] < 1e-1  # autocast did cast
    assert lines[-1].startswith("tiny amp_bf16 eager: ")
    lines.clear()
    assert training.run(["tiny"], ["fp32", "amp_bf16"], resume=True, **arguments)["rows"] == document["rows"]
    assert lines == ["tiny: passed over, the file has its rows"]
    assert training.run(["tiny"], ["fp32"], device="cpu", budget_s=0.0)["rows"] == []


def test_a_side_that_fails_is_null_with_its_reason(tiny_network, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no swap today")

    monkeypatch.setattr(fastconv, "swap_", broken)
    (row,) = training.run(["tiny"], ["tf32"], rounds=1, device="cpu")["rows"]
    assert row["us"] is row["groups"] is row["loss_error"] is None
    assert row["failures"] == {"fastconv_eager": "RuntimeError: no swap today"}
    assert row["best_peer"] == "torch_eager"
    assert results.problems({**HEAD, "suite": "training", "rows": [row]}) == []


def test_training_arguments(tiny_network):
    for arguments, message in (
        ((["lenet"],), "network is 'lenet'"),
        ((["tiny"], ["fp16"]), "class is 'fp16'; expected one of fp32, tf32, amp_fp16, amp_bf16"),
        ((["tiny"], ["fp32"], ["fast"]), "mode is 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            training.run(*arguments, device="cpu")


def test_a_gradient_that_is_wrong_and_a_weight_that_is_stale_show(tiny_network):
    """The errors of a row are those of what was trained: a wrong gradient is in the first step, and weights that do not
    follow the optimizer are in the second loss."""
    base = trainer.without_dropout(models.build("tiny", calibrate=False))
    batch = trainer.random_batch(base, 4, 8)
    expected = trainer.reference(base, batch, CPU)

    def side():
        return trainer.Trainer(base, batch, trainer.Form(True), "fp32", None, CPU)

    right = side().first_steps().errors(expected)
    assert max(right.values()) < 1e-5
    wrong = side()
    wrong.model[0].weight.register_hook(lambda gradient: gradient * 1.01)
    found = wrong.first_steps().errors(expected)
    assert 1e-4 < found["gradient_error"] < 1e-1
    stale = side()
    stale.optimizer.step = lambda *arguments: None
    found = stale.first_steps().errors(expected)
    assert found["gradient_error"] < 1e-5
    assert found["loss_error"] > 1e-5 > 10 * right["loss_error"]
    lost = trainer.Losses([math.nan, 1.0], expected.gradient).errors(expected)
    assert lost["loss_error"] == trainer.NOT_FINITE


def test_targets_are_of_the_network_s_output():
    for name, targets in (("tiny-classes", (2,)), ("unet", (2, 32, 32))):
        classes = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7))
        model = models.build("unet", calibrate=False) if name == "unet" else classes
        batch = trainer.random_batch(model, 2, 32)
        assert batch.images.shape == (2, 3, 32, 32)
        assert batch.targets.shape == targets
        assert batch.targets.dtype == torch.int64


def test_unet_gives_scores_of_every_pixel():
    """An odd multiple of 16, and what is kept on the way down is read on the way up: without it, another output."""
    model = models.UNet(width=4, classes=5).eval()
    x = torch.randn(1, 3, 16, 48)
    y = model(x)
    assert y.shape == (1, 5, 16, 48)
    model.down[0].register_forward_hook(lambda module, inputs, output: output + 1)
    assert not torch.equal(model(x), y)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 2 * (5 + 4) + 1


class _Event:
    def __init__(self, name, kernels=(), parent=None):
        self.name, self.cpu_parent = name, parent
        self.kernels = [type("Kernel", (), {"name": n, "duration": us})() for n, us in kernels]


def test_kernels_belong_to_the_group_of_their_name_or_of_their_outermost_operator():
    backward = _Event("ConvolutionBackward0")
    step = _Event("Optimizer.step#SGD.step")
    groups = training.GROUPS
    for event, kernel, group in (
        (_Event("aten::convolution_backward", parent=backward), "sm90_xmma_dgrad", "convolution"),
        (_Event("fastconv::layer_weight_gradient"), "void fastconv::convert_vectors<float, 2>", "conversion"),
        (_Event("aten::cudnn_convolution", parent=_Event("aten::convolution")), "nchwToNhwcKernel", "conversion"),
        (_Event("aten::copy_", parent=_Event("aten::to")), "elementwise_kernel", "conversion"),
        (_Event("aten::add_", parent=step), "multi_tensor_apply", "optimizer"),
        (_Event("aten::cudnn_batch_norm_backward", parent=_Event("CudnnBatchNormBackward0")), "bn_bw", "norm"),
        (_Event("CompiledFunctionBackward"), "triton_red_fused_native_batch_norm_backward_3", "norm"),
        (_Event("CompiledFunction"), "triton_poi_fused_add_relu_1", "elementwise"),
        (_Event("aten::nll_loss_forward"), "nll_loss", "other"),
    ):  # fmt: skip
        assert groups.of(event, kernel) == group, kernel


def test_an_annotation_is_no_kernel_and_a_kernel_of_triton_s_counts_once():
    step = _Event("Optimizer.step#SGD.step", [("Optimizer.step#SGD.step", 100.0), ("multi_tensor_apply", 7.0)])
    assert profile._kernels_of(step) == [("multi_tensor_apply", 7.0)]
    fused = _Event("triton_poi_fused_relu_0", [("triton_poi_fused_relu_0", 5.0), ("triton_poi_fused_relu_0", 6.0)])
    assert profile._kernels_of(fused) == [("triton_poi_fused_relu_0", 5.0)]


def test_what_there_was_no_time_to_compile_is_for_the_next_run(tiny_network, tmp_path, monkeypatch):
    out = tmp_path / "training.json"
    arguments = {"rounds": 1, "device": "cpu", "out": out}
    early = iter([False, False])
    with monkeypatch.context() as patch:
        patch.setattr(training, "is_past", lambda deadline: next(early, True))
        training.run(["tiny"], ["tf32"], ["compile"], budget_s=600.0, **arguments)
    (row,) = results.read(out)["rows"]
    assert (row["us"], row["failures"]["compile_default"]) == (None, f"not begun: {runs.SPENT}")
    lines = []
    with monkeypatch.context() as patch:  # by something that may be interrupted anywhere
        patch.setattr(torch, "compile", lambda *_, **__: lambda x: time.sleep(30))
        arguments |= {"resume": True, "report": lines.append}
        training.run(["tiny"], ["tf32"], ["compile"], compile_limit_s=0.0, **arguments)
    (row,) = results.read(out)["rows"]
    assert row["failures"]["compile_default"] == "TimeoutError: not ready within 0 s"  # was begun
    lines.clear()
    training.run(["tiny"], ["tf32"], ["compile"], **arguments)
    assert lines == ["tiny: passed over, the file has its rows"]


# -------------------------------------------------------------------------------------------------------------- host


def test_host_rows_keep_the_contract(tiny_network, tmp_path):
    out = tmp_path / "host.json"
    calls, forms = ["no_grad", "forward", "forward_backward"], ["swapped", "functional", "fused"]
    host.run([SMALL], ["tiny"], ["fp32"], forms, calls, rounds=1, device="cpu", out=out)
    document = results.read(out)
    assert document["suite"] == "host_cpu"
    rows = {(row["layer"], row["form"], row["call"]): row for row in document["rows"]}
    expected = {("small", form, call) for form in ("swapped", "functional") for call in calls}
    assert {key for key, row in rows.items() if "k" in row} == expected | {("small", "fused", "no_grad")}
    assert rows.keys() - expected == {(layer, "fused", "no_grad") for layer in ("small", "tiny")} | {
        ("tiny", "swapped", "no_grad")
    }
    for row in rows.values():
        assert row["failures"] == {}
        assert min(row["us"], row["torch_us"], row["empty_operator_us"]) > 0
        assert max(row["error"], row["peer_error"]) < 1e-5
    assert rows["small", "functional", "forward"]["peer"] == "F.conv2d"
    assert host.run([SMALL], [], ["fp32"], device="cpu", budget_s=0.0)["rows"] == []


def test_host_times_threads_that_share_a_layer(tmp_path):
    names = "threads_1", "threads_8"
    document = host.run([SMALL], [], ["fp32"], ["swapped", "frozen"], names, rounds=1, device="cpu")
    assert [(row["form"], row["call"], row["failures"]) for row in document["rows"]] == [
        (form, name, {}) for form in ("swapped", "frozen") for name in names
    ]
    assert all(row["us"] > 0 and row["torch_us"] > 0 for row in document["rows"])
    assert "`threads_8`" in host_tables.table(document)
    seen = set()
    _, subject = host._subject(SMALL, "fp32", CPU, ["swapped"], names, None)
    module = subject.module("swapped", ours=True)
    module.register_forward_hook(lambda *of: seen.add((threading.get_ident(), torch.is_grad_enabled())))
    subject.call("swapped", module, "threads_8")()
    assert len(seen) == 8
    assert not any(enabled for _, enabled in seen)


def test_host_goes_on_where_it_ended(tmp_path):
    out, lines = tmp_path / "host.json", []
    arguments = {"rounds": 1, "device": "cpu", "out": out, "report": lines.append}
    host.run([SMALL], [], ["fp32"], ["swapped"], ["no_grad"], **arguments)
    (first,) = results.read(out)["rows"]
    lines.clear()
    host.run([SMALL], [], ["fp32", "bf16"], ["swapped"], ["no_grad"], resume=True, **arguments)
    assert lines[0] == "small fp32: passed over, the file has its rows"
    held, _ = results.read(out)["rows"]
    assert held == first
    late = {**first, "us": None, "failures": {"swapped no_grad": f"TimeoutError: not ready: {runs.SPENT}"}}
    results.write(out, {**results.read(out), "rows": [late]})
    host.run([SMALL], [], ["fp32"], ["swapped"], ["no_grad"], resume=True, **arguments)
    (again,) = results.read(out)["rows"]
    assert again["us"] > 0


def test_host_calls_call_what_they_say(tiny_network, monkeypatch):
    """The numbers of calls, with and without gradients, on ours and on PyTorch's."""
    _, subject = host._subject(SMALL, "fp32", CPU, ["swapped", "fused"], host.CALLS, None)
    module = subject.module("swapped", ours=True)
    assert isinstance(module, fastconv.Conv2d)
    assert type(subject.module("swapped", ours=False)) is nn.Conv2d
    assert isinstance(subject.module("fused", ours=False).conv, nn.Conv2d)
    seen = []
    module.register_forward_hook(lambda module, inputs, y: seen.append(y.requires_grad))
    module.weight.register_hook(lambda gradient: seen.append("gradient"))
    for how, expected in (
        ("no_grad", [False]),
        ("forward", [True]),
        ("forward_backward", [True, "gradient"]),
    ):
        call = subject.call("swapped", module, how)
        seen.clear()
        call()
        assert seen == expected, how
        assert module.weight.grad is None


def test_the_host_s_time_is_of_one_call_of_a_block():
    calls = []
    measured = timing.measure({"one": lambda: calls.append(1)}, device="cpu", rounds=4, host_calls=5)
    assert len(calls) == 3 + 4 * 5
    assert measured.timings["one"].rounds == 4


def test_host_says_what_failed(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no fuse today")

    monkeypatch.setitem(host.LAYER_FORMS, "fused", host.replace(host.LAYER_FORMS["fused"], ours=broken))
    (row,) = host.run([SMALL], [], ["fp32"], ["fused"], ["no_grad"], rounds=1, device="cpu")["rows"]
    assert row["us"] is None
    assert row["torch_us"] > 0
    assert row["failures"] == {"fused": "RuntimeError: no fuse today"}
    with pytest.raises(ValueError, match="form is 'melted'; expected one of swapped, frozen, functional, fused"):
        host.run([SMALL], [], ["fp32"], ["melted"], device="cpu")


# ----------------------------------------------------------------------------------------------------------- reports


def training_row(**changes):
    row = {"network": "resnet50", "batch": 64, "class": "fp32", "mode": "eager", "us": 30e3, "kernels_us": 25e3}
    row |= {"groups": {"convolution": 20e3, "norm": 5e3}, "peers": {"torch_eager": 60e3, "torch_eager_nchw": 75e3}}
    row |= {"best_peer": "torch_eager", "best_peer_us": 60e3, "peer_kernels_us": 59e3, "loss_error": 1e-7}
    row |= {"peer_groups": {"torch_eager": {"convolution": 50e3, "norm": 9e3}}, "best_tf32_peer_us": 24e3}
    row |= {"gradient_error": 2e-6, "peer_gradient_error": 1e-6, "peak_bytes": 6 << 30, "peer_peak_bytes": 5 << 30}
    return row | changes


def host_row(**changes):
    row = {"layer": "3x3", "class": "fp16", "form": "swapped", "call": "no_grad", "us": 28.0, "torch_us": 32.0}
    return row | {"peer": "nn.Conv2d", "empty_operator_us": 5.04, "kernels_us": 4.0, "torch_kernels_us": 6.0} | changes


def test_schemas_of_training_and_host_name_what_is_wrong():
    good = {**HEAD, "suite": "training", "rows": [training_row()]}
    assert results.problems(good) == []
    bad = training_row(**{"class": "fp16", "best_peer": "nobody", "groups": {"norm": "much"}})
    del bad["peak_bytes"]
    text = "\n".join(results.problems({**good, "rows": [bad]}))
    for expected in ("class is 'fp16'", "best_peer is 'nobody'", "groups['norm'] is 'much'", "peak_bytes is missing"):
        assert expected in text
    rows = {**HEAD, "suite": "host", "rows": [host_row(), host_row(call=None)]}
    assert results.problems(rows) == ["row 1: call is None"]


def test_tables_show_losses_and_who_waits_for_the_host(tmp_path):
    folder = tmp_path / "h200"
    for name in ("training", "training/groups", "training/fp32", "host", "machine/host"):
        assert documents.region(f"h200/{name}", tmp_path) == "(not measured)"
    rows = [
        training_row(),
        training_row(**{"class": "tf32", "us": 50e3, "best_peer_us": 40e3, "peer_kernels_us": 39e3}),
    ]
    results.write(folder / "training.json", {**HEAD, "suite": "training", "rows": rows})
    table = documents.region("h200/training", tmp_path).splitlines()
    assert "| 30.00 (h) | 25.00 | 60.00 | `torch_eager` | 59.00 | 2.00x | **0.80x** | 6144 | 5120 |" in table[2]
    assert "| **0.80x** |" in table[3]
    assert table[-1] == "(h): more than a tenth longer than its kernels."
    assert len(documents.region("h200/training/fp32", tmp_path).splitlines()) == len(table) - 1
    groups = documents.region("h200/training/groups/fp32", tmp_path)
    assert "| 20.00 (50.00) | 0.00 (0.00) | 5.00 (9.00) |" in groups
    assert groups.endswith("| 25.00 (59.00) |")
    slower = host_row(call="forward", us=194.0, torch_us=37.0)
    results.write(folder / "host.json", {**HEAD, "suite": "host", "rows": [host_row(), slower]})
    line = "| 3x3 | `fp16` | swapped | nn.Conv2d | 28.0 (32.0) | **194 (37.0)** | - | - | 4.0 (6.0) | 5.0 |"
    assert documents.region("h200/host", tmp_path).splitlines()[2] == line
    with pytest.raises(ValueError, match="h200/training/fp16"):
        documents.region("h200/training/fp16", tmp_path)
