"""What fails inside PyTorch, or on the device, arrives as PyTorch's exception, and the next call works."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, packed_algorithms, relative_error
from torch import Tensor, nn

import fastconv
from fastconv import _C, failures, ops
from fastconv.ops import gradients

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; torch.cuda.is_available() is False"
)
MIB = 1 << 20
# Of the CUDA driver's API: CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
RELAXED, INVALIDATED = 2, 901


def on_a_gpu(problem: _C.ConvProblem) -> list[str]:
    """The algorithms of ours that serve a problem on some GPU."""
    rows = _C.candidates(problem, _C.h200_device())
    return [row["algorithm"] for row in rows if row["ok"] and row["algorithm"] != "torch"]


def works(device: str) -> None:
    x, w = torch.randn(2, 8, 9, 9, device=device), torch.randn(8, 8, 3, 3, device=device)
    y = fastconv.conv2d(x, w, padding=1, precision="fp32")
    assert relative_error(y.double(), F.conv2d(x.double(), w.double(), padding=1)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["auto", "torch"])
@pytest.mark.parametrize(
    ("images", "weight", "arguments"),
    [
        (2, (4, 3, 0, 3), {}),
        (2, (4, 3, 3, 3), {"stride": 1 << 31}),
        (0, (4, 3, 3, 0), {}),
        (1, (2, 3, 2, 2), {"padding": 1 << 30}),
    ],
    ids=["no_rows", "stride", "no_images", "padding"],  # the last one is an IndexError of PyTorch's on the CPU
)
def test_what_pytorch_refuses(
    device: str, algorithm: str, images: int, weight: tuple[int, ...], arguments: dict
) -> None:
    x, w = torch.randn(images, 3, 8, 8, device=device), torch.randn(weight, device=device)
    try:
        expected: Tensor | type[Exception] = F.conv2d(x, w, **arguments)
    except Exception as error:
        expected = type(error)
    for _ in range(3):
        if isinstance(expected, Tensor):
            assert fastconv.conv2d(x, w, algorithm=algorithm, **arguments).shape == expected.shape
        else:
            with pytest.raises(expected) as ours:
                fastconv.conv2d(x, w, algorithm=algorithm, **arguments)
            assert "API call failed" not in str(ours.value)
        works(device)


@pytest.mark.parametrize("algorithm", ["im2col_gemm", *packed_algorithms()])
def test_a_failing_library_call(algorithm: str) -> None:
    x, w = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3)
    calls = []

    def fail(*_: object, **__: object) -> Tensor:
        calls.append(1)
        raise RuntimeError("this product fails")

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("bmm.out", fail, "CPU")
        message = None
        try:
            fastconv.conv2d(x, w, padding=1, algorithm=algorithm)
        except RuntimeError as error:
            message = str(error)
    finally:
        library._destroy()
    assert (message is not None) == bool(calls)  # some multiply by themselves
    assert message is None or "this product fails" in message or "bmm" in message
    assert message is None or "API call failed" not in message
    works("cpu")


@pytest.mark.parametrize("algorithm", ["auto", "direct", "winograd_f2"])
def test_a_copy_that_the_machine_cannot_hold(algorithm: str) -> None:
    # 2^48 bytes are beyond a process's addresses; fewer, a system that overcommits memory hands out, and then kills it.
    x = torch.zeros(1, 1, 1, 1).expand(1, 1, 1 << 23, 1 << 23)
    with pytest.raises(RuntimeError) as theirs:
        x.contiguous()
    with pytest.raises(theirs.type) as ours:
        fastconv.conv2d(x, torch.randn(1, 1, 3, 3), padding=1, algorithm=algorithm)
    assert "API call failed" not in str(ours.value)
    works("cpu")


def test_each_message_has_its_type() -> None:
    """As they come from torch up to 2.12 (no message) and since 2.13, and from our own calls."""
    place = " API call failed at csrc/ops/stable.h, line 25"
    told = " (originally from f(x)" + place + ")"
    accelerator = getattr(torch, "AcceleratorError", RuntimeError)
    for text, expected, words in (
        ("CUDA out of memory. Tried to allocate 2 GiB" + told, torch.OutOfMemoryError, "2 GiB"),
        ("CUDA error: an illegal memory access was encountered" + told, accelerator, "illegal"),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM" + told, RuntimeError, "BAD_PARAM"),
        (
            'torch_call_dispatcher("aten::bmm", "out", stack.data(), TORCH_ABI_VERSION)' + place,
            RuntimeError,
            "aten::bmm",
        ),
        ("fastconv.DeviceError: winograd_f2: out of memory", torch.OutOfMemoryError, "winograd_f2"),
        ("fastconv.DeviceError: winograd_f2: invalid argument", accelerator, "invalid argument"),
        ("fastconv.UnsupportedError: stride is 2", fastconv.UnsupportedError, "stride is 2"),
    ):
        error = failures.translated(RuntimeError(text), ())
        assert type(error) is expected
        assert words in str(error)
        assert "API call failed" not in str(error)
    other = RuntimeError("fastconv: stride is [0, 0]; expected two positive integers")
    assert failures.translated(other, ()) is other


@contextmanager
def at_most(free: int) -> Iterator[None]:
    """So many bytes more may be allocated. What the allocator has free between other tests' tensors is taken before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    free_sizes = [block["size"] for block in blocks if block["state"] == "inactive" and block["size"] >= MIB]
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(free_sizes)]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        held.clear()


def _input(channels: int, size: int, **options: object) -> Tensor:
    return torch.randn(1, channels, size, size, device="cuda", **options)


def _known(x: Tensor, w: Tensor, algorithm: str) -> Callable[[], object]:
    """A call whose weight is packed already: that stays."""

    def call(x: Tensor = x) -> object:
        return fastconv.conv2d(x, w, padding=1, algorithm=algorithm, precision="fp32")

    for _ in range(2):  # kept from the second on
        call(x[:, :, :9, :9])
    return call


def _output() -> tuple[Callable[[], object], int]:
    return _known(_input(8, 512), torch.randn(256, 8, 3, 3, device="cuda"), "implicit_gemm"), 32 * MIB


def _workspace() -> tuple[Callable[[], object], int]:
    return _known(_input(64, 512), torch.randn(64, 64, 3, 3, device="cuda"), "winograd_f4"), 72 * MIB


def _packing() -> tuple[Callable[[], object], int]:
    w = torch.randn(1024, 1024, 3, 3, device="cuda")
    return lambda: ops.pack_weight(w, 1, "winograd_f4", "fp32"), 32 * MIB


def _torch() -> tuple[Callable[[], object], int]:
    x, w = _input(8, 512), torch.randn(256, 8, 3, 3, device="cuda")
    return lambda: fastconv.conv2d(x, w, padding=1, algorithm="torch"), 32 * MIB


def _layer() -> tuple[Callable[[], object], int]:
    layer = fastconv.Conv2d(8, 256, 3, padding=1, algorithm="implicit_gemm", precision="fp32", device="cuda")
    x = _input(8, 512)
    with torch.no_grad():
        layer(x[:, :, :9, :9])  # what is packed stays
    return lambda: layer(x), 32 * MIB


def _gradient(of: str) -> Callable[[], tuple[Callable[[], object], int]]:
    def case() -> tuple[Callable[[], object], int]:
        layer = fastconv.Conv2d(64, 64, 3, padding=1, precision="fp32", device="cuda")
        x = _input(64, 512, requires_grad=True)
        y = layer(x)
        seed = torch.randn_like(y)
        wanted = x if of == "input" else layer.weight
        return lambda: torch.autograd.grad(y, wanted, seed, retain_graph=True), 2 * MIB

    return case


@needs_cuda
@pytest.mark.parametrize(
    "case",
    [_output, _workspace, _packing, _torch, _layer, _gradient("input"), _gradient("weight")],
    ids=["output", "workspace", "packed_weight", "torch", "layer", "input_gradient", "weight_gradient"],
)
def test_out_of_memory(case: Callable[[], tuple[Callable[[], object], int]]) -> None:
    works("cuda")
    call, free = case()
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with at_most(free), pytest.raises(torch.OutOfMemoryError):
            call()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
        works("cuda")
    call()  # there is enough now
    torch.cuda.synchronize()


@contextmanager
def launches_fail() -> Iterator[type[RuntimeError]]:
    """Every launch on the current stream fails: it records a CUDA graph, and a call that is illegal meanwhile has
    invalidated the recording. Yields the exception of PyTorch's own launches. The driver is told to record, not
    PyTorch, whose allocator would take it that the recording goes on."""
    driver, stream, ones = ctypes.CDLL("libcuda.so.1"), torch.cuda.current_stream(), torch.ones(4, device="cuda")
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    torch.cuda.synchronize()
    assert driver.cuStreamBeginCapture_v2(handle, RELAXED) == 0
    try:
        with pytest.raises(RuntimeError, match="captur"):
            stream.synchronize()
        with pytest.raises(RuntimeError, match="captur") as theirs:
            ones.add_(1)
        yield theirs.type
    finally:
        status = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
    assert status == INVALIDATED


@needs_cuda
@pytest.mark.parametrize("algorithm", on_a_gpu(_C.ConvProblem(n=2, c=64, h=14, w=14, k=64, r=3, s=3, padding=(1, 1))))
def test_a_failing_launch(algorithm: str) -> None:
    layer, x = nn.Conv2d(64, 64, 3, padding=1, device="cuda"), torch.randn(2, 64, 14, 14, device="cuda")
    expected = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), padding=1).float()
    unseen = layer.weight.detach().clone()
    fastconv.swap_(layer, algorithm=algorithm, precision="fp32", frozen=True)

    def function(algorithm: str) -> Tensor:
        return fastconv.conv2d(x, unseen, layer.bias, padding=1, algorithm=algorithm, precision="fp32")

    # Of the layer the convolution's own launch fails, of the function that which packs the weight, if there is one.
    calls = (lambda: layer(x), lambda: function(algorithm))
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        try:
            for _ in range(2):  # what is packed stays
                layer(x)
        except fastconv.UnsupportedError as error:
            pytest.skip(f"on this GPU {error}")
        for call in calls:
            with launches_fail() as theirs:
                for _ in range(3):
                    with pytest.raises(theirs, match="captur") as ours:
                        call()
                    assert ours.type is theirs
            # At once, by another kernel: of what failed nothing is left that its launch would be blamed for.
            assert relative_error(function("direct"), expected) < 1e-5
            assert relative_error(call(), expected) < 1e-5
        torch.cuda.synchronize()
    with torch.no_grad():
        for call in calls:
            assert relative_error(call(), expected) < 1e-5
    works("cuda")


@needs_cuda
@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_failing_launch_in_a_backward_pass(of: str) -> None:
    layer = fastconv.Conv2d(64, 64, 3, padding=1, precision="fp32", device="cuda")
    x = torch.randn(8, 64, 56, 56, device="cuda", requires_grad=True)
    seed = torch.randn(8, 64, 56, 56, device="cuda")
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, layer.weight)]
    output = F.conv2d(*doubles, padding=1)
    (expected,) = torch.autograd.grad(output, doubles[of == "weight"], seed.double())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = layer(x)

        def gradient() -> Tensor:
            return torch.autograd.grad(y, layer.weight if of == "weight" else x, seed, retain_graph=True)[0]

        gradient()
        with launches_fail() as theirs, pytest.raises(theirs, match="captur") as ours:
            gradient()
        assert ours.type is theirs
        assert relative_error(gradient().double(), expected) < 1e-5
        torch.cuda.synchronize()
    works("cuda")


def out_of_memory(*args: object, **kwargs: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_failure_in_what_python_computes_of_a_gradient(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Without channels both gradients are Python's. In a graph the type is lost, as everywhere (fastconv.failures)."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return fastconv.conv2d(x, w, padding=1).relu()

    call = torch.compile(function, backend="aot_eager") if compiled else function
    x, w = torch.randn(2, 0, 9, 9, requires_grad=True), torch.randn(16, 0, 3, 3, requires_grad=True)
    call(x, w).sum().backward()
    with monkeypatch.context() as patched:
        patched.setattr(gradients, "input_gradient", out_of_memory)
        y = call(x, w)
        with pytest.raises(RuntimeError) as raised:
            y.sum().backward()
        if not compiled and "printed the reason" not in str(raised.value):
            assert type(raised.value) is torch.OutOfMemoryError
    call(x, w).sum().backward()
    works("cpu")
