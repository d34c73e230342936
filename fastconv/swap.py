"""swap_: turns the convolutions of a model into fastconv's in place, and reports on every one of them.

A module is swapped by changing its class and adding one attribute, so its identity, parameters, hooks, names and
everything else that hangs on it survive by construction; undo() takes both back.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fastconv import ops, selection, serving, settings
from fastconv.eager import LayerState
from fastconv.layer import Layer
from fastconv.nn import Conv2d, check_settings
from fastconv.reports import by, json_text, plain_table
from fastconv.tensors import is_distributed
from fastconv.views import Conv1d, ConvTranspose2d, without_height

__all__ = ["SwapReport", "SwapRow", "swap_"]

# PyTorch's classes and ours; what is in the report but never swapped.
_SERVED: dict[type[nn.Module], type[Layer]] = {
    nn.Conv2d: Conv2d, nn.ConvTranspose2d: ConvTranspose2d, nn.Conv1d: Conv1d,
}  # fmt: skip
_NOT_SERVED = (nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d)


def _nothing() -> None:
    """What is left of a layer in a row that was read from a file."""


@dataclass
class SwapRow:
    """One convolution of the model: what it is, whether it was swapped, and why not.

    `algorithm` and `last_input_shape` are live: before the first eager call the algorithm asked for ("auto": the choice
    depends on the input, and is one of `candidates` or "torch"), after it what ran, and for which input.
    """

    names: tuple[str, ...]  # every name under which the model holds it; "" is the model itself
    shape: str  # of the weight, K x C/groups x R x S; of a transposed convolution C x K/groups x R x S
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    dtype: str
    device: str
    swapped: bool = False  # in a dry run: would be
    candidates: tuple[str, ...] = ()  # what fits of the algorithms asked for
    reason_code: str = ""  # why not: for programs
    reason: str = ""  # why not: for people
    requested: str = "auto"
    kind: str = "Conv2d"  # PyTorch's class that it is, or derives from
    output_padding: tuple[int, ...] = ()  # of a transposed convolution
    _required_grad: bool = field(default=False, repr=False, compare=False)  # the weight, before it was frozen
    _module: Callable[[], nn.Module | None] = field(default=lambda: None, repr=False, compare=False)
    _state: Callable[[], LayerState | None] = field(default=lambda: None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in a file is of the row alone: it follows no layer."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_module", "_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=_nothing, _state=_nothing)

    @property
    def algorithm(self) -> str | None:
        """What ran last; the algorithm asked for if nothing ran yet; None if the layer is not fastconv's."""
        if not self.swapped and self.reason_code != "already_swapped":
            return None
        state = self._state()
        return state.last_algorithm if state is not None and state.last_algorithm is not None else self.requested

    @property
    def last_input_shape(self) -> tuple[int, ...] | None:
        """The shape of the input of the most recent eager call."""
        state = self._state()
        shape = None if state is None else state.last_input_shape
        return without_height(shape) if self.kind == "Conv1d" else shape

    def choice(self, pass_: str) -> str | None:
        """What a pass takes by the planner, for the input of the most recent eager call: an algorithm, of an input
        gradient with what is made by it ("phases direct", or "torch", PyTorch's gradient); "(measured)" behind it says
        that `fastconv.tune` found it. Of the forward pass that is `algorithm`. None before such a call."""
        (pass_,) = selection.check_passes((pass_,))
        module, state = self._module(), self._state()
        if pass_ == "forward":
            return self.algorithm
        return None if module is None or state is None else serving.gradient(module, state, pass_)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}
        return row | {"algorithm": self.algorithm, "last_input_shape": self.last_input_shape}


class SwapReport:
    """What `swap_` did; `rows` has a `SwapRow` for each convolution. `print(report)` shows a table. Rows follow the
    layers: print it again after a forward pass."""

    def __init__(self, rows: list[SwapRow], dry_run: bool = False) -> None:
        self.rows = rows
        self.dry_run = dry_run
        self.undone = False

    @property
    def swapped(self) -> int:
        """How many convolutions were swapped, or in a dry run would be."""
        return sum(row.swapped for row in self.rows)

    @property
    def total(self) -> int:
        """How many convolutions the model has, each counted once."""
        return len(self.rows)

    @property
    def ours(self) -> int | None:
        """In how many an algorithm of fastconv's own ran last; None before the first eager call."""
        ran = [row.algorithm for row in self.rows if row.last_input_shape is not None]
        return sum(not selection.is_librarys(algorithm) for algorithm in ran if algorithm) if ran else None

    @property
    def advice(self) -> str:
        """What channels_last is expected to spare the layers that were called in NCHW; empty: nothing."""
        layers = ((row._module(), row._state()) for row in self.rows)
        return serving.layout_advice((module, state) for module, state in layers if module and state)

    def undo(self) -> None:
        """Makes the swapped layers PyTorch's again. What is gone, or was undone before, is left alone.

        Warns:
            UserWarning: naming layers whose class is another one since (torch.nn.utils.parametrize makes one). They
                stay fastconv's; `undone` stays False, and undo() can be called again once the class is what it was. A
                copy of a report, or one from a file, follows no layer, and names all.
        """
        kept = []
        for row in self.rows:
            if row.swapped and row._module is _nothing:
                kept.append(f"{', '.join(row.names) or '(model)'}, which a copy of a report does not follow")
            module, state = row._module(), row._state()
            if not row.swapped or module is None or state is None:
                continue
            swapped_again = module.__dict__.get("_fastconv") is not state
            if swapped_again:
                continue
            before = {ours: torchs for torchs, ours in _SERVED.items()}.get(_class_below(type(module)))  # type: ignore[call-overload]
            if before is None:
                kept.append(f"{', '.join(row.names) or '(model)'} is a {type(module).__name__}")
                continue
            state.drop_packed(module)
            if row._required_grad:
                for name, parameter in module.named_parameters(recurse=False):
                    if name.startswith("weight"):  # or weight_orig, weight_v, of which a hook computes it since
                        parameter.requires_grad_(True)
            del module.__dict__["_fastconv"]
            _set_class(module, before)
        if kept:
            warnings.warn(f"not undone: {'; '.join(kept)}", UserWarning, stacklevel=2)
        self.undone = not self.dry_run and not kept

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given."""
        head = {
            "swapped": self.swapped, "total": self.total, "dry_run": self.dry_run, "undone": self.undone,
            "ours": self.ours, "advice": self.advice,
        }  # fmt: skip
        return json_text(head | {"rows": [row.to_dict() for row in self.rows]}, path)

    def table(self, passes: Sequence[str] = ("forward",)) -> str:
        """The report as `print` shows it, or with what gradients take (`SwapRow.choice`) in columns of their own.

        passes: some of "forward", "backward_input", "backward_weight"."""
        passes = selection.check_passes(passes)
        verb = "would be swapped" if self.dry_run else "swapped, then undone" if self.undone else "swapped"
        title = f"fastconv: {self.swapped} of {self.total} convolutions {verb}"
        before = sum(row.reason_code == "already_swapped" for row in self.rows)
        if before:
            title += f", {before} already swapped"
        if self.ours is not None:
            title += f"; an algorithm of fastconv's own ran in {self.ours}"
        rows = []
        for row in self.rows:
            padding = row.padding if isinstance(row.padding, str) else by(row.padding)
            if row.padding_mode != "zeros":
                padding += f" {row.padding_mode}"
            cells = [
                ", ".join(name or "(model)" for name in row.names), row.kind, row.shape, by(row.stride), padding,
                by(row.dilation), str(row.groups), row.dtype, row.device,
            ]  # fmt: skip
            rows.append(cells + [_outcome(row) if pass_ == "forward" else row.choice(pass_) or "-" for pass_ in passes])
        headers = ["layer", "kind", "weight", "stride", "padding", "dilation", "groups", "dtype", "device"]
        headers += ["algorithm" if pass_ == "forward" else pass_ for pass_ in passes]
        return "\n".join([title, *filter(None, [self.advice]), *plain_table(headers, rows)])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"SwapReport(swapped={self.swapped}, total={self.total}, dry_run={self.dry_run}, undone={self.undone})"


def swap_(
    model: nn.Module,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    algorithm: str = "auto",
    precision: str | None = None,
    dry_run: bool = False,
    strict: bool = False,
    max_error: float | None = None,
    frozen: bool = False,
    max_workspace: int | None = None,
) -> SwapReport:
    """Makes every torch.nn.Conv2d, ConvTranspose2d and Conv1d of `model` that fastconv serves fastconv's, in place.

    Args:
        model: any module; itself a convolution, or containing some. A module under several names is swapped once.
        filter_fn: `filter_fn(name, module) -> bool`, called with each name of each convolution; False for any of a
            module's names leaves it alone.
        algorithm: "auto" (take every layer that an algorithm of fastconv's own fits), or a registry name (take the
            layers which that algorithm fits).
        precision, max_error, max_workspace: as for fastconv.Conv2d.
        dry_run: report what would happen and change nothing.
        strict: raise if a convolution that the filter admits cannot be swapped.
        frozen: the weights of the swapped layers will not change, as in inference. They stop requiring gradients, are
            packed once and not compared with what was packed at every call; again after `load_state_dict`, `.to()`, a
            new parameter, and `fastconv.refresh(model)`, which any other change has to be followed by. A weight that is
            made to require a gradient is compared as ever.

    Returns:
        A SwapReport with a row per convolution. It leaves alone, with a reason code, other convolutions of PyTorch
        ("not_served": Conv3d, ConvTranspose1d, ConvTranspose3d), subclasses ("subclass", "parametrized", "lazy",
        "quantized"), scripted ones ("script"), weights computed by a hook, as by pruning ("weight_hook"), an instance's
        own forward ("forward_override"), weights that are tensor subclasses other than DTensor ("tensor_subclass"),
        devices and dtypes that fastconv does not know ("device", "dtype"), layers that were swapped before
        ("already_swapped"), filtered ones ("filtered"), and what the planner gives as its reason.

    Raises:
        TypeError, ValueError: an argument that is not one of these.
        fastconv.UnsupportedError: `strict`, and some convolution cannot be swapped; the model is unchanged.

    Warns:
        UserWarning: if no convolution of the model runs, or would run, on fastconv.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn is a {type(filter_fn).__name__}; expected a function of (name, module), or None")
    for name, flag in (("dry_run", dry_run), ("strict", strict), ("frozen", frozen)):
        settings.check_flag(name, flag)
    check_settings(algorithm, precision, max_error, max_workspace)

    # First decide, then change: an exception on the way leaves the model as it was.
    rows: list[SwapRow] = []
    for module, names in _convolutions(model):
        row = _describe(module, names, algorithm)
        row.reason_code, row.reason = _obstacle(module, names, filter_fn)
        if not row.reason_code:
            asked = settings.auto_algorithm if algorithm == "auto" else algorithm
            row.candidates, row.reason_code, row.reason = serving.fitting(
                module, asked, precision, max_error, max_workspace
            )
        row.swapped = not row.reason_code
        rows.append(row)
    refused = [row for row in rows if row.reason_code not in ("", "already_swapped", "filtered")]
    if strict and refused:
        lines = [f"  {', '.join(row.names) or '(model)'}: {row.reason} [{row.reason_code}]" for row in refused]
        raise ops.UnsupportedError(
            "\n".join([f"{len(refused)} of {len(rows)} convolutions cannot be swapped:", *lines])
        )
    if not dry_run:
        for row in rows:
            target = row._module()
            if row.swapped and target is not None:
                state = LayerState(algorithm, precision, max_error, frozen, max_workspace)
                if frozen:
                    weight = target.get_parameter("weight")
                    row._required_grad = weight.requires_grad
                    weight.requires_grad_(False)
                target.__dict__["_fastconv"] = state
                _set_class(target, _SERVED[_class_below(type(target))])
                row._state = weakref.ref(state)
    if not any(row.swapped or row.reason_code == "already_swapped" for row in rows):
        codes = Counter(row.reason_code for row in rows)
        why = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        text = f"none of {len(rows)} fit: {why}" if rows else "the model has no convolution"
        warnings.warn(f"fastconv.swap_ swapped no convolution ({text})", stacklevel=2)
    return SwapReport(rows, dry_run)


def _convolutions(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Each convolution once, with every name it has, in the order of the model."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _kind(module):
            modules[id(module)] = module
            names.setdefault(id(module), []).append(name)
    for key, module in modules.items():
        yield module, tuple(names[key])


def _kind(module: nn.Module) -> str:
    """PyTorch's convolution that the module is, derives from, or was scripted or quantized from; "" if none."""
    classes = (*_SERVED, *_NOT_SERVED)
    if isinstance(module, torch.jit.ScriptModule):
        name = str(getattr(module, "original_name", ""))
        return name if name in [cls.__name__ for cls in classes] else ""
    if _is_quantized(module):
        return "Conv2d"
    return next((cls.__name__ for cls in classes if isinstance(module, cls)), "")


def _is_quantized(module: nn.Module) -> bool:
    """A convolution of torch.ao, quantized or prepared for it. Told by name: importing that costs seconds."""
    cls = type(module)
    parts = cls.__module__.split(".")
    return "Conv" in cls.__name__ and "2d" in cls.__name__ and "Transpose" not in cls.__name__ and (
        "quantized" in parts or "qat" in parts
    )  # fmt: skip


def _describe(module: nn.Module, names: tuple[str, ...], algorithm: str) -> SwapRow:
    def get(name: str, default: Any) -> Any:
        return getattr(module, name, default)

    weight = get("weight", None)
    plain = isinstance(weight, torch.Tensor) and not nn.parameter.is_lazy(weight)
    state = module.__dict__.get("_fastconv")
    padding = get("padding", ())
    return SwapRow(
        names=names,
        shape=by(weight.shape) if plain else "?",
        in_channels=get("in_channels", 0),
        out_channels=get("out_channels", 0),
        kernel=tuple(get("kernel_size", ())),
        stride=tuple(get("stride", ())),
        padding=padding if isinstance(padding, str) else tuple(padding),
        dilation=tuple(get("dilation", ())),
        groups=get("groups", 1),
        padding_mode=get("padding_mode", "zeros"),
        dtype=str(weight.dtype).removeprefix("torch.") if plain else "?",
        device=str(weight.device) if plain else "?",
        requested=algorithm if state is None else state.algorithm,
        kind=_kind(module),
        output_padding=tuple(get("output_padding", ())) if get("transposed", False) else (),
        _module=weakref.ref(module),
        _state=(lambda: None) if state is None else weakref.ref(state),
    )


def _obstacle(
    module: nn.Module, names: tuple[str, ...], filter_fn: Callable[[str, nn.Module], bool] | None
) -> tuple[str, str]:
    """The code and text of what keeps this module from being swapped whatever the planner says; ("", "") if nothing."""
    cls = type(module)
    if isinstance(module, Layer):
        return "already_swapped", f"it is a fastconv.{_class_below(cls).__name__}"
    if filter_fn is not None and not all(filter_fn(name, module) for name in names):
        return "filtered", "filter_fn returned False"
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "script",
            "it is a TorchScript module; swap what it was scripted from, and torch.jit.trace or torch.export that",
        )
    if _is_quantized(module):
        return "quantized", f"it is quantized ({cls.__module__}.{cls.__qualname__})"
    if isinstance(module, _NOT_SERVED):
        return "not_served", f"it is a {_kind(module)}; fastconv serves {', '.join(c.__name__ for c in _SERVED)}"
    if parametrize.is_parametrized(module):
        what = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return "parametrized", f"its {what} is computed by torch.nn.utils.parametrize"
    if isinstance(module, LazyModuleMixin):
        return "lazy", "its weight has no shape yet; run the model once first"
    if _class_below(cls) not in _SERVED:
        return "subclass", f"it is a {cls.__module__}.{cls.__qualname__}, which may compute something else"
    for name in ("forward", "_conv_forward"):
        if name in module.__dict__:
            return "forward_override", f"the instance has its own {name}"
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if name not in module._parameters or (name == "weight" and parameter is None):
            how = "pruned" if hasattr(module, f"{name}_mask") else "computed before each forward"
            return "weight_hook", f"its {name} is not a parameter; it is {how}"
        known = type(parameter) is nn.Parameter or parameter is None or is_distributed(parameter)
        if not known:
            return "tensor_subclass", f"its {name} is a {type(parameter).__name__}"
    weight = module.weight
    if not weight.dtype.is_floating_point:
        return "dtype", f"its weight is {weight.dtype}; expected float32, float16 or bfloat16"
    if weight.device.type not in ("cpu", "cuda"):
        return "device", f"its weight is on '{weight.device}'; expected cpu or cuda"
    return "", ""


# Classes that torch.distributed.fsdp.fully_shard put over others, and ours in their place, by what they derive from.
_SHARDED: dict[tuple[type, ...], type] = {}


def _class_below(cls: type) -> type:
    """The class that a module had before fully_shard put one over it, (FSDPModule, class); else its own."""
    name = f"{cls.__bases__[0].__module__}.{cls.__bases__[0].__qualname__}"
    return cls.__bases__[1] if name.startswith("torch.distributed.fsdp") and len(cls.__bases__) == 2 else cls


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes it one of this class; what fully_shard put over the former stays over the new one."""
    old: type = type(module)
    if _class_below(old) is not old:
        _SHARDED[old.__bases__] = old
        bases = (old.__bases__[0], cls)
        if bases not in _SHARDED:
            own = {name: value for name, value in vars(old).items() if name not in ("__dict__", "__weakref__")}
            _SHARDED[bases] = type(old.__name__, bases, own)
        cls = _SHARDED[bases]
    module.__class__ = cls  # type: ignore[assignment]


def _outcome(row: SwapRow) -> str:
    if row.swapped or row.reason_code == "already_swapped":
        state = row._state()
        if state is not None and row.last_input_shape is not None:
            ran = f"{row.algorithm} for {by(row.last_input_shape)}"
        else:
            ran = f"{row.requested} ({', '.join(row.candidates)})" if row.candidates else row.requested
        return ran if row.swapped else f"{ran}; already swapped"
    return f"not swapped: {row.reason} [{row.reason_code}]"
