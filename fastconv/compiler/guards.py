"""Modules of torch.nn, which Dynamo would check one attribute at a time in every call: checked here, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fastconv import _C

# What a call of a module reads beside its own attributes.
_MEMBERS = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Modules:
    """The modules of a model as they are now: their classes and submodules, and of torch.nn's the parameters, buffers,
    hooks, `training`, and how many attributes they have. Which objects these are: another value within a parameter is
    not seen, and no other attribute that is set anew."""

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.modules())
        self._classes = list(map(type, self._all))
        self._checked = [module for module in self._all if type(module).__module__.startswith("torch.")]
        its = list(map(vars, self._checked))
        members = [vars(module)["_modules"] for module in self._all] + [each[name] for each in its for name in _MEMBERS]
        self._snapshot = _C.Snapshot(members, "training", its)

    def are_the_same(self) -> bool:
        return self._snapshot.holds() and list(map(type, self._all)) == self._classes

    def kept_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Dynamo's guards of one graph (its `guard_filter_fn`): not those on modules of torch.nn, which
        `are_the_same` stands for; all, if one of these is no module of the model."""
        checked = set(map(id, self._checked))
        kept = [not guard.orig_guard.source.is_unspecialized_builtin_nn_module() for guard in guards]
        left = (guard.value for guard, keeps in zip(guards, kept, strict=True) if not keeps)
        is_covered = all(id(value) in checked for value in left if isinstance(value, nn.Module))
        return kept if is_covered else [True] * len(kept)
