"""cuDNN's graph API, called directly in the library that torch has loaded: every plan for a convolution, the fastest.

A plan is an engine with its knobs. The heuristics list some (modes A, B and fallback); the engines that none of them
names are tried with their default knobs. Engines that compile at run time belong to them. A frontend package would add
nothing: it calls these same functions. Names and values: cudnn_graph.h.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_bool, c_char, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import turns
from benchmarks.peers import cudnn
from benchmarks.peers.cudnn import CudnnError
from benchmarks.peers.fastest import fastest
from fastconv.models.layers import Layer

# cudnnBackendDescriptorType_t
_KINDS = {
    "POINTWISE": 0, "CONVOLUTION": 1, "ENGINE": 2, "ENGINECFG": 3, "ENGINEHEUR": 4, "EXECUTION_PLAN": 5,
    "KNOB_CHOICE": 7, "OPERATION_CONVOLUTION_FORWARD": 10, "OPERATION_CONVOLUTION_BWD_FILTER": 11,
    "OPERATION_CONVOLUTION_BWD_DATA": 12, "OPERATION_POINTWISE": 13, "OPERATIONGRAPH": 15, "VARIANT_PACK": 16,
    "TENSOR": 17,
}  # fmt: skip
# cudnnBackendAttributeType_t, and what its values are in C
_TYPES: dict[str, tuple[int, Any]] = {
    "HANDLE": (0, c_void_p), "DATA_TYPE": (1, c_int), "BOOLEAN": (2, c_bool), "INT64": (3, c_int64),
    "FLOAT": (4, c_float), "VOID_PTR": (6, c_void_p), "CONVOLUTION_MODE": (7, c_int), "HEUR_MODE": (8, c_int),
    "KNOB_TYPE": (9, c_int), "NUMERICAL_NOTE": (11, c_int), "POINTWISE_MODE": (14, c_int),
    "BACKEND_DESCRIPTOR": (15, c_void_p), "BEHAVIOR_NOTE": (19, c_int), "CHAR": (24, c_char),
}  # fmt: skip
# cudnnBackendAttributeName_t: value, type
_ATTRIBUTES = {
    "POINTWISE_MODE": (0, "POINTWISE_MODE"), "POINTWISE_MATH_PREC": (1, "DATA_TYPE"),
    "CONVOLUTION_COMP_TYPE": (100, "DATA_TYPE"), "CONVOLUTION_CONV_MODE": (101, "CONVOLUTION_MODE"),
    "CONVOLUTION_DILATIONS": (102, "INT64"), "CONVOLUTION_FILTER_STRIDES": (103, "INT64"),
    "CONVOLUTION_POST_PADDINGS": (104, "INT64"), "CONVOLUTION_PRE_PADDINGS": (105, "INT64"),
    "CONVOLUTION_SPATIAL_DIMS": (106, "INT64"),
    "ENGINEHEUR_MODE": (200, "HEUR_MODE"), "ENGINEHEUR_OPERATION_GRAPH": (201, "BACKEND_DESCRIPTOR"),
    "ENGINEHEUR_RESULTS": (202, "BACKEND_DESCRIPTOR"),
    "ENGINECFG_ENGINE": (300, "BACKEND_DESCRIPTOR"), "ENGINECFG_KNOB_CHOICES": (302, "BACKEND_DESCRIPTOR"),
    "EXECUTION_PLAN_HANDLE": (400, "HANDLE"), "EXECUTION_PLAN_ENGINE_CONFIG": (401, "BACKEND_DESCRIPTOR"),
    "EXECUTION_PLAN_WORKSPACE_SIZE": (402, "INT64"),
    "KNOB_CHOICE_KNOB_TYPE": (600, "KNOB_TYPE"), "KNOB_CHOICE_KNOB_VALUE": (601, "INT64"),
    "OPERATION_CONVOLUTION_FORWARD_ALPHA": (700, "FLOAT"), "OPERATION_CONVOLUTION_FORWARD_BETA": (701, "FLOAT"),
    "OPERATION_CONVOLUTION_FORWARD_CONV_DESC": (702, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_FORWARD_W": (703, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_FORWARD_X": (704, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_FORWARD_Y": (705, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_DATA_ALPHA": (706, "FLOAT"), "OPERATION_CONVOLUTION_BWD_DATA_BETA": (707, "FLOAT"),
    "OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC": (708, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_DATA_W": (709, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_DATA_DX": (710, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_DATA_DY": (711, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_FILTER_ALPHA": (712, "FLOAT"), "OPERATION_CONVOLUTION_BWD_FILTER_BETA": (713, "FLOAT"),
    "OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC": (714, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_FILTER_DW": (715, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_FILTER_X": (716, "BACKEND_DESCRIPTOR"),
    "OPERATION_CONVOLUTION_BWD_FILTER_DY": (717, "BACKEND_DESCRIPTOR"),
    "OPERATION_POINTWISE_PW_DESCRIPTOR": (750, "BACKEND_DESCRIPTOR"),
    "OPERATION_POINTWISE_XDESC": (751, "BACKEND_DESCRIPTOR"), "OPERATION_POINTWISE_BDESC": (752, "BACKEND_DESCRIPTOR"),
    "OPERATION_POINTWISE_YDESC": (753, "BACKEND_DESCRIPTOR"),
    "OPERATIONGRAPH_HANDLE": (800, "HANDLE"), "OPERATIONGRAPH_OPS": (801, "BACKEND_DESCRIPTOR"),
    "OPERATIONGRAPH_ENGINE_GLOBAL_COUNT": (802, "INT64"),
    "TENSOR_BYTE_ALIGNMENT": (900, "INT64"), "TENSOR_DATA_TYPE": (901, "DATA_TYPE"),
    "TENSOR_DIMENSIONS": (902, "INT64"), "TENSOR_STRIDES": (903, "INT64"), "TENSOR_UNIQUE_ID": (906, "INT64"),
    "TENSOR_IS_VIRTUAL": (907, "BOOLEAN"),
    "VARIANT_PACK_UNIQUE_IDS": (1000, "INT64"), "VARIANT_PACK_DATA_POINTERS": (1001, "VOID_PTR"),
    "VARIANT_PACK_WORKSPACE": (1003, "VOID_PTR"),
    "ENGINE_OPERATION_GRAPH": (1300, "BACKEND_DESCRIPTOR"), "ENGINE_GLOBAL_INDEX": (1301, "INT64"),
    "ENGINE_NUMERICAL_NOTE": (1303, "NUMERICAL_NOTE"), "ENGINE_BEHAVIOR_NOTE": (1305, "BEHAVIOR_NOTE"),
}  # fmt: skip
_HEURISTICS = {"A": 3, "fallback": 2, "B": 1}
_ADD, _RELU = 0, 100  # cudnnPointwiseMode_t
_TENSOR_CORE, _DOWN_CONVERT = 0, 1  # cudnnBackendNumericalNote_t
_RUNTIME_COMPILATION = 0  # cudnnBackendBehaviorNote_t
_MAX_KNOBS, _MAX_NOTES = 64, 16

HOPELESS, HOPELESS_US = 50.0, 50e3  # an engine so many times slower than the best, and so slow, is not run again
PROPOSED = 2  # so many of the heuristics' first are tried beside what earlier searches found
_EARLIER = ", in earlier searches"
BUILD_S = 3.0  # seconds in which no further plan is begun; what was not built is counted in the description


class Descriptor:
    """A backend descriptor: created, its attributes set, finalized; freed with this one.

    attributes: name (without the kind before it) -> value or list of values, Descriptors among them.
    """

    def __init__(self, kind: str, /, **attributes: Any) -> None:
        finalize = attributes.pop("finalize", True)
        self.kind = kind
        self.pointer = c_void_p()
        self._children: list[Any] = list(attributes.values())  # alive as long as this one
        cudnn.call("cudnnBackendCreateDescriptor", _KINDS[kind], byref(self.pointer))
        for name, value in attributes.items():
            attribute, type_, ctype = self._attribute(name)
            values = value if isinstance(value, list | tuple) else [value]
            plain = [item.pointer if isinstance(item, Descriptor) else item for item in values]
            array = (ctype * len(plain))(*(item.value if isinstance(item, c_void_p) else item for item in plain))
            cudnn.call("cudnnBackendSetAttribute", self.pointer, attribute, type_, len(plain), array)
        if finalize:
            cudnn.call("cudnnBackendFinalize", self.pointer)

    def _attribute(self, name: str) -> tuple[int, int, Any]:
        attribute, type_ = _ATTRIBUTES[f"{self.kind}_{name}"]
        return attribute, *_TYPES[type_]

    def get(self, name: str, most: int = 1) -> list[Any]:
        """Up to `most` values of an attribute."""
        attribute, type_, ctype = self._attribute(name)
        count, array = c_int64(), (ctype * most)()
        cudnn.call("cudnnBackendGetAttribute", self.pointer, attribute, type_, most, byref(count), array)
        return list(array[: min(count.value, most)])

    def count(self, name: str) -> int:
        """How many values an attribute has."""
        attribute, type_, _ = self._attribute(name)
        count = c_int64()
        cudnn.call("cudnnBackendGetAttribute", self.pointer, attribute, type_, 0, byref(count), None)
        return count.value

    def descriptors(self, name: str, kind: str, most: int) -> list[Descriptor]:
        """Up to `most` descriptors that an attribute holds."""
        found = [Descriptor(kind, finalize=False) for _ in range(most)]
        attribute, type_, _ = self._attribute(name)
        count, array = c_int64(), (c_void_p * most)(*(item.pointer.value for item in found))
        cudnn.call("cudnnBackendGetAttribute", self.pointer, attribute, type_, most, byref(count), array)
        return found[: min(count.value, most)]

    def __del__(self) -> None:
        if self.pointer and not sys.is_finalizing():
            cudnn.library().cudnnBackendDestroyDescriptor(self.pointer)


def _tensor(uid: int, tensor: torch.Tensor, layout: str, virtual: bool = False) -> Descriptor:
    """`tensor`, dense in `layout`; virtual: a float intermediate of its shape that is never stored."""
    n, c, h, w = tensor.shape
    # torch's strides may be anything where a size is 1.
    strides = [h * w * c, 1, w * c, c] if layout == "nhwc" else [c * h * w, h * w, w, 1]
    dtype = cudnn.FLOAT if virtual else cudnn.DATA_TYPES[tensor.dtype]
    return Descriptor(
        "TENSOR", DATA_TYPE=dtype, DIMENSIONS=[n, c, h, w], STRIDES=strides, UNIQUE_ID=uid, BYTE_ALIGNMENT=16,
        IS_VIRTUAL=virtual,
    )  # fmt: skip


@dataclass
class Config:
    """An engine and its knobs (None: the defaults), before a plan is built."""

    descriptor: Descriptor
    engine: int
    knobs: tuple[tuple[int, int], ...] | None
    numerical: frozenset[int]
    behavior: frozenset[int]

    def __str__(self) -> str:
        knobs = "default knobs" if self.knobs is None else " ".join(f"k{knob}={value}" for knob, value in self.knobs)
        compiled = ", compiled at run time" if _RUNTIME_COMPILATION in self.behavior else ""
        return f"engine {self.engine} ({knobs}{compiled})"


class Graph:
    """One convolution, or one of its gradients, as cuDNN's operation graph, and the tensors that it reads and writes.

    x: [N, C, H, W], weight: [K, C/groups, R, S], grad (of the gradients): [N, K, P, Q]; CUDA, dense in the
    layout. bias [K] and residual [N, K, P, Q]: ReLU(conv + residual + bias) in one graph.
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, layer: Layer, layout: str, direction: str = "forward",
        grad: torch.Tensor | None = None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        y = grad
        if y is None:
            shape = (x.shape[0], layer.k, layer.p, layer.q)
            y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)
        if direction == "backward_weight":
            weight = torch.empty_like(weight)
        elif direction == "backward_input":
            x = torch.empty_like(x)
        self.device = x.device
        self._kind = f"{str(x.dtype).removeprefix('torch.')} {layout} {direction}"
        self.result = {"forward": y, "backward_weight": weight, "backward_input": x}[direction]
        self.tensors: dict[int, torch.Tensor] = {1: x, 2: weight, 3: y}
        fused = bias is not None
        image, filters = _tensor(1, x, layout), _tensor(2, weight, layout)
        output = _tensor(4 if fused else 3, y, layout, virtual=fused)
        convolution = Descriptor(
            "CONVOLUTION", COMP_TYPE=cudnn.FLOAT, CONV_MODE=cudnn.CROSS_CORRELATION, SPATIAL_DIMS=2,
            DILATIONS=[layer.dilation] * 2, FILTER_STRIDES=[layer.stride] * 2, PRE_PADDINGS=[layer.padding] * 2,
            POST_PADDINGS=[layer.padding] * 2,
        )  # fmt: skip
        kind, roles = {
            "forward": ("FORWARD", {"X": image, "W": filters, "Y": output}),
            "backward_weight": ("BWD_FILTER", {"X": image, "DW": filters, "DY": output}),
            "backward_input": ("BWD_DATA", {"DX": image, "W": filters, "DY": output}),
        }[direction]
        operations = [Descriptor(f"OPERATION_CONVOLUTION_{kind}", CONV_DESC=convolution, ALPHA=1.0, BETA=0.0, **roles)]
        if bias is not None:
            # In the order of cuDNN's ready-made fusion: residual, bias, activation.
            steps: list[tuple[int, torch.Tensor | None]] = [(_ADD, bias.view(1, -1, 1, 1)), (_RELU, None)]
            steps = ([] if residual is None else [(_ADD, residual)]) + steps
            for index, (mode, operand) in enumerate(steps):
                last, inputs = index == len(steps) - 1, {"XDESC": output}
                if operand is not None:
                    self.tensors[10 + index] = operand
                    inputs["BDESC"] = _tensor(10 + index, operand, layout)
                output = _tensor(3 if last else 20 + index, y, layout, virtual=not last)
                step = Descriptor("POINTWISE", MODE=mode, MATH_PREC=cudnn.FLOAT)
                operations.append(Descriptor("OPERATION_POINTWISE", PW_DESCRIPTOR=step, YDESC=output, **inputs))
        of_device = {"HANDLE": cudnn.handle(self.device.index or 0)} if self.device.type == "cuda" else {}
        self.descriptor = Descriptor("OPERATIONGRAPH", OPS=operations, **of_device)

    def label(self, config: Config) -> str:
        """Names an engine and what it is asked for: what is banned where it crashes or hangs."""
        return f"cudnn_engine_{config.engine} {self._kind}"

    def configs(self) -> list[Config]:
        """What the heuristics propose, best first, then every other engine with its default knobs. Each once."""
        found: dict[tuple[int, Any], Config] = {}
        for mode in _HEURISTICS.values():
            try:
                heuristic = Descriptor("ENGINEHEUR", OPERATION_GRAPH=self.descriptor, MODE=mode)
                results = heuristic.descriptors("RESULTS", "ENGINECFG", heuristic.count("RESULTS"))
            except CudnnError:  # a mode that has nothing to say about this graph
                continue
            for result in results:
                (engine,) = result.descriptors("ENGINE", "ENGINE", 1)
                config = _config(result, engine, _knobs(result))
                found.setdefault((config.engine, config.knobs), config)
        seen = {engine for engine, _ in found}
        last: list[Config] = []  # what compiles takes the most time to build
        for index in range(self.descriptor.get("ENGINE_GLOBAL_COUNT")[0]):
            if index in seen:
                continue
            try:
                engine = Descriptor("ENGINE", OPERATION_GRAPH=self.descriptor, GLOBAL_INDEX=index)
                config = _config(Descriptor("ENGINECFG", ENGINE=engine), engine, None)
            except CudnnError:  # serves other graphs
                continue
            last.append(config)
        last.sort(key=lambda config: _RUNTIME_COMPILATION in config.behavior)
        return [*found.values(), *last]


def _knobs(config: Descriptor) -> tuple[tuple[int, int], ...]:
    choices = config.descriptors("KNOB_CHOICES", "KNOB_CHOICE", _MAX_KNOBS)
    return tuple((choice.get("KNOB_TYPE")[0], choice.get("KNOB_VALUE")[0]) for choice in choices)


def _config(descriptor: Descriptor, engine: Descriptor, knobs: tuple[tuple[int, int], ...] | None) -> Config:
    numerical, behavior = (frozenset(engine.get(f"{which}_NOTE", _MAX_NOTES)) for which in ("NUMERICAL", "BEHAVIOR"))
    return Config(descriptor, engine.get("GLOBAL_INDEX")[0], knobs, numerical, behavior)


def is_of_class(config: Config, dtype: torch.dtype, tf32: bool) -> bool:
    """Whether an engine computes in a class: never with operands rounded to less than their type; FP32 without TF32 not
    on tensor cores."""
    if _DOWN_CONVERT in config.numerical:
        return False
    return dtype != torch.float32 or tf32 or _TENSOR_CORE not in config.numerical


class Plan:
    """A built plan with its data: calling it runs it on the current stream and returns the result."""

    def __init__(self, graph: Graph, config: Config) -> None:
        """Compiles what the engine compiles. Raises CudnnError where it does not serve the graph."""
        self._graph, self.config = graph, config
        handle = cudnn.handle(graph.device.index or 0)
        self._plan = Descriptor("EXECUTION_PLAN", HANDLE=handle, ENGINE_CONFIG=config.descriptor)
        self.workspace_bytes = int(self._plan.get("WORKSPACE_SIZE")[0])
        self._pack: Descriptor | None = None

    def bind(self, workspace: torch.Tensor) -> None:
        """Gives the plan its workspace, uint8 of at least workspace_bytes."""
        tensors = self._graph.tensors
        self._workspace = workspace
        self._pack = Descriptor(
            "VARIANT_PACK", UNIQUE_IDS=list(tensors), DATA_POINTERS=[t.data_ptr() for t in tensors.values()],
            WORKSPACE=workspace.data_ptr(),
        )  # fmt: skip

    def __call__(self) -> torch.Tensor:
        assert self._pack is not None
        handle = cudnn.handle(self._graph.device.index or 0)
        stream = torch.cuda.current_stream(self._graph.device).cuda_stream
        cudnn.call("cudnnSetStream", handle, c_void_p(stream))
        cudnn.call("cudnnBackendExecute", handle, self._plan.pointer, self._pack.pointer)
        return self._graph.result


def build(
    graph: Graph, configs: Sequence[Config], seconds: float, announce: Callable[[str], None] = lambda name: None
) -> tuple[list[Plan], list[str], int]:
    """(plans, why others were not built, how many were not begun within `seconds`)."""
    deadline = time.perf_counter() + seconds
    plans: list[Plan] = []
    failures: list[str] = []
    for done, config in enumerate(configs):
        if time.perf_counter() > deadline:
            return plans, failures, len(configs) - done
        announce(graph.label(config))
        try:
            plan = Plan(graph, config)
        except CudnnError as error:
            failures.append(f"{config}: {error}")
            continue
        if plan.workspace_bytes <= cudnn.WORKSPACE_LIMIT:
            plans.append(plan)
        else:
            failures.append(f"{config}: workspace of {plan.workspace_bytes / 2**30:.1f} GiB")
    return plans, failures, 0


_hopeless: dict[str, str] = {}  # label of an engine -> how slow it was, in this process


def search(
    graph: Graph,
    tf32: bool,
    refuse: Callable[[torch.Tensor], str],
    seconds: float = BUILD_S,
    announce: Callable[[str], None] = lambda name: None,
    banned: Mapping[str, str] = {},
    earlier: Sequence[str] = (),
) -> tuple[Plan, str, list[str]]:
    """Builds every plan of the class: the fastest, in words how it was found, why others were not built or refused.

    refuse: why a result is not of the class, or "". announce: called with an engine's label before it is compiled or
    run; banned: labels that are passed over, and why. earlier: the words of searches for the same graph: if their
    plans are still there, only these and what the heuristics propose first are built. Raises CudnnError if there is no
    plan, fastest.NoneRuns.
    """
    everything = graph.configs()
    configs = [config for config in everything if is_of_class(config, graph.result.dtype, tf32)]
    others = len(everything) - len(configs)
    passed_over = {**_hopeless, **banned}
    failures = [f"{each}: {passed_over[graph.label(each)]}" for each in configs if graph.label(each) in passed_over]
    configs = [config for config in configs if graph.label(config) not in passed_over]
    counts = {name: count for name, _, count in (words.removesuffix(_EARLIER).partition("; ") for words in earlier)}
    again = [config for config in configs if str(config) in counts]
    if again:
        configs = again + [config for config in configs[:PROPOSED] if config not in again]
        seconds = math.inf  # each has been the fastest once
    with turns.aside():
        plans, unbuilt, left = build(graph, configs, seconds, announce)
    failures += unbuilt
    if not plans:
        reason = failures[0] if failures else f"none of {len(everything)} engines computes in the class"
        raise CudnnError(f"no plan; {reason}")
    workspace = torch.empty(max(plan.workspace_bytes for plan in plans) + 256, dtype=torch.uint8, device=graph.device)
    for plan in plans:
        plan.bind(workspace)
    forms = {str(plan.config): plan for plan in plans}
    found = fastest(forms, graph.device, refuse, lambda name: announce(graph.label(forms[name].config)))
    winner = forms[found.name]
    winner.bind(torch.empty(winner.workspace_bytes + 256, dtype=torch.uint8, device=graph.device))
    best = min(found.times.values())
    for name, us in found.times.items():
        if us > max(HOPELESS * best, HOPELESS_US):
            why = f"not run: {us / 1e3:.0f} ms in an earlier layer, {us / best:.0f} times the best"
            _hopeless[graph.label(forms[name].config)] = why
    if again:
        count = counts.get(found.name, counts[str(again[0])])
        return winner, f"{found.name}; {count}{_EARLIER}", failures + found.failures
    words = f"{found.name}; {len(found.times)} of {len(everything)} plans ran"
    words += f", {others} are of another class" if others else ""
    words += f", {left} were not built within {seconds:g} s" if left else ""
    return winner, words, failures + found.failures
