"""First layers of networks: who is chosen for them, on GPUs that are not there."""

from __future__ import annotations

import pytest

from fastconv import _C


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32")]
)
def test_first_layers_of_networks_run_on_tensor_cores(dtype, precision, layout, capability):
    """A batch of images: `auto` takes implicit_gemm's kernel for few channels, in either layout as it is."""
    device = _C.h200_device()
    device.compute_capability = capability
    for c, k, r, stride in [(3, 64, 7, 2), (3, 96, 7, 2), (3, 64, 3, 1), (4, 64, 7, 2)]:
        problem = _C.ConvProblem(64, c, 224, 224, k, r, r, (stride, stride), (r // 2, r // 2), dtype=dtype,
                                 precision=precision, layout=layout)  # fmt: skip
        choice = _C.choose("auto", problem, device)
        assert (choice["algorithm"], choice["workspace_bytes"]) == ("implicit_gemm", 0)
        assert choice["config"].startswith("few channels")
    # Longer reductions than a block keeps are the portable kernel's, with the same packed weight.
    far = _C.ConvProblem(1, 3, 4096, 4096, 64, 7, 7, (64, 64), dtype=dtype, precision=precision, layout=layout)
    assert not _C.choose("implicit_gemm", far, device)["config"].startswith("few channels")
