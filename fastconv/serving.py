"""What the planner says of a module: which algorithms fit it whatever input may come, and what its gradients take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fastconv import _C, ops, selection, settings
from fastconv.eager import LayerState
from fastconv.ops import transposed
from fastconv.ops.geometry import Geometry, pair

# H and W at which a layer is shown to the planner, whose answer then does not depend on the input that will come.
_NOMINAL_SIZE = 56


def fitting(
    module: Any, algorithm: str, precision: str | None, max_error: float | None, max_workspace: int | None
) -> tuple[tuple[str, ...], str, str]:
    """The algorithms that fit whatever input may come, or the reason code and text why none of those asked for does."""
    device = ops.device_info(module.weight.device)
    try:
        geometry, extras = _geometry(module), pair("output_padding", module.output_padding)
    except (TypeError, RuntimeError) as error:
        return (), "invalid", str(error)
    refused = module.transposed and transposed.reason_for_torch(geometry.stride, extras, geometry.dilation)
    if refused and algorithm != "torch":
        return (), "output_padding", refused
    fitting: list[str] = []
    reasons: dict[str, tuple[str, str]] = {}
    # Either layout will do: which one comes is up to the input.
    for layout in ("nchw", "nhwc"):
        common = {
            "dtype": ops.dtype_name(module.weight.dtype), "layout": layout,
            "bias": module.bias is not None, "precision": settings.resolve_precision(precision, module.weight.is_cuda),
            **settings.resolve_limits(max_error, max_workspace, algorithm)._asdict(),
        }  # fmt: skip
        try:
            problems = _problems(module, geometry, common)
        except ValueError as error:
            return (), "invalid", str(error)
        found = [_C.candidates(problem, device) for problem in problems]
        # Of a module that is made of several convolutions, an algorithm that is named has to serve them all.
        for rows in zip(*(found if algorithm != "auto" else found[:1]), strict=True):
            name = rows[0]["algorithm"]
            asked = name == algorithm or (algorithm == "auto" and not selection.is_librarys(name))
            if not asked or name in fitting:
                continue
            limited = algorithm == "auto" or max_error is not None
            each = zip(rows, problems, strict=False)
            obstacle = next(
                filter(None, (ops.obstacle_of(row, problem, device, limited) for row, problem in each)), None
            )
            if obstacle is None:
                fitting.append(name)
            elif obstacle[0] == "accuracy" or name not in reasons:
                reasons[name] = obstacle
    if fitting:
        return tuple(fitting), "", ""
    codes = {code for code, _ in reasons.values()}
    texts = list(dict.fromkeys(text for _, text in reasons.values()))
    return (), codes.pop() if len(codes) == 1 else "unsupported", "; ".join(texts)


def _geometry(module: Any) -> Geometry:
    """That of a two-dimensional convolution: a row has a height of 1. Raises TypeError or RuntimeError for none."""

    def sizes(name: str, height: int) -> list[int]:
        both = pair(name, getattr(module, name))
        return [height, both[1]] if isinstance(module, nn.Conv1d) else both

    dilation, padding = sizes("dilation", 1), [0, 0]
    if module.padding == "same":
        padding = [d * (size - 1) // 2 for d, size in zip(dilation, _kernel(module), strict=True)]
    elif not isinstance(module.padding, str) and module.padding_mode == "zeros":
        padding = sizes("padding", 0)
    return Geometry(sizes("stride", 1), padding, dilation, module.groups)


def _kernel(module: Any) -> list[int]:
    """R and S."""
    sizes = [1] * isinstance(module, nn.Conv1d) + list(module.weight.shape[2:])
    if len(sizes) != 2:
        raise RuntimeError(f"weight has shape {list(module.weight.shape)}; expected R and S at its end")
    return sizes


def _problems(module: Any, geometry: Geometry, common: dict[str, Any]) -> list[_C.ConvProblem]:
    """The convolutions that a module is made of, for an input of nominal size; the largest filter first."""
    stride, padding, dilation, groups = geometry
    kernel = _kernel(module)
    height, width = (max(_NOMINAL_SIZE, d * (size - 1) + 1) for d, size in zip(dilation, kernel, strict=True))
    if isinstance(module, nn.Conv1d):
        height = 1
    if isinstance(module, nn.ConvTranspose2d):
        extras = pair("output_padding", module.output_padding)
        return transposed.convolutions(module.weight.shape, [height, width], geometry, extras, common)
    problem = _C.ConvProblem(
        n=1, c=module.weight.shape[1] * groups, k=module.weight.shape[0], r=kernel[0], s=kernel[1], h=height, w=width,
        stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=groups, **common,
    )  # fmt: skip
    return [problem]


def gradient(module: Any, state: LayerState, pass_: str) -> str | None:
    """What "backward_input" or "backward_weight" takes by the planner, for the layer's most recent eager call; None
    before one, and where what ran is not known so well."""
    problem = _last_problem(module, state)
    if problem is None:
        return None
    asked = state.resolved
    if module.transposed:  # an input gradient, whose own is the convolution; a name is that of the former
        pass_ = {"backward_input": "forward"}.get(pass_, pass_)
        asked = "torch" if asked == "torch" else "auto"
    chosen = selection.choose(pass_, problem, ops.device_info(module.weight.device), asked)
    if chosen.measured:
        return f"{chosen.name} (measured)"
    return "torch" if state.is_left_to_torch else chosen.name


def layout_advice(layers: Iterable[tuple[Any, LayerState]]) -> str:
    """What channels_last would spare the layers whose most recent eager call was in NCHW; empty where the planner
    expects nothing of it, or nothing else to choose from."""
    count, now, then = 0, 0.0, 0.0
    for module, state in layers:
        if not isinstance(module, nn.Conv2d) or not state.last_kind or state.last_kind[0] != "nchw":
            continue
        _, c, h, w = state.last_input_shape or (0, 0, 0, 0)
        if c == 1 or h * w == 1:
            continue  # both formats are one
        device = ops.device_info(module.weight.device)
        problems = _last_problem(module, state), _last_problem(module, state, "nhwc")
        try:
            nchw, nhwc = (ops.choose(state.resolved, problem, device) for problem in problems)  # type: ignore[arg-type]
        except ops.UnsupportedError:  # the algorithm asked for, in NHWC
            continue
        count, now, then = count + 1, now + nchw["cost_us"], then + nhwc["cost_us"]
    if now <= then:
        return ""
    got = "1 layer" if count == 1 else f"{count} layers"
    faster = f"channels_last is estimated {now / then:.2f} times as fast for {'it' if count == 1 else 'them'}"
    return f"{got} got contiguous (NCHW) input; {faster}: model.to(memory_format=torch.channels_last), and its input"


def _last_problem(module: Any, state: LayerState, layout: str = "") -> _C.ConvProblem | None:
    """The convolution of that call, or the same in another layout; of a transposed layer the one whose input gradient
    it was, and which packs in the call where it is the gradient."""
    shape = state.last_input_shape
    if shape is None or not state.last_kind:
        return None
    ran_in, dtype, accuracy = state.last_kind
    geometry, kernel = _geometry(module), _kernel(module)
    (n, c, h, w), k = shape, module.weight.shape[0]
    if module.transposed:
        extras = pair("output_padding", module.output_padding)
        h, w = transposed.output_size(shape, kernel, geometry.stride, geometry.padding, extras, geometry.dilation)
        c, k = module.weight.shape[1] * module.groups, c
    return _C.ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=kernel[0], s=kernel[1], stride=tuple(geometry.stride),
        padding=tuple(geometry.padding), dilation=tuple(geometry.dilation), groups=geometry.groups, dtype=dtype,
        precision=accuracy, layout=layout or ran_in, packs=module.transposed, **state.limits._asdict(),
    )  # fmt: skip
