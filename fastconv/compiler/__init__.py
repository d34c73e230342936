"""compile: torch.compile with fastconv's convolutions. Dynamo captures a model, the rewrites put fastconv's operators
into its graph, with batch norm, residual and activation inside them, and Inductor compiles the rest."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext

from fastconv import frozen as frozen_code
from fastconv import settings
from fastconv.nn import check_settings
from fastconv.rewrites import Asked
from fastconv.rewrites.report import RewriteReport

__all__ = ["RewriteReport", "backend", "compile"]

_DYNAMOS_OPTION = "guard_filter_fn"  # of torch.compile's options the only one that is not the backend's
_OWN_OPTIONS = ("algorithm", "precision", "max_error", "max_workspace")


class _Backend:
    """One call of `compile`: what it asked, and what came of it."""

    def __init__(
        self, algorithm: str = "auto", precision: str | None = None, max_error: float | None = None,
        max_workspace: int | None = None, frozen: bool = False, report: RewriteReport | None = None,
    ) -> None:  # fmt: skip
        check_settings(algorithm, precision, max_error, max_workspace)
        settings.check_flag("frozen", frozen)
        self.asked = Asked(algorithm, precision, max_error, max_workspace)
        self.frozen, self.report = frozen, report
        self.codes: set[CodeType] = set()  # of which it has compiled something
        self.model: weakref.ref[nn.Module] | None = None  # whose parameters are constants of what it compiles
        self.__name__ = "fastconv"

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], *, mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        from fastconv.compiler.inductor import compile_graph

        self.codes.update((TracingContext.get_traced_code() or [])[:1])
        if self.model is not None and (model := self.model()) is not None:  # which may have other modules by now
            frozen_code.register(model, self)
        return compile_graph(graph, inputs, self.asked, self.frozen, mode, options or {}, self.report)

    def forget(self) -> None:
        """Has Dynamo compile again what it has compiled: parameters that are constants have changed."""
        from torch._dynamo.eval_frame import remove_from_cache

        while self.codes:
            remove_from_cache(self.codes.pop())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"codes": set(), "model": None}  # a copy has compiled nothing yet

    def reset(self) -> None:
        """What torch.compiler.reset() calls."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def backend(
    graph: fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fastconv")``. Of its `options` it takes ``algorithm``, ``precision``,
    ``max_error`` and ``max_workspace``, which mean what they do for `compile`; the others are Inductor's."""
    options = dict(options or {})
    if "frozen" in options:
        raise ValueError(
            f"options has 'frozen', {options['frozen']!r}; expected Inductor's name, 'freezing', "
            "or fastconv.compile(model, frozen=True)"
        )
    own = {name: options.pop(name) for name in _OWN_OPTIONS if name in options}
    return _Backend(**own)(graph, inputs, mode=mode, options=options)


def compile(
    model: Any,
    precision: str | None = None,
    *,
    algorithm: str = "auto",
    max_error: float | None = None,
    max_workspace: int | None = None,
    frozen: bool = False,
    **torch_compile_options: Any,
) -> Any:
    """`torch.compile` with fastconv's convolutions: for inference and training, on plain models.

    What follows a convolution goes into it where the kernels can take it: a batch norm with running statistics, a sum
    of the output's shape, ReLU, ReLU6, SiLU, LeakyReLU, GELU, Hardswish, Sigmoid, in this order. A convolution that the
    planner leaves to PyTorch is PyTorch's. Everything else is Inductor's.

    Args:
        model: a torch.nn.Module or a function, as `torch.compile` takes it.
        precision, algorithm, max_error, max_workspace: as for `fastconv.conv2d`; convolutions that a named algorithm
            does not fit stay PyTorch's, and the report says why. A precision of None is PyTorch's switch as it is when
            a graph is compiled.
        frozen: parameters and buffers are constants of what is compiled without gradients: batch norms are folded and
            weights packed once, and again after `load_state_dict` and `fastconv.refresh`. **Another change of a
            parameter is not seen**, as with Inductor's freezing. Otherwise
            compiled code follows its parameters, and folds and packs in every call.
        torch_compile_options: ``mode``, ``dynamic``, ``fullgraph``, ``options`` as for `torch.compile`; with `frozen`,
            ``dynamic`` is False by default: each size is compiled.

    Returns:
        What `torch.compile` returns, with a `report` (`RewriteReport`) of the graphs that were compiled so far.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        RuntimeError: a mode or an option that Inductor does not know.
    """
    if "backend" in torch_compile_options:
        raise TypeError("fastconv.compile has no backend to choose; use torch.compile")
    if not callable(model) or isinstance(model, type):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module or a function")
    mode, options = map(torch_compile_options.get, ("mode", "options"))
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options is a {type(options).__name__}; expected a dict")
    inductors = dict(options or {})
    guard_filter = inductors.pop(_DYNAMOS_OPTION, None)
    if guard_filter is not None and not callable(guard_filter):
        raise TypeError(f"{_DYNAMOS_OPTION} is {guard_filter!r}; expected a function of Dynamo's guards")
    if mode is not None or inductors:
        torch._TorchCompileInductorWrapper(mode, inductors, None)  # which raises for those that it does not know
    ours = _Backend(algorithm, precision, max_error, max_workspace, frozen, RewriteReport())
    if frozen:  # a packing is of one size
        torch_compile_options.setdefault("dynamic", False)
    return _compiled(model, ours, torch_compile_options)


def _compiled(model: Any, ours: _Backend, options: dict[str, Any]) -> Any:
    its = options.get("options")
    own = {} if its is None else {"options": dict(its)}  # of which PyTorch takes what is Dynamo's
    compiled: Any = torch.compile(model, backend=ours, **options | own)
    if compiled is model:  # Dynamo is disabled; what is returned has a report, and the caller's model has none
        compiled = torch.compiler.disable(model)
    is_module = isinstance(compiled, nn.Module)  # what is compiled of a compiled module is a function
    if is_module:
        # Of the instance: where Dynamo traces a compiled module it knows PyTorch's class, and none made of that.
        compiled.__dict__["__reduce_ex__"] = lambda protocol: (_compiled, (model, ours, options))
    if ours.frozen and is_module:
        compiled.__dict__["forward"] = _freezing(compiled.forward)
    elif ours.frozen:
        compiled = _freezing(compiled)
    if ours.frozen and isinstance(model, nn.Module):
        ours.model = weakref.ref(model)  # of which nothing is left at the first call if it is what compiled another
        frozen_code.register(model, ours)
    compiled.__dict__["report"] = ours.report
    return compiled


class _Switch:
    """Inductor's `freezing`, on within. In torch 2.14 each thread has its own. Where it is the process's, it stays on
    until the last thread has left, and is then as it was before the first one came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within, self._before = 0, False

    @functools.cached_property
    def _is_of_a_thread(self) -> bool:
        from torch._inductor import config

        before = config.freezing
        contextvars.copy_context().run(setattr, config, "freezing", not before)
        is_own: bool = config.freezing == before
        config.freezing = before
        return is_own

    def enter(self) -> bool:
        """Returns what `leave` is to be told."""
        from torch._inductor import config

        with self._lock:
            before: bool = config.freezing
            if not self._is_of_a_thread:
                self._before = self._before if self._within else before
                self._within += 1
            config.freezing = True  # as config.patch, which takes four times as long, in every call
        return before

    def leave(self, before: bool) -> None:
        from torch._inductor import config

        with self._lock:
            if not self._is_of_a_thread:
                self._within -= 1
                before = True if self._within else self._before
            config.freezing = before


_switch = _Switch()


def _freezing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo makes parameters constants, and guards their identity, where Inductor's switch is on as it traces."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # within other compiled code, whose parameters are as it says
            return function(*args, **kwargs)
        before = _switch.enter()
        try:
            return function(*args, **kwargs)
        finally:
            _switch.leave(before)

    return call
