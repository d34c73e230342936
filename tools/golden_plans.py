"""What the planner answers for a fixed set of problems, classes and devices, kept in tests/golden/plans.json.

usage: python tools/golden_plans.py [--write]      exit status 1 if an answer differs from the file's

A change of structure leaves every answer as it is; a change of a cost or a rule shows here what it moves. After one
that is meant, `--write` replaces the file, and its diff belongs into the review.

The file holds its own problems, so that comparing asks for exactly those; `--write` collects them anew from the tests'
shapes and the benchmarks' layers. A case is a line: problem, device, the choice of `auto`, then per algorithm of the
file's list the index of its configuration, the workspace in bytes and the cost in us; or the code of the reason why it
does not fit; or null where it has no weight gradient for the problem. An input gradient is made of convolutions: its
choice is how, and it has the one plan of these, or the code of why it is PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fastconv import _C  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "plans.json"
COST_DIGITS = 4  # in the file; compared to within 1 %, as another compiler may round elsewhere
PASSES = ("forward", "backward_weight", "backward_input")
CLASSES = {
    "ieee": ("float32", "ieee"),
    "fp32": ("float32", "fp32"),
    "tf32": ("float32", "tf32"),
    "fp16": ("float16", "fp32"),
    "bf16": ("bfloat16", "fp32"),
}


def _gpu(name: str, capability: int, processors: int, shared_kib: int, l2_mib: int, bandwidth: float, ffma: float,
         tensor: float) -> _C.DeviceInfo:  # fmt: skip
    device = _C.h200_device()
    device.name, device.compute_capability, device.processors = name, capability, processors
    device.shared_memory_bytes, device.l2_bytes = shared_kib * 1024, l2_mib << 20
    device.bandwidth_bytes_per_s, device.fp32_flops_per_s, device.fp16_tensor_flops_per_s = bandwidth, ffma, tensor
    device.clock_hz = 1.2 * tensor / (4096 * processors)
    return device


def _portable() -> _C.DeviceInfo:
    device = _C.h200_device()
    _C.limit_to_build(device, "80")
    return device


def devices() -> dict[str, _C.DeviceInfo]:
    return {
        "h200": _C.h200_device(),
        "h100": _gpu("NVIDIA H100", 90, 132, 227, 50, 2.9e12, 47e12, 660e12),
        "a100": _gpu("NVIDIA A100", 80, 108, 163, 40, 1.6e12, 17e12, 250e12),
        "h200 built for sm_80": _portable(),
        "cpu 2": _C.cpu_device(2),
        "cpu 16": _C.cpu_device(16),
    }


def problem_of(row: list[Any]) -> _C.ConvProblem:
    *sizes, stride, padding, dilation, groups, cls, layout, epilogue = row
    dtype, precision = CLASSES[cls]
    n, c, h, w, k, r, s = sizes
    words = epilogue.split()
    activations = [word for word in words if word not in ("bias", "residual")]
    return _C.ConvProblem(
        n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation),
        groups=groups, dtype=dtype, precision=precision, layout=layout, bias="bias" in words,
        residual="residual" in words, activation=activations[0] if activations else "none",
    )  # fmt: skip


def collect() -> Iterator[tuple[list[Any], str, str]]:
    """(problem, device, pass) of every case: all shapes; devices, classes, layouts and epilogues take turns."""
    sys.path.insert(0, str(ROOT / "tests"))
    import shapes

    from fastconv.models.layers import SETS

    sizes: list[list[Any]] = []
    for shape in [*shapes.SHAPES, *shapes.NARROW, *shapes.CROWDED]:
        sizes.append([shape.n, shape.c, shape.h, shape.w, shape.k, shape.r, shape.s, list(shape.stride),
                      list(shape.padding), list(shape.dilation), shape.groups])  # fmt: skip
    for layer in (layer for layers in SETS.values() for layer in layers):
        for n in (64, 1):
            pairs = [[value, value] for value in (layer.stride, layer.padding, layer.dilation)]
            sizes.append([n, layer.c, layer.h, layer.w, layer.k, layer.r, layer.s, *pairs, layer.groups])
    classes, epilogues = list(CLASSES), ["", "bias", "bias relu", "bias residual relu"]
    others = [device for device in devices() if device != "h200"]
    inputs: list[tuple[list[Any], str, str]] = []
    for index, size in enumerate(sizes):
        # On the H200, for which costs are fitted, and on one of the others.
        for place, device in enumerate(("h200", others[index % len(others)])):
            cls = classes[(index + index // len(others) + 2 * place) % len(classes)]
            layout = ("nhwc", "nchw")[(index + place) % 2]
            yield [*size, cls, layout, epilogues[(index // 2 + place) % 4]], device, "forward"
            bare = [*size, cls, layout, ""]
            yield bare, device, "backward_weight"
            inputs.append((bare, device, "backward_input"))
    yield from inputs
    # Activations that not all kernels end with: a 1x1 layer, a depthwise and a dense one.
    for activation, size in (("hardswish", [64, 40, 28, 28, 240, 1, 1, [1, 1], [0, 0], [1, 1], 1]),
                             ("hardswish", [64, 144, 28, 28, 144, 5, 5, [2, 2], [2, 2], [1, 1], 144]),
                             ("gelu", [64, 96, 56, 56, 384, 1, 1, [1, 1], [0, 0], [1, 1], 1]),
                             ("gelu_tanh", [1, 384, 14, 14, 1536, 1, 1, [1, 1], [0, 0], [1, 1], 1]),
                             ("sigmoid", [64, 64, 28, 28, 64, 3, 3, [1, 1], [1, 1], [1, 1], 1])):  # fmt: skip
        for cls in CLASSES:
            yield [*size, cls, "nhwc", f"bias {activation}"], "h200", "forward"
        yield [*size, "fp32", "nhwc", f"bias residual {activation}"], "cpu 2", "forward"


def answer(row: list[Any], device: _C.DeviceInfo, pass_: str) -> dict[str, Any]:
    """The choice of `auto` ("auto"), and per algorithm (configuration, workspace bytes, cost us) or a reason's code."""
    problem = problem_of(row)
    if pass_ == "forward":
        found: dict[str, Any] = {"auto": _C.choose("auto", problem, device)["algorithm"]}
        for candidate in _C.candidates(problem, device):
            found[candidate["algorithm"]] = _plan(candidate) if candidate["ok"] else candidate["code"]
        return found
    if pass_ == "backward_input":
        made = _C.choose_input_gradient("auto", problem, device)
        if made["method"] == "torch":
            return {"auto": "torch", "torch": made["code"]}
        plan = _C.choose(made["algorithm"], made["convolution"], device)
        return {"auto": made["method"], plan["algorithm"]: _plan(plan)}
    found = {"auto": _C.choose_weight_gradient("auto", problem, device)["algorithm"]}
    for algorithm in _C.algorithms():
        choice = _C.choose_weight_gradient(algorithm["name"], problem, device)
        if choice["algorithm"] == algorithm["name"] and not choice["code"]:
            found[algorithm["name"]] = _plan(choice)
    return found


def _plan(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["config"], row["workspace_bytes"], float(f"{row['cost_us']:.{COST_DIGITS}g}")


def write(path: Path = GOLDEN) -> int:
    """Writes the file; returns the number of cases."""
    made = devices()
    names = [algorithm["name"] for algorithm in _C.algorithms()]
    problems: dict[str, int] = {}
    configs: dict[str, int] = {}
    lines: dict[str, list[str]] = {pass_: [] for pass_ in PASSES}
    for row, device, pass_ in collect():
        found = answer(row, made[device], pass_)
        case: list[Any] = [problems.setdefault(_packed(row), len(problems)), device, found["auto"]]
        for value in map(found.get, names):
            case.append([configs.setdefault(value[0], len(configs)), *value[1:]] if isinstance(value, tuple) else value)
        lines[pass_].append(_packed(case))
    tables = {"algorithms": [_packed(names)], "configs": map(json.dumps, configs), "problems": problems, **lines}
    path.parent.mkdir(exist_ok=True)
    path.write_text("{" + ",\n".join(f'"{key}": [\n' + ",\n".join(rows) + "]" for key, rows in tables.items()) + "}\n")
    return sum(map(len, lines.values()))


def _packed(value: list[Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def read(path: Path = GOLDEN) -> Iterator[tuple[list[Any], str, str, dict[str, Any]]]:
    """(problem, device, pass, answer) of every case in the file."""
    golden = json.loads(path.read_text())
    (names,) = golden["algorithms"]
    for pass_ in PASSES:
        for problem, device, auto, *values in golden[pass_]:
            found: dict[str, Any] = {"auto": auto}
            for name, value in zip(names, values, strict=True):
                if value is not None:
                    found[name] = (golden["configs"][value[0]], *value[1:]) if isinstance(value, list) else value
            yield golden["problems"][problem], device, pass_, found


def compare(path: Path = GOLDEN) -> list[str]:
    """A line per answer that is not the file's."""
    made = devices()
    differences = []
    for row, device, pass_, expected in read(path):
        found = answer(row, made[device], pass_)
        for name in dict.fromkeys([*expected, *found]):
            then, now = expected.get(name, "absent"), found.get(name, "absent")
            if not _same(then, now):
                differences.append(f"{device}, {pass_}, {problem_of(row)!r}: {name}: was {then}, is {now}")
    return differences


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, str) or isinstance(now, str):
        return bool(then == now)
    return bool(then[:2] == now[:2] and abs(then[2] - now[2]) <= 0.01 * abs(then[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the file by what the planner answers now")
    if parser.parse_args().write:
        print(f"golden_plans: {write()} cases in {GOLDEN.stat().st_size // 1024} KiB")
        return 0
    differences = compare()
    print(
        "\n".join(differences) if differences else f"golden_plans: {sum(1 for _ in read())} cases as in {GOLDEN.name}"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
