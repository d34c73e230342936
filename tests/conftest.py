"""Shared by every test: the devices, and hypothesis without deadlines (machines differ; nothing here is timed)."""

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before fastconv reads it: the tests, and the processes that they start, know nothing of what the user has measured.
os.environ["FASTCONV_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastconv-tests-")
os.environ.setdefault("FASTCONV_MEASURE", "0")  # nor do they measure, whatever the CPU
atexit.register(shutil.rmtree, os.environ["FASTCONV_CACHE_DIR"], ignore_errors=True)
# Before torch is loaded: processes that share the cores must not take them from each other while their threads wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Last: an installed fastconv comes before the tree's own, whose benchmarks are tested with it.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import processes  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import fastconv  # noqa: E402
from fastconv import _C, measured, timing  # noqa: E402

timing._CPU_CACHES = 1 << 16  # no test looks at how long anything took: flushing takes longer than what is timed
DEVICES_OF = {row["name"]: row["devices"] for row in _C.algorithms()}
settings.register_profile("fastconv", deadline=None, max_examples=60, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
settings.load_profile("fastconv")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """The test runs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{request.node.name}: no CUDA GPU on this machine")
    return request.param


@pytest.fixture(autouse=True)
def _kernel_exists(request: pytest.FixtureRequest) -> None:
    """Skips what is parametrised with an algorithm and a device that it has no kernel for."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    algorithm, device = params.get("algorithm"), params.get("device")
    if algorithm in DEVICES_OF and device in ("cpu", "cuda") and device not in DEVICES_OF[algorithm]:
        pytest.skip(f"{algorithm} has no {device} kernel")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.cuda.is_initialized() and "PYTEST_XDIST_WORKER" in os.environ:
        _leave_gpu()


def _leave_gpu() -> None:
    """Gives unused memory back to the other processes of the run. One whose context a kernel has destroyed ends, and
    another takes its place: every later test in it would fail."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the CUDA context is lost: {error}", file=sys.stderr, flush=True)
        os._exit(1)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """PyTorch's own convolution is the reference: without TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def read_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """fastconv.settings as a process with these variables would have them, without such a process."""

    def read(**variables: str) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return runpy.run_path(fastconv.settings.__file__)

    return read


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the bench begin with torch imported; test_suite_in_its_own_process_writes_the_same_file has others."""
    from benchmarks.harness import supervise

    monkeypatch.setattr(supervise, "subprocess", SimpleNamespace(Popen=processes.Forked))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Makes the clock say these microseconds, 100 for what is not named; contenders run once, and none is hopeless."""
    said: dict[str, float] = {}

    def measure(contenders: dict[str, Callable[[], object]], **options: object) -> timing.Measurement:
        result = timing.Measurement()
        for name, call in contenders.items():
            call()
            us = said.get(name, 100.0)
            result.timings[name] = timing.Timing(us, us, us, 20, False)
        return result

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "once", lambda call, device: (call(), 1.0))
    return said


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """FASTCONV_CACHE_DIR of the test's own; nothing is measured before it, and what was is forgotten after it."""
    monkeypatch.setattr(fastconv.settings, "cache_dir", str(tmp_path / "cache"))
    measured._activate({})
    yield tmp_path / "cache"
    measured._activate({})
