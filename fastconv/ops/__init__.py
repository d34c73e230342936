"""The operators, those without a gradient as typed Python functions; `autograd` has `conv2d` and `conv2d_packed`.

What PyTorch must know of the operators besides their kernels is in files of its own: `autograd` (and vmap), `fake`
(shapes), `autocast`, `scatter` (what writes ranges of channels). `gradients` computes the two gradients, `plain`
everything by PyTorch's own operators.

The only file that names ``torch.ops.fastconv``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fastconv import _C, built, failures, settings
from fastconv.failures import UnsupportedError as UnsupportedError
from fastconv.ops import plain
from fastconv.ops.geometry import Options

with built.loading(built.OPERATORS.name):
    torch.ops.load_library(built.OPERATORS)

# Holds the registrations of all files of this folder; they live as long as this object.
library: torch.library.Library = torch.library.Library("fastconv", "FRAGMENT")
_CONVOLUTION = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
library.define(
    f"conv2d_input_gradient(Tensor grad, Tensor weight, SymInt[] input_size, {_CONVOLUTION}, str algorithm, "
    "str precision, int backend_flags, float? max_error=None, int? max_workspace=None) -> Tensor"
)
library.define(
    f"conv2d_weight_gradient(Tensor input, Tensor grad, SymInt[] weight_size, {_CONVOLUTION}, str algorithm, "
    "str precision, int backend_flags, float? max_error=None, int? max_workspace=None) -> Tensor"
)
library.define("channel_scatter(Tensor x, Tensor buffer, SymInt begin) -> Tensor")
library.define(
    "conv2d_packed_scatter(Tensor input, Tensor packed, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, "
    "Tensor buffer, SymInt begin, SymInt[] geometry, bool channels_last, str algorithm, str precision, str activation, "
    "float negative_slope, str input_activation, bool residual_after, str shuffle='none') -> Tensor"
)
library.define("shuffled_weight(Tensor weight, str of) -> Tensor")

conv2d_op: OpOverload = torch.ops.fastconv.conv2d.default
pack_weight_op: OpOverload = torch.ops.fastconv.pack_weight.default
conv2d_packed_op: OpOverload = torch.ops.fastconv.conv2d_packed.default
# In their place in Inductor's code: without gradients, with one text of all that is no tensor.
conv2d_compiled_op: OpOverload = torch.ops.fastconv.conv2d_compiled.default
conv2d_packed_compiled_op: OpOverload = torch.ops.fastconv.conv2d_packed_compiled.default
# Into a range of channels, in place, and as graphs have it (`scatter`): what Inductor's code calls in its place.
conv2d_packed_into_op: OpOverload = torch.ops.fastconv.conv2d_packed_into.default
conv2d_packed_scatter_op: OpOverload = torch.ops.fastconv.conv2d_packed_scatter.default
shuffled_weight_op: OpOverload = torch.ops.fastconv.shuffled_weight.default
channel_scatter_op: OpOverload = torch.ops.fastconv.channel_scatter.default
refresh_packed_op: OpOverload = torch.ops.fastconv.refresh_packed.default
input_gradient_op: OpOverload = torch.ops.fastconv.conv2d_input_gradient.default
weight_gradient_op: OpOverload = torch.ops.fastconv.conv2d_weight_gradient.default
# Both at once, in a backward pass that nobody differentiates; with the text of `compiled_settings`.
conv2d_gradients_op: OpOverload = torch.ops.fastconv.conv2d_gradients.default
weight_gradient_compiled_op: OpOverload = torch.ops.fastconv.conv2d_weight_gradient_compiled.default
conv_transpose2d_op: OpOverload = torch.ops.fastconv.conv_transpose2d.default
conv_transpose2d_compiled_op: OpOverload = torch.ops.fastconv.conv_transpose2d_compiled.default
compiled_operators = (
    conv2d_compiled_op, conv2d_packed_compiled_op, conv2d_packed_into_op, conv_transpose2d_compiled_op,
    conv2d_gradients_op, weight_gradient_compiled_op,
)  # fmt: skip
weight_gradient_kernel_op: OpOverload = torch.ops.fastconv.weight_gradient.default
max_pool2d_op: OpOverload = torch.ops.fastconv.max_pool2d.default  # `pooling` has it as a function
group_norm_op: OpOverload = torch.ops.fastconv.group_norm.default  # with an activation: `norms`
upsample_nearest2d_op: OpOverload = torch.ops.fastconv.upsample_nearest2d.default  # `upsampling` has both as functions
upsample_nearest2d_into_op: OpOverload = torch.ops.fastconv.upsample_nearest2d_into.default


def call(operator: Callable[..., Any], *args: Any) -> Any:
    """Calls the operator; in eager mode what fails raises the exception that PyTorch would have raised by itself, or
    UnsupportedError (`fastconv.failures`)."""
    if torch.compiler.is_compiling():
        return operator(*args)
    try:
        return operator(*args)
    except RuntimeError as error:
        _raise_translated(operator, error, args)
    return plain.conv2d(*args)  # the same once more, where its exception can be seen


def _raise_translated(operator: Callable[..., Any], error: RuntimeError, args: tuple[Any, ...]) -> None:
    """Raises what `call` does; not where the same call of PyTorch's convolution would tell more."""
    failure = failures.translated(error, args)
    if failure is error:
        raise error
    repeats = operator in (conv2d_op, _layer_forward, _recorded_convolution)
    is_torch = repeats and (last_call() or {}).get("algorithm") == "torch"
    if not (is_torch and (failures.is_silent(error) or type(failure) is RuntimeError)):
        raise failure from None
    if operator is not conv2d_op:
        raise failures.UnseenError(str(failure)) from None


def compiled_settings(sizes: Sequence[int], asked: Options) -> str:
    """The last argument of the operators that take one text for all that is no tensor (csrc/ops/compiled_settings.h).
    sizes: stride,
    padding and dilation, each for height and width, and groups; of a packed weight behind its shape."""
    *values, max_error, max_workspace, after, max_pool = asked._replace(negative_slope=float(asked.negative_slope))
    values += [int(after), int(max_pool), max_error, max_workspace, *map(int, sizes)]
    return " ".join(map(str, values))


def choose(algorithm: str, problem: _C.ConvProblem, device: _C.DeviceInfo) -> dict[str, Any]:
    """The planner's row of what runs where `algorithm` is asked for. Raises UnsupportedError if it does not fit."""
    row: dict[str, Any] = call(_C.choose, algorithm, problem, device)
    return row


def obstacle_of(
    row: dict[str, Any], problem: _C.ConvProblem, device: _C.DeviceInfo, limited: bool
) -> tuple[str, str] | None:
    """The code and text of what keeps an algorithm, a row of `_C.candidates`, from a problem, if anything does. Its
    error does where that is `limited`: for `auto`, and where there is a `max_error`."""
    if not row["ok"]:
        return row["code"], row["reason"]
    if row["auto_eligible"] or not limited:
        return None
    text = f"{row['algorithm']} is expected to err {row['expected_error']:.3g} times as much as PyTorch"
    return "accuracy", f"{text}; the limit is {_C.error_limit(problem, device):.3g} (max_error)"


def pack_weight(weight: Tensor, groups: int, algorithm: str, precision: str) -> Tensor:
    """The weight [K, C/groups, R, S] as one named algorithm reads it: uint8 [bytes], without a gradient."""
    return call(pack_weight_op, weight, groups, algorithm, precision)


def refresh_packed(
    packed: Tensor, snapshot: Tensor, weight: Tensor, groups: int, algorithm: str, precision: str
) -> None:
    """Brings `packed` up to date with `weight`, in place, without a host synchronisation. `snapshot` is a copy of the
    weight that `packed` was made from, and becomes one of `weight`; contiguous or channels_last: a weight in the same
    format is read as it is, any other is converted first."""
    call(refresh_packed_op, packed, snapshot, weight.detach(), groups, algorithm, precision)


# What the operators leave to Python of a layer's gradients, why a backward pass has failed, and PyTorch's switches:
# for csrc/ops/layer_gradients.cpp alone.
library.define(
    "gradients_in_python(Tensor grad, Tensor input, Tensor weight, int[] geometry, bool transposed, str algorithm, "
    "str precision, float max_error, int max_workspace, int wanted) -> (Tensor?, Tensor?, Tensor?)"
)
library.define("backward_failed(str message, Tensor grad) -> ()")
library.define("allows_tf32() -> int")
library.define("backend_flags() -> int")

# A layer keeps its packed weight and its choices in the operators, under a number; a call passes tensors, that and a
# mode: a precision, plus
PRECISIONS = {"ieee": 0, "fp32": 1, "tf32": 2}
FROZEN = 4  # the weight will not change, and is compared with its packing once
ADMITS_TORCH = 8  # PyTorch's own convolution computes in the class asked for
TRAINED = 16  # the weight will change before it is used again, and is packed for this call alone
MEASURED = 32  # where costs do not tell what is fastest, it is to be measured first
# Why layer_forward returned None (csrc/ops/layer.h).
STATUS_TORCH, STATUS_PACK, STATUS_STREAM, STATUS_TORCH_CHANNELS_LAST, STATUS_MEASURE = 1, 2, 3, 4, 7
layer_status = torch.ops.fastconv.layer_status.default
# (input, weight, bias, layer, mode, whether the input's gradient is wanted) -> whether a call that trains the weight is
# PyTorch's altogether.
layer_left_to_torch: Callable[..., bool] = torch.ops.fastconv.layer_left_to_torch.default
layer_forget = torch.ops.fastconv.layer_forget.default  # drops packed weights; whether a captured graph reads any
layer_adopt = torch.ops.fastconv.layer_adopt.default
layer_refresh = torch.ops.fastconv.layer_refresh.default  # packs the weight again, in the same memory
layer_see_stream = torch.ops.fastconv.layer_see_stream.default
# Of a convolution's arguments (input, weight, bias, a layer's number); does nothing, for the benchmarks of the host.
empty_operator = torch.ops.fastconv.empty_operator.default
_layer_forward: Callable[..., Tensor | None] = torch.ops.fastconv.layer_forward.default._op  # past its Python
_layer_free = torch.ops.fastconv.layer_free.default
_of_the_kernel = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def layer_free(layer: int) -> None:
    """Drops what is kept of a layer that is gone. Python collects objects whenever it likes, and so while something is
    traced: a call past all modes, which would make a node of it."""
    _layer_free.redispatch(_of_the_kernel, layer)


def layer_new(
    algorithm: str, geometry: Sequence[int], activation: str, negative_slope: float,
    limits: settings.Limits, residual_after: bool = False, max_pool: bool = False,
    output_padding: Sequence[int] | None = None,
) -> int:  # fmt: skip
    """`geometry`: stride, padding and dilation, each for height and width, and groups: 7 integers. `residual_after`: a
    call's residual is added to the activation's value. `max_pool`: of that value each 2 x 2 give their largest.
    `output_padding`: of a transposed convolution, which has no activation."""
    arguments = (algorithm, geometry, activation, negative_slope, *limits, residual_after, max_pool, output_padding)
    return int(call(torch.ops.fastconv.layer_new.default, *arguments))


def layer_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, layer: int, mode: int
) -> Tensor | None:
    """activation(conv(input [N, C, H, W], weight [K, C/groups, R, S]) + bias [K] + residual [N, K, P, Q]), or the
    residual behind the activation, below autograd, after comparing the weight with what was packed; of a transposed
    layer conv_transpose(input [N, C, H, W], weight [C, K/groups, R, S]) + bias [K]. None if that takes Python:
    `layer_status()` says what."""
    try:
        return _layer_forward(input, weight, bias, residual, layer, mode)
    except RuntimeError as error:
        _raise_translated(_layer_forward, error, (input, weight, bias, residual))
        raise  # after conv2d alone the former returns


_layer_forward_around = torch.ops.fastconv.layer_forward_around.default


def layer_forward_around(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, input_activation: str, layer: int, mode: int,
) -> Tensor | None:  # fmt: skip
    """`layer_forward` of input_activation(input * scale + shift), which has no residual, and into `out` [N, K, P, Q],
    which may be a range of channels; where these are given. None, too, where a norm apart is faster."""
    around = out, scale, shift, input_activation
    try:
        y: Tensor | None = _layer_forward_around(input, weight, bias, residual, *around, layer, mode)
    except RuntimeError as error:
        _raise_translated(_layer_forward_around, error, (input, weight, bias, residual))
    return y


def layer_call(layer: int, mode: int) -> int:
    """What `recorded_convolution` takes beside tensors."""
    return int(torch.ops.fastconv.layer_call.default(layer, mode))


# On CPU and CUDA ours (csrc/ops/layer_gradients.cpp). A later PyTorch may do without it.
_recorded_convolution: Callable[..., Tensor] | None = getattr(torch, "_mps_convolution", None)


def recorded_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, layer_call: int) -> Tensor:
    """`layer_forward` without a residual, of a layer without an activation, recorded by autograd. What takes Python is
    for the next call: `layer_status()` says what. Raises UnseenError if the general operator has to do it."""
    if _recorded_convolution is None:
        raise failures.UnseenError("PyTorch has no operator of which autograd makes this record")
    try:
        y = _recorded_convolution(input, weight, bias, (), (), (), layer_call)
    except RuntimeError as error:
        _raise_translated(_recorded_convolution, error, (input, weight, bias))
    return y


def layer_packed(layer: int) -> list[Tensor]:
    """Packed weights and their snapshots."""
    get, count = torch.ops.fastconv.layer_packed.default, torch.ops.fastconv.layer_packed_count.default(layer)
    return [get(layer, index, snapshot) for index in range(count) for snapshot in (False, True)]


def layer_last(layer: int) -> tuple[str | None, tuple[int, ...] | None, tuple[str, ...]]:
    """Of the layer's last call the algorithm, the input's shape, and layout, dtype and class of its problem."""
    algorithm, *rest = torch.ops.fastconv.layer_last.default(layer).split() or (None,)
    return algorithm, tuple(map(int, rest[3:])) or None, tuple(rest[:3])


def weight_gradient_reason(
    input: Tensor, grad: Tensor, weight_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, channels_last: bool, algorithm: str, precision: str,
    *limits: Any,
) -> str:  # fmt: skip
    """Why PyTorch computes the weight gradient of a convolution asked for as `algorithm`: "code: reason"; empty if an
    algorithm of ours does. `channels_last`: whether input and grad [N, K, P, Q] are read in that format."""
    return str(
        torch.ops.fastconv.weight_gradient_reason(
            input, grad, weight_size, stride, padding, dilation, groups, channels_last, algorithm, precision, *limits
        )
    )


def input_gradient_choice(
    grad: Tensor, weight: Tensor, input_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, algorithm: str, precision: str, own: bool, *limits: Any,
) -> str:  # fmt: skip
    """What computes the input gradient of a convolution asked for as `algorithm`: "torch", or a method and an algorithm
    of `input_gradient_by_convolutions`: "phases auto". own: where PyTorch's would be one in another class."""
    return str(
        torch.ops.fastconv.input_gradient_choice.default(
            grad, weight, input_size, stride, padding, dilation, groups, algorithm, precision, own, *limits
        )
    )


def input_gradient_by_convolutions(
    grad: Tensor, weight: Tensor, bias: Tensor | None, input_size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, together: bool, algorithm: str, precision: str,
    *limits: Any,
) -> Tensor:  # fmt: skip
    """The input gradient [N, C, H, W], plus `bias` [C], by forward convolutions of `algorithm`: one for each phase of
    the stride, or one for all `together`, as the planner says."""
    return call(
        torch.ops.fastconv.input_gradient.default, grad, weight, bias, input_size, stride, padding, dilation, groups,
        together, algorithm, precision, *limits,
    )  # fmt: skip


def instrumented_megakernel(
    input: Tensor, packed: Tensor, weight: Tensor | None, weight_shape: Sequence[int], padding: Sequence[int],
    channels_last: bool, precision: str, d_ig: int, d_go: int, m: int, blocks: int, delay: int, series: bool,
    output: Tensor, records: Tensor | None,
) -> None:  # fmt: skip
    """winograd_megakernel as measurements want it, into `output`: see `fastconv.instrumented`, which calls it."""
    call(
        torch.ops.fastconv.instrumented_megakernel.default, input, packed, weight, weight_shape, padding, channels_last,
        precision, d_ig, d_go, m, blocks, delay, series, output, records,
    )  # fmt: skip


def ladder(
    input: Tensor, weight: Tensor, stride: int, padding: int, form: str, restricted: bool, constant_size: bool,
    constant_filters: bool, rows: int, columns: int, output: Tensor, workspace: Tensor | None,
) -> None:  # fmt: skip
    """A convolution by one of the kernels of two sources' optimisation ladders, into `output`; for measurements alone
    (benchmarks/studies/ladder.py). CUDA, contiguous, float32, or float16 with products and sums in half.

    form: "direct", "unroll", whose `workspace` (uint8) holds the unrolled input of one image or more, or "fused".
    restricted: pointers are `__restrict__`. constant_size: the filter's size is a template constant. constant_filters:
    the filters lie in constant memory, which all streams share: one such call at a time. rows, columns: of a product's
    tile. Raises UnsupportedError for what has no kernel.
    """
    flags = (form, restricted, constant_size, constant_filters, rows, columns)
    call(torch.ops.fastconv.ladder.default, input, weight, stride, padding, *flags, output, workspace)


measured_generation = 0  # grows with every table: what was chosen at a smaller one may be chosen otherwise now


def set_measured(choices: Mapping[tuple[str, str, str], str]) -> None:
    """Replaces the measured choices, which `auto` takes where they fit: (device, problem, pass) -> choice, by the names
    of `_C.measured_device`, `repr(_C.ConvProblem)` and `fastconv.selection`. Planner and operators have one table each.
    """
    global measured_generation
    lines = "".join(f"{device}\t{pass_}\t{problem}\t{choice}\n" for (device, problem, pass_), choice in choices.items())
    _C.set_measured(lines)
    torch.ops.fastconv.set_measured(lines)
    measured_generation += 1


def last_call() -> dict[str, Any] | None:
    """What the most recent convolution on this thread ran, or None before the first. Not of a layer's call that trains
    and is PyTorch's altogether: the layer's `last_algorithm` says that."""
    call = json.loads(torch.ops.fastconv.last_call())
    return call or None


def record_torch(dtype: torch.dtype, precision: str) -> None:
    """Has `last_call` name PyTorch: for what no operator of ours computes."""
    halves = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: precision}
    torch.ops.fastconv.record_torch(halves.get(dtype, "other"))


def set_debug(enabled: bool) -> None:
    """Poisons workspaces and outputs with NaN before every call and checks their guards after it (slow)."""
    torch.ops.fastconv.set_debug(enabled)


def device_info(device: torch.device) -> _C.DeviceInfo:
    """The device as the planner sees it; for CUDA without a GPU, the H200."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return _C.h200_device()
    index = -1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    info = _C.DeviceInfo()
    for name, value in json.loads(torch.ops.fastconv.device_info(index)).items():
        setattr(info, name, _as_type_of(getattr(info, name), value))
    return info


def _as_type_of(current: Any, value: Any) -> Any:
    if isinstance(current, _C.DeviceType | _C.InstructionSet):
        return getattr(type(current), value)
    return int(value) if type(current) is int else value


def dtype_name(dtype: torch.dtype) -> str:
    """The planner's name of a dtype."""
    known = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return known.get(dtype, "other")


def format_of(*tensors: Tensor) -> torch.memory_format:
    """channels_last if any of the tensors suggests it: PyTorch's rule for the output of a convolution."""
    if any(suggest_memory_format(tensor) == torch.channels_last for tensor in tensors):
        return torch.channels_last
    return torch.contiguous_format


def output_size(
    input_size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """[P, Q] from the sizes' last two, floor rounding."""
    return [
        (input_size[i - 2] + 2 * padding[i] - dilation[i] * (kernel[i - 2] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]


def packed_bytes(weight: Tensor, groups: int, algorithm: str, precision: str) -> int:
    """Size of `pack_weight`'s result. Raises as `pack_weight` does."""
    k, c_per_group, r, s = (int(size) for size in weight.shape)
    problem = _C.ConvProblem(
        n=1, c=c_per_group * groups, h=r, w=s, k=k, r=r, s=s, groups=groups, dtype=dtype_name(weight.dtype),
        precision=precision,
    )  # fmt: skip
    device = device_info(weight.device) if weight.device.type == "cuda" else _C.cpu_device(1)
    _C.choose(algorithm, problem, device)  # raises if it does not fit
    return _C.packed_weight_bytes(algorithm, problem, device)
