"""Shared by every test: the devices, and hypothesis without deadlines (machines differ; nothing here is timed)."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("fastconv", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("fastconv")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """The test runs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{request.node.name}: no CUDA GPU on this machine")
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """PyTorch's own convolution is the reference: without TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
