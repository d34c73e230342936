"""What the registry's tests share: the operators, problems for the planner, tensors in hostile memory, references."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from metrics import Bound, Rounding, bound
from shapes import Shape

from fastconv import _C, ops, testing
from fastconv.ops import autograd

LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Accuracy class -> (dtype, the precision argument that asks for it).
CLASSES = {
    "ieee": (torch.float32, "ieee"),
    "fp32": (torch.float32, "fp32"),
    "tf32": (torch.float32, "tf32"),
    "fp16": (torch.float16, "fp32"),
    "bf16": (torch.bfloat16, "fp32"),
}
ALGORITHMS = {row["name"]: row for row in _C.algorithms()}
OWN = [name for name, row in ALGORITHMS.items() if row["family"] != "library"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                reason="needs a CUDA device"))]  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """What follows the sum: y = activation(sum + bias + residual), or activation(sum + bias) + residual, or of each 2 x
    2 of the activation's values the largest."""

    bias: bool = False
    residual: bool = False
    activation: str = "none"
    negative_slope: float = 0.01
    residual_after: bool = False
    max_pool: bool = False


NO_EPILOGUE = Epilogue()


@dataclass
class Case:
    """A convolution with its tensors, all of one dtype on one device."""

    shape: Shape
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    epilogue: Epilogue


def hostile(values: torch.Tensor, layout: str, offset: int = 0) -> torch.Tensor:
    """The same values, dense in `layout`, as a view inside a buffer of NaN: reading a neighbour shows in the output.

    `offset`: elements beyond a 256-byte boundary at which the view starts; a tensor need not be aligned to more than
    its element.
    """
    dense = values.contiguous(memory_format=LAYOUTS[layout] if values.dim() == 4 else torch.contiguous_format)
    margin = 1024
    buffer = torch.full((dense.numel() + 2 * margin + offset,), float("nan"), dtype=dense.dtype, device=dense.device)
    view = buffer.as_strided(dense.shape, dense.stride(), margin + offset)
    view.copy_(dense)
    return view


def make_case(
    shape: Shape,
    cls: str,
    layout: str,
    device: str = "cpu",
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    offset: int = 0,
    scale: float = 1.0,
    integers: bool = False,
) -> Case:
    """Random data that depends on the shape alone. Odd seeds take a ReLU'd input, whose sums only grow."""
    dtype, _ = CLASSES[cls]
    sizes = (shape.n, shape.c, shape.h, shape.w, shape.k, shape.r, shape.s)
    seed = sum(prime * size for prime, size in zip((3, 5, 7, 11, 13, 17, 19), sizes, strict=True))
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        if integers:  # sparse, so that no sum leaves what bfloat16 holds exactly
            values = torch.randint(-3, 4, size, generator=generator)
            return (values * (torch.rand(size, generator=generator) < 4.0 / max(4, shape.terms))).float()
        return torch.randn(size, generator=generator)

    x = random(shape.n, shape.c, shape.h, shape.w)
    weight = random(shape.k, shape.c // shape.groups, shape.r, shape.s)
    if not integers:
        weight = weight / shape.terms**0.5
        if seed % 2:
            x = x.relu()
    x = x * scale
    bias = random(shape.k) if epilogue.bias else None
    residual = random(shape.n, shape.k, shape.p, shape.q) if epilogue.residual else None

    def place(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else hostile(values.to(device, dtype), layout, offset)

    return Case(shape, place(x), place(weight), place(bias), place(residual), epilogue)  # type: ignore[arg-type]


# --- The operators: the only calls in the tests of the registry


def conv2d(case: Case, algorithm: str, cls: str) -> torch.Tensor:
    shape, epilogue = case.shape, case.epilogue
    return autograd.conv2d(
        case.input, case.weight, case.bias, case.residual, list(shape.stride), list(shape.padding),
        list(shape.dilation), shape.groups, algorithm, CLASSES[cls][1], epilogue.activation, epilogue.negative_slope, 4,
        None, None, epilogue.residual_after, epilogue.max_pool,
    )  # fmt: skip


def pack_weight(weight: torch.Tensor, groups: int, algorithm: str, cls: str) -> torch.Tensor:
    return ops.pack_weight(weight, groups, algorithm, CLASSES[cls][1])


def refresh_packed(
    packed: torch.Tensor, snapshot: torch.Tensor, weight: torch.Tensor, groups: int, algorithm: str, cls: str
) -> None:
    ops.refresh_packed(packed, snapshot, weight, groups, algorithm, CLASSES[cls][1])


def conv2d_packed(case: Case, packed: torch.Tensor, algorithm: str, cls: str, layout: str) -> torch.Tensor:
    shape, epilogue = case.shape, case.epilogue
    return autograd.conv2d_packed(
        case.input, packed, list(case.weight.shape), case.bias, case.residual, list(shape.stride), list(shape.padding),
        list(shape.dilation), shape.groups, layout == "nhwc", algorithm, CLASSES[cls][1], epilogue.activation,
        epilogue.negative_slope, epilogue.residual_after, epilogue.max_pool,
    )  # fmt: skip


# --- The planner


@cache
def planner_device(device: str) -> _C.DeviceInfo:
    """The device as the operators see it."""
    return ops.device_info(torch.device(device))


def problem(shape: Shape, cls: str, layout: str = "nchw", epilogue: Epilogue = NO_EPILOGUE) -> _C.ConvProblem:
    return _C.ConvProblem(
        shape.n, shape.c, shape.h, shape.w, shape.k, shape.r, shape.s, shape.stride, shape.padding, shape.dilation,
        shape.groups, ops.dtype_name(CLASSES[cls][0]),
        CLASSES[cls][1], layout, epilogue.bias, epilogue.residual, epilogue.activation,
        residual_after=epilogue.residual_after, max_pool=epilogue.max_pool,
    )  # fmt: skip


def refusal(algorithm: str, shape: Shape, cls: str, layout: str, device: str) -> str:
    """Why the algorithm does not take the shape; empty if it does."""
    # An empty batch is everybody's, for want of work; asked of one image, so that its weight can be packed too.
    for row in _C.candidates(problem(shape.with_batch(max(shape.n, 1)), cls, layout), planner_device(device)):
        if row["algorithm"] == algorithm:
            return "" if row["ok"] else f"{row['code']}: {row['reason']}"
    raise LookupError(algorithm)


def supported(
    algorithm: str, shapes: list[Shape], cls: str, layout: str, device: str, min_count: int = 1
) -> list[Shape]:
    """The shapes that the algorithm takes; skips the test, with the planner's reason, if there are none."""
    reasons = {shape: refusal(algorithm, shape, cls, layout, device) for shape in shapes}
    taken = [shape for shape, reason in reasons.items() if not reason]
    if len(taken) < min_count:
        pytest.skip(f"{algorithm} takes none of these shapes: {next(filter(None, reasons.values()))}")
    return taken


def share(cls: str, device: str, shapes: list[Any]) -> list[Any]:
    """The shapes, or epilogues, for a class. On the CPU all classes are the same FP32 arithmetic of values that are
    loaded as they are, or widened: a third will do for two of float32, and the half types share them."""
    some = {"ieee": shapes[::3], "tf32": shapes[::3], "fp16": shapes[::2], "bf16": shapes[1::2]}
    return some.get(cls, shapes) if device == "cpu" else shapes


def shared(algorithm: str, shapes: list[Shape], cls: str, layout: str, device: str) -> list[Shape]:
    """The class's share of the shapes that the algorithm takes, or one of them."""
    taken, some = supported(algorithm, shapes, cls, layout, device), set(share(cls, device, shapes))
    return [shape for shape in taken if shape in some] or taken[:1]


# --- References

Result = TypeVar("Result")
REMEMBERED = 256  # results: more than a test asks for


def by_value(compute: Callable[..., Result]) -> Callable[..., Result]:
    """Remembers what `compute` made of a case on the CPU: every algorithm is held against the same reference, which
    takes longer than most of them. By the bits and strides of the tensors, for tests write to them. The results are
    shared: to be read only."""
    remembered: OrderedDict[Any, Result] = OrderedDict()

    @wraps(compute)
    def recall(case: Case, *arguments: str) -> Result:
        if case.input.is_cuda:  # fast, and its memory is needed
            return compute(case, *arguments)
        key = case.shape, case.epilogue, arguments, *map(_value, (case.input, case.weight, case.bias, case.residual))
        if key not in remembered:
            remembered[key] = compute(case, *arguments)
        remembered.move_to_end(key)
        if len(remembered) > REMEMBERED:
            remembered.popitem(last=False)
        return remembered[key]

    return recall


def _value(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return tensor.dtype, tensor.stride(), hashlib.blake2b(bits, digest_size=16).digest()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
}
# On a GPU kernels have ends of their own for these.
GATED = ("gelu", "gelu_tanh", "hardswish", "sigmoid")


def activated(y: torch.Tensor, activation: str, slope: float = 0.01) -> torch.Tensor:
    """The activation by PyTorch."""
    return F.leaky_relu(y, slope) if activation == "leaky_relu" else ACTIVATIONS[activation](y)


def finish(
    total: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, epilogue: Epilogue
) -> torch.Tensor:
    """What the epilogue makes of `total`, in its dtype, by PyTorch's own functions."""
    if bias is not None:
        total = total + bias.to(total.dtype)[:, None, None]
    if residual is not None and not epilogue.residual_after:
        total = total + residual.to(total.dtype)
    total = activated(total, epilogue.activation, epilogue.negative_slope)
    if residual is not None and epilogue.residual_after:
        total = total + residual.to(total.dtype)
    return F.max_pool2d(total, 2) if epilogue.max_pool else total


def error_multiple(algorithm: str, cls: str, shape: Shape, device: str) -> float:
    """How many times PyTorch's error is allowed: docs/concepts/numerics.md, "What the tests check"."""
    plain = 2.0 if cls in ("fp16", "bf16") else 4.0
    return max(plain, data_spread(algorithm) * expected_error(algorithm, cls, shape, device))


@cache
def expected_error(algorithm: str, cls: str, shape: Shape, device: str) -> float:
    """What the planner expects, over PyTorch's own error; 1 for shapes that the algorithm does not take."""
    asked = problem(shape.with_batch(max(shape.n, 1)), cls)
    rows = _C.candidates(asked, planner_device(device))
    return next(row["expected_error"] if row["ok"] else 1.0 for row in rows if row["algorithm"] == algorithm)


def data_spread(algorithm: str) -> float:
    """By how much data may cost more than is expected: half as much again, and where a single pixel outweighs its tile
    what that costs by the tile's matrices."""
    return max(1.5, ALGORITHMS[algorithm]["noisiest_pixel"])


# A serial sum of n products of random signs errs by this times sqrt(n) roundoffs of its result; no algorithm sums more
# than LONGEST_RUN of them in a row on the table's small shapes.
SUM_GROWTH, LONGEST_RUN = 0.41, 256


def expected_rounding(algorithm: str, cls: str, shape: Shape, device: str) -> Rounding:
    """The constants of docs/concepts/numerics.md, "Floors"."""
    if ALGORITHMS[algorithm]["family"] != "winograd":
        return Rounding(2.0, SUM_GROWTH * min(shape.terms, LONGEST_RUN) ** 0.5)
    noise_gain = math.ceil(10 * ALGORITHMS[algorithm]["noise_gain"]) / 10
    # Relative error of a product of two transformed values, in FP32 roundoffs; half operands are rounded once more.
    halves = {"fp16": 0.6 * 2.0**13, "bf16": 0.6 * 2.0**16}
    if algorithm == "winograd_fused":  # one product of float16 in each of these, transformed in float16
        halves = dict.fromkeys(("tf32", "fp16", "bf16"), 0.7 * 2.0**13)
    if algorithm == "winograd_megakernel":  # one product of float16 in both, whose sums are rounded, too
        halves = dict.fromkeys(("fp16", "bf16"), 0.71 * 2.0**13)
    product = halves.get(cls, 2.5) if device == "cuda" else 1.5
    growth = noise_gain * SUM_GROWTH * min(shape.c // shape.groups, LONGEST_RUN) ** 0.5
    return Rounding(2.0 + noise_gain * product, growth)


def correlation(algorithm: str, shape: Shape) -> float:
    """Outputs that share a rounding error: those of one Winograd tile, and those of one filter weight."""
    rows, columns = ALGORITHMS[algorithm]["tile"]
    if rows * columns == 1:
        return 1.0
    outputs = shape.n * shape.k * shape.p * shape.q
    return max(rows * columns, outputs / (shape.k * shape.terms))


@dataclass
class Yardstick:
    """What outputs of one case are held against, all of the output's shape."""

    expected: torch.Tensor  # float64
    magnitude: torch.Tensor  # float64
    peers: list[torch.Tensor]  # PyTorch's own, in both layouts: they run different kernels
    shape: Shape
    parts: dict[tuple[int, int], Yardstick] = field(default_factory=dict)

    def part(self, image: int, filter: int) -> Yardstick:
        """That of output[image, filter], as if it had been computed alone."""
        if (image, filter) not in self.parts:
            at = slice(image, image + 1), slice(filter, filter + 1)
            alone = replace(self.shape, n=1, k=1, c=self.shape.c // self.shape.groups, groups=1)
            peers = [peer[at] for peer in self.peers]
            self.parts[image, filter] = Yardstick(self.expected[at], self.magnitude[at], peers, alone)
        return self.parts[image, filter]

    @cached_property
    def peer_errors(self) -> testing.Errors:
        """PyTorch's own errors: the larger ones of its two layouts."""
        both = [testing.errors(peer, self.expected) for peer in self.peers]
        return testing.Errors(*(max((getattr(errors, name) for errors in both), key=abs)
                                for name in ("relative_l2", "maximum", "bias")))  # fmt: skip

    def violations(self, output: torch.Tensor, algorithm: str, cls: str, more: Bound | None = None) -> list[str]:
        """What is wrong with the output of `algorithm`; empty if it is within the bound of its class, and `more`."""
        errors = testing.errors(output, self.expected)
        allowed = bound(
            self.expected, self.magnitude, peer=self.peer_errors,
            multiple=error_multiple(algorithm, cls, self.shape, output.device.type),
            rounding=expected_rounding(algorithm, cls, self.shape, output.device.type),
            dtype=CLASSES[cls][0], terms=self.shape.terms, correlated=correlation(algorithm, self.shape),
            expected=expected_error(algorithm, cls, self.shape, output.device.type),
            uneven=ALGORITHMS[algorithm]["noisiest_output"],
        )  # fmt: skip
        return (allowed if more is None else allowed + more).violations(errors)


@by_value
def yardstick(case: Case, cls: str) -> Yardstick:
    peers = []
    for layout in LAYOUTS.values():
        x, weight = (tensor.contiguous(memory_format=layout) for tensor in (case.input, case.weight))
        peers.append(peer(replace(case, input=x, weight=weight), cls))
    if (
        cls == "tf32" and case.input.is_cuda
    ):  # what the class means, whether or not cuDNN has a TF32 kernel for the shape
        operands = {name: to_tf32(getattr(case, name)) for name in ("input", "weight")}
        peers.append(reference(replace(case, **operands)))
    return Yardstick(reference(case), magnitude(case), peers, case.shape)


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of TF32, in float64: 11 bits, and below 2^-126 multiples of its subnormals' quantum."""
    double = values.double()
    quantum = torch.ldexp(torch.ones_like(double), (double.frexp().exponent - 11).clamp(min=-136))
    return (double / quantum).round() * quantum


def check(output: torch.Tensor, case: Case, algorithm: str, cls: str) -> list[str]:
    """The violations of one output, named by its case."""
    found = yardstick(case, cls).violations(output, algorithm, cls)
    return [f"{case.shape} {case.epilogue}: {violation}" for violation in found]


def differs(
    output: torch.Tensor, other: torch.Tensor, case: Case, algorithm: str, cls: str, whole: Yardstick | None = None
) -> bool:
    """Whether two runs of one algorithm on the same values in different memory disagree: bit for bit.

    A GEMM of the library applied to the caller's own memory may round differently with its alignment (MKL and cuBLAS
    choose kernels by it), so there the second result has to stay within the bound instead: that of `whole`, if the
    caller has the case's yardstick already.
    """
    if algorithm == "im2col_gemm":
        return bool((whole or yardstick(case, cls)).violations(other, algorithm, cls))
    return not torch.equal(output, other)


def _convolve(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return F.conv2d(x, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)


@by_value
def reference(case: Case) -> torch.Tensor:
    """The result in float64 arithmetic."""
    total = _convolve(case.input.double(), case.weight.double(), case.shape)
    return finish(total, case.bias, case.residual, case.epilogue)


def magnitude(case: Case) -> torch.Tensor:
    """Sum of |x||w|, plus |bias| and |residual|, in float64: the scale on which rounding errors happen."""
    total = _convolve(case.input.double().abs(), case.weight.double().abs(), case.shape)
    absolute = [None if extra is None else extra.abs() for extra in (case.bias, case.residual)]
    return finish(total, *absolute, Epilogue(max_pool=case.epilogue.max_pool))


def peer(case: Case, cls: str) -> torch.Tensor:
    """PyTorch's own answer in the same class and layout: TF32 only where the class is tf32."""
    switch = torch.backends.cudnn.conv  # per operation: reading allow_tf32 raises once both APIs were used
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if cls == "tf32" else "ieee"
    try:
        total = _convolve(case.input, case.weight, case.shape)
    finally:
        switch.fp32_precision = before
    return finish(total, case.bias, case.residual, case.epilogue)
