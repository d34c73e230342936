"""fastconv.compile and fastconv.export with Inductor behind them: few and tiny, for each compiles C++."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.nn.functional as F
from concatenating import model as ranged
from concatenating import picture
from fusing import norm, sequence
from layers import relative_error
from torch import nn

import fastconv
from fastconv import ops
from fastconv.ops.geometry import Options

pytestmark = pytest.mark.usefixtures("full_precision")
ROOT = Path(__file__).resolve().parent.parent


def network() -> nn.Module:
    """The planner's choice is ours for the second convolution on any CPU: PyTorch's takes a pass for each of four."""
    model = sequence(
        nn.Conv2d(3, 32, 3, padding=1), norm(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), norm(32), nn.SiLU()
    )
    return model.eval()


@pytest.fixture
def inductor_cache(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_arguments():
    for arguments, error in (
        ({"precision": "fp8"}, ValueError),
        ({"algorithm": "fastest"}, ValueError),
        ({"max_error": 0.5}, ValueError),
        ({"frozen": 1}, TypeError),
        ({"backend": "inductor"}, TypeError),
    ):
        with pytest.raises(error):
            fastconv.compile(network(), **arguments)


def test_the_backend_has_a_name():
    assert "fastconv" in torch._dynamo.list_backends()


def test_compiled_code_follows_its_parameters_and_the_batch(inductor_cache):
    model = network()
    compiled = fastconv.compile(model, "fp32", algorithm="winograd_f2", dynamic=True)
    assert "nothing compiled" in str(compiled.report)
    with torch.no_grad():
        for n in (4, 2):
            x = torch.randn(n, 3, 8, 8)
            assert relative_error(compiled(x), model(x)) < 1e-5
            model[0].weight.mul_(1.5)  # in place, behind the compiler's back
            model[4].running_var.mul_(0.5)
            assert relative_error(compiled(x), model(x)) < 1e-5
    report = compiled.report
    assert (report.total, report.ours, report.fused, len(report.graphs)) == (2, 2, 2, 1)
    assert [row.fused for row in report.rows] == ["conv+bn+relu", "conv+bn+silu"]
    assert [row.names for row in report.rows] == [("0",), ("3",)]
    assert "2 of 2 convolutions, 2 fused" in str(report)
    assert "frozen=True" in str(report)  # what it would save
    document = json.loads(report.to_json())
    assert document["rows"][0]["algorithm"] == "winograd_f2"


def test_frozen(inductor_cache):
    model = network()
    compiled = fastconv.compile(model, algorithm="winograd_f2", frozen=True)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
        y = compiled(x)
        assert relative_error(y, exact.float()) < 1e-5
        model[0].weight.mul_(1.5)
        assert torch.equal(compiled(x), y)  # as promised
        assert "frozen=True" not in str(compiled.report)
        # Another model of the same class is another one.
        other = fastconv.compile(model, algorithm="winograd_f2", frozen=True)
        assert relative_error(other(x), model(x)) < 1e-5


@pytest.mark.parametrize("frozen", [False, True])
def test_code_calls_operators_without_a_formula_for_gradients(frozen):
    """Which for both of them is Python's, and would run in every call."""
    torch._dynamo.reset()  # after other sizes of the same code a size would be dynamic
    model = network()
    compiled = fastconv.compile(model, algorithm="winograd_f2", frozen=frozen)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        y = compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(compiled(x), y)
    assert relative_error(y, model(x)) < 1e-5
    names = {event.key for event in profile.key_averages() if event.key.startswith("fastconv::conv2d")}
    assert names == {"fastconv::conv2d_packed_compiled" if frozen else "fastconv::conv2d_compiled"}


WARM = """
import json, sys, torch, fastconv
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.LeakyReLU(float(sys.argv[1])))
compiled = fastconv.compile(model.train(), algorithm="winograd_f2")
x = torch.randn(3, 4, 9, 9)
compiled(x).square().mean().backward()
found = model[0].weight.grad.clone()
model[0].weight.grad = None
model(x).square().mean().backward()
torch.testing.assert_close(found, model[0].weight.grad, rtol=1e-4, atol=1e-6)
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"], compiled.report.cached]))
"""


def test_training_and_a_warm_cache():
    """Two processes that train a step: the second takes what the first has compiled. In the cache of all tests, where
    Inductor finds what it has learnt of the compiler: of a slope that was never asked for there is no code yet."""
    slope = str(0.1 + random.SystemRandom().random() / 2)

    def run() -> list[int]:
        result = processes.run(WARM, slope)
        assert result.returncode == 0, result.stderr[-3000:]
        return list(json.loads(result.stdout.splitlines()[-1]))

    assert run() == [0, 0]
    assert run() == [1, 1]


def test_what_was_asked_for_is_in_the_key_of_a_cache(monkeypatch):
    from fastconv.compiler.inductor import RewritePass
    from fastconv.rewrites import Asked

    def key(**asked: Any) -> Any:
        return RewritePass(Asked(**asked)).uuid()

    assert key() == key()
    keys = [key(), key(algorithm="direct"), key(precision="tf32"), key(packed=True), key(max_error=2.0)]
    keys.append(key(max_workspace=0))
    monkeypatch.setattr(fastconv.measured, "choices", lambda: {("device", "problem"): "direct"})
    assert len({*keys, key()}) == 7


@pytest.mark.parametrize("limit", [0, 10**12])
def test_max_workspace(limit, tmp_path, monkeypatch):
    model, x = nn.Conv2d(8, 8, 3).eval(), torch.randn(1, 8, 9, 9)
    asked = {"algorithm": "im2col_gemm", "max_workspace": limit}
    # What is packaged is tested below.
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, **arguments: None)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        compiled = fastconv.compile(model, **asked)
        by_name = torch.compile(model, backend="fastconv", options=asked)
        for forward in (compiled, by_name):
            assert relative_error(forward(x), model(x)) < 1e-5
        for report in (compiled.report, fastconv.export(model, (x,), tmp_path / "model.pt2", **asked)):
            (row,) = report.rows
            assert row.algorithm == ("torch" if limit == 0 else "im2col_gemm")
            assert ("the limit is 0" in row.reason) == (limit == 0)


def test_an_exported_package_runs_in_cpp_and_in_python(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("test_an_exported_package_runs_in_cpp_and_in_python: no g++")

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = F.silu(m.norm(m.b(x)))
        return m.wide(F.relu(m.wide_norm(torch.cat([x, m.a(F.relu(m.norm(x)))], 1))))

    model, x = ranged(forward).eval(), picture()
    report = fastconv.export(model, (x,), tmp_path / "model.pt2", algorithm="implicit_gemm", precision="fp32")
    found = ["conv+bn+silu+cat", "bn+relu+conv+cat", "bn+relu+conv"]
    assert [(row.fused, row.algorithm) for row in report.rows] == [(each, "implicit_gemm") for each in found]
    assert report.concatenations == {"": 1}
    with torch.no_grad():
        expected = model(x)
    loaded = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    assert relative_error(loaded(x), expected) < 1e-5

    torch.save(x, tmp_path / "input.pt")
    torch_folder = Path(torch.__file__).parent
    program = tmp_path / "deploy"
    includes = [f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-Wl,--no-as-needed"]
    source = ROOT / "examples/deploy/main.cpp"
    build = [compiler, "-std=c++20", "-O0", str(source), "-o", str(program), *includes, *libraries]
    subprocess.run([*build, "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"], check=True)
    library = Path(fastconv.__file__).parent / "libfastconv.so"
    arguments = [str(library), *(str(tmp_path / name) for name in ("model.pt2", "input.pt", "output.pt"))]
    subprocess.run([str(program), *arguments], check=True)
    assert relative_error(torch.load(tmp_path / "output.pt"), expected) < 1e-5
    missing = subprocess.run([str(program), "missing.so", *arguments[1:]], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "missing.so" in missing.stderr


def test_export_refuses(tmp_path):
    x = torch.randn(1, 3, 9, 9)
    with pytest.raises(RuntimeError, match="training mode"):
        fastconv.export(network().train(), (x,), tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"\.pt2"):
        fastconv.export(network(), (x,), tmp_path / "model.so")
    with pytest.raises(TypeError):
        fastconv.export(lambda x: x, (x,), tmp_path / "model.pt2")


def test_settings_of_compiled_calls_are_one_text() -> None:
    x, w = torch.randn(2, 4, 7, 8), torch.randn(8, 4, 3, 3)
    geometry = [1, 1, 1, 1, 1, 1, 1]
    for slope, max_error in ((0.01, None), (1 / 3, 3.5)):
        asked = Options("im2col_gemm", "fp32", "leaky_relu", slope, 4, max_error, 1 << 40, max_pool=True)
        text = ops.compiled_settings(geometry, asked)
        y = ops.conv2d_compiled_op(x, w, None, None, text)
        z = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
        exact = torch.nn.functional.max_pool2d(torch.nn.functional.leaky_relu(z, slope), 2)
        assert relative_error(y.double(), exact) < 1e-6
        assert ops.conv2d_compiled_op(*(t.to("meta") for t in (x, w)), None, None, text).shape == y.shape
    for wrong in ("", "auto fp32 none", text + " 1", text.rsplit(" ", 1)[0], text.replace("4", "four", 1)):
        with pytest.raises(RuntimeError, match=r"settings are '.*expected algorithm, precision"):
            ops.conv2d_compiled_op(x, w, None, None, wrong)


def test_sizes_that_are_not_known_when_code_is_made(inductor_cache) -> None:
    """A stride that is an argument: the text cannot have it."""

    def convolve(x: torch.Tensor, w: torch.Tensor, stride: int) -> torch.Tensor:
        return fastconv.conv2d(x, w, None, stride, stride, algorithm="im2col_gemm")

    torch._dynamo.reset()
    compiled = torch.compile(convolve, fullgraph=True, dynamic=True)
    x, w = torch.randn(2, 4, 13, 12), torch.randn(8, 4, 3, 3)
    for stride in (2, 3, 4):
        exact = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, stride)
        assert relative_error(compiled(x, w, stride).double(), exact) < 1e-6


def test_what_is_kept_on_disk_is_of_these_operators() -> None:
    """Inductor's keys know the graph, not what it is lowered to."""
    import torch._inductor.lowering

    assert torch._inductor.lowering.lowerings
    assert torch.compiler.config.cache_key_tag.count("fastconv ") == 1


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"options": {"fast": True}}, {"options": {"freezing": "yes"}}])
def test_a_mode_or_an_option_that_inductor_does_not_know_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Unrecognized mode=fast|Unexpected optimization option fast|got str"):
        fastconv.compile(nn.Conv2d(3, 3, 3), **wrong)
