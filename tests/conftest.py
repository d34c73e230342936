"""Shared by every test: the devices, and hypothesis without deadlines (machines differ; nothing here is timed)."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from fastconv import _C

DEVICES_OF = {row["name"]: row["devices"] for row in _C.algorithms()}
settings.register_profile("fastconv", deadline=None, max_examples=60, derandomize=True)
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
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """PyTorch's own convolution is the reference: without TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
