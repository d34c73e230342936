"""`tune`: which algorithm is the fastest on this device, by measuring, for each pass of each convolution that a model
runs."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastconv import _C, measured, ops, selection, settings, timing
from fastconv.ops import autograd, gradients, transposed
from fastconv.ops.geometry import Geometry, Options
from fastconv.reports import json_text, plain_table

__all__ = ["Convolution", "TuneReport", "TuneRow", "tune"]

_Calls = Mapping[str, Callable[[], object]]


class _Timer(Protocol):
    def __call__(self, calls: _Calls, *, few_rounds: Sequence[str]) -> timing.Measurement: ...


# The cost model's choice stays where nothing is faster by more than the noise: it does not change from run to run.
NOISE = 0.01
QUICK_NOISE = 0.03  # of few rounds

# What is measured at a call.
_CPU_CANDIDATES = 2  # beside PyTorch's
_CLOSE_CANDIDATES = 4


@dataclass(frozen=True)
class Convolution:
    """A pass of a convolution as the operator gets it. Pairs are of height and width."""

    device: torch.device
    dtype: torch.dtype
    input_shape: tuple[int, ...]  # [N, C, H, W]
    weight_shape: tuple[int, ...]  # [K, C/groups, R, S]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    precision: str = "fp32"
    input_format: torch.memory_format = torch.contiguous_format
    weight_format: torch.memory_format = torch.contiguous_format
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    negative_slope: float = 0.01
    max_error: float | None = None
    max_workspace: int | None = None
    residual_after: bool = False
    max_pool: bool = False
    backend_flags: int = field(default_factory=lambda: settings.switches.backend_flags)
    pass_: str = "forward"  # of `selection.PASSES`; a gradient is one of the convolution alone
    trained: bool = False  # the weight of a forward pass changes at every step: packed in every call

    def in_pass(self, pass_: str) -> Convolution:
        """The same convolution in another pass; a gradient without what is computed with it."""
        if pass_ == "forward":
            return self
        bare: dict[str, Any] = {"bias": False, "residual": False, "residual_after": False, "max_pool": False}
        return replace(self, pass_=pass_, activation="none", trained=False, **bare)

    @property
    def key(self) -> measured.Key:
        return measured.device_name(self.device), repr(self.problem()), self.pass_

    def problem(self) -> _C.ConvProblem:
        """As the planner sees it."""
        (n, c, h, w), (k, _, r, s) = self.input_shape, self.weight_shape
        channels_last = torch.channels_last in (self.input_format, self.weight_format)
        return _C.ConvProblem(
            n, c, h, w, k, r, s, self.stride, self.padding, self.dilation, self.groups, ops.dtype_name(self.dtype),
            self.precision, "nhwc" if channels_last else "nchw", self.bias, self.residual, self.activation,
            self.max_error, self.max_workspace, self.residual_after, self.max_pool, packs=self.trained,
        )  # fmt: skip

    def contenders(self, algorithms: Iterable[str], failures: dict[str, str]) -> dict[str, Callable[[], Tensor]]:
        """Each candidate of the pass as a callable on random data; into `failures`, why not. The weight of a forward
        pass is packed already, unless it is trained; what a gradient does with it is done in the call."""
        x = self._random(self.input_shape, self.input_format).relu_()
        fan_in = math.prod(self.weight_shape[1:])
        weight = self._random(self.weight_shape, self.weight_format).mul_(math.sqrt(2.0 / fan_in))
        geometry = self.stride, self.padding, self.dilation
        size = ops.output_size(self.input_shape, self.weight_shape, *geometry)
        output_format = ops.format_of(x, weight)
        output_shape = (self.input_shape[0], self.weight_shape[0], *size)
        calls: dict[str, Callable[[], Tensor]] = {}
        if self.pass_ != "forward":
            grad = self._random(output_shape, output_format)
            return {name: self._gradient_by(name, x, weight, grad) for name in algorithms}
        bias = self._random(self.weight_shape[:1]) if self.bias else None
        residual = self._random(output_shape, output_format) if self.residual else None
        for name in algorithms:
            rest = (*geometry, self.groups)
            tail = (name, self.precision, self.activation, self.negative_slope)
            if name == "torch" or self.trained:
                arguments = (x, weight, bias, residual, *rest, *tail, self.backend_flags, *settings.Limits())
                calls[name] = functools.partial(autograd.conv2d, *arguments, self.residual_after, self.max_pool)
                continue
            try:
                packed = ops.pack_weight(weight, self.groups, name, self.precision)
            except Exception as error:
                failures[name] = timing.message_of(error)
                timing.recover()
                continue
            channels_last = self.weight_format == torch.channels_last
            calls[name] = functools.partial(
                autograd.conv2d_packed, x, packed, self.weight_shape, bias, residual, *rest, channels_last, *tail,
                self.residual_after, self.max_pool,
            )  # fmt: skip
        return calls

    def _gradient_by(self, name: str, x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], Tensor]:
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)
        rest = (geometry, self.precision, self.backend_flags, self.max_error, self.max_workspace)
        if self.pass_ == "backward_input":
            return functools.partial(gradients.input_gradient_by, name, grad, weight, self.input_shape, *rest)
        return functools.partial(gradients.weight_gradient_by, name, x, grad, self.weight_shape, *rest)

    @contextlib.contextmanager
    def switches(self) -> Iterator[None]:
        """PyTorch's switches, which its gradients follow, as they are to be measured: in the convolution's class. Its
        forward convolution has them as arguments."""
        if self.pass_ == "forward" or self.device.type != "cuda":
            yield
            return
        from fastconv.models.compare import pytorch_class

        with pytorch_class(self.precision, benchmark=settings.unpack_flags(self.backend_flags)[0]):
            yield

    def _random(self, shape: Sequence[int], format: torch.memory_format = torch.contiguous_format) -> Tensor:
        own = torch.Generator(self.device).manual_seed(0)  # PyTorch's goes on as if nothing had been tuned
        return torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=format).normal_(generator=own)


class _Recorder(TorchDispatchMode):
    """Counts passes of the convolutions, among all operators that run, whose algorithm `auto` chooses. passes: of a
    layer; None: those of a training step, the gradients of what requires one."""

    def __init__(self, passes: Sequence[str] | None) -> None:
        super().__init__()
        self.passes = passes
        self.found: Counter[Convolution] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known: dict[Any, Callable[..., Any]] = {ops.conv2d_op: _convolution_of, ops.conv_transpose2d_op: _transposed_of}
        if func in known and args[8] == "auto" and ops.dtype_name(args[0].dtype) != "other":
            convolution, of_pass = known[func](*args)
            passes = self._passes(args[0], args[1]) if convolution else ()
            if "backward_weight" in passes and func is ops.conv2d_op:
                convolution = replace(convolution, trained=True)
            for pass_ in passes:
                self.found[convolution.in_pass(of_pass[pass_])] += 1
        return func(*args, **(kwargs or {}))

    def _passes(self, x: Tensor, weight: Tensor) -> Sequence[str]:
        if self.passes is not None:
            return self.passes
        needed = True, x.requires_grad, weight.requires_grad
        return [pass_ for pass_, needs in zip(selection.PASSES, needed, strict=True) if needs]


_SAME_PASSES = {pass_: pass_ for pass_ in selection.PASSES}
# A transposed convolution is an input gradient.
_TRANSPOSED_PASSES = _SAME_PASSES | {"forward": "backward_input", "backward_input": "forward"}


def _convolution_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Any, padding: Any, dilation: Any,
    groups: int, *options: Any,
) -> tuple[Convolution | None, dict[str, str]]:  # fmt: skip
    """Of a call of the operator; None if there is nothing to compute."""
    asked = Options(*options)
    if 0 in (*x.shape, *weight.shape):
        return None, {}
    found = Convolution(
        x.device, x.dtype, tuple(x.shape), tuple(weight.shape), tuple(stride), tuple(padding), tuple(dilation), groups,
        asked.precision, ops.format_of(x), ops.format_of(weight), bias is not None, residual is not None,
        asked.activation, asked.negative_slope, asked.max_error, asked.max_workspace, asked.residual_after,
        asked.max_pool, asked.backend_flags,
    )  # fmt: skip
    return found, _SAME_PASSES


def _transposed_of(
    y: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any, dilation: Any,
    groups: int, algorithm: str, precision: str, flags: int, *limits: Any,
) -> tuple[Convolution | None, dict[str, str]]:  # fmt: skip
    """The convolution whose input gradient the call is."""
    size = transposed.output_size(y.shape, weight.shape[2:], stride, padding, output_padding, dilation)
    shape = (y.shape[0], weight.shape[1] * groups, *size)
    if 0 in (*y.shape, *weight.shape, *shape) or transposed.reason_for_torch(stride, output_padding, dilation):
        return None, {}
    found = Convolution(
        y.device, y.dtype, shape, tuple(weight.shape), tuple(stride), tuple(padding), tuple(dilation), groups,
        precision, ops.format_of(y), ops.format_of(weight), backend_flags=flags,
        **settings.Limits(*limits)._asdict(),
    )  # fmt: skip
    return found, _TRANSPOSED_PASSES


@dataclass(frozen=True)
class TuneRow:
    """A pass of a problem on one device: what the cost model takes, what was measured, what `auto` takes from now on.
    Algorithms are called as in the registry; what an input gradient is made of by a method, too: "phases direct" is one
    convolution for each phase of the stride, "together direct" one for all, "torch" PyTorch's gradient."""

    device: str
    problem: str
    calls: int  # of the model, in one run
    planned: str  # by the cost model
    algorithm: str | None  # the choice; None if nothing could be measured
    us: dict[str, float]  # medians
    failures: dict[str, str]  # algorithm -> why it has no time
    pass_: str = "forward"

    def __str__(self) -> str:
        return self.problem if self.pass_ == "forward" else f"{self.pass_} of {self.problem}"

    @property
    def changed(self) -> bool:
        return self.algorithm is not None and self.algorithm != self.planned

    @property
    def gain(self) -> float | None:
        """The planned algorithm's time over the choice's; None without both."""
        if self.algorithm is None or self.planned not in self.us:
            return None
        return self.us[self.planned] / self.us[self.algorithm]


@dataclass(frozen=True)
class TuneReport:
    """What was measured. `print(report)` shows what changed against the cost model, and by how much."""

    rows: tuple[TuneRow, ...]
    path: str | None  # of the file that keeps the choices; None: they end with the process

    @property
    def changed(self) -> int:
        """Of how many problems the choice is not the cost model's."""
        return sum(row.changed for row in self.rows)

    @property
    def failed(self) -> list[TuneRow]:
        """The problems of which nothing could be measured."""
        return [row for row in self.rows if row.algorithm is None]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given."""
        rows = [asdict(row) | {"gain": row.gain} for row in self.rows]
        return json_text({"path": self.path, "changed": self.changed, "rows": rows}, path)

    def __str__(self) -> str:
        devices = "; ".join(dict.fromkeys(row.device for row in self.rows))
        lines = [
            f"{devices}: {self.changed} of {len(self.rows)} convolutions are faster by another algorithm than planned"
        ]
        cells = []
        for row in self.rows:
            if row.algorithm is None or not row.changed:
                continue
            gain = "" if row.gain is None else f"{row.gain:.2f}x"
            planned = f"{row.us[row.planned]:.1f}" if row.planned in row.us else "failed"
            choice = f"{row.us[row.algorithm]:.1f}"
            cells.append([row.pass_, row.problem, str(row.calls), row.planned, planned, row.algorithm, choice, gain])
        lines += plain_table(["pass", "problem", "calls", "planned", "us", "measured", "us", "gain"], cells)
        both = [row for row in self.rows if row.gain is not None]
        before = sum(row.calls * row.us[row.planned] for row in both) / 1e3
        after = sum(row.calls * row.us[row.algorithm or ""] for row in both) / 1e3
        lines.append(f"all calls together: {before:.3f} ms as planned by the cost model, {after:.3f} ms as measured")
        for row in self.rows:
            lines += [f"{row}: {name} left out: {text}" for name, text in row.failures.items()]
        lines.append(f"kept in {self.path}" if self.path else "not kept beyond this process: FASTCONV_CACHE_DIR is ''")
        return "\n".join(lines)


def tune(
    model: Callable[..., Any],
    *args: Any,
    max_error: float | None = None,
    max_workspace: int | None = None,
    passes: Sequence[str] | None = None,
    **kwargs: Any,
) -> TuneReport:
    """Measures which algorithm is the fastest for each convolution that ``model(*args, **kwargs)`` runs, and for its
    gradients where it trains, and makes ``algorithm="auto"`` take it: from now on in this process, and, by a file, in
    those to come.

    Args:
        model: a module with fastconv's layers (`fastconv.swap_`, `fastconv.fuse`), or any callable that calls
            `fastconv.conv2d`. It is called once, as it is (in training mode that updates its batch norms, as any call
            does); nothing is propagated backward. Its weights are not touched: random ones of their shapes are
            measured.
        max_error, max_workspace: measure what `auto` may take within these limits (see `fastconv.conv2d`), for the
            calls that give none of their own. The choices are those of calls and layers with the same limits.
        passes: some of "forward", "backward_input" and "backward_weight", to be measured of every convolution. None:
            what the model is for. Of a module in training mode (or another callable), where gradients are enabled,
            those of a training step: the forward pass, and the gradient of each input and weight that requires one (a
            first layer's input does not). In eval mode, or under `torch.no_grad()`, the forward pass alone.
        args, kwargs: what it is called with. Sizes, dtypes, memory formats and the device are what is measured.

    Returns:
        A TuneReport with a row per pass and problem, that is N, C, H, W, K, R, S, stride, padding, dilation, groups,
        layout, class, and, of a forward pass, what is computed with it: what `fastconv.fuse` makes of a model is other
        problems than the model's. The candidates are those that `auto` may take, ours and PyTorch's with its switches
        as they are: 20 rounds in turns, from cold caches. A forward pass has the bias, the residual and the activation
        of the call, and its weight packed beforehand, or in the call where the weight's gradient is measured, too, as
        training does: what was measured last counts. An input gradient packs in the call, and PyTorch's gradients are
        measured in the convolution's class, whatever its switch says of that. A transposed convolution is an input
        gradient, and its input gradient a convolution.

    Raises:
        TypeError: `model` cannot be called, or `max_error` is no number, or `passes` no names.
        ValueError: `max_error` is below 1, `max_workspace` below 0; `passes` has a name that is none, or has none; the
            model ran no convolution whose algorithm is "auto".
        RuntimeError: FASTCONV_ALGORITHM or FASTCONV_DISABLE takes the choice away.
        OSError: the file in FASTCONV_CACHE_DIR cannot be written.
    """
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module or another callable")
    limits = settings.resolve_limits(max_error, max_workspace, "torch")  # of the caller alone
    if passes is not None:
        passes = selection.check_passes(passes)
    elif not torch.is_grad_enabled() or (isinstance(model, nn.Module) and not model.training):
        passes = ("forward",)
    return measure(limited(record(model, *args, passes=passes, **kwargs), limits))


def limited(convolutions: Mapping[Convolution, int], limits: settings.Limits) -> Counter[Convolution]:
    """The same under limits, where they have none of their own."""
    result: Counter[Convolution] = Counter()
    for convolution, count in convolutions.items():
        own = {name: limit for name, limit in limits._asdict().items() if getattr(convolution, name) is None}
        result[replace(convolution, **own)] += count
    return result


def require_choice() -> None:
    """RuntimeError if a variable says what "auto" is: there is nothing to choose then."""
    if settings.auto_algorithm != "auto":
        variable = "FASTCONV_DISABLE" if settings.disabled else "FASTCONV_ALGORITHM"
        raise RuntimeError(f"{variable} is set to {os.environ.get(variable)!r}; expected unset: there is no choice")


def record(
    model: Callable[..., Any], *args: Any, passes: Sequence[str] | None = ("forward",), **kwargs: Any
) -> Counter[Convolution]:
    """The convolutions of one call for which `auto` chooses, by pass, and how often each runs. passes: None for those
    of a training step. Raises as `tune`."""
    require_choice()
    # A mode sees nothing of what was compiled.
    force_eager, recorder = torch.compiler.set_stance("force_eager"), _Recorder(passes)
    with torch.set_grad_enabled(passes is None), force_eager, recorder:
        model(*args, **kwargs)
    if not recorder.found:
        raise ValueError(
            f"model is a {type(model).__name__} that ran no convolution with algorithm 'auto'; expected one with "
            "fastconv's layers (fastconv.swap_)"
        )
    return recorder.found


def measure(
    convolutions: Mapping[Convolution, int],
    rounds: int = 20,
    progress: Callable[[TuneRow, int, int], None] = lambda row, done, total: None,
) -> TuneReport:
    """Measures and keeps the choices for `convolutions`, with how often each is called; `tune` with its rounds.

    progress: called after each problem with its row, its number from 1, and how many there are. What was measured
    before an exception is kept, too. Raises OSError, and `fastconv.timing.DeviceLost` if the GPU fails.
    """
    require_choice()
    measured.require_writable()
    # Of what is one problem to the planner (with and without a bias, say) the most frequent form is measured.
    forms: dict[measured.Key, Convolution] = {}
    calls: Counter[measured.Key] = Counter()
    for convolution, count in sorted(convolutions.items(), key=lambda item: -item[1]):
        forms.setdefault(convolution.key, convolution)
        calls[convolution.key] += count
    rows: list[TuneRow] = []
    try:
        for seed, (key, convolution) in enumerate(forms.items()):
            device, problem, pass_ = key
            time = functools.partial(timing.measure, device=convolution.device, rounds=rounds, seed=seed)
            planned, algorithm, us, failures = _measure(convolution, _candidates(convolution), time, NOISE)
            rows.append(TuneRow(device, problem, calls[key], planned, algorithm, us, failures, pass_))
            if convolution.device.type == "cuda":
                torch.cuda.empty_cache()
            progress(rows[-1], len(rows), len(forms))
    finally:
        measured.add(
            measured.Choice(row.device, row.problem, row.algorithm, row.us, row.pass_)
            for row in rows
            if row.algorithm is not None
        )
    file = measured.path()
    return TuneReport(tuple(rows), None if file is None else str(file))


def measure_quickly(convolution: Convolution, kept: bool) -> None:
    """Makes `quick_choice` the choice of `auto`. kept: in the file, too, if that can be written."""
    choice = quick_choice(convolution)
    if choice is not None:
        with contextlib.suppress(OSError):
            measured.add([choice], kept and bool(choice.us))


def quick_choice(convolution: Convolution) -> measured.Choice | None:
    """Measures those candidates that the cost model does not tell from the fastest, with few rounds; None where there
    is one alone."""
    device, rows = convolution.device, _candidates(convolution)
    if device.type == "cpu":
        rows = [row for i, row in enumerate(rows) if i < _CPU_CANDIDATES or row["algorithm"] == "torch"]
        time: _Timer = functools.partial(timing.measure, device=device, rounds=3)
    else:
        # Somewhat more than the planner's own doubt, which has a preference among them (csrc/plan/registry.h).
        rows = [row for row in rows[:_CLOSE_CANDIDATES] if row["cost_us"] <= 1.1 * _C.close_costs * rows[0]["cost_us"]]

        def time(calls: _Calls, *, few_rounds: Sequence[str]) -> timing.Measurement:
            return timing.estimate(calls, device, samples=5)

    if len(rows) < 2:
        return None
    planned, algorithm, us, _ = _measure(convolution, rows, time, QUICK_NOISE)
    return measured.Choice(*convolution.key[:2], algorithm or planned, us, convolution.pass_)


def _candidates(convolution: Convolution) -> list[dict[str, Any]]:
    """What `auto` may take, the cheapest first."""
    every = selection.candidates(convolution.pass_, convolution.problem(), ops.device_info(convolution.device))
    # PyTorch's alone where none is within the class: what `auto` takes then.
    rows = [row for row in every if row["auto_eligible"]] or [row for row in every if row["algorithm"] == "torch"]
    return sorted(rows, key=lambda row: float(row["cost_us"]))


def _measure(
    convolution: Convolution, rows: Sequence[Mapping[str, Any]], time: _Timer, noise: float
) -> tuple[str, str | None, dict[str, float], dict[str, str]]:
    """(what the cost model takes, what of `rows` was measured to be the fastest, medians, failures). noise: what is
    planned stays, if nothing is faster by more."""
    device = convolution.device
    planned = _C.choose_by_cost(convolution.pass_, convolution.problem(), ops.device_info(device))
    failures: dict[str, str] = {}
    us: dict[str, float] = {}
    try:
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        # Its calls are nobody's business: a mode of the caller's is not told.
        with torch.no_grad(), on_device, convolution.switches(), torch._C.DisableTorchFunction():
            calls = convolution.contenders([row["algorithm"] for row in rows], failures)
            few = timing.drop_hopeless(rows, calls, device, failures)
            found = time(calls, few_rounds=few)
        us, failures = {name: round(time.us, 2) for name, time in found.timings.items()}, failures | found.failures
    except timing.DeviceLost:
        raise
    except Exception as error:  # of the problem as a whole: out of memory for its data, say
        failures["all candidates"] = timing.message_of(error)
        timing.recover()
    best = min(us, key=us.__getitem__, default=None)
    if best is not None and us.get(planned, math.inf) <= (1 + noise) * us[best]:
        best = planned
    return planned, best, us, failures
