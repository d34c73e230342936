"""Where costs do not tell what is fast, `auto` measures each problem at its first call: on a CPU whose rates nobody has
measured, and on a GPU where PyTorch may search, too."""

import os
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import torch
import torch.nn.functional as F
from layers import relative_error
from torch import nn

import fastconv
from fastconv import _C, measured, once, ops, timing

pytestmark = pytest.mark.usefixtures("cache_folder", "full_precision")


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; torch.cuda.is_available() is False"
)


@pytest.fixture
def anew(monkeypatch):
    """Nothing has been asked for yet, neither by the environment."""
    monkeypatch.setattr(once, "_seen", {})
    monkeypatch.setattr(fastconv.settings, "measure", None)


@pytest.fixture
def timed(monkeypatch, anew):
    """Which algorithms were timed, of each problem. The last of them is said to be the fastest."""
    found = []

    def measure(calls, **_):
        found.append(list(calls))
        shapes = {tuple(call().shape) for call in calls.values()}
        assert len(shapes) == 1
        return timing.Measurement({name: timing.Timing(9.0 - i, 0, 0, 3, False) for i, name in enumerate(calls)})

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "once", lambda call, device: (call(), 1.0))  # nobody is hopeless
    monkeypatch.setattr(once, "_is_unknown_cpu", lambda: True)
    return found


def layer(**asked):
    return fastconv.Conv2d(8, 8, 3, padding=1, **asked)


def test_a_problem_is_measured_at_its_first_call(timed):
    conv, x = layer(), torch.randn(2, 8, 9, 10)
    expected = F.conv2d(x, conv.weight, conv.bias, padding=1)
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(conv(x), expected) < 1e-5
            layer()(x)  # another weight, the same problem
    assert len(timed) == 1
    problem = _C.ConvProblem(n=2, c=8, h=9, w=10, k=8, r=3, s=3, padding=(1, 1), bias=True)
    rows = [row for row in _C.candidates(problem, ops.device_info(x.device)) if row["auto_eligible"]]
    cheapest = [row["algorithm"] for row in sorted(rows, key=lambda row: row["cost_us"])]
    assert set(timed[0]) == {*cheapest[:2], "torch"}
    assert conv.last_algorithm == timed[0][-1]
    (choice,) = measured.choices().values()
    assert (choice.device, choice.problem) == (measured.device_name(x.device), repr(problem))
    assert measured.path().exists()
    with torch.no_grad():
        conv(torch.randn(2, 8, 9, 11))
        conv(x.to(memory_format=torch.channels_last))
    assert len(timed) == 3


def test_every_form_of_a_call(timed):
    x, r = torch.randn(2, 8, 9, 10), torch.randn(2, 8, 9, 10)
    fused = fastconv.FusedConv2d(8, 8, 3, padding=1, activation="relu", residual_after=True)
    pooled = fastconv.FusedConv2d(8, 8, 3, padding=1, activation="silu", max_pool=True)
    with torch.no_grad():
        assert relative_error(fused(x, r), F.relu(nn.Conv2d.forward(fused, x)) + r) < 1e-5
        assert fused(x).shape == x.shape
        assert relative_error(pooled(x), F.max_pool2d(F.silu(nn.Conv2d.forward(pooled, x)), 2)) < 1e-5
        weight = torch.randn(8, 8, 3, 3)
        for _ in range(3):
            fastconv.conv2d(x[0], weight, padding=1)
    assert len(timed) == 4
    for _ in range(3):
        layer()(x.requires_grad_()).sum().backward()
    assert [pass_ for *_, pass_ in list(measured.choices())[4:]] == ["forward", "backward_weight"]
    frozen = layer().requires_grad_(False)
    frozen(x).sum().backward()  # the problem of a layer with a bias, whose weight is packed beforehand
    assert len(timed) == len(measured.choices()) == 7


def test_a_call_that_was_measured_is_as_short_as_any(timed, monkeypatch):
    """Nothing but the first one comes to Python for it."""
    asked, measure = [], once.measure
    monkeypatch.setattr(once, "measure", lambda *args: (asked.append(args), measure(*args)))
    x, r = torch.randn(2, 8, 10, 10), torch.randn(2, 8, 10, 10)
    layers = [
        (layer(), (x,)), (fastconv.Conv2d(8, 8, 1), (x.to(memory_format=torch.channels_last),)), (layer(), (x[0],)),
        (fastconv.Conv1d(8, 8, 3), (x[:, :, 0],)), (layer(max_error=2.0, max_workspace=10**6), (x[:, :, :8],)),
        (fastconv.FusedConv2d(8, 8, 3, padding=1, activation="leaky_relu", negative_slope=0.2), (x, r)),
        (fastconv.FusedConv2d(8, 8, 3, padding=1, activation="relu", residual_after=True), (x, r)),
        (fastconv.FusedConv2d(8, 8, 3, padding=1, activation="silu", max_pool=True), (x,)),
    ]  # fmt: skip
    for module, arguments in layers:
        with torch.no_grad():
            module(*arguments)
            assert asked, module
            asked.clear()
            module(*arguments)
            assert not asked, module


def test_what_is_not_measured(timed, monkeypatch):
    x = torch.randn(2, 8, 9, 10)
    with torch.no_grad():
        layer(algorithm="direct_tiled")(x)
        layer().double()(x.double())
        layer()(x[:0])
        with pytest.raises(RuntimeError, match="channels"):
            layer()(x[:, :3])
        monkeypatch.setattr(once, "_is_unknown_cpu", lambda: False)
        conv = layer()
        conv(x)
        assert conv.last_algorithm == _C.choose(
            "auto", _C.ConvProblem(2, 8, 9, 10, 8, 3, 3, padding=(1, 1)), ops.device_info(x.device)
        )["algorithm"]  # fmt: skip
    assert timed == []


def test_what_is_known_already_counts_and_a_file_is_no_must(timed, monkeypatch, tmp_path):
    x = torch.randn(2, 8, 9, 10)
    monkeypatch.setattr(fastconv.settings, "cache_dir", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("in the way")
    with torch.no_grad():
        layer()(x)
        assert len(measured.choices()) == 1
        once._seen.clear()
        layer()(x)
    assert len(timed) == 1


def test_a_process_with_the_variable_measures():
    """By the clock."""
    script = (
        "import torch, fastconv; from fastconv import measured, once; c = fastconv.Conv2d(8, 8, 3)\n"
        "with torch.no_grad(): c(torch.randn(2, 8, 9, 10))\n"
        "print(len(once._seen), len(measured.choices()))"
    )
    environment = {**os.environ, "FASTCONV_MEASURE": "1", "FASTCONV_CACHE_DIR": ""}
    ran = processes.run(script, environment=environment)
    assert ran.stdout.strip() == "1 1", ran.stderr


def test_the_variable(timed, monkeypatch, read_settings):
    for value, wanted in (("1", True), ("0", False), ("", None)):
        assert read_settings(FASTCONV_MEASURE=value)["measure"] is wanted
    with pytest.raises(ValueError, match="FASTCONV_MEASURE is 'yes'; expected 0 or 1"):
        read_settings(FASTCONV_MEASURE="yes")
    x = torch.randn(2, 8, 9, 10)
    with torch.no_grad():
        monkeypatch.setattr(fastconv.settings, "measure", False)
        layer()(x)
        assert timed == []  # not even where the CPU is unknown
        monkeypatch.setattr(fastconv.settings, "measure", None)
        layer()(x)
        assert len(timed) == 1


def test_a_cpu_is_unknown_without_vectors(monkeypatch):
    for name in ("generic", "avx2", "avx512"):
        cpu = _C.cpu_device(1, getattr(_C.InstructionSet, name))
        monkeypatch.setattr(once.ops, "device_info", lambda _, cpu=cpu: cpu)
        assert once.is_unknown(torch.device("cpu")) == (name == "generic")


def test_training_under_autocast_keeps_no_packed_weight(timed):
    """What is cast for a call is another tensor at the next; the problem is that of the lower type."""
    conv, x = layer(), torch.randn(2, 8, 9, 10, requires_grad=True)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = conv(x)
        y.sum().backward()
    assert conv._fastconv.packed == []
    assert {("bfloat16" in problem, pass_) for _, problem, pass_ in measured.choices()} == {
        (True, "forward"), (True, "backward_weight")
    }  # fmt: skip
    assert len(timed) == 2


def _compiled(model, **options):
    torch._dynamo.reset()
    return fastconv.compile(model, options={"fx_graph_cache": False}, **options)


def test_compiled_code_is_measured_while_it_is_compiled(timed):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        compiled = _compiled(model, frozen=True)
        for _ in range(2):
            assert relative_error(compiled(x), model(x)) < 1e-5
    keys = list(measured.choices())
    assert [("relu" in problem, pass_) for _, problem, pass_ in keys] == [(True, "forward"), (False, "forward")]
    assert len(timed) == 2
    ran = [choice.algorithm for choice in measured.choices().values()]
    assert [name for row in compiled.report.rows for name in [row.algorithm] if name] == ran
    x.requires_grad_()
    _compiled(model.train())(x).sum().backward()
    passes = [pass_ for *_, pass_ in list(measured.choices())[2:]]
    assert sorted(passes) == ["backward_weight"] * 2 + ["forward"] * 2


def test_compiled_code_is_not_measured_where_sizes_are_unknown_or_nobody_wants_it(timed, monkeypatch):
    model, x = nn.Conv2d(3, 8, 3).eval(), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        torch._dynamo.mark_dynamic(x, 0)
        assert relative_error(_compiled(model)(x), model(x)) < 1e-5
        monkeypatch.setattr(once, "_is_unknown_cpu", lambda: False)
        _compiled(model)(torch.randn(2, 3, 12, 12))
    assert timed == []


def test_a_failure_leaves_the_planned_choice(timed, monkeypatch):
    """And is not tried again at every call."""

    def measure(calls, **_):
        found.append(calls)
        raise torch.OutOfMemoryError("no memory")

    found = []
    monkeypatch.setattr(timing, "measure", measure)
    conv, x = layer(), torch.randn(2, 8, 9, 10)
    problem = _C.ConvProblem(2, 8, 9, 10, 8, 3, 3, padding=(1, 1), bias=True)
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1)) < 1e-5
    assert conv.last_algorithm == _C.choose_by_cost("forward", problem, ops.device_info(x.device))
    assert len(found) == 1
    assert not measured.path().exists()  # another process may have the memory


def test_what_was_forgotten_is_measured_anew_and_what_nobody_wants_any_more_is_not(timed, monkeypatch):
    conv, x = layer(), torch.randn(2, 8, 9, 10)
    with torch.no_grad():
        conv(x)
        measured.forget(measured.device_name(x.device))
        conv(x)
        assert len(timed) == 2
        monkeypatch.setattr(fastconv.settings, "measure", False)
        conv(x[:1])
    assert len(timed) == 2


def test_two_threads_lose_no_choice(timed):
    convs = [fastconv.Conv2d(8, 8, 3, padding=pad) for pad in range(4) for _ in range(2)]
    x = torch.randn(2, 8, 9, 10)

    def run(conv):
        with torch.no_grad():
            conv(x)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, convs))
    assert len(measured.choices()) == 4
    for pad in range(4):
        problem = _C.ConvProblem(2, 8, 9, 10, 8, 3, 3, padding=(pad, pad), bias=True)
        assert _C.choose("auto", problem, ops.device_info(x.device))["measured"]


def test_doubt_is_two_close_costs():
    """Without it nothing is measured on a GPU."""
    device, doubts = _C.h200_device(), set()
    for c in (16, 64, 256, 512):
        for precision in ("fp32", "tf32"):
            problem = _C.ConvProblem(8, c, 28, 28, c, 3, 3, padding=(1, 1), precision=precision, layout="nhwc")
            rows = [row for row in _C.candidates(problem, device) if row["auto_eligible"]]
            costs = sorted(row["cost_us"] * _C.preference(row["algorithm"], device) for row in rows)
            unsure = _C.choose("auto", problem, device)["unsure"]
            assert unsure == (costs[1] <= _C.close_costs * costs[0])
            doubts.add(unsure)
            assert not _C.choose("torch", problem, device)["unsure"]
    assert doubts == {True, False}


@pytest.fixture
def searching(anew):
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=cudnn.allow_tf32):
        yield


@needs_cuda
def test_a_gpu_measures_where_pytorch_searches(searching):
    """What costs do not tell; the choice ends with the process, and is none that is slower by far."""
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    convs = [fastconv.Conv2d(64, k, 3, padding=1, device="cuda", dtype=x.dtype) for k in (16, 64, 128, 256)]
    for conv in convs:
        conv.to(memory_format=torch.channels_last)
        with torch.no_grad():
            for _ in range(3):
                expected = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)
                assert relative_error(conv(x).double(), expected) < 3e-3
    unsure = 0
    for conv in convs:
        problem = _C.ConvProblem(
            8, 64, 28, 28, conv.out_channels, 3, 3, padding=(1, 1), dtype="float16", layout="nhwc", bias=True
        )
        choice = _C.choose("auto", problem, ops.device_info(x.device))
        unsure += choice["measured"]
        assert not choice["unsure"]
        assert conv.last_algorithm == choice["algorithm"]
    assert unsure == len(measured.choices())
    assert unsure > 0
    assert not measured.path().exists()
    convs[0](x.clone().requires_grad_()).sum().backward()
    assert {pass_ for *_, pass_ in measured.choices()} <= {"forward", "backward_input", "backward_weight"}
    assert len(measured.choices()) > unsure


@needs_cuda
def test_a_capture_is_not_measured(searching):
    conv = fastconv.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.float16)
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = conv(x)
    graph.replay()
    assert measured.choices() == {}
    assert relative_error(y, F.conv2d(x, conv.weight, conv.bias, padding=1)) < 3e-3


@needs_cuda
def test_a_gpu_does_not_measure_where_pytorch_does_not_search(anew):
    cudnn, x = torch.backends.cudnn, torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16)
    conv = fastconv.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.float16)
    for switches in ({"benchmark": False, "deterministic": False}, {"benchmark": True, "deterministic": True}):
        with torch.no_grad(), cudnn.flags(enabled=True, allow_tf32=cudnn.allow_tf32, **switches):
            conv(x)
    assert measured.choices() == {}
