"""Several processes that measure on one GPU: whoever times has it to itself.

A parent calls `sharing()`, and its workers find the lock in the environment. `timing()` is exclusive; `preparing()` is
for what uses the GPU but is not timed, compilers that try kernels out, say, and goes on beside others that prepare;
`aside()` gives a turn away in the middle of it, for work that the GPU has no part in. Without a parent that shares,
nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

VARIABLE = "FASTCONV_BENCH_TURNS"  # the file whose lock it is
_POLL_S, _BEAT_S = 0.002, 5.0


class _Turn:
    def __init__(self, path: str, kind: int, beat: Callable[[], None]) -> None:
        self._file = open(path, "w")  # noqa: SIM115 (closed by `close`)
        self._kind, self._beat = kind, beat

    def take(self) -> None:
        last = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
                return
            time.sleep(_POLL_S)
            if time.monotonic() - last > _BEAT_S:
                last = time.monotonic()
                self._beat()

    def give(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()


_held: list[_Turn] = []  # of this process


def are_shared() -> bool:
    """Whether this process takes turns with others."""
    return VARIABLE in os.environ


@contextlib.contextmanager
def _turn(kind: int, beat: Callable[[], None]) -> Iterator[None]:
    path = os.environ.get(VARIABLE)
    if path is None:
        yield
        return
    mine = _Turn(path, kind, beat)
    mine.take()
    _held.append(mine)
    try:
        yield
    finally:
        _held.remove(mine)
        mine.give()
        mine.close()


def timing(beat: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
    """Alone on the GPU. beat: called every few seconds of waiting, so that a supervisor does not take it for a hang."""
    return _turn(fcntl.LOCK_EX, beat)


def preparing(beat: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
    """On the GPU beside others that prepare, and never while somebody times."""
    return _turn(fcntl.LOCK_SH, beat)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leaves the GPU to others meanwhile, everything of this process on it done; takes the turn again."""
    held = list(_held)
    for mine in held:
        mine.give()
    try:
        yield
    finally:
        for mine in held:
            mine.take()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Processes that are started within take turns with each other."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(Path(folder) / "turn")
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before
