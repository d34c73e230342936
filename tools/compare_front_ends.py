"""What `fastconv.compile` and `fastconv.fuse` make of a network, on a GPU that need not be there: every convolution,
what is fused with it and the planner's time, and every pass that is left around them with the bytes that it moves.

usage: python tools/compare_front_ends.py efficientnet_b0 hrnet_w18 [--gpu h100] [--batch 64] [--class fp16] [--list]

Networks are those of the corpus, else timm's. A pass's time is a launch and its bytes at the GPU's bandwidth. Passes
of `compile` are what Inductor makes of them, roughly: what is computed by element goes into those who read it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import lowering as _inductor  # noqa: F401  (max-pools are decomposed by it)
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import golden_plans  # noqa: E402

import fastconv  # noqa: E402
from benchmarks.networks import zoo  # noqa: E402
from fastconv import ops, rewrites  # noqa: E402
from fastconv.fuse import lowering  # noqa: E402
from fastconv.reports import by, plain_table  # noqa: E402
from fastconv.rewrites import Asked, Taken  # noqa: E402
from fastconv.rewrites.convolution import call_of, plan_of  # noqa: E402

CLASSES = {
    "fp16": (torch.float16, None), "bf16": (torch.bfloat16, None), "tf32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "fp32"),
}  # fmt: skip
LAUNCH_US = 2.0
# What moves nothing, by the operator's name.
VIEWS = {
    "slice", "narrow", "view", "permute", "getitem", "reshape", "flatten", "as_strided_", "as_strided", "squeeze",
    "unsqueeze", "expand", "empty", "getattr", "wide", "size",
}  # fmt: skip
EXTERN = {"convolution", "addmm", "mm", "bmm"}  # kernels that Inductor does not make
REDUCTIONS = {
    "mean", "sum", "max_pool2d_with_indices", "_low_memory_max_pool_with_offsets", "avg_pool2d", "var_mean", "amax",
    "_softmax",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A convolution, or a pass over memory between them."""

    what: str  # "conv+bn+silu", "mean"
    shape: str  # of the value
    kernel: str = ""  # of a convolution, K x C/groups x R x S / stride
    algorithm: str = ""
    us: float = 0.0
    bytes: int = 0  # read and written, of a pass


# The graphs ----------------------------------------------------------------------------------------------------------


def fake_parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters and buffers of a model in channels_last on a GPU, by name, without values. In a FakeTensorMode."""
    found = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        given = torch.empty(each.shape, dtype=dtype if each.is_floating_point() else each.dtype, device="cuda")
        found[name] = given.to(memory_format=torch.channels_last) if given.dim() == 4 else given
    return found


def picture(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda").to(memory_format=torch.channels_last)


def compiled_graph(model: nn.Module, shape: Iterable[int], dtype: torch.dtype, asked: Asked) -> fx.Graph:
    """What `compile` gives Inductor of a frozen model."""
    table = rewrites.table(select_decomp_table())
    with FakeTensorMode(), torch.no_grad():
        x, named = picture(shape, dtype), fake_parameters(model, dtype)
        call = torch.func.functionalize(lambda x, named: torch.func.functional_call(model, named, (x,)))
        graph = make_fx(call, table)(x, named).graph
    graph.eliminate_dead_code()
    rewrites.rewrite(graph, asked, select_decomp_table())
    return graph


def fused_graph(
    model: nn.Module, shape: Iterable[int], dtype: torch.dtype, algorithm: str = "auto", precision: str | None = None
) -> fx.Graph:
    """What runs of the fused model. It is fused where it is, with the numbers that are there, before it goes to the
    GPU."""
    model = copy.deepcopy(model).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused: Any = fastconv.fuse(model, algorithm=algorithm, precision=precision)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for name, tensor in fake_parameters(fused, dtype).items():
            inner, _, attribute = name.rpartition(".")
            owner = fused.get_submodule(inner)
            is_parameter = attribute in owner._parameters
            setattr(owner, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
        graph = copy.deepcopy(fused.graph)
        edit, _ = lowering.rewritten(fused, graph, (picture(shape, dtype),), fused._found)
        if edit is None:
            raise RuntimeError(f"what {type(model).__name__} computes takes values, which are not there")
        calls = {node: call for node in graph.nodes if (call := call_of(node)) is not None}
        edit.finish()
    for node in graph.find_nodes(op="call_module"):
        node.meta["class"] = type(fused.get_submodule(str(node.target))).__name__
    for node, call in calls.items():
        taken = node.meta.get("fastconv")
        if isinstance(taken, Taken):
            row = plan_of(call)
            assert row is not None
            taken.algorithm = row["algorithm"]
            taken.expect(call)
    return graph


# What is in them -----------------------------------------------------------------------------------------------------


def convolutions(graph: fx.Graph) -> list[Taken]:
    """In the order of the graph; each one's record as the front ends make it, with the planner's answer."""
    return [taken for node in graph.nodes if isinstance(taken := node.meta.get("fastconv"), Taken)]


def steps(graph: fx.Graph, device: Any) -> list[Step]:
    """What a call computes, constants apart."""
    moving = _moving(graph)
    found = (_step(node, moving, device) for node in graph.nodes if node in moving and node.op != "placeholder")
    return [step for step in found if step is not None]


def _moving(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the picture."""
    found = {next(iter(graph.find_nodes(op="placeholder")))}
    for node in graph.nodes:
        if node.op != "output" and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.meta["class"])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0]


def _value(node: fx.Node) -> Any:
    """The first one of several."""
    value = node.meta.get("val")
    return value[0] if isinstance(value, (tuple, list)) and value else value


def _is_view(node: fx.Node) -> bool:
    return _name(node) in VIEWS or not isinstance(_value(node), Tensor)


def _is_inductors(node: fx.Node) -> bool:
    """Whether it is in code that Inductor makes, or a part of it."""
    is_ours = isinstance(node.meta.get("fastconv"), Taken) or _name(node) in EXTERN
    return isinstance(node.target, torch._ops.OpOverload) and not is_ours


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes it where it is read, and nowhere else."""
    if not _is_inductors(node) or _name(node) in {*REDUCTIONS, *VIEWS, "channel_scatter"}:
        return False
    return all(_is_inductors(user) for user in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _reads(node: fx.Node, moving: set[fx.Node]) -> Iterator[fx.Node]:
    """The values in memory that a pass reads."""
    for each in node.all_input_nodes:
        if each in moving:
            is_of_inlined = _is_view(each) and any(map(_is_inlined, each.all_input_nodes))
            if _is_inlined(each) or is_of_inlined:
                yield from _reads(each, moving)
            elif isinstance(_value(each), Tensor):
                yield each


def _step(node: fx.Node, moving: set[fx.Node], device: Any) -> Step | None:
    taken, value = node.meta.get("fastconv"), _value(node)
    if isinstance(taken, Taken):
        kernel = f"{taken.shape}/{taken.stride}"
        return Step("+".join(taken.parts), by(value.shape), kernel, taken.algorithm, taken.us or 0.0)
    if _is_view(node) or _is_inlined(node):
        return None
    what, values = _name(node), [value, *(_value(each) for each in dict.fromkeys(_reads(node, moving)))]
    if what in ("channel_scatter", "copy_into"):  # a range of the tensor is written, the rest is not read
        source: Any = node.args[0]
        inner = [_value(each) for each in _reads(source, moving)] if _is_inlined(source) else [_value(source)]
        values = [_value(source), *inner]
    elif what == "cleared":
        values = [value[:, node.args[1] :]]  # type: ignore[misc]
    moved = sum(each.numel() * each.element_size() for each in values)
    us = LAUNCH_US + 1e6 * moved / device.bandwidth_bytes_per_s
    return Step(what, by(values[0].shape), us=us, bytes=moved)


# What is printed -----------------------------------------------------------------------------------------------------


def summary(found: list[Step]) -> list[list[str]]:
    """Rows of kinds of steps: how many, their time and bytes."""
    kinds: dict[str, list[Step]] = collections.defaultdict(list)
    for step in found:
        kinds[f"{step.what}, {step.algorithm}" if step.kernel else step.what].append(step)
    return [
        [kind, str(len(each)), f"{sum(s.us for s in each):.0f}", f"{sum(s.bytes for s in each) / 1e6:.1f}"]
        for kind, each in sorted(kinds.items(), key=lambda item: ("," not in item[0], item[0]))
    ]


def compare(name: str, gpu: str, batch: int, cls: str, is_listed: bool) -> None:
    dtype, precision = CLASSES[cls]
    device = golden_plans.devices()[gpu]
    ops.device_info = lambda _: device  # type: ignore[assignment]
    if name in zoo.names():
        entry = zoo.network(name)
        model, shape = entry.make().eval(), (batch, zoo.channels(name), entry.image, entry.image)
    else:
        import timm

        model, shape = timm.create_model(name).eval(), (batch, 3, 224, 224)
    ours = {}
    try:
        ours["fuse"] = fused_graph(model, shape, dtype, precision=precision)
    except fastconv.UnsupportedError as error:
        print(f"{name}: fuse: {error}")
    ours["compile"] = compiled_graph(model, shape, dtype, Asked(precision=precision, packed=True, scatters=True))
    for front_end, graph in ours.items():
        found = steps(graph, device)
        inside, outside = (sum(s.us for s in found if bool(s.kernel) == which) for which in (True, False))
        print(f"{name} {cls} {batch} {gpu} {front_end}: convolutions {inside:.0f} us, passes {outside:.0f} us")
        if is_listed:
            rows = [[s.what, s.kernel, s.shape, s.algorithm, f"{s.us:.1f}", f"{s.bytes / 1e6:.1f}"] for s in found]
            print("\n".join(plain_table(["step", "kernel", "value", "algorithm", "us", "MB"], rows)))
        print("\n".join(plain_table(["step", "count", "us", "MB"], summary(found))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--gpu", default="h100", choices=list(golden_plans.devices()))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--class", dest="cls", default="fp16", choices=list(CLASSES))
    parser.add_argument("--list", action="store_true", help="every step")
    arguments = parser.parse_args()
    for name in arguments.networks:
        compare(name, arguments.gpu, arguments.batch, arguments.cls, arguments.list)


if __name__ == "__main__":
    main()
