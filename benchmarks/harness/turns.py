"""Several processes that measure on one GPU: whoever times has it to itself.

A parent calls `sharing()`, and its workers find the lock in the environment. `timing()` is exclusive; `preparing()` is
for what uses the GPU but is not timed, compilers that try kernels out, say, and goes on beside others that prepare;
patient, it lets everybody who waits to time go first, so that many short preparations do not keep those waiting.
`aside()` gives a turn away in the middle of it, for work that the GPU has no part in. Without a parent that shares,
nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

VARIABLE = "FASTCONV_BENCH_TURNS"  # the file whose lock it is
_POLL_S, _BEAT_S = 0.002, 5.0


def _cuda() -> Any:
    """torch.cuda, if the process has used it: one that has not even imported torch need not do so for a lock."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _give_memory() -> None:
    """What this process's allocator has in store goes back to the card, whose memory all share."""
    if cuda := _cuda():
        cuda.empty_cache()


class _Turn:
    """Whoever times, or waits for it, holds the queue's lock shared; whoever is patient passes through it alone."""

    def __init__(self, path: str, kind: int, beat: Callable[[], None], patient: bool = False) -> None:
        self._file, self._queue = open(path, "w"), open(f"{path}.queue", "w")  # noqa: SIM115 (closed by `close`)
        self._kind, self._beat = kind, beat
        self._passes = fcntl.LOCK_SH if kind == fcntl.LOCK_EX else fcntl.LOCK_EX if patient else None

    def take(self) -> None:
        if self._passes is not None:
            self._lock(self._queue, self._passes)
        self._lock(self._file, self._kind)
        if self._passes == fcntl.LOCK_EX:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def _lock(self, file: IO[str], kind: int) -> None:
        last = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            time.sleep(_POLL_S)
            if time.monotonic() - last > _BEAT_S:
                last = time.monotonic()
                self._beat()

    def give(self) -> None:
        if cuda := _cuda():
            cuda.synchronize()
        for file in (self._file, self._queue):
            fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        for file in (self._file, self._queue):
            file.close()


_held: list[_Turn] = []  # of this process


def are_shared() -> bool:
    """Whether this process takes turns with others."""
    return VARIABLE in os.environ


@contextlib.contextmanager
def _turn(kind: int, beat: Callable[[], None], patient: bool = False) -> Iterator[None]:
    path = os.environ.get(VARIABLE)
    if path is None:
        yield
        return
    mine = _Turn(path, kind, beat, patient)
    _give_memory()  # whoever has a turn meanwhile may need it
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


def preparing(
    beat: Callable[[], None] = lambda: None, patient: bool = False
) -> contextlib.AbstractContextManager[None]:
    """On the GPU beside others that prepare, and never while somebody times; patient: nor while somebody waits to."""
    return _turn(fcntl.LOCK_SH, beat, patient)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leaves the GPU to others meanwhile, everything of this process on it done, and what its allocator has in store
    given back, which is most of the memory of a card of 80 GB; takes the turn again."""
    held = list(_held)
    if held:
        _give_memory()
    for mine in held:
        mine.give()
    try:
        yield
    finally:
        for mine in held:
            mine.take()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Processes that are started within take turns with each other, and with those that this one takes turns with."""
    if are_shared():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = str(Path(folder) / "turn")
        try:
            yield
        finally:
            del os.environ[VARIABLE]
