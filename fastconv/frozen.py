"""Compiled code in which parameters of modules are constants: it is made again when they have changed."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

# Whoever makes code of a module's parameters, with a method `forget`.
_makers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def register(model: nn.Module, maker: Any) -> None:
    """Has `load_state_dict` into a module of the model, and `fastconv.refresh`, call ``maker.forget()``."""
    for module in model.modules():
        if module not in _makers:
            _makers[module] = weakref.WeakSet()
            module.register_load_state_dict_post_hook(forget)
        _makers[module].add(maker)


def forget(module: nn.Module, _: Any = None) -> None:
    """Drops the code in which parameters of the module are constants."""
    for maker in _makers.get(module, ()):
        maker.forget()
