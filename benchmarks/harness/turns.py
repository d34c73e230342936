"""Several processes that measure on one GPU, each alone on it while it does: what one of them builds on the CPU, it
builds while another runs.

A turn is a lock on a file that the processes share. `aside()` gives it away in the middle of a measurement, for work
that the GPU has no part in.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

_POLL_S, _BEAT_S = 0.002, 5.0
_held: list[_Turn] = []  # of this process: none or one


class _Turn:
    def __init__(self, path: Path, beat: Callable[[], None]) -> None:
        self._file: IO[str] = path.open("w")
        self._beat = beat

    def take(self) -> None:
        last = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


@contextlib.contextmanager
def turn(path: Path | None, beat: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Has the GPU that `path` stands for to itself, among the processes that ask for it so; None: asks nobody.

    beat: called every few seconds while it waits, so that a supervisor does not take waiting for a hang.
    """
    if path is None:
        yield
        return
    mine = _Turn(path, beat)
    mine.take()
    _held.append(mine)
    try:
        yield
    finally:
        _held.remove(mine)
        mine.give()
        mine.close()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leaves the GPU to others meanwhile, everything of this process on it done; takes it again."""
    for mine in _held:
        mine.give()
    try:
        yield
    finally:
        for mine in _held:
            mine.take()
