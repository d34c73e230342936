"""What the tests of the rewrites share: `torch.compile` that rewrites as `fastconv.compile` does and runs the graph as
it is, without Inductor."""

import copy
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layers import relative_error
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import lowering  # noqa: F401  (max-pools are decomposed by it)
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastconv import rewrites
from fastconv.rewrites import Asked, Concatenation, Left, Taken

# An algorithm of ours that fits nearly everything, so that the planner's costs decide nothing.
OURS = Asked(algorithm="implicit_gemm")


class Rewriting:
    """A backend; what it found and the graphs that it made."""

    def __init__(self, asked: Asked = OURS) -> None:
        self.asked = asked
        self.found: list[Taken] = []
        self.left: list[tuple[str, str]] = []
        self.concatenations: list[str] = []  # why each one was left
        self.graphs: list[fx.Graph] = []

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.rewrite(joint)
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

        return aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            inference_compiler=lambda graph, _: make_boxed_func(self.rewrite(graph).forward),
            partition_fn=partition,
            decompositions=rewrites.table(select_decomp_table()),
        )(module, inputs)

    def rewrite(self, module: fx.GraphModule) -> fx.GraphModule:
        records = rewrites.rewrite(module.graph, self.asked, select_decomp_table())
        self.found += [record for record in records if isinstance(record, Taken)]
        self.left += [(record.what, record.code) for record in records if isinstance(record, Left)]
        self.concatenations += [record.code for record in records if isinstance(record, Concatenation)]
        self.graphs.append(module.graph)
        module.recompile()
        return module

    @property
    def parts(self) -> list[str]:
        return ["+".join(taken.parts) for taken in self.found]

    @property
    def codes(self) -> list[str]:
        return [taken.obstacle[0] for taken in self.found]

    def count(self, target: Any) -> int:
        return sum(len(graph.find_nodes(op="call_function", target=target)) for graph in self.graphs)


def compiled(model: Any, asked: Asked = OURS, **options: Any) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(asked)
    return torch.compile(model, backend=backend, **options), backend


def check(model: nn.Module, x: Tensor, asked: Asked = OURS, limit: float = 1e-5, **options: Any) -> Rewriting:
    """Rewrites the model's graph and holds what it computes against the model in float64."""
    function, backend = compiled(model.eval(), asked, **options)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        y = function(x)
        again = model(x)
    assert (y.shape, y.dtype, y.stride()) == (again.shape, again.dtype, again.stride())
    assert relative_error(y.double(), exact) < limit
    return backend


def on_a_gpu(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float16, norms: torch.dtype | None = None,
    asked: Asked = OURS,
) -> fx.Graph:  # fmt: skip
    """The rewritten graph of a call with an input in channels_last on a GPU, which need not be there. norms: the dtype
    of the parameters of modules that are called so."""
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        x = torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last)
        named = {}
        for name, each in model.named_parameters():
            given = torch.empty(each.shape, dtype=(norms or dtype) if "norm" in name else dtype)
            named[name] = given.to(memory_format=torch.channels_last) if given.dim() == 4 else given
        known = select_decomp_table()
        table = rewrites.table(known)
        graph = make_fx(lambda x, named: torch.func.functional_call(model, named, (x,)), table)(x, named).graph
    graph.eliminate_dead_code()
    rewrites.rewrite(graph, asked, known)
    kept = {operator for operator, how in known.items() if table.get(operator) is not how}
    left = kept & {node.target for node in graph.nodes}
    assert not left, left  # Inductor has no code for what it takes apart
    return graph
