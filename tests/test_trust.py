"""What a caller may rely on beside accuracy: the same bits every time, on any stream, in a graph, at any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import (
    ALGORITHMS,
    DEVICES,
    OWN,
    Case,
    Epilogue,
    conv2d,
    conv2d_packed,
    make_case,
    pack_weight,
    planner_device,
    problem,
    reference,
    refusal,
    supported,
)
from shapes import LARGER, SMALL, Shape

from fastconv import _C, testing

own = pytest.mark.parametrize("algorithm", OWN)
devices = pytest.mark.parametrize("device", DEVICES)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CANDIDATES = [shape for shape in [*LARGER, *SMALL] if shape.n and shape.p * shape.q > 20]


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((a.contiguous().view(integers) == b.contiguous().view(integers)).all())


def some_case(algorithm: str, cls: str, device: str, layout: str = "nhwc") -> Case:
    if cls not in ALGORITHMS[algorithm]["accuracy"]:
        pytest.skip(f"{algorithm} does not offer class {cls}")
    shape = supported(algorithm, CANDIDATES, cls, layout, device)[0]
    return make_case(shape, cls, layout, device, Epilogue(bias=True, activation="relu"))


@devices
@pytest.mark.parametrize("cls", ["ieee", "fp32", "fp16"])
@own
def test_the_same_bits_every_time(algorithm, cls, device):
    case = some_case(algorithm, cls, device)
    first = conv2d(case, algorithm, cls)
    repeats = 200 if device == "cuda" else 5
    assert all(bits_equal(conv2d(case, algorithm, cls), first) for _ in range(repeats))


@devices
@own
def test_images_do_not_depend_on_their_batch(algorithm, device):
    """Image i of a batch of one, within the class's rounding, is image i of the batch."""
    case = some_case(algorithm, "fp32", device)
    shape = case.shape.with_batch(3)
    batch = make_case(shape, "fp32", "nhwc", device)
    together = conv2d(batch, algorithm, "fp32")
    for i in range(3):
        alone = Case(shape.with_batch(1), batch.input[i : i + 1], batch.weight, None, None, Epilogue())
        assert testing.errors(conv2d(alone, algorithm, "fp32"), together[i : i + 1].double()).relative_l2 < 1e-5


@devices
@own
def test_inputs_are_left_alone(algorithm, device):
    case = some_case(algorithm, "fp32", device)
    tensors = [case.input, case.weight, case.bias]
    copies = [tensor.clone() for tensor in tensors]
    conv2d(case, algorithm, "fp32")
    assert all(bits_equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@own
def test_threads_may_call_at_once(algorithm):
    """No state is shared between calls: concurrent ones give the bits of a single one."""
    cases = [some_case(algorithm, "fp32", "cpu", layout) for layout in ("nchw", "nhwc")]
    expected = [conv2d(case, algorithm, "fp32") for case in cases]

    def work(index: int) -> bool:
        return all(bits_equal(conv2d(cases[index % 2], algorithm, "fp32"), expected[index % 2]) for _ in range(4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@own
def test_thread_count_changes_rounding_at_most(algorithm):
    case = some_case(algorithm, "fp32", "cpu")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = conv2d(case, algorithm, "fp32")
    finally:
        torch.set_num_threads(threads)
    assert testing.errors(conv2d(case, algorithm, "fp32"), alone.double()).relative_l2 < 1e-5


@needs_cuda
@pytest.mark.parametrize("cls", ["ieee", "fp32", "fp16"])
@own
def test_graph_capture_and_replay(algorithm, cls):
    """A captured call follows its input and its packed weight, with no host synchronisation inside."""
    case = some_case(algorithm, cls, "cuda")
    packed = pack_weight(case.weight, case.shape.groups, algorithm, cls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        conv2d(case, algorithm, cls)  # the first call may load modules
        conv2d_packed(case, packed, algorithm, cls, "nhwc")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        direct = conv2d(case, algorithm, cls)
        through_packed = conv2d_packed(case, packed, algorithm, cls, "nhwc")
    for factor in (1.0, -2.0, 0.25):
        case.input.mul_(factor)
        direct.fill_(float("nan"))
        through_packed.fill_(float("nan"))
        graph.replay()
        expected = conv2d(case, algorithm, cls)
        assert bits_equal(direct, expected)
        assert bits_equal(through_packed, expected)


@needs_cuda
@pytest.mark.parametrize("cls", ["ieee", "fp32", "fp16"])
@own
def test_two_streams_and_a_competing_kernel(algorithm, cls):
    """Calls that overlap on two streams, beside a matrix product on a third, give the bits of a lone call."""
    case = some_case(algorithm, cls, "cuda")
    other = make_case(case.shape, cls, "nchw", "cuda", case.epilogue)
    expected = [conv2d(case, algorithm, cls), conv2d(other, algorithm, cls)]
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        with torch.cuda.stream(streams[2]):
            noise = (noise @ noise).tanh()
        for index, tensors in enumerate((case, other)):
            with torch.cuda.stream(streams[index]):
                results[index].append(conv2d(tensors, algorithm, cls))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(bits_equal(result, expected[index]) for result in results[index])


@needs_cuda
@own
def test_runs_on_the_current_stream(algorithm):
    """Work queued before the call on the same stream is seen by it; nothing runs on the default stream."""
    case = some_case(algorithm, "fp32", "cuda")
    doubled = make_case(case.shape, "fp32", "nhwc", "cuda", case.epilogue)
    doubled.input.mul_(2.0)
    expected = conv2d(doubled, algorithm, "fp32")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # keeps the stream busy while the host runs ahead
        case.input.mul_(2.0)
        output = conv2d(case, algorithm, "fp32")
    stream.synchronize()
    assert bits_equal(output, expected)


@needs_cuda
@own
def test_more_than_2_31_elements(algorithm):
    """Offsets survive tensors beyond 2^31 elements: the far corner is computed from the far corner."""
    options = [
        Shape(2, 16, 8200, 8200, 16, 3, 3, padding=(1, 1)),
        Shape(2, 16, 8200, 8200, 16, 1, 1, groups=16),
        Shape(2, 16, 8200, 8200, 16, 1, 1),
    ]
    shape = supported(algorithm, options, "fp16", "nhwc", "cuda")[0]
    assert shape.n * shape.c * shape.h * shape.w > 2**31
    plan = _C.choose(algorithm, problem(shape, "fp16", "nhwc"), planner_device("cuda"))
    needed = 4 * shape.n * shape.c * shape.h * shape.w * 2 + plan["workspace_bytes"]
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        pytest.skip(f"needs {needed >> 30} GiB of device memory; {free >> 30} are free")
    for layout in ("nhwc", "nchw"):
        torch.manual_seed(0)
        memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        x = torch.empty(shape.n, shape.c, shape.h, shape.w, dtype=torch.float16, device="cuda",
                        memory_format=memory_format).normal_()  # fmt: skip
        weight = torch.randn(shape.k, shape.c // shape.groups, shape.r, shape.s, dtype=torch.float16, device="cuda")
        output = conv2d(Case(shape, x, weight, None, None, Epilogue()), algorithm, "fp16")
        # The last image's last rows and columns, padded below and on the right alone.
        pad = shape.padding[0]
        corner = torch.nn.functional.pad(x[-1:, :, -64:, -64:], (0, pad, 0, pad))
        size = 64 + pad
        part = Shape(1, shape.c, size, size, shape.k, shape.r, shape.s, groups=shape.groups)
        expected = reference(Case(part, corner, weight, None, None, Epilogue()))
        got = output[-1:, :, -expected.shape[2] :, -expected.shape[3] :]
        assert testing.errors(got, expected).relative_l2 < 2e-2, f"{layout}: {testing.errors(got, expected)}"
        del x, output
        torch.cuda.empty_cache()


def test_the_table_reaches_every_algorithm_here():
    for algorithm in OWN:
        assert any(not refusal(algorithm, shape, "fp32", "nhwc", "cpu") for shape in CANDIDATES), algorithm
